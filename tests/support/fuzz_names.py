"""What the names in a drawn program mean: in its own dtypes, or in the widest ones for a standard to measure against.

A program names dtypes `F16`, `BF16`, `F32`, `F64`, `C64` and makes tensors by `normal`, `leaf`, `ints`, `bools`, so
that the same text runs in double precision on the same numbers.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Refused(ValueError):
    """What a program's own operator raises."""


refusals = [0]


def namespace(*, wide: bool) -> dict[str, Any]:
    """The globals of a program.

    Args:
        wide: whether floating and complex dtypes mean double precision.
    """
    meaning: Callable[[torch.dtype], torch.dtype] = (lambda d: WIDE.get(d, d)) if wide else (lambda d: d)

    def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64) * scale
        return drawn.to(dtype).to(meaning(dtype))

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return normal(*shape, dtype=dtype).requires_grad_()

    def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        return nn.Parameter(normal(*shape, dtype=dtype, scale=0.5))

    def ints(*shape: int, dtype: torch.dtype = torch.int64, low: int = 0, high: int = 4) -> Tensor:
        return torch.randint(low, high, shape).to(dtype)

    def bools(*shape: int) -> Tensor:
        return torch.rand(shape) > 0.4

    def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(meaning(dtype))

    def autocast() -> Any:
        return contextlib.nullcontext() if wide else torch.autocast("cpu", torch.bfloat16)

    return {
        "__name__": "fuzzed",
        "torch": torch,
        "nn": nn,
        "F": F,
        "Square": Square,
        **{name: meaning(dtype) for name, dtype in _DTYPES.items()},
        **{f.__name__: f for f in (normal, leaf, parameter, ints, bools, cast, autocast)},
    }


def widened(module: nn.Module) -> nn.Module:
    """The module with its state in double precision."""
    return module._apply(lambda tensor: tensor.to(WIDE.get(tensor.dtype, tensor.dtype)))


class Square(torch.autograd.Function):
    """A function with a gradient of its own, which is not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x * 3


@torch.library.custom_op("fuzz::affine", mutates_args=())
def _affine(x: Tensor, factor: float, shift: float) -> Tensor:
    return x * factor + shift


_affine.register_fake(lambda x, factor, shift: torch.empty_like(x))
_affine.register_autograd(
    lambda ctx, grad: (grad * ctx.factor, None, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


@torch.library.custom_op("fuzz::pair", mutates_args=())
def _pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.sum(0)


_pair.register_fake(lambda x: (torch.empty_like(x), x.new_empty(x.shape[1:])))


@torch.library.custom_op("fuzz::accumulate_", mutates_args=("target",))
def _accumulate(target: Tensor, amount: float) -> None:
    target.add_(amount)


@torch.library.custom_op("fuzz::refuse", mutates_args=())
def _refuse(x: Tensor) -> Tensor:
    refusals[0] += 1
    raise Refused("the operator refuses")


_refuse.register_fake(lambda x: torch.empty_like(x))
