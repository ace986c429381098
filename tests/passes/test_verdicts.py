"""What checks found is remembered for a tensor that nobody wrote to, and for no other one."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from concurrency import in_threads

from omnicomp.backend.variants import Checks
from omnicomp.passes import mask_classes, verdicts
from omnicomp.passes.assumptions import Assumption
from omnicomp.passes.verdicts import Checker

KINDS = frozenset(("full", "causal", "rows"))
CAUSAL = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()


def question() -> Assumption:
    """The class of a mask that is an input: another graph each time, as those of layers are."""
    return Assumption(
        check=torch.fx.symbolic_trace(lambda mask: (mask, (), ())), inputs=("mask",), sentence="", accepts=KINDS
    )


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many checks were waited for; tensors on the CPU count as those of an accelerator do."""
    found: list[int] = []
    sent: Callable[[Any], Any] = verdicts._sent

    def counted(asked: dict[int, torch.Tensor]) -> Any:
        if asked:
            found.append(len(asked))
        return sent(asked)

    monkeypatch.setattr(verdicts, "_sent", counted)
    monkeypatch.setattr(verdicts, "_remembers", lambda value: not value.is_inference())
    verdicts.forget()
    yield found
    verdicts.forget()


def kind(checker: Checker, mask: torch.Tensor) -> str:
    (found,) = checker.verdicts([[mask]])
    assert not isinstance(found, bool)
    return found.kind


def test_layers_that_share_a_mask_check_it_once(waits: list[int]) -> None:
    mask = CAUSAL.clone()
    assert {kind(Checker([question()]), mask) for _ in range(32)} == {"causal"}
    assert waits == [1]
    assert kind(Checker([question()]), mask[:]) == "causal", "a view of the same elements"
    assert waits == [1]


def test_all_masks_of_a_graph_are_waited_for_together(waits: list[int]) -> None:
    checker = Checker([question(), question(), question()])
    masks = [CAUSAL.clone(), torch.ones_like(CAUSAL), CAUSAL.flip(-1)]
    assert [str(found) for found in checker.verdicts([[mask] for mask in masks])] == [
        "causal",
        "full",
        "no row is empty",
    ]
    assert waits == [3]


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask.fill_(True),
        lambda mask: mask[0, 0, 0].fill_(True),
        lambda mask: mask.detach().logical_not_(),
        lambda mask: setattr(mask, "data", torch.ones_like(mask)),
        lambda mask: mask.set_(torch.ones_like(mask)),
        lambda mask: mask.transpose_(-1, -2),
    ],
    ids=["written", "a view written", "an alias written", "other data", "another storage", "other strides"],
)
def test_a_mask_that_changed_is_checked_again(change: Callable[[torch.Tensor], Any], waits: list[int]) -> None:
    mask, checker = CAUSAL.clone(), Checker([question()])
    assert kind(checker, mask) == "causal"
    change(mask)
    assert kind(checker, mask) == kind(Checker([question()]), mask.clone())
    assert len(waits) >= 2


def test_a_write_through_an_alias_with_a_counter_of_its_own_is_not_confused(waits: list[int]) -> None:
    mask, checker = CAUSAL.clone(), Checker([question()])
    mask.mul_(True)
    assert kind(checker, mask) == "causal"
    alias = mask.data
    alias.fill_(True)  # as many writes as the mask had
    assert alias._version == mask._version
    assert kind(checker, alias) == "full"


def test_other_elements_of_the_same_memory_are_checked_for_themselves(waits: list[int]) -> None:
    both = torch.cat([CAUSAL, torch.ones_like(CAUSAL)])
    checker = Checker([question()])
    assert [kind(checker, both[:1]), kind(checker, both[1:]), kind(checker, both)] == ["causal", "full", "rows"]
    assert [kind(checker, both[:1]), kind(checker, both[1:])] == ["causal", "full"]
    assert len(waits) <= 4, "three masks, and one that was expected to be what it had been"


