"""OpenVINO's forms of operators that make tensors of nothing: constants."""

from typing import Any

import torch

from omnicomp.lowerings.engines.conversion import form
from omnicomp.lowerings.engines.openvino.engine import OpenVinoEngine
from omnicomp.lowerings.engines.openvino.library import ops, type_of
from omnicomp.lowerings.engines.openvino.shapes import broadcast

aten = torch.ops.aten


def _filled(value: Any, like: Any) -> Any:
    filled = value if hasattr(value, "get_element_type") else ops.constant(value, type_of(like.dtype))
    return broadcast(filled, like.shape)


@OpenVinoEngine.op(aten.full.default, aten.full_like.default, aten.new_full.default, aten.fill.Scalar, aten.fill.Tensor)
@form(like=True)
def full(*args: Any, like: Any, **ignored: Any) -> Any:
    return _filled(args[-1], like)


@OpenVinoEngine.op(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
@form(like=True)
def zeros(*args: Any, like: Any, **ignored: Any) -> Any:
    return _filled(0, like)


@OpenVinoEngine.op(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
@form(like=True)
def ones(*args: Any, like: Any, **ignored: Any) -> Any:
    return _filled(1, like)


@OpenVinoEngine.op(aten.scalar_tensor.default)
@form(like=True)
def scalar_tensor(value: Any, like: Any, **ignored: Any) -> Any:
    return _filled(value, like)


@OpenVinoEngine.op(aten.arange.default, aten.arange.start, aten.arange.start_step)
@form(like=True)
def arange(*args: Any, like: Any, **ignored: Any) -> Any:
    """Computed by torch: all of it is known."""
    values = torch.arange(*args, dtype=like.dtype)
    if values.dtype in (torch.bfloat16, torch.float16):
        return ops.convert(ops.constant(values.float().numpy()), "bf16" if values.dtype is torch.bfloat16 else "f16")
    return ops.constant(values.numpy())
