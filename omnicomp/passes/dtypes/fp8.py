"""Linear layers in float8: operands scaled to the range of E4M3 by their largest element, products by `_scaled_mm`.

E4M3 has 4 significant bits and ends at 448. With a scale for each row (of the activations: each token; of the weight:
each output), one large element costs the other rows nothing; with one for the tensor there is less to compute. Both are
dynamic: they are found in each call, from the operands in the low-precision dtype that the policy computes in.
"""

from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp.dtypes import DtypePolicy
from omnicomp.graphs import fake_value, insert_call
from omnicomp.passes.base import PassContext
from omnicomp.passes.dtypes.operators import kind
from omnicomp.passes.dtypes.resolve import NAME
from omnicomp.passes.dtypes.rewrite import CAST, Compute
from omnicomp.timeline import Reason

__all__ = ["FLOAT8", "in_fp8"]

FLOAT8: Final = torch.float8_e4m3fn
_LARGEST: Final = torch.finfo(FLOAT8).max
_TINY: Final = 1e-12  # keeps the scale of a row of zeros from being zero
_MULTIPLE: Final = 16  # of both sizes of the weight, for the kernels
_aten: Final = torch.ops.aten


def in_fp8(node: Node, policy: DtypePolicy, context: PassContext) -> Compute | Reason | None:
    """How a linear layer is computed in float8.

    Args:
        node: an operator that is to compute in `policy.compute`.
        policy: with the kind of scales in `fp8`.
        context: of the pass.

    Returns:
        What inserts it, for operands in `policy.compute`; the reason why it is not done; None for what is no linear
        layer.
    """
    if policy.fp8 is None or kind(node) != "linear":
        return None
    weight = fake_value(node.args[1] if len(node.args) > 1 else node.kwargs.get("weight"))
    sizes = tuple(weight.shape) if isinstance(weight, torch.Tensor) else ()
    if context.training:
        return _reason("float8 is for inference, and the graph is differentiated", "a graph under torch.no_grad()")
    if FLOAT8 not in context.device.capabilities().storage_dtypes:
        return _reason(f"the {context.device.type} device has no float8", "a GPU of compute capability 8.9 or newer")
    if policy.compute is not torch.bfloat16:
        return _reason("products of float8 are given out in bfloat16", "compute=bfloat16", str(policy.compute))
    if len(sizes) != 2 or not all(type(size) is int and size % _MULTIPLE == 0 for size in sizes):
        return _reason("the weight's sizes do not fit the kernels", f"multiples of {_MULTIPLE}", f"{sizes}")
    operand = node.args[0] if node.args else node.kwargs.get("input")
    if any(type(size) is int and size == 0 for size in fake_value(operand).shape):
        return _reason("its input is empty, and has no largest element", "one row or more")
    rows = policy.fp8 == "row"

    def compute(node: Node, args: Any, kwargs: Any, dtype: torch.dtype) -> Node:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return _linear(node, given["input"], given["weight"], given.get("bias"), dtype, rows=rows)

    return compute


def _linear(anchor: Node, x: Node, weight: Node, bias: Node | None, dtype: torch.dtype, *, rows: bool) -> Node:
    def insert(target: Any, *args: Any, **kwargs: Any) -> Node:
        return insert_call(anchor, target, args, kwargs)

    def quantized(value: Node) -> tuple[Node, Node]:
        wide = insert(CAST, value, torch.float32)
        size = insert(_aten.abs.default, wide)
        largest = insert(_aten.amax.default, size, [-1], True) if rows else insert(_aten.amax.default, size)
        scale = insert(_aten.div.Tensor, insert(_aten.clamp_min.default, largest, _TINY), _LARGEST)
        scaled = insert(_aten.clamp.default, insert(_aten.div.Tensor, wide, scale), -_LARGEST, _LARGEST)
        return insert(CAST, scaled, FLOAT8), scale

    shape = fake_value(x).shape
    flat = x if len(shape) == 2 else insert(_aten.reshape.default, x, [-1, shape[-1]])
    low_x, scale_x = quantized(flat)
    low_w, scale_w = quantized(weight)
    scale_w = insert(_aten.t.default, scale_w) if rows else scale_w
    product = insert(_aten._scaled_mm.default, low_x, insert(_aten.t.default, low_w), scale_x, scale_w, out_dtype=dtype)
    if len(shape) != 2:
        sizes = [s if type(s) is int else insert(_aten.sym_size.int, x, i) for i, s in enumerate(shape[:-1])]
        product = insert(_aten.reshape.default, product, [*sizes, fake_value(weight).shape[0]])
    return product if bias is None else insert(_aten.add.Tensor, product, bias)


def _reason(sentence: str, needed: str, observed: str = "") -> Reason:
    return Reason(
        code="option_ineffective",
        by=NAME,
        sentence=f"the layer is not computed in float8: {sentence}",
        observed=observed,
        needed=needed,
        lever='choose dtype_policy="bf16" to compute as it does now',
    )
