"""TVM's forms of matrix products, convolutions, attention, normalisations and pools."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.checks import argument, first_alone, no_dropout
from omnicomp.lowerings.engines.conversion import form
from omnicomp.lowerings.engines.tvm.engine import TvmEngine
from omnicomp.lowerings.engines.tvm.library import const, dims, emit, nn, op, relax
from omnicomp.lowerings.engines.tvm.pointwise import is_float
from omnicomp.lowerings.engines.tvm.reductions import axes

aten = torch.ops.aten


@TvmEngine.op(aten.mm.default, aten.bmm.default, aten.dot.default, aten.mv.default)
@form("result")
def matmul(x: Any, y: Any) -> Any:
    return op.matmul(x, y)


@TvmEngine.op(aten.addmm.default, aten.baddbmm.default)
@form("result", keep=("beta", "alpha"))
def addmm(bias: Any, x: Any, y: Any, *, beta: float, alpha: float) -> Any:
    """What is scaled by zero counts as zero, even if it is NaN."""
    made = op.matmul(x, y)
    made = made if alpha == 1 else op.multiply(made, const(alpha, x))
    if beta == 0:
        return made
    return op.add(bias if beta == 1 else op.multiply(bias, const(beta, x)), made)


def _known_convolution(node: Node) -> str:
    weight: Any = fake_value(node.args[1])
    args: Any = node.args
    if args[6] and (weight.dim() > 4 or args[8] != 1 or any(step != 1 for step in args[5])):
        return "of transposed convolutions it takes those in one or two dimensions without groups and dilation"
    return ""


@TvmEngine.op(aten.convolution.default, check=_known_convolution)
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
    rank = len(dims(weight)) - 2
    stride, padding, dilation, output_padding = (
        list(each) * (rank if len(each) == 1 else 1) for each in (stride, padding, dilation, output_padding)
    )
    if transposed:
        function = {1: nn.conv1d_transpose, 2: nn.conv2d_transpose}[rank]
        made = function(x, weight, stride, padding * 2, output_padding, dilation, groups)
    else:
        function = {1: nn.conv1d, 2: nn.conv2d, 3: nn.conv3d}[rank]
        made = function(x, weight, stride, padding * 2, dilation, groups)
    return made if bias is None else op.add(made, op.reshape(bias, (1, dims(bias)[0], *(1,) * rank)))


@TvmEngine.op(aten._scaled_dot_product_flash_attention_for_cpu.default, check=no_dropout)
@form("result", keep=("scale", "dropout_p"))
def attention(q: Any, k: Any, v: Any, dropout: float, causal: bool, *, attn_mask: Any, scale: Any) -> tuple[Any, Any]:
    """The result, and the logarithm of the sum of exponentials of each row; zero in one that is masked as a whole."""
    *_, rows, size = dims(q)
    columns = dims(k)[-2]
    scores = op.matmul(q, op.permute_dims(k, [0, 1, 3, 2]))
    scores = emit(op.multiply(scores, const(1 / math.sqrt(size) if scale is None else scale, q)))
    if causal:
        visible = relax.const([[column <= row for column in range(columns)] for row in range(rows)], "bool")
        scores = emit(op.where(visible, scores, const(-math.inf, q)))
    if attn_mask is not None:
        scores = emit(op.add(scores, attn_mask))
    top = emit(op.max(scores, 3, True))
    top = emit(op.where(op.equal(top, const(-math.inf, q)), const(0, q), top))
    rise = emit(op.exp(op.subtract(scores, top)))
    total = emit(op.sum(rise, 3, True))
    weights = op.where(op.equal(total, const(0, q)), const(0, q), op.divide(rise, total))
    known = op.where(op.equal(total, const(0, q)), const(0, q), op.add(op.log(total), top))
    return op.matmul(weights, v), op.squeeze(known, [3])


@TvmEngine.op(aten.native_layer_norm.default)
@form("result")
def native_layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: Any) -> tuple[Any, Any, Any]:
    rank = len(dims(x))
    made, middle, scale = _normalised(x, list(range(rank - len(shape), rank)), eps)
    return _affine(made, weight, bias), middle, scale


@TvmEngine.op(aten.native_group_norm.default)
@form("result")
def native_group_norm(
    x: Any, weight: Any, bias: Any, batch: int, channels: int, size: int, groups: int, eps: Any
) -> tuple[Any, Any, Any]:
    shape = dims(x)
    made, middle, scale = _normalised(emit(op.reshape(x, (batch, groups, channels // groups * size))), [2], eps)
    wide = (1, channels, *(1,) * (len(shape) - 2))
    weight, bias = (each if each is None else op.reshape(each, wide) for each in (weight, bias))
    return _affine(op.reshape(made, shape), weight, bias), op.squeeze(middle, [2]), op.squeeze(scale, [2])


@TvmEngine.op(aten._native_batch_norm_legit_no_training.default, check=first_alone)
@form("result")
def batch_norm_no_training(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: Any, eps: Any
) -> tuple[Any, Any, Any]:
    wide = (1, dims(mean)[0], *(1,) * (len(dims(x)) - 2))
    scale = op.rsqrt(op.add(variance, const(eps, variance)))
    scale = emit(scale if weight is None else op.multiply(scale, weight))
    shift = op.negative(op.multiply(mean, scale))
    shift = shift if bias is None else op.add(shift, bias)
    return op.add(op.multiply(x, op.reshape(scale, wide)), op.reshape(shift, wide)), None, None


@TvmEngine.op(aten.max_pool2d_with_indices.default, check=first_alone)
@form("result", like=True)
def max_pool2d(
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    like: Any,
) -> tuple[Any, Any]:
    """The values; NaN where there is one in the window, which TVM's maximum drops."""
    settings = (_pair(kernel), _pair(stride) if len(stride) else _pair(kernel), _pair(padding) * 2, _pair(dilation))
    shape = tuple(map(int, like[0].shape))
    planes = emit(op.reshape(x, (1, *dims(x)))) if len(dims(x)) == 3 else x
    made = nn.max_pool2d(planes, *settings, ceil_mode)
    if is_float(x):
        marks = emit(op.astype(op.isnan(planes), "float32"))
        found = emit(nn.max_pool2d(marks, *settings, ceil_mode))
        made = op.where(op.greater(found, const(0, found)), const(math.nan, x), made)
    return op.reshape(made, shape), None