def test_what_a_kernel_reads_at_once_is_always_looked_at_in_full(
    waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks beside each other, one of which the kernel takes, which leaves columns of numbers for parts of the rows."""
    taken: list[torch.Tensor] = []

    def launched(keep: torch.Tensor, *rest: Any) -> torch.Tensor:
        taken.append(keep)
        whole = mask_classes.statistics(keep, None)
        parts = torch.stack([whole, whole, whole], 1)
        parts[mask_classes._LEAST :, :2] = 0
        return parts

    monkeypatch.setattr(mask_classes, "usable", lambda tensor: bool(tensor[0, 0, 0, 0]))
    monkeypatch.setattr(mask_classes, "_launched", launched)
    checker, hidden = Checker([question(), question()]), CAUSAL.flip(-1)
    for mask, wanted in ((CAUSAL, "causal"), (CAUSAL, "causal"), (CAUSAL, "causal"), (CAUSAL | True, "full")):
        found = checker.verdicts([[mask.clone()], [hidden.clone()]])
        assert [each.kind for each in found if not isinstance(each, bool)] == [wanted, "rows"]
    assert len(taken) == len(waits) == 4, "one look each, whatever was expected"


def test_memory_that_is_used_again_holds_another_mask(waits: list[int]) -> None:
    checker, memory = Checker([question()]), bytearray(CAUSAL.numel())
    wanted = {"causal": CAUSAL, "full": torch.ones_like(CAUSAL)}
    for name in ("causal", "full", "full", "causal") * 5:
        memory[:] = bytes(wanted[name].flatten().tolist())
        mask = torch.frombuffer(memory, dtype=torch.bool).view(1, 1, 6, 6)
        assert kind(checker, mask) == name
        del mask


def test_nothing_is_kept_alive(waits: list[int]) -> None:
    mask, checker, memo = CAUSAL.clone(), Checker([question()]), verdicts.Memo([0])
    kind(checker, mask)
    memo.keep([mask], ["known"])
    assert memo.recall([mask]) == ["known"]
    tensor, storage = weakref.ref(mask), weakref.ref(mask.untyped_storage())
    del mask
    gc.collect()
    assert tensor() is storage() is None


def test_tensors_without_a_counter_and_on_the_cpu_are_not_known_by_their_counter() -> None:
    with torch.inference_mode():
        mask = torch.ones(2, device="meta")
    assert not verdicts._remembers(mask)
    assert not verdicts._remembers(torch.ones(2))
    assert verdicts._remembers(torch.ones(2, device="meta"))


def _sliced(mask: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(mask, (1, 1, 1, 1))[..., 1:-1, 1:-1]


@pytest.mark.parametrize(
    "same",
    [
        torch.clone,
        _sliced,
        pytest.param(lambda mask: mask.mT.contiguous().mT, id="transposed"),
        pytest.param(lambda mask: mask.expand(3, 2, 6, 6), id="expanded"),
        pytest.param(lambda mask: torch.cat([mask[:1, :, :1, :1].flatten(), mask.flatten()])[1:].view(mask.shape)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float64])
def test_on_the_cpu_a_mask_is_known_by_what_is_in_it(
    same: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts.forget()
    check = torch.fx.symbolic_trace(lambda mask: (mask != 0, (), ()))
    asked = Assumption(check=check, inputs=("mask",), sentence="", accepts=KINDS)
    first, second = same(CAUSAL.to(dtype)), same(CAUSAL.to(dtype))
    assert kind(Checker([asked]), first) == "causal"
    with monkeypatch.context() as patch:
        patch.setattr(verdicts, "reduced", lambda *args: pytest.fail("it was looked at in full"))
        assert kind(Checker([asked]), second) == "causal"
    changed = CAUSAL.clone()
    changed[..., 2, 5] = True
    assert kind(Checker([asked]), same(changed.to(dtype))) == "rows"
    if same is torch.clone:
        second[..., 2, 5] = 1
        assert kind(Checker([asked]), second) == "rows", "written in place"
    verdicts.forget()


@pytest.mark.parametrize("counted", [False, True], ids=["by bits", "by counters"])
def test_what_a_check_holds_itself_counts_as_what_it_is_given(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_remembers", lambda value: counted)
    verdicts.forget()

    class Check(torch.nn.Module):
        def __init__(self, own: torch.Tensor) -> None:
            super().__init__()
            self.own = own

        def forward(self, mask: torch.Tensor) -> Any:
            return mask & self.own, (), ()

    def asked(own: torch.Tensor) -> Assumption:
        return Assumption(check=torch.fx.symbolic_trace(Check(own)), inputs=("mask",), sentence="", accepts=KINDS)

    def found(checks: Checks, mask: torch.Tensor) -> list[str]:
        return [str(verdict) for verdict in checks.begin([mask]).verdicts()]

    own, mask = torch.ones_like(CAUSAL), CAUSAL.clone()
    checks = Checks([asked(own)], ["mask"])
    assert found(checks, mask) == found(Checks([asked(own)], ["mask"]), mask) == ["causal"]
    own[..., 2, :] = False
    assert found(checks, mask) == ["general"], "a row is empty"
    assert found(Checks([asked(~CAUSAL)], ["mask"]), mask) == ["general"], "the same code with other constants"
    verdicts.forget()


def test_copies_of_masks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts.forget()
    monkeypatch.setattr(verdicts, "_MOST_COPIED", 200)
    for size in range(4, 20):
        assert kind(Checker([question()]), torch.ones(size, size, dtype=torch.bool).tril()) == "causal"
    held = [item.nbytes for found in verdicts._bits_known._known.values() for copies, _ in found for item in copies]
    assert 0 < sum(held) <= 200
    verdicts.forget()


def test_masks_whose_classes_alternate_are_waited_for_once_a_call(waits: list[int]) -> None:
    checker = Checker([question()])
    for number in range(20):
        kind(checker, CAUSAL.clone() if number % 2 else torch.ones_like(CAUSAL))
    assert len(waits) == 20


def test_what_is_the_same_all_the_time_is_only_compared(waits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    checker = Checker([question()])
    for _ in range(2):
        kind(checker, CAUSAL.clone())
    with monkeypatch.context() as patch:
        patch.setattr(verdicts, "reduced", lambda *args: pytest.fail("it was looked at in full"))
        assert kind(checker, CAUSAL.clone()) == "causal"
    assert kind(checker, torch.ones_like(CAUSAL)) == "full"


def test_threads_find_the_same(waits: list[int]) -> None:
    checker, wrong = Checker([question()]), list[str]()
    shared = {"causal": CAUSAL.clone(), "full": torch.ones_like(CAUSAL), "rows": CAUSAL.flip(-1)}

    def check(index: int) -> None:
        name, own = list(shared)[index // 2], bool(index % 2)
        for _ in range(50):
            found = kind(checker, shared[name].clone() if own else shared[name])
            if found != name:
                wrong.append(f"{name}: {found}")

    in_threads(check, 6)
    assert not wrong
