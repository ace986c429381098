"""What a compilation leaves alone of the program around it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

OPTIONS: dict[str, Any] = {"lowerings": ["eager"], "dtype_policy": "bf16"}


def attention(x: Tensor) -> Tensor:
    q, k, v = x.chunk(3, dim=-1)
    return torch.softmax(q @ k.mT / 2, dim=-1) @ v


def layers() -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))


PROGRAMS = pytest.mark.parametrize("make", [layers, lambda: attention], ids=["layers", "attention"])


@PROGRAMS
def test_hooks_for_saved_tensors_see_what_the_program_saves(make: Callable[[], Callable[[Tensor], Tensor]]) -> None:
    """Not the fake tensors on which passes evaluate operators while the first call compiles."""
    compiled = torch.compile(make(), backend="omni", options=OPTIONS)
    x = torch.randn(2, 3, 12, requires_grad=True)
    packed: list[list[tuple[type, torch.dtype, torch.Size]]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed[-1].append((type(tensor), tensor.dtype, tensor.shape))
        return tensor

    for _ in range(2):
        packed.append([])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            compiled(x)
    first, second = packed
    assert first
    assert first == second


@PROGRAMS
def test_the_first_call_in_a_checkpointed_region(make: Callable[[], Callable[[Tensor], Tensor]]) -> None:
    program = make()
    compiled = torch.compile(program, backend="omni", options=OPTIONS)
    x = torch.randn(2, 3, 12, requires_grad=True)
    (got,) = torch.autograd.grad(checkpoint(lambda x: torch.sin(compiled(x)), x, use_reentrant=False).sum(), x)
    (want,) = torch.autograd.grad(torch.sin(program(x)).sum(), x)
    torch.testing.assert_close(got, want, atol=3e-2, rtol=3e-2)
