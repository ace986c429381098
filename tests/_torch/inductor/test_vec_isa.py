"""The best vector instruction set is what torch finds, and no other is tested for it."""

import pytest
import torch._inductor.config
from torch._inductor import cpu_vec_isa

from omnicomp._torch.inductor import vec_isa
from omnicomp._torch.inductor.vec_isa import LazyISAs, isas_tested_lazily


class Known:
    def __init__(self, name: str, *, works: bool, bits: int = 512) -> None:
        self.name, self.works, self.bits, self.tested = name, works, bits, 0

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        self.tested += 1
        return self.works

    def bit_width(self) -> int:
        return self.bits


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[Known]:
    """Sets of a processor: it does not have the first, and the compiler not the second."""
    found = [
        Known("other", works=True),
        Known("avx512 amx", works=False),
        Known("avx512", works=True),
        Known("avx2", works=True, bits=256),
    ]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", found)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx512", "amx", "avx2"])
    monkeypatch.setattr(vec_isa.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    return found


def test_no_set_is_tested_once_a_better_one_works(known: list[Known]) -> None:
    with isas_tested_lazily:
        assert cpu_vec_isa.pick_vec_isa() is known[2]
    assert [bool(each.tested) for each in known] == [False, True, True, False]


def test_torch_tests_them_all() -> None:
    """What the module is for; without it, it can go."""
    known = [Known("avx512", works=True), Known("avx2", works=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_vec_isa, "supported_vec_isa_list", known)
        patch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx512", "avx2"])
        patch.setattr(cpu_vec_isa.platform, "machine", lambda: "x86_64")
        assert list(cpu_vec_isa.valid_vec_isa_list.__wrapped__()) == known
    assert [each.tested for each in known] == [1, 1]


@pytest.mark.parametrize(("capability", "at"), [("avx2", 3), ("avx512", 2), ("default", None)])
def test_the_set_that_the_environment_asks_for_is_found(
    capability: str, at: int | None, known: list[Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    with isas_tested_lazily:
        found = cpu_vec_isa.pick_vec_isa()
    assert found is (cpu_vec_isa.invalid_vec_isa if at is None else known[at])


def test_the_set_of_a_width_is_found(known: list[Known]) -> None:
    with isas_tested_lazily, torch._inductor.config.patch({"cpp.simdlen": 256}):  # type: ignore[attr-defined]
        assert cpu_vec_isa.pick_vec_isa() is known[3]


def test_none_is_picked_where_none_works(known: list[Known]) -> None:
    for each in known:
        each.works = False
    with isas_tested_lazily:
        assert cpu_vec_isa.pick_vec_isa() is cpu_vec_isa.invalid_vec_isa


def test_it_is_a_list_of_those_that_work(known: list[Known]) -> None:
    sets = LazyISAs(known)
    assert list(sets) == [known[0], known[2], known[3]]
    assert len(sets) == 3
    assert sets[2] is sets[-1] is known[3]
    assert sets[1:] == [known[2], known[3]]
    with pytest.raises(IndexError):
        sets[3]


def test_other_processors_are_asked_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    neon = [cpu_vec_isa.VecNEON()]
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: neon)
    monkeypatch.setattr(vec_isa.platform, "machine", lambda: "aarch64")
    with isas_tested_lazily:
        assert cpu_vec_isa.pick_vec_isa() is neon[0]


def test_the_real_one_is_torchs() -> None:
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):  # type: ignore[attr-defined]
        expected = cpu_vec_isa.pick_vec_isa()
        with isas_tested_lazily:
            assert str(cpu_vec_isa.pick_vec_isa()) == str(expected)
