"""XLA's forms of operators along dimensions: sums, extremes, softmax, cumulative sums, orders."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from omnicomp.lowerings.engines.conversion import form
from omnicomp.lowerings.engines.xla.engine import XlaEngine
from omnicomp.lowerings.engines.xla.library import jax, jnp

aten = torch.ops.aten


@XlaEngine.op(aten.sum.default, aten.sum.dim_IntList)
@form("result")
def sum_of(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any) -> Any:
    return jnp.sum(x, axis=axes(dim, x), keepdims=keepdim)


@XlaEngine.op(aten.mean.default, aten.mean.dim)
@form("result")
def mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any) -> Any:
    return jnp.mean(x, axis=axes(dim, x), keepdims=keepdim)


@XlaEngine.op(aten.prod.default)
@form("result")
def prod(x: Any, *, dtype: Any) -> Any:
    return jnp.prod(x)


@XlaEngine.op(aten.prod.dim_int)
@form("result")
def prod_along(x: Any, dim: int, keepdim: bool, *, dtype: Any) -> Any:
    return jnp.prod(x, axis=axes(dim, x), keepdims=keepdim)


@XlaEngine.op(aten.amax.default)
@form("result")
def amax(x: Any, dim: Sequence[int], keepdim: bool) -> Any:
    return jnp.max(x, axis=axes(dim, x), keepdims=keepdim)


@XlaEngine.op(aten.amin.default)
@form("result")
def amin(x: Any, dim: Sequence[int], keepdim: bool) -> Any:
    return jnp.min(x, axis=axes(dim, x), keepdims=keepdim)


@XlaEngine.op(aten.max.default)
@form("result")
def max_of(x: Any) -> Any:
    return jnp.max(x)


@XlaEngine.op(aten.min.default)
@form("result")
def min_of(x: Any) -> Any:
    return jnp.min(x)


@XlaEngine.op(aten.max.dim)
@form("result")
def max_along(x: Any, dim: int, keepdim: bool) -> Any:
    return jnp.max(x, axes(dim, x), keepdims=keepdim), argmax(x, dim, keepdim)


@XlaEngine.op(aten.min.dim)
@form("result")
def min_along(x: Any, dim: int, keepdim: bool) -> Any:
    return jnp.min(x, axes(dim, x), keepdims=keepdim), argmin(x, dim, keepdim)


@XlaEngine.op(aten.argmax.default)
def argmax(x: Any, dim: int | None, keepdim: bool) -> Any:
    return jnp.argmax(x, axis=dim if x.ndim else None, keepdims=keepdim)


@XlaEngine.op(aten.argmin.default)
def argmin(x: Any, dim: int | None, keepdim: bool) -> Any:
    return jnp.argmin(x, axis=dim if x.ndim else None, keepdims=keepdim)


@XlaEngine.op(aten.any.default, aten.any.dim, aten.any.dims)
def any_of(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.any(x, axis=axes(dim, x), keepdims=keepdim)


@XlaEngine.op(aten.all.default, aten.all.dim, aten.all.dims)
def all_of(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.all(x, axis=axes(dim, x), keepdims=keepdim)


@XlaEngine.op(aten.logsumexp.default)
@form("result")
def logsumexp(x: Any, dim: Sequence[int], keepdim: bool) -> Any:
    return jax.nn.logsumexp(x, axis=axes(dim, x), keepdims=keepdim)


@XlaEngine.op(aten.var.correction)
@form("result", keep=("correction",))
def var(x: Any, dim: Any, *, correction: Any, keepdim: bool) -> Any:
    return _moments(x, dim, correction, keepdim)[0]


@XlaEngine.op(aten.std.correction)
@form("result", keep=("correction",))
def std(x: Any, dim: Any, *, correction: Any, keepdim: bool) -> Any:
    return jnp.sqrt(_moments(x, dim, correction, keepdim)[0])


@XlaEngine.op(aten.var_mean.correction)
@form("result", keep=("correction",))
def var_mean(x: Any, dim: Any, *, correction: Any, keepdim: bool) -> Any:
    return _moments(x, dim, correction, keepdim)


@XlaEngine.op(aten.linalg_vector_norm.default)
@form("result", keep=("ord",))
def linalg_vector_norm(x: Any, ord: float, dim: Any, keepdim: bool, *, dtype: Any) -> Any:
    along, size = axes(dim, x), jnp.abs(x)
    if math.isinf(ord):
        return (jnp.max if ord > 0 else jnp.min)(size, axis=along, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(jnp.asarray(x != 0, x.dtype), axis=along, keepdims=keepdim)
    if ord == 2:
        return jnp.sqrt(jnp.sum(x * x, axis=along, keepdims=keepdim))
    return jnp.sum(size**ord, axis=along, keepdims=keepdim) ** (1.0 / ord)


@XlaEngine.op(aten._softmax.default)
@form("result")
def softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    return jax.nn.softmax(x, axis=axes(dim, x)) if x.ndim else jnp.ones_like(x)


@XlaEngine.op(aten._log_softmax.default)
@form("result")
def log_softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    return jax.nn.log_softmax(x, axis=axes(dim, x)) if x.ndim else jnp.zeros_like(x)


@XlaEngine.op(aten._softmax_backward_data.default)
@form("result")
def softmax_backward(grad: Any, result: Any, dim: int, dtype: Any) -> Any:
    return result * (grad - jnp.sum(grad * result, axis=axes(dim, grad), keepdims=True))


@XlaEngine.op(aten._log_softmax_backward_data.default)
@form("result")
def log_softmax_backward(grad: Any, result: Any, dim: int, dtype: Any) -> Any:
    return grad - jnp.exp(result) * jnp.sum(grad, axis=axes(dim, grad), keepdims=True)


@XlaEngine.op(aten.cumsum.default)
@form("result")
def cumsum(x: Any, dim: int, *, dtype: Any) -> Any:
    return jnp.cumsum(x, axis=dim) if x.ndim else x


@XlaEngine.op(aten.cumprod.default)
@form("result")
def cumprod(x: Any, dim: int, *, dtype: Any) -> Any:
    return jnp.cumprod(x, axis=dim) if x.ndim else x


@XlaEngine.op(aten.sort.default)
def sort(x: Any, dim: int, descending: bool) -> Any:
    return _sorted(x, dim, descending)


@XlaEngine.op(aten.sort.stable)
def sort_stable(x: Any, *, stable: Any, dim: int, descending: bool) -> Any:
    return _sorted(x, dim, descending)


@XlaEngine.op(aten.argsort.default)
def argsort(x: Any, dim: int, descending: bool) -> Any:
    return _sorted(x, dim, descending)[1]


@XlaEngine.op(aten.topk.default)
def topk(x: Any, count: int, dim: int, largest: bool, ordered: bool) -> Any:
    values, order = _sorted(x, dim, largest)
    if not x.ndim:
        return values, order
    picked = (slice(None),) * (dim % x.ndim) + (slice(count),)
    return values[picked], order[picked]


def axes(dim: Any, x: Any = None) -> Any:
    """Torch's dimensions as JAX's: no list, or an empty one, is all of them; so is any of a zero-dimensional `x`."""
    if dim is None or (x is not None and not x.ndim):
        return None
    if isinstance(dim, int):
        return (dim,)
    return tuple(dim) or None


def _moments(x: Any, dim: Any, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    """Variance and mean; of fewer elements than the correction it is NaN or infinite, as in torch."""
    along = axes(dim, x)
    middle = jnp.mean(x, axis=along, keepdims=True)
    dims = range(x.ndim) if along is None else along
    count = math.prod(x.shape[each] for each in dims)
    spread = jnp.sum((x - middle) ** 2, axis=along, keepdims=keepdim)
    left = max(count - (1 if correction is None else correction), 0)
    return spread / jnp.asarray(left, x.dtype), jnp.mean(x, axis=along, keepdims=keepdim)


def _sorted(x: Any, dim: int, descending: bool) -> tuple[Any, Any]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order
