"""XLA's forms of operators that move elements: views, joins, parts, gathers, scatters, and tensors made of nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from omnicomp.lowerings.engines.checks import argument, no_masks
from omnicomp.lowerings.engines.conversion import form
from omnicomp.lowerings.engines.xla.engine import XlaEngine
from omnicomp.lowerings.engines.xla.library import as_jax, jnp, lax

aten = torch.ops.aten


@XlaEngine.op(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
@form(like=True)
def reshape(x: Any, size: Sequence[int], like: Any) -> Any:
    return x.reshape(tuple(like.shape))


@XlaEngine.op(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default)
@form(like=True)
def squeeze(x: Any, dim: Any = None, *, like: Any) -> Any:
    return x.reshape(tuple(like.shape))


@XlaEngine.op(aten.permute.default)
def permute(x: Any, dims: Sequence[int]) -> Any:
    return jnp.transpose(x, tuple(dims))


@XlaEngine.op(aten.transpose.int)
def transpose(x: Any, first: int, second: int) -> Any:
    return jnp.swapaxes(x, first, second) if x.ndim else x


@XlaEngine.op(aten.t.default)
def t(x: Any) -> Any:
    return x.T


@XlaEngine.op(aten.expand.default)
@form(like=True)
def expand(x: Any, size: Sequence[int], *, implicit: bool, like: Any) -> Any:
    return jnp.broadcast_to(x, tuple(like.shape))


@XlaEngine.op(aten.repeat.default)
def repeat(x: Any, repeats: Sequence[int]) -> Any:
    return jnp.tile(x, tuple(repeats))


@XlaEngine.op(aten.cat.default)
@form("result")
def cat(tensors: Sequence[Any], dim: int) -> Any:
    """Empty vectors fit anything, as they do in torch."""
    fitting = [x for x in tensors if x.shape != (0,)] or tensors[:1]
    return jnp.concatenate(fitting, axis=dim)


@XlaEngine.op(aten.stack.default)
@form("result")
def stack(tensors: Sequence[Any], dim: int) -> Any:
    return jnp.stack(tensors, axis=dim)


@XlaEngine.op(aten.slice.Tensor)
def slice_tensor(x: Any, dim: int, start: int | None, end: int | None, step: int) -> Any:
    return x[part(x, dim, slice(start, end, step))]


@XlaEngine.op(aten.select.int)
def select(x: Any, dim: int, index: int) -> Any:
    return x[part(x, dim, index)]


@XlaEngine.op(aten.split.Tensor, aten.split_with_sizes.default)
@form(like=True)
def split(x: Any, sizes: Any, dim: int, like: Any) -> Any:
    ends = 0
    parts: list[Any] = []
    for each in like:
        start, ends = ends, ends + int(each.shape[dim])
        parts.append(x[part(x, dim, slice(start, ends))])
    return parts


@XlaEngine.op(aten.unbind.int)
def unbind(x: Any, dim: int) -> Any:
    return [x[part(x, dim, index)] for index in range(x.shape[dim])]


@XlaEngine.op(aten.flip.default)
def flip(x: Any, dims: Sequence[int]) -> Any:
    return jnp.flip(x, tuple(dims))


@XlaEngine.op(aten.roll.default)
def roll(x: Any, shifts: Sequence[int], dims: Sequence[int]) -> Any:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@XlaEngine.op(aten.diagonal.default)
def diagonal(x: Any, offset: int, first: int, second: int) -> Any:
    return jnp.diagonal(x, offset, first, second)


@XlaEngine.op(aten.diagonal_backward.default)
def diagonal_backward(grad: Any, sizes: Sequence[int], offset: int, first: int, second: int) -> Any:
    zeros = jnp.zeros(tuple(sizes), grad.dtype)
    places = jnp.arange(zeros.size).reshape(zeros.shape)
    flat = zeros.reshape(-1).at[jnp.diagonal(places, offset, first, second)].set(grad)
    return flat.reshape(zeros.shape)


@XlaEngine.op(aten.trace.default)
@form("result")
def trace(x: Any) -> Any:
    return jnp.trace(x)


@XlaEngine.op(aten.unfold.default)
@form(like=True)
def unfold(x: Any, dim: int, size: int, step: int, like: Any) -> Any:
    """Windows along a dimension; their elements become the last one."""
    if not x.ndim:
        return x.reshape(tuple(like.shape))
    dim %= x.ndim
    starts = jnp.arange(int(like.shape[dim]))[:, None] * step + jnp.arange(size)
    return jnp.moveaxis(jnp.take(x, starts, axis=dim), dim + 1, -1)


@XlaEngine.op(aten.tril.default)
def tril(x: Any, diagonal: int) -> Any:
    return jnp.tril(x, diagonal)


@XlaEngine.op(aten.triu.default)
def triu(x: Any, diagonal: int) -> Any:
    return jnp.triu(x, diagonal)


@XlaEngine.op(aten.constant_pad_nd.default)
@form("result")
def constant_pad_nd(x: Any, pad: Sequence[int], value: Any) -> Any:
    """From the last dimension on, two numbers each; a negative one cuts off."""
    widths = [(0, 0, 0)] * x.ndim
    for index in range(len(pad) // 2):
        widths[x.ndim - 1 - index] = (pad[2 * index], pad[2 * index + 1], 0)
    return lax.pad(x, value, widths)


@XlaEngine.op(aten.index_select.default)
def index_select(x: Any, dim: int, index: Any) -> Any:
    return jnp.take(x, jnp.atleast_1d(index), axis=dim) if x.ndim else x


@XlaEngine.op(aten.index.Tensor, aten._unsafe_index.Tensor, check=no_masks)
def index(x: Any, indices: Sequence[Any]) -> Any:
    return x[tuple(slice(None) if each is None else each for each in indices)]


@XlaEngine.op(aten.index_put.default, aten._unsafe_index_put.default, check=no_masks)
def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    place = x.at[tuple(slice(None) if each is None else each for each in indices)]
    return added(place, values) if accumulate else place.set(values)


@XlaEngine.op(aten.embedding.default)
def embedding(weight: Any, indices: Any, padding: int, scale: bool, sparse: bool) -> Any:
    return jnp.take(weight, indices, axis=0)


def _not_by_frequency(node: Node) -> str:
    return "it does not scale gradients by frequency" if argument(node, "scale_grad_by_freq") else ""


@XlaEngine.op(aten.embedding_dense_backward.default, check=_not_by_frequency)
@form("result", keep=("indices",))
def embedding_dense_backward(grad: Any, indices: Any, count: int, padding: int, by_frequency: bool) -> Any:
    grad = jnp.where((indices == padding)[..., None], 0, grad)
    return jnp.zeros((count, grad.shape[-1]), grad.dtype).at[indices].add(grad)


@XlaEngine.op(aten.gather.default)
def gather(x: Any, dim: int, index: Any, *, sparse_grad: bool) -> Any:
    x, index, shape = jnp.atleast_1d(x), jnp.atleast_1d(index), index.shape
    return x[grid(x, dim, index)].reshape(shape)


@XlaEngine.op(aten.scatter.src, aten.scatter.value)
@form("result", keep=("index",))
def scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    place, source = _target(x, dim, index, source)
    return place.set(source).reshape(x.shape)


@XlaEngine.op(aten.scatter_add.default)
@form("result", keep=("index",))
def scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    place, source = _target(x, dim, index, source)
    return added(place, source).reshape(x.shape)


@XlaEngine.op(aten.slice_scatter.default)
def slice_scatter(x: Any, source: Any, dim: int, start: int | None, end: int | None, step: int) -> Any:
    return x.at[part(x, dim, slice(start, end, step))].set(source)


@XlaEngine.op(aten.select_scatter.default)
def select_scatter(x: Any, source: Any, dim: int, index: int) -> Any:
    return x.at[part(x, dim, index)].set(source)


@XlaEngine.op(aten.slice_backward.default)
def slice_backward(grad: Any, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    zeros = jnp.zeros(tuple(sizes), grad.dtype)
    return zeros.at[part(zeros, dim, slice(start, end, step))].set(grad)


@XlaEngine.op(aten.select_backward.default)
def select_backward(grad: Any, sizes: Sequence[int], dim: int, index: int) -> Any:
    zeros = jnp.zeros(tuple(sizes), grad.dtype)
    return zeros.at[part(zeros, dim, index)].set(grad)


@XlaEngine.op(aten.full.default)
@form(like=True)
def full(size: Sequence[int], value: float, *, like: Any, **_: Any) -> Any:
    return jnp.full(tuple(size), value, as_jax(like.dtype))


@XlaEngine.op(aten.full_like.default)
@form(like=True)
def full_like(x: Any, value: float, *, like: Any, **_: Any) -> Any:
    return jnp.full(x.shape, value, as_jax(like.dtype))


@XlaEngine.op(aten.new_full.default)
@form(like=True)
def new_full(x: Any, size: Sequence[int], value: float, *, like: Any, **_: Any) -> Any:
    return jnp.full(tuple(size), value, as_jax(like.dtype))


@XlaEngine.op(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
@form(like=True)
def zeros(*_: Any, like: Any, **__: Any) -> Any:
    return jnp.zeros(tuple(like.shape), as_jax(like.dtype))


@XlaEngine.op(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
@form(like=True)
def ones(*_: Any, like: Any, **__: Any) -> Any:
    return jnp.ones(tuple(like.shape), as_jax(like.dtype))


@XlaEngine.op(aten.scalar_tensor.default)
@form(like=True)
def scalar_tensor(value: float, *, like: Any, **_: Any) -> Any:
    return jnp.full((), value, as_jax(like.dtype))


@XlaEngine.op(aten.arange.default, aten.arange.start, aten.arange.start_step)
@form(like=True)
def arange(*ends: Any, like: Any, **_: Any) -> Any:
    start = ends[0] if len(ends) > 1 else 0
    step = ends[2] if len(ends) > 2 else 1
    count = lax.iota(as_jax(torch.float64 if like.is_floating_point() else torch.int64), int(like.shape[0]))
    return start + count * step


def part(x: Any, dim: int, where: Any) -> tuple[Any, ...]:
    """What picks a part along one dimension."""
    return (slice(None),) * (dim % x.ndim) + (where,)


def grid(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """Coordinates of the elements that `index` names along a dimension, in the other dimensions its own."""
    own = jnp.meshgrid(*(jnp.arange(size) for size in index.shape), indexing="ij", sparse=True)
    return (*own[: dim % x.ndim], index, *own[dim % x.ndim + 1 :])


def added(place: Any, values: Any) -> Any:
    """Values added where they belong; of booleans the sum is whether one of them is true."""
    return place.max(values) if jnp.asarray(values).dtype == jnp.bool_ else place.add(values)


def _target(x: Any, dim: int, index: Any, source: Any) -> tuple[Any, Any]:
    """Where a scatter writes, and what."""
    x, index = jnp.atleast_1d(x), jnp.atleast_1d(index)
    if source.ndim or x.shape == index.shape == (1,):
        source = jnp.atleast_1d(source) if source.ndim < x.ndim else source
        source = source[tuple(slice(size) for size in index.shape)] if source.ndim == index.ndim else source
    return x.at[grid(x, dim, index)], source
