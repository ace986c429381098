import functools
from typing import Any

import pytest
import torch
from torch._inductor.cudagraph_trees import StorageWeakRefWrapper

from omnicomp._torch.inductor.cuda_graphs import all_are_dead, held_once


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


def test_a_tensor_that_autograd_alone_saves_is_held() -> None:
    tensors = [torch.ones(3)]
    assert held_once(tensors, 0)
    result = Saves.apply(torch.ones(3, requires_grad=True), tensors[0])
    assert not held_once(tensors, 0)
    result.sum().backward()
    assert held_once(tensors, 0)
    also = tensors[0]
    assert not held_once(tensors, 0)
    del also
    assert held_once(tensors, 0)


@pytest.mark.parametrize("known", [True, False])
def test_all_are_dead_once_nobody_holds_a_tensor_a_view_or_what_autograd_saved(known: bool) -> None:
    tensors: list[Any] = [torch.ones(3) for _ in range(3)]
    storages = [tensor.untyped_storage() for tensor in tensors]  # torch's nodes have them in Python, too
    checks = [functools.partial(held_once, tensors, at) if known else None for at in range(3)]
    references = [None, *map(StorageWeakRefWrapper, tensors, checks)]
    if not known:
        del storages
        held = tensors.pop()
        tensors.clear()
        assert not all_are_dead(references)
        del held
        assert all_are_dead(references)
        return
    assert all_are_dead(references)
    also = tensors[1]
    assert not all_are_dead(references)
    also = also[1:]
    assert not all_are_dead(references)
    del also
    result = Saves.apply(torch.ones(3, requires_grad=True), tensors[2])
    assert not all_are_dead(references)
    result.sum().backward()
    assert all_are_dead(references)
    assert all(reference is None or reference.expired() for reference in references)
