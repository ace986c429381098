"""OpenVINO's forms of matrix products and convolutions, and of attention."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.checks import all_of, filled, first_alone, no_dropout, same_heads
from omnicomp.lowerings.engines.conversion import form
from omnicomp.lowerings.engines.openvino.engine import OpenVinoEngine
from omnicomp.lowerings.engines.openvino.library import integers, number, ops, shape_of

aten = torch.ops.aten


def floating(node: Node) -> str:
    """Why a node whose first result is no floating-point number is not taken."""
    value = fake_value(node)
    first = value[0] if isinstance(value, (tuple, list)) else value
    return "" if first.dtype.is_floating_point else "it computes it of floating-point numbers alone"


@OpenVinoEngine.op(
    aten.mm.default, aten.bmm.default, aten.dot.default, aten.mv.default, aten.matmul.default, check=floating
)
@form("result")
def matmul(x: Any, y: Any) -> Any:
    return ops.matmul(x, y, False, False)


@OpenVinoEngine.op(aten.addmm.default, aten.baddbmm.default, check=floating)
@form("result", keep=("beta", "alpha"))
def addmm(bias: Any, x: Any, y: Any, *, beta: float, alpha: float) -> Any:
    made = ops.matmul(x, y, False, False)
    made = made if alpha == 1 else ops.multiply(made, number(alpha, made))
    if beta == 0:  # a bias that counts for nothing does so even if it is NaN
        return ops.add(made, number(0, made))
    return ops.add(made, bias if beta == 1 else ops.multiply(bias, number(beta, bias)))


@OpenVinoEngine.op(aten.linear.default, check=floating)
@form("result")
def linear(x: Any, weight: Any, bias: Any) -> Any:
    made = ops.matmul(x, weight, False, True)
    return made if bias is None else ops.add(made, bias)


def _batched(node: Node) -> str:
    """Why a convolution is not taken: a batch or channels of none, or a kernel beyond three dimensions."""
    x, weight = fake_value(node.args[0]), fake_value(node.args[1])
    rank = len(weight.shape) - 2
    if not 1 <= rank <= 3 or len(x.shape) != rank + 2:
        return "it convolves over one, two or three dimensions, of a batch"
    return floating(node)


@OpenVinoEngine.op(aten.convolution.default, check=_batched)
@form("result")
def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    outs, ins, *sizes = shape_of(weight)
    rank = len(sizes)
    stride, padding, dilation, output_padding = (
        list(each) * (rank if len(each) == 1 else 1) for each in (stride, padding, dilation, output_padding)
    )
    if groups > 1:
        weight = ops.reshape(weight, integers([groups, outs // groups, ins, *sizes]), False)
    if transposed:
        function = ops.group_convolution_backprop_data if groups > 1 else ops.convolution_backprop_data
        made = function(
            x,
            weight,
            strides=stride,
            pads_begin=padding,
            pads_end=padding,
            dilations=dilation,
            output_padding=output_padding,
        )
    else:
        function = ops.group_convolution if groups > 1 else ops.convolution
        made = function(x, weight, stride, padding, padding, dilation)
    return made if bias is None else ops.add(made, ops.reshape(bias, integers([1, -1, *[1] * rank]), False))


@OpenVinoEngine.op(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    check=all_of(no_dropout, first_alone, filled, same_heads),
)
@form("result", keep=("dropout_p", "scale"))
def attention(
    q: Any, k: Any, v: Any, dropout_p: float, is_causal: bool, *, attn_mask: Any, scale: float | None
) -> tuple[Any, None]:
    """The result alone; the sums of exponentials are for a backward."""
    scale = 1 / math.sqrt(shape_of(q)[-1]) if scale is None else scale
    made = ops.scaled_dot_product_attention(q, k, v, attn_mask, number(scale, q), causal=is_causal)
    if attn_mask is None:
        return made, None
    # What attends to nothing is zero, and not NaN.
    hidden = ops.equal(attn_mask, number(-math.inf, attn_mask))
    hidden = ops.reduce_logical_and(hidden, integers([-1]), True)
    return ops.select(hidden, number(0, made), made), None
