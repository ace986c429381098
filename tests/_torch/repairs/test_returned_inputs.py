"""Inputs that a graph writes to and returns keep their places, where others that need gradients are written to."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Counted(nn.Module):
    """Counts its calls in a buffer, which `+=` makes an output of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2, 2))
        self.register_buffer("sums", torch.zeros(3))

    def forward(self, x: Tensor, w: Tensor) -> Any:
        x.mul_(2)
        w.detach().mul_(0.5)
        self.calls += 1
        y = x.sin() + w.sum()
        self.sums += 2
        return y, x.cos()


def outcome(compile: Any) -> list[Tensor]:
    torch.manual_seed(0)
    module, start, w = Counted(), torch.randn(4, 2, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    x = start * 1
    results = compile(module)(x, w)
    sum((r * r).sum() for r in (*results, x)).backward()
    return [*results, x, w, module.calls, module.sums, start.grad, w.grad]


@pytest.mark.parametrize("lowerings", [["eager"], pytest.param(["inductor"], marks=[pytest.mark.slow])])
def test_results_are_not_exchanged_for_buffers(lowerings: list[str]) -> None:
    expected = outcome(lambda module: module)
    found = outcome(lambda module: torch.compile(module, backend="omni", options={"lowerings": lowerings}))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
