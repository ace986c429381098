"""TVM's forms of operators along dimensions: sums, extremes, softmax, cumulative sums, orders.

TVM's own extremes drop NaN; here they keep it, as torch's do.
"""

import math
from typing import Any

import torch

from omnicomp.lowerings.engines.conversion import form
from omnicomp.lowerings.engines.tvm.engine import TvmEngine
from omnicomp.lowerings.engines.tvm.library import const, counted, dims, emit, nn, op, truth
from omnicomp.lowerings.engines.tvm.pointwise import is_float
from omnicomp.lowerings.engines.tvm.shapes import part

aten = torch.ops.aten


@TvmEngine.op(aten.sum.default, aten.sum.dim_IntList)
@form("result")
def sum_of(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any) -> Any:
    return op.sum(x, axes(x, dim), keepdim) if dims(x) else x


@TvmEngine.op(aten.mean.default, aten.mean.dim)
@form("result")
def mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any) -> Any:
    return op.mean(x, axes(x, dim), keepdim) if dims(x) else x


@TvmEngine.op(aten.prod.default)
@form("result")
def prod(x: Any, *, dtype: Any) -> Any:
    return op.prod(x) if dims(x) else x


@TvmEngine.op(aten.prod.dim_int)
@form("result")
def prod_along(x: Any, dim: int, keepdim: bool, *, dtype: Any) -> Any:
    return op.prod(x, axes(x, dim), keepdim) if dims(x) else x


