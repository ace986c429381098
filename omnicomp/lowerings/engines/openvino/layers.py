"""OpenVINO's forms of normalisations and pools."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.conversion import form
from omnicomp.lowerings.engines.openvino.engine import OpenVinoEngine
from omnicomp.lowerings.engines.openvino.library import integers, number, openvino, ops, shape_of

aten = torch.ops.aten


@OpenVinoEngine.op(aten.native_layer_norm.default)
@form("result", keep=("eps",))
def native_layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    axes = integers(list(range(len(shape_of(x)) - len(shape), len(shape_of(x)))))
    made = ops.mvn(x, axes, True, eps, "INSIDE_SQRT")
    return (_affine(made, weight, bias), *_statistics(x, axes, eps))


@OpenVinoEngine.op(aten.native_group_norm.default)
@form("result", keep=("eps",))
def native_group_norm(
    x: Any, weight: Any, bias: Any, batch: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Any, Any, Any]:
    rows = ops.reshape(x, integers([batch, groups, -1]), False)
    axes = integers([2])
    wide = integers([1, channels, *[1] * (len(shape_of(x)) - 2)])
    weight, bias = (each if each is None else ops.reshape(each, wide, False) for each in (weight, bias))
    made = ops.reshape(ops.mvn(rows, axes, True, eps, "INSIDE_SQRT"), integers(list(shape_of(x))), False)
    middle, scale = _statistics(rows, axes, eps)
    return _affine(made, weight, bias), ops.squeeze(middle, axes), ops.squeeze(scale, axes)


def _statistics(x: Any, axes: Any, eps: float) -> tuple[Any, Any]:
    """The mean and the reciprocal of the standard deviation, which are computed if they are read."""
    middle = ops.reduce_mean(x, axes, True)
    away = ops.subtract(x, middle)
    variance = ops.reduce_mean(ops.multiply(away, away), axes, True)
    return middle, ops.divide(number(1, x), ops.sqrt(ops.add(variance, number(eps, x))))


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else ops.multiply(x, weight)
    return x if bias is None else ops.add(x, bias)


@OpenVinoEngine.op(aten._native_batch_norm_legit_no_training.default)
@form("result", keep=("eps",))
def batch_norm_no_training(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: Any, eps: float
) -> tuple[Any, Any, Any]:
    one, zero = number(1, mean), number(0, mean)
    weight = ops.broadcast(one, ops.shape_of(mean)) if weight is None else weight
    bias = ops.broadcast(zero, ops.shape_of(mean)) if bias is None else bias
    made = ops.batch_norm_inference(x, weight, bias, mean, variance, eps)
    nothing = ops.broadcast(zero, integers([0]))
    return made, nothing, nothing


def _pools(node: Node) -> str:
    value, size = fake_value(node.args[0]), node.args[1]
    rank = len(size) if isinstance(size, (list, tuple)) else 0
    return "" if len(value.shape) == rank + 2 else "it pools a batch alone"


@OpenVinoEngine.op(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, check=_pools)
def max_pool(
    x: Any, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], ceil: bool
) -> tuple[Any, Any]:
    rank = len(size)
    stride, padding, dilation = (_spread(each or size, rank) for each in (stride, padding, dilation))
    rounding = "ceil_torch" if ceil else "floor"
    made = ops.max_pool(x, stride, dilation, padding, padding, list(size), rounding, "explicit", "i64", 2)
    return made[0], made[1]


def _averages(node: Node) -> str:
    divisor = node.args[6] if len(node.args) > 6 else node.kwargs.get("divisor_override")
    if divisor is not None:
        return "it divides by the number of elements alone"
    return _pools(node)


@OpenVinoEngine.op(aten.avg_pool2d.default, aten.avg_pool3d.default, check=_averages)
@form("result")
def avg_pool(
    x: Any,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil: bool,
    count_include_pad: bool,
    divisor: Any,
) -> Any:
    rank = len(size)
    stride, padding = (_spread(each or size, rank) for each in (stride, padding))
    rounding = "ceil_torch" if ceil else "floor"
    return ops.avg_pool(x, stride, padding, padding, list(size), not count_include_pad, rounding, "explicit")


def _spread(values: Sequence[int], rank: int) -> list[int]:
    return list(values) * (rank if len(values) == 1 else 1)


@OpenVinoEngine.op(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, check=_pools)
@form("result")
def adaptive_avg_pool(x: Any, size: Sequence[int]) -> Any:
    sizes = ops.constant(list(size), openvino.Type.i32)
    return ops.adaptive_avg_pool(x, sizes)
