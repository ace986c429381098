"""A number that changes from call to call is the number of the call, also where it is built into a graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch._aot_autograd import graph_compile

from omnicomp._torch.repairs.stale_floats import NEEDED, floats_current

NUMBERS = (0.5, 0.75, 1.25)  # the first is a constant, the second changes, the third was another's


def clamped(x: Tensor, a: float) -> Any:
    return torch.clamp(x, max=a) * a


def moved_in_place(x: Tensor, a: float) -> Any:
    return (x * a).addcmul_(x, x, value=a)


def softly_clamped(x: Tensor, a: float) -> Any:
    return torch.where(x > a, x, a) + F.softplus(x, beta=a)


def filled(x: Tensor, a: float) -> Any:
    return x * a, torch.full((2,), a)


def normalised(x: Tensor, a: float) -> Any:
    return F.layer_norm(x * a, (4,), eps=a + 1e-3)


def interpolated(x: Tensor, a: float) -> Any:
    return F.interpolate(x[None, None] * a, scale_factor=a + 1)


def averaged(x: Tensor, a: float) -> Any:
    return torch.lerp(x, x.flip(0), a) * a


def returned(x: Tensor, a: float) -> Any:
    return x * a, a * 2


def only_multiplied(x: Tensor, a: float) -> Any:
    return x * a + a


def check(program: Callable[..., Any], training: bool, lowering: str) -> None:
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(program, backend="omni", options={"lowerings": [lowering]})
    for number in NUMBERS:
        gradients: list[Tensor] = []
        results: list[Any] = []
        for run in (compiled, program):
            x = torch.linspace(-2, 4, 16).view(4, 4).requires_grad_(training)
            results.append(run(x, number))
            first = results[-1][0] if isinstance(results[-1], tuple) else results[-1]
            gradients += torch.autograd.grad(first.sum(), x) if training else ()
        torch.testing.assert_close(*results)
        torch.testing.assert_close(gradients[:1], gradients[1:])
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] == frames["total"] <= len(NUMBERS)  # none was given up


PROGRAMS = [clamped, moved_in_place, softly_clamped, filled, normalised, interpolated, averaged, returned]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_call_has_its_own_number(program: Callable[..., Any]) -> None:
    check(program, training=True, lowering="eager")


@pytest.mark.inductor
@pytest.mark.parametrize(("program", "training"), [(clamped, False), (averaged, True)])
def test_under_inductor_too(program: Callable[..., Any], training: bool) -> None:
    check(program, training, lowering="inductor")


@pytest.mark.inductor
@pytest.mark.parametrize("program", [only_multiplied, moved_in_place])
@torch.no_grad()
def test_one_graph_serves_all_numbers_where_it_can(program: Callable[..., Any]) -> None:
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(program, backend="omni")
    for number in (*NUMBERS, -1.0, 2.0):
        x = torch.linspace(-2, 4, 16).view(4, 4)
        torch.testing.assert_close(compiled(x, number), program(x, number))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # of the first number, and of any


@torch.no_grad()
def test_a_constant_of_one_function_is_an_input_of_another() -> None:
    for program, graphs in ((normalised, len(NUMBERS)), (only_multiplied, 2)):
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(program, backend="omni", options={"lowerings": ["eager"]})
        for number in NUMBERS:
            compiled(torch.ones(4, 4), number)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_torch_is_as_it_was_afterwards() -> None:
    before = graph_compile.tensorify_python_scalars
    with floats_current():
        assert (graph_compile.tensorify_python_scalars is not before) == NEEDED.here
    assert graph_compile.tensorify_python_scalars is before