def _plain_average(node: Node) -> str:
    given = argument(node, "ceil_mode") or argument(node, "divisor_override") is not None
    return "it takes no averages over rounded-up windows or with a divisor" if given else ""


@TvmEngine.op(aten.avg_pool2d.default, check=_plain_average)
@form("result", like=True)
def avg_pool2d(
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    with_padding: bool,
    divisor: int | None,
    like: Any,
) -> Any:
    planes = emit(op.reshape(x, (1, *dims(x)))) if len(dims(x)) == 3 else x
    steps = _pair(stride) if len(stride) else _pair(kernel)
    made = nn.avg_pool2d(planes, _pair(kernel), steps, _pair(padding) * 2, (1, 1), False, with_padding)
    return op.reshape(made, tuple(map(int, like.shape)))


@TvmEngine.op(aten._adaptive_avg_pool2d.default)
@form("result", like=True)
def adaptive_avg_pool2d(x: Any, sizes: Sequence[int], like: Any) -> Any:
    planes = emit(op.reshape(x, (1, *dims(x)))) if len(dims(x)) == 3 else x
    return op.reshape(nn.adaptive_avg_pool2d(planes, tuple(sizes)), tuple(map(int, like.shape)))


def _normalised(x: Any, along: Sequence[int], eps: float) -> tuple[Any, Any, Any]:
    along = axes(x, list(along))
    middle = emit(op.mean(x, along, True))
    way = emit(op.subtract(x, middle))
    scale = emit(op.rsqrt(op.add(op.mean(op.multiply(way, way), along, True), const(eps, x))))
    return op.multiply(way, scale), middle, scale


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else op.multiply(x, weight)
    return x if bias is None else op.add(x, bias)


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return (values[0], values[-1])
