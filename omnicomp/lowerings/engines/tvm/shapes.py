"""TVM's forms of operators that move elements: views, joins, parts, gathers, scatters, and tensors made of nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.conversion import dtype_name, form
from omnicomp.lowerings.engines.tvm.engine import TvmEngine
from omnicomp.lowerings.engines.tvm.library import const, dims, emit, nn, op, relax

aten = torch.ops.aten


@TvmEngine.op(
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
)
@form(like=True)
def reshape(x: Any, *_: Any, like: Any) -> Any:
    return op.reshape(x, _sizes(like))


@TvmEngine.op(aten.permute.default)
def permute(x: Any, order: Sequence[int]) -> Any:
    rank = len(dims(x))
    return op.permute_dims(x, [dim % rank for dim in order]) if rank else x


@TvmEngine.op(aten.transpose.int)
def transpose(x: Any, first: int, second: int) -> Any:
    order = list(range(len(dims(x))))
    if not order:
        return x
    order[first], order[second] = order[second], order[first]
    return op.permute_dims(x, order)


@TvmEngine.op(aten.t.default)
def t(x: Any) -> Any:
    return op.permute_dims(x, [1, 0]) if len(dims(x)) == 2 else x


@TvmEngine.op(aten.expand.default)
@form(like=True)
def expand(x: Any, size: Sequence[int], *, implicit: bool, like: Any) -> Any:
    return op.broadcast_to(x, _sizes(like))


@TvmEngine.op(aten.repeat.default)
def repeat(x: Any, repeats: Sequence[int]) -> Any:
    return op.tile(x, list(repeats)) if len(repeats) else x


@TvmEngine.op(aten.cat.default)
@form("result")
def cat(tensors: Sequence[Any], dim: int) -> Any:
    return op.concat(list(tensors), dim % len(dims(tensors[0])))


@TvmEngine.op(aten.stack.default)
@form("result", like=True)
def stack(tensors: Sequence[Any], dim: int, like: Any) -> Any:
    return op.stack(list(tensors), dim % like.dim())


@TvmEngine.op(aten.slice.Tensor)
def slice_tensor(x: Any, dim: int, start: int | None, end: int | None, step: int) -> Any:
    first, last, step = slice(start, end, step).indices(dims(x)[dim])
    return part(x, dim, first, last, step)


@TvmEngine.op(aten.select.int)
@form(like=True)
def select(x: Any, dim: int, index: int, like: Any) -> Any:
    index %= dims(x)[dim]
    return op.reshape(part(x, dim, index, index + 1), _sizes(like))


@TvmEngine.op(aten.split.Tensor, aten.split_with_sizes.default)
@form(like=True)
def split(x: Any, sizes: Any, dim: int, like: Any) -> Any:
    end = 0
    parts: list[Any] = []
    for each in like:
        start, end = end, end + int(each.shape[dim])
        parts.append(part(x, dim, start, end))
    return parts


@TvmEngine.op(aten.unbind.int)
@form(like=True)
def unbind(x: Any, dim: int, like: Any) -> Any:
    return [op.reshape(part(x, dim, index, index + 1), _sizes(each)) for index, each in enumerate(like)]


@TvmEngine.op(aten.flip.default)
def flip(x: Any, along: Sequence[int]) -> Any:
    for dim in along:
        x = emit(op.flip(x, dim % len(dims(x)))) if dims(x) else x
    return x


@TvmEngine.op(aten.roll.default)
def roll(x: Any, shifts: Sequence[int], along: Sequence[int]) -> Any:
    shape = dims(x)
    if not along:
        count = 1
        for size in shape:
            count *= size
        return op.reshape(_rolled(emit(op.reshape(x, (count,))), shifts[0], 0), shape)
    for shift, dim in zip(shifts, along, strict=True):
        x = _rolled(x, shift, dim % len(shape)) if shape else x
    return x


def _rolled(x: Any, shift: int, dim: int) -> Any:
    size = dims(x)[dim]
    cut = -shift % size
    return emit(op.concat([part(x, dim, cut, size), part(x, dim, 0, cut)], dim)) if cut else x


@TvmEngine.op(aten.tril.default)
def tril(x: Any, diagonal: int) -> Any:
    return op.tril(x, diagonal)


@TvmEngine.op(aten.triu.default)
def triu(x: Any, diagonal: int) -> Any:
    return op.triu(x, diagonal)


@TvmEngine.op(aten.constant_pad_nd.default)
@form(keep=("value",))
def constant_pad_nd(x: Any, pad: Sequence[int], value: float) -> Any:
    """From the last dimension on, two numbers each; a negative one cuts off."""
    shape = dims(x)
    widths = [0] * (2 * len(shape))
    for index in range(len(pad) // 2):
        dim = len(shape) - 1 - index
        before, after = pad[2 * index], pad[2 * index + 1]
        x = emit(part(x, dim, max(-before, 0), shape[dim] - max(-after, 0)))
        widths[2 * dim], widths[2 * dim + 1] = max(before, 0), max(after, 0)
    return nn.pad(x, widths, "constant", float(value)) if any(widths) else x


def _within(index: Any, size: int) -> Any:
    """Indices from the end as ones from the beginning; what is out of range must not be read, and is the nearest."""
    zero, last = const(0, index), const(size - 1, index)
    wrapped = emit(op.where(op.less(index, zero), op.add(index, const(size, index)), index))
    raised = emit(op.where(op.less(wrapped, zero), zero, wrapped))
    return emit(op.where(op.greater(raised, last), last, raised))


@TvmEngine.op(aten.index_select.default)
def index_select(x: Any, dim: int, index: Any) -> Any:
    if not dims(x):
        return x
    index = index if dims(index) else emit(op.reshape(index, (1,)))
    return op.take(x, _within(index, dims(x)[dim]), axis=dim % len(dims(x)))


@TvmEngine.op(aten.embedding.default)
def embedding(weight: Any, indices: Any, padding: int, scale: bool, sparse: bool) -> Any:
    return op.take(weight, _within(indices, dims(weight)[0]), axis=0)


def _leading_numbers(node: Node) -> str:
    """Relax indexes the first dimensions, with one tensor each, of numbers."""
    given: Any = node.args[1]
    values = [fake_value(each) for each in given if isinstance(each, Node)]
    if any(value.dtype in (torch.bool, torch.uint8) for value in values):
        return "the size of what a mask picks is only known when it runs"
    if len(values) != len(given):
        return "it takes indices of the first dimensions alone"
    return ""


@TvmEngine.op(aten.index.Tensor, aten._unsafe_index.Tensor, check=_leading_numbers)
def index(x: Any, indices: Sequence[Any]) -> Any:
    shape = dims(x)
    return op.index_tensor(x, [_within(each, size) for each, size in zip(indices, shape, strict=False)])


@TvmEngine.op(aten.gather.default)
@form(like=True)
def gather(x: Any, dim: int, index: Any, *, sparse_grad: bool, like: Any) -> Any:
    if not dims(x):
        return op.broadcast_to(x, _sizes(like))
    made = op.gather_elements(x, _within(_vector(index), dims(x)[dim]), axis=dim % len(dims(x)))
    return op.reshape(made, _sizes(like))


@TvmEngine.op(aten.scatter.src, aten.scatter.value)
@form("result", keep=("index",))
def scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    return _scattered(x, dim, index, source, "update")


@TvmEngine.op(aten.scatter_add.default)
@form("result", keep=("index",))
def scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    return _scattered(x, dim, index, source, "add")


def _scattered(x: Any, dim: int, index: Any, source: Any, how: str) -> Any:
    shape = dims(x)
    data, index = _vector(x), _vector(index)
    source = emit(op.broadcast_to(source, dims(index))) if not dims(source) else source
    for axis, size in enumerate(dims(index)):
        source = emit(part(source, axis, 0, size)) if dims(source)[axis] != size else source
    made = op.scatter_elements(data, _within(index, dims(data)[dim]), source, dim % max(len(shape), 1), how)
    return op.reshape(made, shape)


@TvmEngine.op(aten.full.default)
@form(like=True)
def full(size: Sequence[int], value: float, *, like: Any, **_: Any) -> Any:
    return _filled(like, value)


@TvmEngine.op(aten.full_like.default)
@form(like=True)
def full_like(x: Any, value: float, *, like: Any, **_: Any) -> Any:
    return _filled(like, value)


@TvmEngine.op(aten.new_full.default)
@form(like=True)
def new_full(x: Any, size: Sequence[int], value: float, *, like: Any, **_: Any) -> Any:
    return _filled(like, value)


@TvmEngine.op(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
@form(like=True)
def zeros(*_: Any, like: Any, **__: Any) -> Any:
    return _filled(like, 0)


@TvmEngine.op(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
@form(like=True)
def ones(*_: Any, like: Any, **__: Any) -> Any:
    return _filled(like, 1)


@TvmEngine.op(aten.scalar_tensor.default)
@form(like=True)
def scalar_tensor(value: float, *, like: Any, **_: Any) -> Any:
    return _filled(like, value)


@TvmEngine.op(aten.arange.default, aten.arange.start, aten.arange.start_step)
@form(like=True)
def arange(*ends: Any, like: Any, **_: Any) -> Any:
    start = ends[0] if len(ends) > 1 else 0
    step = ends[2] if len(ends) > 2 else 1
    wide = "float64" if like.is_floating_point() else "int64"
    count = emit(op.astype(op.arange(0, int(like.shape[0]), 1, "int64"), wide))
    return op.add(relax.const(start, wide), op.multiply(count, relax.const(step, wide)))


def _filled(like: Any, value: float) -> Any:
    dtype = dtype_name(like.dtype)
    return op.full(_sizes(like), relax.const(value, dtype), dtype)


def part(x: Any, dim: int, start: int, end: int, step: int = 1) -> Any:
    """A part along one dimension; the bounds are within it."""
    return op.strided_slice(x, [dim % len(dims(x))], [start], [end], [step])


def _sizes(like: Any) -> tuple[int, ...]:
    return tuple(map(int, like.shape))


def _vector(x: Any) -> Any:
    return x if dims(x) else emit(op.reshape(x, (1,)))
