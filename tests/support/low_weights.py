"""A small model whose weights have low-precision copies, and what is asked of these in tests."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omnicomp import weights

ONCE = {"lowerings": ["eager"], "dtype_policy": "bf16"}
CALL = {"lowerings": ["eager"], "dtype_policy": {"preset": "bf16", "weights": "call"}}


class Model(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def expected(model: nn.Module, x: Tensor) -> Tensor:
    """What the policy computes, with casts of what the weights are now."""
    first, second = model.get_submodule("first"), model.get_submodule("second")
    low = F.linear(x.bfloat16(), first.weight.bfloat16(), first.bias.bfloat16()).relu()
    return F.linear(low, second.weight.bfloat16()).float()


def renewals() -> list[int]:
    """How often each copy was written to."""
    return sorted(low._version for _, low in weights.copies())


def compiled(model: nn.Module, options: dict[str, Any] = ONCE) -> Callable[..., Tensor]:
    return torch.compile(model, backend="omni", options=options)
