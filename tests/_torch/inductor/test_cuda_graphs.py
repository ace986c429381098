from typing import Any

import torch

from omnicomp._torch.inductor.cuda_graphs import held_once


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
