import importlib.metadata
from typing import Any

import fake_engines as fake
import pytest
import torch
from processes import python
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from omnicomp.backend.options import policy_of
from omnicomp.cli.doctor import examine
from omnicomp.errors import EngineError, OptionError
from omnicomp.lowerings import in_order, lowering
from omnicomp.lowerings.engines import resolve_engine
from omnicomp.lowerings.engines.program import EngineLowering
from omnicomp.lowerings.engines.toy import ToyEngine
from omnicomp.options import checks
from omnicomp.options.checks import BUILT_IN


def entries(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    found = [importlib.metadata.EntryPoint(name, value, checks.GROUP) for name, value in values.items()]
    real = importlib.metadata.entry_points

    def entry_points(**wanted: Any) -> Any:
        return found if wanted.get("group") == checks.GROUP else real(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    checks.engine_names.cache_clear()
    resolve_engine.cache_clear()


def test_built_in_engines_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    entries(monkeypatch, acme="fake_engines:Fake", toy="omnicomp.lowerings.engines.toy:ToyEngine")
    assert checks.engine_names() == (*BUILT_IN, "acme")


def test_an_engine_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    entries(monkeypatch, fake="fake_engines:Fake")
    engine = resolve_engine("fake")
    assert type(engine) is fake.Fake
    assert resolve_engine("fake") is engine
    assert lowering("fake") == EngineLowering(engine)
    x = torch.randn(3)
    options: dict[str, Any] = {"lowerings": ["fake", "eager"]}
    torch.testing.assert_close(torch.compile(torch.exp, backend="omni", options=options)(x), x.exp())


def test_the_order_is_the_policys() -> None:
    assert [each.name for each in in_order(("toy", "eager"), ("eager", "inductor"))] == ["toy", "eager"]
    assert [each.name for each in in_order(("inductor", "toy"), ("inductor",))] == ["inductor", "toy", "eager"]


def test_an_unknown_engine() -> None:
    with pytest.raises(EngineError, match=r"unknown engine 'toyy'; known engines are .*; did you mean"):
        resolve_engine("toyy")
    with pytest.raises(OptionError, match=r"lowerings can't contain 'toyy'; it takes .* or .*; did you mean"):
        torch.compile(torch.exp, backend="omni", options={"lowerings": ["toyy"]})(torch.ones(1))  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:E", "can't be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("fake_engines:NoSuch", "can't be loaded: AttributeError: .*NoSuch"),
        ("fake_engines:Build", "can't be loaded: TypeError"),
        ("fake_engines:Fake", "is no subclass of Engine with that name"),  # its name is another one
        ("builtins:dict", "is no subclass of Engine with that name"),
    ],
)
def test_what_is_declared_may_be_broken(monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    entries(monkeypatch, acme=value)
    with pytest.raises(EngineError, match=message):
        resolve_engine("acme")
    # The model is right all the same.
    x = torch.randn(3)
    options: dict[str, Any] = {"lowerings": ["acme", "eager"]}
    torch.testing.assert_close(torch.compile(torch.exp, backend="omni", options=options)(x), x.exp())


def test_the_doctor_lists_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {"fake": "Fake", "fake_missing": "Missing", "fake_unsure": "Unsure", "acme": "NoSuch"}
    entries(monkeypatch, **{name: f"fake_engines:{value}" for name, value in fakes.items()})
    found = {check.name: check for check in examine() if check.name.startswith("engine ")}
    assert set(found) == {f"engine {name}" for name in checks.engine_names()}
    toy = found["engine toy"]
    assert (toy.status, toy.found) == (
        "ok", f"{ToyEngine().version()}, {len(ToyEngine.operators)} operators, cpu, training and inference",
    )  # fmt: skip
    assert found["engine fake"].found.startswith("1.0, ")
    assert found["engine fake"].found.endswith(" operators, cpu, inference")
    for name, text in {
        "fake_missing": 'FakeLib is not installed: pip install "omnicomp[fake]"',
        "fake_unsure": "OSError: libfake.so: undefined symbol",
    }.items():
        assert (found[f"engine {name}"].status, found[f"engine {name}"].found) == ("note", text)
    assert "the engine acme can't be loaded: AttributeError" in found["engine acme"].found
    assert all(check.status in ("ok", "note") for check in found.values())


def test_names_are_known_without_importing_any_engine() -> None:
    """An option is checked before a library is loaded."""
    code = (
        "import sys, omnicomp.options.checks as n; assert 'toy' in n.engine_names(); "
        "import omnicomp.lowerings; "
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('openvino', 'onnxruntime', 'jax', 'tvm', 'onnx')]; "
        "assert not loaded, loaded; "
        "assert not any(m.startswith('omnicomp.lowerings.engines.toy') for m in sys.modules)"
    )
    python("-c", code, check=True)


def test_engine_options_of_what_is_no_mapping() -> None:
    for value, message in (
        (["toy"], "it takes a mapping of engines to their options"),
        ({"toy": 3}, "it takes a mapping of options"),
        ({"toyy": {}}, "unknown engine 'toyy'"),
    ):
        with pytest.raises(OptionError, match=message):
            policy_of(None, {"engines": value})


def test_an_engine_is_made_outside_of_the_modes_of_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that its module or itself makes at that moment would be fake ones otherwise."""
    monkeypatch.setattr(ToyEngine, "__init__", lambda self: setattr(self, "made", torch.empty(1)))
    resolve_engine.cache_clear()
    try:
        with FakeTensorMode():
            assert isinstance(torch.empty(1), FakeTensor)
            found: Any = resolve_engine("toy")
        assert not isinstance(found.made, FakeTensor)
    finally:
        resolve_engine.cache_clear()
