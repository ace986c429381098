"""Regions of a program in training: what the backward reads is not overwritten by what follows a call."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.compiler import nested_compile_region


def exponential(x: Tensor, w: Tensor) -> Tensor:
    return torch.exp(x @ w)


def of_views(x: Tensor, w: Tensor) -> Tensor:
    y = torch.sin(x @ w.t())
    return (y.t() @ y).tanh() * y.view(8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("body", [exponential, of_views])
def test_gradients_of_a_region(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    region = nested_compile_region(body)

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = region(x * 0.1, weight) + 1
        return x

    inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    before = [each.clone() for each in inputs]
    y, expected = torch.compile(run, backend="omni")(*inputs), run(*inputs)
    torch.testing.assert_close(y, expected)
    tangent = torch.randn(8, 8)
    for got, want in zip(*(torch.autograd.grad(each, inputs, tangent) for each in (y, expected)), strict=True):
        torch.testing.assert_close(got, want)
    for value, old in zip(inputs, before, strict=True):
        assert torch.equal(value, old)
