"""A backward that writes to an input: a second one reads what the first one wrote, as in eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omnicomp.timeline import Retreat, current


class Counts(torch.autograd.Function):
    """Its backward reads a tensor of the program, and changes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counter: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.counter = counter
        return x.sin() * counter

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        result = grad * x.cos() * ctx.counter
        ctx.counter.add_(1)
        return result, None


def written_by_both(x: Tensor, counter: Tensor) -> Tensor:
    y = Counts.apply(x, counter)
    counter.add_(5)
    return y * 1


def written_by_a_hook(x: Tensor, counter: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad * counter.add_(1))
    return y.sin() * 1


def steps(function: Callable[..., Any]) -> list[Tensor]:
    x, counter = torch.ones(3, requires_grad=True), torch.full((3,), 0.5)
    y = function(x, counter).sum()
    found = [y.detach()]
    for _ in range(2):
        found += [*torch.autograd.grad(y, x, retain_graph=True), counter.clone()]
    y = function(x, counter).sum()
    counter.mul_(10)
    return [*found, *torch.autograd.grad(y, x), counter]


@pytest.mark.parametrize("program", [Counts.apply, written_by_both, written_by_a_hook])
def test_several_backwards_read_what_is_there_by_then(program: Callable[..., Any]) -> None:
    def call(x: Tensor, counter: Tensor) -> Tensor:
        return program(x, counter) * 2

    run = torch.compile(call, backend="omni", options={"lowerings": ["eager"]})
    for got, want in zip(steps(run), steps(call), strict=True):
        torch.testing.assert_close(got, want)
    retreats = [e for e in current() if isinstance(e, Retreat)]
    if not retreats and program is written_by_a_hook:
        return  # from torch 2.15 on Dynamo leaves the hook out of the graph
    (retreat,) = retreats
    assert retreat.reason.sentence.startswith(
        "AOTAutograd is known to be wrong about a backward that writes to an input"
    )


def test_torch_alone_gets_them_wrong() -> None:
    """If this fails, torch can do it by now, and such a graph need not run eager."""

    def wrong() -> bool:
        compiled = torch.compile(written_by_both, backend="aot_eager")
        return not all(map(torch.allclose, steps(compiled), steps(written_by_both)))

    assert wrong()
