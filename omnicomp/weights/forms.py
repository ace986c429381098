"""Forms of copies of a parameter: a cast, or the numbers and the scales of its float8 form.

E4M3 has 4 significant bits and ends at 448, so that a tensor is divided by a scale first: of the whole, or of each row,
the last dimension, such as a token of the activations or an output of a weight.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["CAST", "FLOAT8", "Form", "scaled"]

FLOAT8: Final = torch.float8_e4m3fn
CAST: Final = torch.ops.aten.to.dtype  # an OpOverload: differentiable, and known to AOTAutograd's cache as safe
_LARGEST: Final = torch.finfo(FLOAT8).max
_TINY: Final = 1e-12  # keeps the scale of a row of zeros from being zero
_aten: Final = torch.ops.aten


def scaled(value: Any, call: Callable[..., Any], *, rows: bool) -> tuple[Any, Any]:
    """Scale to the range of float8, with the largest element at its end.

    Args:
        value: a floating-point tensor with at least one element, or what stands for one.
        call: gets an ATen operator and its arguments, and computes it or writes it down.
        rows: whether each row has a scale of its own.

    Returns:
        The numbers in float8, in the shape of the value, and the scale in float32: a scalar, or in the shape of the
        value with 1 for the last dimension. Their product is the value but for the rounding.
    """
    wide = call(CAST, value, torch.float32)
    size = call(_aten.abs.default, wide)
    largest = call(_aten.amax.default, size, [-1], True) if rows else call(_aten.amax.default, size)
    scale = call(_aten.div.Tensor, call(_aten.clamp_min.default, largest, _TINY), _LARGEST)
    ranged = call(_aten.clamp.default, call(_aten.div.Tensor, wide, scale), -_LARGEST, _LARGEST)
    return call(CAST, ranged, FLOAT8), scale


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of a copy of a parameter.

    Attributes:
        dtype: of the copy.
        scales: None for a cast to the dtype; else `row` or `tensor`, of which the numbers are kept if the dtype is
            float8, and the scales if it is float32. They are those of the parameter in bfloat16, which is what an
            operator in float8 has for an operand.
        layout: of a cast of four dimensions, `torch.channels_last` or the parameter's own.
    """

    dtype: torch.dtype
    scales: str | None = None
    layout: torch.memory_format = torch.preserve_format

    @property
    def is_plain(self) -> bool:
        """Whether it is a cast in the parameter's own layout."""
        return self.scales is None and self.layout is torch.preserve_format

    def of(self, parameter: Tensor) -> Tensor:
        """The copy of the parameter as it is now: a new tensor, or the parameter itself if it has this form already."""
        if self.scales is None:
            return parameter.to(self.dtype, memory_format=self.layout)
        numbers, scale = scaled(parameter.to(torch.bfloat16), _compute, rows=self.scales == "row")
        return numbers if self.dtype is FLOAT8 else scale

    def empty(self, parameter: Tensor) -> Tensor:
        """Memory for it."""
        if self.scales is None or self.dtype is FLOAT8:
            return torch.empty_like(parameter, dtype=self.dtype, requires_grad=False, memory_format=self.layout)
        shape = (*parameter.shape[:-1], 1) if self.scales == "row" else ()
        return torch.empty(shape, dtype=self.dtype, device=parameter.device)

    def fits(self, kept: Tensor, parameter: Tensor) -> bool:
        """Whether memory that was made for it is still laid out as it would be made now."""
        if kept.device != parameter.device:
            return False
        like = self.layout is torch.preserve_format and (self.scales is None or self.dtype is FLOAT8)
        if like and parameter.is_contiguous():
            return kept.shape == parameter.shape and kept.stride() == parameter.stride()
        there = self.empty(torch.empty_like(parameter, device="meta"))
        return kept.shape == there.shape and kept.stride() == there.stride()


def _compute(operator: Callable[..., Any], *args: Any) -> Any:
    return operator(*args)
