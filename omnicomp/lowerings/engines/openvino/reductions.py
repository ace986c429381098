"""OpenVINO's forms of operators that compute one element of many."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.checks import all_of as all_of_checks
from omnicomp.lowerings.engines.checks import argument, filled, of_several
from omnicomp.lowerings.engines.conversion import form
from omnicomp.lowerings.engines.openvino.engine import OpenVinoEngine
from omnicomp.lowerings.engines.openvino.library import OpenVino, integers, number, ops, shape_of
from omnicomp.lowerings.engines.openvino.linear import floating
from omnicomp.lowerings.engines.openvino.pointwise import magnitude

aten = torch.ops.aten
_LARGEST = torch.finfo(torch.float32).max


def _axes(x: Any, dim: Any) -> Any:
    """Axes as a constant; none and no list at all stand for all."""
    rank = len(shape_of(x))
    dims = [dim] if isinstance(dim, int) else list(dim or range(rank))
    return integers([each % rank for each in dims] if rank else [])


def _reduced(function: Callable[..., Any], x: Any, dim: Any, keepdim: bool) -> Any:
    """What a reduction makes of a value; a single number is what it is reduced to."""
    return function(x, _axes(x, dim), keepdim) if shape_of(x) else x


@OpenVinoEngine.op(aten.sum.default, aten.sum.dim_IntList)
@form("result")
def summed(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any) -> Any:
    return _reduced(ops.reduce_sum, x, dim, keepdim)


@OpenVinoEngine.op(aten.mean.default, aten.mean.dim, check=filled)
@form("result")
def mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any) -> Any:
    return _reduced(ops.reduce_mean, x, dim, keepdim)


@OpenVinoEngine.op(aten.prod.default, aten.prod.dim_int, check=floating)
@form("result")
def prod(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any) -> Any:
    return _reduced(ops.reduce_prod, x, dim, keepdim)


def _comparable(node: Node) -> str:
    value = fake_value(node.args[0])
    return "it compares no booleans" if value.dtype is torch.bool else filled(node)


@OpenVinoEngine.op(aten.amax.default, aten.max.default, check=_comparable)
def amax(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _extreme(ops.reduce_max, -math.inf, x, dim, keepdim)


@OpenVinoEngine.op(aten.amin.default, aten.min.default, check=_comparable)
def amin(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _extreme(ops.reduce_min, math.inf, x, dim, keepdim)


def _extreme(function: Callable[..., Any], neutral: float, x: Any, dim: Any, keepdim: bool) -> Any:
    """Of infinite numbers alone OpenVINO's result is the largest finite one."""
    made = _reduced(function, x, dim, keepdim)
    if not x.get_element_type().is_real() or not shape_of(x):
        return made
    infinite = _reduced(ops.reduce_logical_and, ops.equal(x, number(neutral, x)), dim, keepdim)
    return ops.select(infinite, number(neutral, x), made)


