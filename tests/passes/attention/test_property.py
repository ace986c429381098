"""Random attention programs under omni against float64: every spelling with every other, values and gradients."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from attention_checks import Mismatch, Program, Tally, Unsuited, build, check, random_program, sample
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

# Share of the programs that have to be fused. It is over all choices at once, the odd ones included: a program of this
# kind has several features that a real model has one of.
FUSED = {"any": 0.4, "inference": 0.4, "training": 0.4, "dynamic": 0.3}

# Share of the programs that may differ. Most of these differ from eager in rows in which no key is left, combined with
# what a program does to such rows itself (docs/attention.md); the failures are printed with the programs.
DIFFERENT = 0.03


@st.composite
def programs(draw: Any, **fixed: bool) -> Program:
    return sample(lambda name, options: draw(st.sampled_from(options), label=name), **fixed)


@pytest.mark.parametrize(
    ("kind", "examples", "fixed"),
    [
        ("any", 40, {}),
        pytest.param("inference", 110, {"training": False, "dynamic": False}, marks=pytest.mark.slow),
        pytest.param("training", 90, {"training": True, "dynamic": False}, marks=pytest.mark.slow),
        pytest.param("dynamic", 40, {"dynamic": True}, marks=pytest.mark.slow),
    ],
)
def test_a_program_gives_what_eager_gives(kind: str, examples: int, fixed: dict[str, bool]) -> None:
    tally = Tally()

    @settings(max_examples=examples)
    @given(programs(**fixed))
    def compare(program: Program) -> None:
        try:
            outcome = check(program)
        except Unsuited:
            tally.unsuited.append(program)
            assume(False)
        except Mismatch as error:
            tally.failures.append((program, str(error)))
        else:
            tally.add(program, outcome)
            event("fused" if outcome.fused else "not fused")

    compare()
    print(tally.report())
    assert len(tally.unsuited) < examples / 20, "programs that eager cannot run are programs not drawn"
    assert tally.empty_rows > examples / 20
    assert tally.share() >= FUSED[kind] - luck(FUSED[kind], examples), tally.report()
    assert len(tally.failures) <= (DIFFERENT + luck(DIFFERENT, examples)) * examples, tally.report()


def luck(share: float, examples: int) -> float:
    """By how much a share of so few examples may be off: three standard deviations of it."""
    return 3 * math.sqrt(share * (1 - share) / examples) if examples < 100 else 0.0


PLAIN = Program(mask="tril", padding="right", bias="head", softcap="functions", training=True)


@pytest.mark.parametrize(
    "change",
    [
        {"factor": 0.55},
        {"mask": "prefix"},
        {"mask": "none"},
        {"padding": "none"},
        {"bias": "none"},
        {"softcap": "none"},
        {"softmax": "quiet"},
        {"softmax": "handmade", "bottom_right": False, "mask": "window"},
        {"merge": "swapped"},
        {"region": "no_grad"},
    ],
)
def test_the_check_sees_a_program_that_is_another(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would pass whatever the compiler does, if this did not fail."""
    other = dataclasses.replace(PLAIN, **change)

    def wrong(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
        module.forward = type(module).forward.__get__(build(other).module)
        return module

    monkeypatch.setattr(torch, "compile", wrong)
    with pytest.raises(Mismatch, match="mask='tril'"):
        check(PLAIN)


def test_the_check_passes_eager_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    assert not check(PLAIN).fused


@pytest.mark.parametrize(("failing", "raised"), [(("omni", "eager"), Unsuited), (("omni",), NotImplementedError)])
def test_a_program_that_no_backend_gets_to_see_is_not_the_backends_fault(
    failing: tuple[str, ...], raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**inputs: torch.Tensor) -> None:
        raise NotImplementedError

    def compiled(module: torch.nn.Module, *, backend: str, **options: Any) -> Any:
        return refuse if backend in failing else module

    monkeypatch.setattr(torch, "compile", compiled)
    with pytest.raises(raised):
        check(PLAIN)


def test_a_program_is_made_again_from_its_repr() -> None:
    for index in range(200):
        program = random_program(1, index)
        assert program == random_program(1, index)
        assert eval(repr(program)) == program


def test_every_query_that_attends_to_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    assert check(Program(mask="tril", padding="left")).empty_rows
    assert not check(Program(mask="tril", padding="right")).empty_rows


def test_a_bound_that_no_score_reaches_is_no_mask() -> None:
    assert check(Program(softmax="clamped", scale="after_mask", dtype="bfloat16")).fused