@TvmEngine.op(aten.amax.default, aten.max.default)
@form("result")
def amax(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return extreme(x, dim, keepdim, largest=True)


@TvmEngine.op(aten.amin.default, aten.min.default)
@form("result")
def amin(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return extreme(x, dim, keepdim, largest=False)


@TvmEngine.op(aten.max.dim)
def max_along(x: Any, dim: int, keepdim: bool) -> Any:
    return extreme(x, dim, keepdim, largest=True), argmax(x, dim, keepdim)


@TvmEngine.op(aten.min.dim)
def min_along(x: Any, dim: int, keepdim: bool) -> Any:
    return extreme(x, dim, keepdim, largest=False), argmin(x, dim, keepdim)


@TvmEngine.op(aten.argmax.default)
def argmax(x: Any, dim: int | None, keepdim: bool) -> Any:
    return _place(x, dim, keepdim, largest=True)


@TvmEngine.op(aten.argmin.default)
def argmin(x: Any, dim: int | None, keepdim: bool) -> Any:
    return _place(x, dim, keepdim, largest=False)


@TvmEngine.op(aten.any.default, aten.any.dim, aten.any.dims)
def any_of(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _truths(x, dim, keepdim, op.max)


@TvmEngine.op(aten.all.default, aten.all.dim, aten.all.dims)
def all_of(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _truths(x, dim, keepdim, op.min)


@TvmEngine.op(aten.logsumexp.default)
@form("result")
def logsumexp(x: Any, dim: Any, keepdim: bool) -> Any:
    if not dims(x):
        return x
    along = axes(x, dim)
    top = emit(op.max(x, along, True))
    top = emit(op.where(op.equal(op.abs(top), const(math.inf, x)), const(0, x), top))
    total = op.add(op.log(op.sum(op.exp(op.subtract(x, top)), along, True)), top)
    return total if keepdim else op.squeeze(total, along)


@TvmEngine.op(aten.var.correction)
@form("result", keep=("correction",))
def var(x: Any, dim: Any, *, correction: Any, keepdim: bool) -> Any:
    return _moments(x, dim, correction, keepdim)[0]


@TvmEngine.op(aten.std.correction)
@form("result", keep=("correction",))
def std(x: Any, dim: Any, *, correction: Any, keepdim: bool) -> Any:
    return op.sqrt(_moments(x, dim, correction, keepdim)[0])


@TvmEngine.op(aten.var_mean.correction)
@form("result", keep=("correction",))
def var_mean(x: Any, dim: Any, *, correction: Any, keepdim: bool) -> Any:
    return _moments(x, dim, correction, keepdim)


@TvmEngine.op(aten.linalg_vector_norm.default)
@form("result", keep=("ord",))
def linalg_vector_norm(x: Any, ord: float, dim: Any, keepdim: bool, *, dtype: Any) -> Any:
    size = emit(op.abs(x))
    if math.isinf(ord):
        return extreme(size, dim, keepdim, largest=ord > 0)
    if ord == 0:
        size = op.where(op.equal(x, const(0, x)), const(0, x), const(1, x))
    else:
        size = op.power(size, const(ord, x)) if ord not in (1, 2) else size if ord == 1 else op.multiply(size, size)
    total = op.sum(size, axes(x, dim), keepdim) if dims(x) else size
    if ord in (0, 1):
        return total
    return op.sqrt(total) if ord == 2 else op.power(total, const(1 / ord, x))


@TvmEngine.op(aten._softmax.default)
@form("result")
def softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    return nn.softmax(x, dim) if dims(x) else op.ones_like(x)


@TvmEngine.op(aten._log_softmax.default)
@form("result")
def log_softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    return nn.log_softmax(x, dim) if dims(x) else op.zeros_like(x)


@TvmEngine.op(aten.cumsum.default)
@form("result")
def cumsum(x: Any, dim: int, *, dtype: Any) -> Any:
    return op.cumsum(x, dim % len(dims(x))) if dims(x) else x


@TvmEngine.op(aten.cumprod.default)
@form("result")
def cumprod(x: Any, dim: int, *, dtype: Any) -> Any:
    return op.cumprod(x, dim % len(dims(x))) if dims(x) else x


@TvmEngine.op(aten.sort.default)
def sort(x: Any, dim: int, descending: bool) -> Any:
    return _sorted(x, dim, descending)


@TvmEngine.op(aten.sort.stable)
def sort_stable(x: Any, *, stable: Any, dim: int, descending: bool) -> Any:
    return _sorted(x, dim, descending)


@TvmEngine.op(aten.argsort.default)
def argsort(x: Any, dim: int, descending: bool) -> Any:
    return _sorted(x, dim, descending)[1]


@TvmEngine.op(aten.topk.default)
def topk(x: Any, count: int, dim: int, largest: bool, ordered: bool) -> Any:
    values, order = _sorted(x, dim, largest)
    if not dims(x):
        return values, order
    return part(emit(values), dim, 0, count), part(order, dim, 0, count)


def axes(x: Any, dim: Any) -> list[int]:
    """Torch's dimensions, counted from the first; none given, or none in the list, is all of them."""
    rank = len(dims(x))
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(rank))
    return [each % rank for each in ([dim] if isinstance(dim, int) else dim)] if rank else []


def extreme(x: Any, dim: Any, keepdim: bool, *, largest: bool) -> Any:
    """The largest or smallest element along dimensions; NaN if there is one."""
    if not dims(x):
        return x
    along = axes(x, dim)
    if str(x.ty.dtype) == "bool":
        return _truths(x, dim, keepdim, op.max if largest else op.min)
    found = emit((op.max if largest else op.min)(x, along, keepdim))
    if not is_float(x):
        return found
    return op.where(emit(_missing(x, along, keepdim)), const(math.nan, x), found)


def _missing(x: Any, along: list[int], keepdim: bool) -> Any:
    """Whether there is a NaN along dimensions."""
    marks = emit(op.astype(op.isnan(x), "int32"))
    found = emit(op.max(marks, along, keepdim))
    return op.greater(found, const(0, found))


def _place(x: Any, dim: int | None, keepdim: bool, *, largest: bool) -> Any:
    """Where the first largest or smallest element is; the first NaN, if there is one."""
    find = op.argmax if largest else op.argmin
    if not dims(x):
        return op.zeros((), "int64")
    x = counted(x)
    along = None if dim is None else dim % len(dims(x))
    found = emit(find(x, along, keepdim))
    if not is_float(x):
        return found
    marks = emit(op.astype(op.isnan(x), "int32"))
    return op.where(emit(_missing(x, axes(x, dim), keepdim)), op.argmax(marks, along, keepdim), found)


def _truths(x: Any, dim: Any, keepdim: bool, reduce: Any) -> Any:
    marks = emit(op.astype(truth(x), "int32"))
    found = emit(reduce(marks, axes(x, dim), keepdim)) if dims(x) else marks
    return op.greater(found, const(0, found))


def _moments(x: Any, dim: Any, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    """Variance and mean; of fewer elements than the correction it is NaN or infinite, as in torch."""
    along = axes(x, dim)
    count = math.prod(dims(x)[each] for each in along)
    left = max(count - (1 if correction is None else correction), 0)
    middle = emit(op.mean(x, along, True)) if along else x
    way = emit(op.subtract(x, middle))
    total = op.sum(op.multiply(way, way), along, keepdim) if along else op.multiply(way, way)
    return op.divide(total, const(left, x)), middle if keepdim or not along else op.squeeze(middle, along)


def _sorted(x: Any, dim: int, descending: bool) -> tuple[Any, Any]:
    """Sorted elements and where they were; NaN is larger than all others, which TVM's comparison doesn't know."""
    if not dims(x):
        return x, op.zeros((), "int64")
    dim %= len(dims(x))
    if not is_float(x):
        order = emit(op.argsort(counted(x), dim, descending, "int64"))
        return op.gather_elements(x, order, dim), order
    missing = emit(op.isnan(x))
    order = emit(op.argsort(op.where(missing, const(math.inf, x), x), dim, descending, "int64"))
    marks = emit(op.gather_elements(emit(op.astype(missing, "int32")), order, dim))
    again = emit(op.argsort(marks, dim, descending, "int64"))
    order = emit(op.gather_elements(order, again, dim))
    return op.gather_elements(x, order, dim), order