@OpenVinoEngine.op(aten.any.default, aten.any.dim, aten.any.dims)
def any_of(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _reduced(ops.reduce_logical_or, OpenVino().cast(x, torch.bool), dim, keepdim)


@OpenVinoEngine.op(aten.all.default, aten.all.dim, aten.all.dims)
def all_of(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _reduced(ops.reduce_logical_and, OpenVino().cast(x, torch.bool), dim, keepdim)


_several = all_of_checks(of_several, _comparable)


def _extremes(x: Any, dim: int, keepdim: bool, mode: str) -> tuple[Any, Any]:
    dim %= len(shape_of(x))
    made = ops.topk(x, integers(1), dim, mode, "value", "i64", True)
    return made if keepdim else tuple(ops.squeeze(each, integers([dim])) for each in made)


@OpenVinoEngine.op(aten.max.dim, check=_several)
def max_dim(x: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    return _extremes(x, dim, keepdim, "max")


@OpenVinoEngine.op(aten.min.dim, check=_several)
def min_dim(x: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    return _extremes(x, dim, keepdim, "min")


def _position(x: Any, dim: int | None, keepdim: bool, mode: str) -> Any:
    if dim is not None:
        return _extremes(x, dim, keepdim, mode)[1]
    rank = len(shape_of(x))
    flat = _extremes(ops.reshape(x, integers([-1]), False), 0, False, mode)[1]
    return ops.reshape(flat, integers([1] * rank if keepdim else []), False)


@OpenVinoEngine.op(aten.argmax.default, check=_several)
def argmax(x: Any, dim: int | None, keepdim: bool) -> Any:
    return _position(x, dim, keepdim, "max")


@OpenVinoEngine.op(aten.argmin.default, check=_several)
def argmin(x: Any, dim: int | None, keepdim: bool) -> Any:
    return _position(x, dim, keepdim, "min")


@OpenVinoEngine.op(aten.topk.default, check=_several)
def topk(x: Any, k: int, dim: int, largest: bool, is_sorted: bool) -> tuple[Any, Any]:
    dim %= len(shape_of(x))
    return ops.topk(x, integers(k), dim, "max" if largest else "min", "value", "i64", True)


@OpenVinoEngine.op(aten.sort.default, aten.sort.stable, check=_several)
def sort(x: Any, *args: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    dim, descending = args or (dim, descending)
    dim %= len(shape_of(x))
    return ops.topk(x, integers(shape_of(x)[dim]), dim, "max" if descending else "min", "value", "i64", True)


@OpenVinoEngine.op(aten.cumsum.default)
@form("result")
def cumsum(x: Any, dim: int, *, dtype: Any) -> Any:
    return ops.cum_sum(x, integers(dim % len(shape_of(x)))) if shape_of(x) else x


@OpenVinoEngine.op(aten._softmax.default, check=filled)
@form("result")
def softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    return ops.softmax(x, dim % len(shape_of(x))) if shape_of(x) else number(1, x)


@OpenVinoEngine.op(aten._log_softmax.default, check=filled)
@form("result")
def log_softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    return ops.log_softmax(x, dim % len(shape_of(x))) if shape_of(x) else number(0, x)


def _divisor(count: int, correction: float | None) -> float:
    return count - (1 if correction is None else correction)


def _correction(node: Node) -> str:
    """Variances of too few elements are NaN or infinite; of a symbolic size two are taken to be there at least."""
    sizes = [size if type(size) is int else 2 for size in fake_value(node.args[0]).shape]
    dim = argument(node, "dim")
    dims = [dim] if isinstance(dim, int) else list(dim or range(len(sizes)))
    left = _divisor(math.prod(sizes[each] for each in dims), argument(node, "correction"))
    return "it divides by no more than it sums" if left <= 0 else filled(node)


def _moments(x: Any, dim: Any, correction: float | None, keepdim: bool) -> tuple[Any, Any]:
    axes, sizes = _axes(x, dim), shape_of(x)
    dims = [dim] if isinstance(dim, int) else list(dim or range(len(sizes)))
    away = ops.subtract(x, ops.reduce_mean(x, axes, True))
    total = ops.reduce_sum(ops.multiply(away, away), axes, keepdim)
    divisor = number(_divisor(math.prod(sizes[each] for each in dims), correction), x)
    return ops.divide(total, divisor), ops.reduce_mean(x, axes, keepdim)


_moments_check = all_of_checks(of_several, _correction)


@OpenVinoEngine.op(aten.var_mean.correction, check=_moments_check)
@form("result", keep=("correction",))
def var_mean(x: Any, dim: Any, *, correction: float | None, keepdim: bool) -> tuple[Any, Any]:
    return _moments(x, dim, correction, keepdim)


@OpenVinoEngine.op(aten.var.correction, check=_moments_check)
@form("result", keep=("correction",))
def var(x: Any, dim: Any, *, correction: float | None, keepdim: bool) -> Any:
    return _moments(x, dim, correction, keepdim)[0]


@OpenVinoEngine.op(aten.std.correction, check=_moments_check)
@form("result", keep=("correction",))
def std(x: Any, dim: Any, *, correction: float | None, keepdim: bool) -> Any:
    return ops.sqrt(_moments(x, dim, correction, keepdim)[0])


@OpenVinoEngine.op(aten.logsumexp.default, check=filled)
@form("result")
def logsumexp(x: Any, dim: Sequence[int], keepdim: bool) -> Any:
    """Of what is below the largest element, so that nothing overflows; the largest may be infinite."""
    if not shape_of(x):
        return x
    top = ops.maximum(ops.reduce_max(x, _axes(x, dim), True), number(-_LARGEST, x))
    top = ops.minimum(top, number(_LARGEST, x))
    total = ops.add(ops.log(ops.reduce_sum(ops.exp(ops.subtract(x, top)), _axes(x, dim), True)), top)
    return total if keepdim else ops.squeeze(total, _axes(x, dim))


def _norms(node: Node) -> str:
    order = node.args[1] if len(node.args) > 1 else node.kwargs.get("ord", 2)
    return "" if order in (1, 2, math.inf) else "it knows the norms 1, 2 and infinity alone"


@OpenVinoEngine.op(aten.linalg_vector_norm.default, check=lambda node: _norms(node) or filled(node))
@form("result", keep=("ord",))
def vector_norm(x: Any, order: float, dim: Any, keepdim: bool, *, dtype: Any) -> Any:
    if order == math.inf or not shape_of(x):
        return _reduced(ops.reduce_max, magnitude(x), dim, keepdim)
    if order == 1:
        return _reduced(ops.reduce_sum, magnitude(x), dim, keepdim)
    return _reduced(ops.reduce_l2, x, dim, keepdim)
