"""Random programs on devices that lack random dtypes: they run there, and stay within the bound of their rounding.

A program is up to nine operators (pointwise, products, reductions, indexing, casts, factories, in-place writes) over
matrices of random dtypes. The device computes in and stores random subsets. `Checking` raises where an operator
computes in what the device lacks. The result and the gradients are compared with the same program in exact arithmetic,
up to the running error bound of `tracked`: it follows from the unit roundoffs of the program's dtypes and of those that
the device has instead, and its derivation is there. Inputs are multiples of 1/8 up to 1, which every dtype has exactly,
so that the bound starts at zero; they are all different, so that their order is the same in every dtype.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, event, example, given
from hypothesis import strategies as st
from lacking import Lacking, legalised
from torch import Tensor
from tracked import Tape, Tracked

from omnicomp.passes.legal.dtypes import Legal

N = 4
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2)
UNARY = ("tanh", "sin", "softmax", "mean", "cumsum", "index", "gather", "transpose", "scale", "cast", "eight")
UNARY += ("arange", "written", "counted", "wide_cumsum", "constant", "ordered")
BINARY = ("add", "sub", "mul", "matmul", "where")


@dataclasses.dataclass(frozen=True)
class Step:
    """One operator, the values that it reads (counted from the last), and a dtype for those that name one."""

    name: str
    first: int
    second: int
    dtype: torch.dtype
    eight: torch.dtype


def compute(steps: tuple[Step, ...], values: list[Tensor]) -> Tensor:
    """The program as a user writes it."""
    x0 = values[0]
    for step in steps:
        a, b = values[step.first % len(values)], values[step.second % len(values)]
        rows = torch.arange(N)
        if step.name == "add":
            r = a + b
        elif step.name == "sub":
            r = torch.sub(a, b)
        elif step.name == "mul":
            r = a.mul(b)
        elif step.name == "matmul":
            r = (a @ b.to(a.dtype)) * 0.25
        elif step.name == "where":
            r = torch.where(rows[:, None] >= rows, a, b)
        elif step.name == "tanh":
            r = a.tanh()
        elif step.name == "sin":
            r = torch.sin(a)
        elif step.name == "softmax":
            r = F.softmax(a, -1)
        elif step.name == "mean":
            r = a.mean(0, keepdim=True).expand(N, N)
        elif step.name == "cumsum":
            r = a.cumsum(0) * 0.25
        elif step.name == "wide_cumsum":
            r = a.cumsum(0, dtype=step.dtype) * 0.25
        elif step.name == "index":
            r = a[rows * 3 % N // 2]
        elif step.name == "gather":
            r = a.gather(1, (rows[:, None] + rows) % 3)
        elif step.name == "ordered":
            r = a[x0.detach().argmax(0)]
        elif step.name == "transpose":
            r = a.T
        elif step.name == "scale":
            r = a * -0.75
        elif step.name == "cast":
            r = a.to(step.dtype)
        elif step.name == "eight":
            r = a.to(step.eight).to(step.dtype)
        elif step.name == "arange":
            r = a * torch.arange(1, N + 1, dtype=step.dtype)
        elif step.name == "constant":
            r = a * torch.tensor([0.5, 1.0, -1.0, 0.25], dtype=step.dtype)
        elif step.name == "counted":
            r = a * (rows > 1).sum()
        else:
            r = a.clone()
            r.mul_(0.5)
            r[:, 1] += 0.25
            r[0].add_(1)
        values = [*values, r]
    return values[-1]


def track(tape: Tape, steps: tuple[Step, ...], values: list[Tracked]) -> Tracked:
    """The same in exact arithmetic, with bounds."""
    rows = torch.arange(N)
    x0 = values[0].value
    for step in steps:
        a, b = values[step.first % len(values)], values[step.second % len(values)]
        if step.name in ("add", "sub"):
            r = tape.add(a, b, 1 if step.name == "add" else -1)
        elif step.name == "mul":
            r = tape.mul(a, b)
        elif step.name == "matmul":
            r = tape.scale(tape.matmul(a, tape.cast(b, a.dtype)), 0.25)
        elif step.name == "where":
            r = tape.where(rows[:, None] >= rows, a, b)
        elif step.name in ("tanh", "sin", "softmax"):
            r = getattr(tape, step.name)(a)
        elif step.name == "mean":
            r = tape.mean(a, 0)
        elif step.name == "cumsum":
            r = tape.scale(tape.cumsum(a), 0.25)
        elif step.name == "wide_cumsum":
            r = tape.scale(tape.cumsum(tape.cast(a, step.dtype)), 0.25)
        elif step.name in ("index", "ordered"):
            at = rows * 3 % N // 2 if step.name == "index" else x0.argmax(0)
            r = tape.index(a, lambda t, at=at: t[at], lambda t, at=at: torch.zeros_like(t).index_add(0, at, t))
        elif step.name == "gather":
            at = (rows[:, None] + rows) % 3
            add = lambda t, at=at: torch.zeros_like(t).scatter_add(1, at, t)  # noqa: E731
            r = tape.index(a, lambda t, at=at: t.gather(1, at), add)
        elif step.name == "transpose":
            r = tape.index(a, lambda t: t.T, lambda t: t.T)
        elif step.name == "scale":
            r = tape.scale(a, -0.75)
        elif step.name == "cast":
            r = tape.cast(a, step.dtype)
        elif step.name == "eight":
            r = tape.cast(tape.cast(a, step.eight), step.dtype)
        elif step.name == "arange":
            r = tape.scale(a, torch.arange(1, N + 1).double(), step.dtype)
        elif step.name == "constant":
            r = tape.scale(a, torch.tensor([0.5, 1.0, -1.0, 0.25]), step.dtype)
        elif step.name == "counted":
            r = tape.scale(a, 2.0)
        else:
            r = written(tape, a)
        values = [*values, r]
    return values[-1]


def written(tape: Tape, a: Tracked) -> Tracked:
    """Half of it, and then exact numbers added to a row and a column."""
    half = tape.scale(a, 0.5)
    more = torch.zeros(N, N, dtype=torch.float64)
    more[:, 1] += 0.25
    more[0] += 1
    return tape.add(half, tape.make(more, more * 0, 3, a.dtype))


@st.composite
def devices(draw: st.DrawFn) -> Lacking:
    computed = draw(st.sets(st.sampled_from(FLOATS), min_size=1))
    missing = [d for d in FLOATS if d not in computed]
    unstored = draw(st.sets(st.sampled_from(missing))) if missing else set()
    eights = draw(st.sampled_from([(), EIGHTS]))
    integers = draw(st.sampled_from([(), (torch.int64,)]))
    return Lacking(
        uncomputed=tuple(d for d in missing if d not in unstored) + (() if eights else EIGHTS),
        unstored=tuple(d for d in FLOATS if d in unstored) + eights + integers,
    )


steps = st.lists(
    st.builds(
        Step,
        st.one_of(st.sampled_from(UNARY), st.sampled_from(BINARY)),
        st.integers(0, 9),
        st.integers(0, 9),
        st.sampled_from(FLOATS),
        st.sampled_from(EIGHTS),
    ),
    min_size=1,
    max_size=9,
).map(tuple)


def inputs(dtypes: list[torch.dtype], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randperm(16, generator=generator).reshape(N, N).double() - 7 for _ in dtypes]
    return [(number / 8).to(dtype) for number, dtype in zip(numbers, dtypes, strict=True)]


def bounds(device: Lacking, program: tuple[Step, ...], values: list[Tensor]) -> tuple[Tape, list[Tracked], Tracked]:
    legal = Legal.of(device.capabilities())
    assert legal is not None
    tape = Tape(legal)
    tracked = [Tracked(v.double(), torch.zeros(N, N, dtype=torch.float64), v.dtype) for v in values]
    return tape, tracked, track(tape, program, tracked)


def assert_within(actual: Tensor, tracked: Tracked, what: str) -> None:
    off = (actual.double() - tracked.value).abs()
    assert bool((off <= tracked.error + 1e-12).all()), (
        f"{what}: off by {off.max():.3g}, bound {tracked.error.max():.3g}"
    )


@given(devices(), steps, st.lists(st.sampled_from(FLOATS), min_size=1, max_size=3), st.integers(0, 99), st.booleans())
@example(Lacking(uncomputed=FLOATS[1:2]), (Step("index", 0, 0, *FLOATS[:1], EIGHTS[0]),), list(FLOATS[1:2]), 0, True)
def test_random_programs_run_and_stay_within_the_bound(device, program, dtypes, seed, training):
    dtypes = [d for d in dtypes if d not in device.unstored]
    assume(dtypes)
    values = inputs(dtypes, seed)
    tape, tracked, expected = bounds(device, program, values)
    assume(bool(expected.value.abs().max() + expected.error.max() < 100))
    if training:
        for value in values:
            value.requires_grad_()
    compiled, backend = legalised(lambda *args: compute(program, list(args)), device, training=training)
    actual = compiled(*values)
    event(f"legalised: {backend.modified}")
    event(f"training: {training}")
    assert_within(actual.detach(), expected, "result")
    if expected.dtype not in device.unstored:
        assert actual.dtype is expected.dtype
    if not training:
        return
    cotangent = (torch.arange(N * N).reshape(N, N) % 5 - 2).double() / 4
    actual.backward(cotangent.to(actual.dtype))
    tape.backward([(expected, cotangent)])
    for value, known in zip(values, tracked, strict=True):
        gradient = tape.gradients.get(id(known))
        if gradient is None or value.grad is None:
            assert value.grad is None or not value.grad.any()
            continue
        assert value.grad.dtype is value.dtype
        assume(bool(gradient.value.abs().max() + gradient.error.max() < 100))
        assert_within(value.grad, gradient, "gradient")


@pytest.mark.parametrize("name", ["mul", "matmul", "softmax", "cumsum"])
def test_the_bound_notices_a_dtype_that_is_too_coarse(name):
    program = (Step("sin", 0, 0, *FLOATS[:1], EIGHTS[0]), Step(name, 1, 1, FLOATS[0], EIGHTS[0]))
    device = Lacking(unstored=(torch.float64,))
    (value,) = inputs([torch.float32], 0)
    _, _, expected = bounds(device, program, [value])
    assert_within(compute(program, [value]), expected, "float32")
    for coarse in (torch.bfloat16, torch.float16):
        with pytest.raises(AssertionError, match="off by"):
            assert_within(compute(program, [value.to(coarse)]), expected, str(coarse))
