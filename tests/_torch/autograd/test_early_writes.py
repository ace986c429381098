"""What a call wrote to its inputs before an operator of the program raised is there afterwards, as in eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


@torch.library.custom_op("early_writes::refuse", mutates_args=())
def refuse(x: Tensor) -> Tensor:
    raise ValueError("refused")


refuse.register_fake(torch.empty_like)
refuse.register_autograd(lambda ctx, grad: grad)


def whole(a: Tensor, b: Tensor) -> Any:
    b.copy_(b.flip(0))
    return refuse(a)


def views(a: Tensor, b: Tensor) -> Any:
    b[0] = a[1]
    b.t()[1:].mul_(2)
    return refuse(a)


def behind(a: Tensor, b: Tensor) -> Any:
    y = a.sin()
    x = refuse(a)
    b.copy_(y * 2)
    return x, y


def both_sides(a: Tensor, b: Tensor) -> Any:
    y = b * 2 + 1
    b.mul_(3)
    z = y.sin()
    x = refuse(a)
    a[0].add_(1)
    return x + y, z, b + 1


def reduced(a: Tensor, b: Tensor) -> Any:
    y = a.sum(0)
    b.add_(1)
    x = refuse(a)
    return x + b, a.cumsum(0) * b, y


def one_after_the_other(a: Tensor, b: Tensor) -> Any:
    b.copy_(a)
    a.copy_(b * 2)
    return refuse(a)


def asserted(a: Tensor, b: Tensor) -> Any:
    b.add_(1)
    torch._assert_async((a > 100).any(), "refused")
    return a.cos(), b * 2


EAGER: Any = {"lowerings": ["eager"]}
PROGRAMS = [whole, views, behind, both_sides, reduced, one_after_the_other, asserted]


def compare(program: Callable[..., Any], lowerings: list[str], *inputs: Tensor) -> None:
    mine = [x.detach().clone().requires_grad_(x.requires_grad) * 1 for x in inputs]
    inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) * 1 for x in inputs)
    with pytest.raises((ValueError, RuntimeError, IndexError)) as eagers:
        program(*inputs)
    options: Any = {"lowerings": lowerings}
    compiled = torch.compile(program, backend="omni", options=options)
    with pytest.raises(type(eagers.value)):
        compiled(*mine)
    for found, expected in zip(mine, inputs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("program", PROGRAMS)
def test_writes_before_an_error_are_kept(program: Callable[..., Any]) -> None:
    compare(program, ["eager"], torch.randn(4, 4), torch.randn(4, 4))


@pytest.mark.inductor
@pytest.mark.parametrize("program", PROGRAMS)
def test_inductor_keeps_their_order(program: Callable[..., Any]) -> None:
    compare(program, ["inductor", "eager"], torch.randn(4, 4), torch.randn(4, 4))


def test_an_index_that_is_out_of_range() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        b.add_(1)
        return a[(a > 100).sum().reshape(1) + 9] + b

    compare(program, ["eager"], torch.randn(4, 4), torch.randn(4, 4))


@pytest.mark.parametrize("program", [whole, views, both_sides])
def test_writes_that_autograd_follows(program: Callable[..., Any]) -> None:
    a, b = (torch.randn(4, 4, requires_grad=True) for _ in "ab")
    compare(program, ["eager"], a, b)


def test_statistics_of_a_batch_norm() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return refuse(self.norm(x))

    x, mine, eagers = torch.randn(8, 4), Model(), Model()
    for model in (eagers, torch.compile(mine, backend="omni", options=EAGER)):
        with pytest.raises(ValueError, match="refused"):
            model(x)
    for found, expected in zip(mine.buffers(), eagers.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_call_that_returns_is_as_before() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        b.mul_(a)
        torch._assert_async((a < 100).all(), "refused")
        return (b * a).sum() + b.exp().sum()

    a, b = (torch.randn(4, 4, requires_grad=True) for _ in "ab")
    found = []
    for function in (program, torch.compile(program, backend="omni", options=EAGER)):
        written = b * 1
        (function(a, written) + (written * 3).sum()).backward()
        found.append((a.grad, b.grad, written.detach()))
        a.grad = b.grad = None
    torch.testing.assert_close(found[1], found[0])
