"""OpenVINO's forms of operators that move elements: views, joins, parts, gathers and scatters."""

from collections.abc import Sequence
from typing import Any

import torch

from omnicomp.lowerings.engines.checks import dense, no_masks, of_several, pads
from omnicomp.lowerings.engines.conversion import form
from omnicomp.lowerings.engines.openvino.engine import OpenVinoEngine
from omnicomp.lowerings.engines.openvino.library import OpenVino, integers, number, openvino, ops, shape_of

aten = torch.ops.aten


def _shaped(x: Any, shape: Sequence[int]) -> Any:
    return ops.reshape(x, integers([int(size) for size in shape]), False)


@OpenVinoEngine.op(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
@form(like=True)
def reshape(x: Any, size: Sequence[int], like: Any) -> Any:
    return _shaped(x, like.shape)


@OpenVinoEngine.op(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default)
@form(like=True)
def squeeze(x: Any, dim: Any = None, *, like: Any) -> Any:
    return _shaped(x, like.shape)


@OpenVinoEngine.op(aten.permute.default)
def permute(x: Any, dims: Sequence[int]) -> Any:
    rank = len(shape_of(x))
    return ops.transpose(x, integers([dim % rank for dim in dims])) if rank else x


@OpenVinoEngine.op(aten.transpose.int, aten.t.default)
def transpose(x: Any, first: int = 0, second: int = 1) -> Any:
    rank = len(shape_of(x))
    if rank < 2:
        return x
    order = list(range(rank))
    order[first % rank], order[second % rank] = second % rank, first % rank
    return ops.transpose(x, integers(order))


@OpenVinoEngine.op(aten.expand.default)
@form(like=True)
def expand(x: Any, size: Sequence[int], *, implicit: bool, like: Any) -> Any:
    return broadcast(x, like.shape)


def broadcast(x: Any, shape: Sequence[int]) -> Any:
    """The value in a shape that it fits into."""
    shape = [int(size) for size in shape]
    return x if list(shape_of(x)) == shape else ops.broadcast(x, integers(shape))


@OpenVinoEngine.op(aten.repeat.default)
def repeat(x: Any, repeats: Sequence[int]) -> Any:
    x = _shaped(x, [*[1] * (len(repeats) - len(shape_of(x))), *shape_of(x)])
    return ops.tile(x, integers(list(repeats))) if repeats else x


@OpenVinoEngine.op(aten.cat.default)
@form("result")
def cat(tensors: Sequence[Any], dim: int) -> Any:
    """Empty vectors fit anything, as they do in torch."""
    fitting = [x for x in tensors if shape_of(x) != (0,)] or list(tensors[:1])
    return ops.concat([x.get_node() if x.get_node().get_output_size() == 1 else x for x in fitting], dim)


@OpenVinoEngine.op(aten.stack.default)
@form("result", like=True)
def stack(tensors: Sequence[Any], dim: int, like: Any) -> Any:
    dim %= len(like.shape)
    shape = [1 if index == dim else int(size) for index, size in enumerate(like.shape)]
    return ops.concat([_shaped(x, shape) for x in tensors], dim)


def _part(x: Any, dim: int, start: int, stop: int, step: int = 1) -> Any:
    return ops.slice(x, *(integers([each]) for each in (start, stop, step, dim % len(shape_of(x)))))


@OpenVinoEngine.op(aten.slice.Tensor)
def slice_tensor(x: Any, dim: int, start: int | None, end: int | None, step: int) -> Any:
    size = shape_of(x)[dim]
    start, end, step = slice(start, end, step).indices(size)
    if (start, step) == (0, 1) and end == size:
        return x
    return _part(x, dim, start, max(start, end), step)


@OpenVinoEngine.op(aten.select.int)
@form(like=True)
def select(x: Any, dim: int, index: int, like: Any) -> Any:
    index %= shape_of(x)[dim]
    return _shaped(_part(x, dim, index, index + 1), like.shape)


@OpenVinoEngine.op(aten.split.Tensor, aten.split_with_sizes.default)
@form(like=True)
def split(x: Any, sizes: Any, dim: int = 0, *, like: Any) -> Any:
    dim %= len(shape_of(x))
    made = ops.variadic_split(x, integers(dim), integers([int(each.shape[dim]) for each in like]))
    return made if isinstance(made, tuple) else (made,)


@OpenVinoEngine.op(aten.unbind.int)
@form(like=True)
def unbind(x: Any, dim: int, like: Any) -> Any:
    made = ops.split(x, integers(dim % len(shape_of(x))), len(like))
    parts = made if isinstance(made, tuple) else (made,)
    return [_shaped(part, each.shape) for part, each in zip(parts, like, strict=True)]


@OpenVinoEngine.op(aten.flip.default)
def flip(x: Any, dims: Sequence[int]) -> Any:
    for dim in dims if shape_of(x) else ():
        size = shape_of(x)[dim]
        x = ops.gather(x, integers(list(range(size - 1, -1, -1))), integers(dim))
    return x


@OpenVinoEngine.op(aten.roll.default)
def roll(x: Any, shifts: Sequence[int], dims: Sequence[int]) -> Any:
    shape = shape_of(x)
    if not shape:
        return x
    if dims:
        return ops.roll(x, integers(list(shifts)), integers([dim % len(shape) for dim in dims]))
    return _shaped(ops.roll(_shaped(x, [-1]), integers([shifts[0]]), integers([0])), shape)


@OpenVinoEngine.op(aten.constant_pad_nd.default, check=pads)
@form("result")
def constant_pad(x: Any, pad: Sequence[int], value: Any) -> Any:
    return ops.pad(x, *_ends(x, pad), "constant", value) if any(pad) else x


def _ends(x: Any, pad: Sequence[int]) -> tuple[Any, Any]:
    """What is put in front of each dimension, and behind; torch gives it from the last dimension on."""
    rank = len(shape_of(x))
    begin, end = [0] * rank, [0] * rank
    for index in range(len(pad) // 2):
        begin[rank - 1 - index], end[rank - 1 - index] = pad[2 * index], pad[2 * index + 1]
    return integers(begin), integers(end)


@OpenVinoEngine.op(
    aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default, check=pads
)
def reflection_pad(x: Any, pad: Sequence[int]) -> Any:
    return ops.pad(x, *_ends(x, pad), "reflect")


@OpenVinoEngine.op(
    aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default, check=pads
)
def replication_pad(x: Any, pad: Sequence[int]) -> Any:
    return ops.pad(x, *_ends(x, pad), "edge")


@OpenVinoEngine.op(aten.embedding.default)
def embedding(weight: Any, indices: Any, *ignored: Any) -> Any:
    return ops.gather(weight, indices, integers(0))


@OpenVinoEngine.op(aten.index_select.default)
def index_select(x: Any, dim: int, indices: Any) -> Any:
    if not shape_of(x):
        return x
    return ops.gather(x, _shaped(indices, [-1]), integers(dim % len(shape_of(x))))


@OpenVinoEngine.op(aten.gather.default, check=of_several)
def gather(x: Any, dim: int, indices: Any, *, sparse_grad: bool) -> Any:
    """Sizes of the indices may be smaller than those of the value, of which the rest is cut off first."""
    dim %= len(shape_of(x))
    for axis, (size, wanted) in enumerate(zip(shape_of(x), shape_of(indices), strict=True)):
        if axis != dim and wanted < size:
            # Not by a slice, which OpenVINO leaves out in front of this operation, and then does not take the shapes.
            x = ops.gather(x, integers(list(range(wanted))), integers(axis))
    return ops.gather_elements(x, indices, dim)


@OpenVinoEngine.op(aten.index.Tensor, aten._unsafe_index.Tensor, check=no_masks)
@form(like=True)
def index(x: Any, indices: Sequence[Any], like: Any) -> Any:
    """By one flat index, made of those of each dimension: it does not matter which dimensions they are of."""
    shape = shape_of(x)
    given = [(dim, each) for dim, each in enumerate(indices) if each is not None]
    if len(given) == 1:
        return ops.gather(x, given[0][1], integers(given[0][0]))
    dims = [dim for dim, _ in given]
    rest = [dim for dim in range(len(shape)) if dim not in dims]
    moved = ops.transpose(x, integers([*dims, *rest])) if dims != list(range(len(dims))) else x
    flat = _shaped(moved, [-1, *(shape[dim] for dim in rest)])
    position: Any = None
    for dim, each in given:
        each = OpenVino().cast(each, torch.int64)
        negative = ops.less(each, number(0, each))
        each = ops.select(negative, ops.add(each, number(shape[dim], each)), each)
        position = each if position is None else ops.add(ops.multiply(position, number(shape[dim], each)), each)
    made = ops.gather(flat, position, integers(0))
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    if together and dims[0]:
        # Adjacent indices stay where they were, so that the dimensions in front of them come first again.
        width = len(shape_of(position))
        order = [*range(width, width + dims[0]), *range(width), *range(width + dims[0], len(shape_of(made)))]
        made = ops.transpose(made, integers(order))
    return made


@OpenVinoEngine.op(aten.scatter.src, aten.scatter.value, check=of_several)
@form("result", keep=("index",))
def scatter(x: Any, dim: int, indices: Any, source: Any) -> Any:
    source = broadcast(source, shape_of(indices)) if not shape_of(source) else source
    for axis, (size, wanted) in enumerate(zip(shape_of(source), shape_of(indices), strict=True)):
        source = _part(source, axis, 0, wanted) if wanted < size else source
    return ops.scatter_elements_update(x, indices, source, integers(dim % len(shape_of(x))))


@OpenVinoEngine.op(aten.tril.default)
def tril(x: Any, diagonal: int) -> Any:
    return _triangle(x, diagonal, lower=True)


@OpenVinoEngine.op(aten.triu.default)
def triu(x: Any, diagonal: int) -> Any:
    return _triangle(x, diagonal, lower=False)


def _triangle(x: Any, diagonal: int, *, lower: bool) -> Any:
    mask = torch.ones(shape_of(x)[-2:], dtype=torch.bool)
    mask = mask.tril(diagonal) if lower else mask.triu(diagonal)
    zero = ops.constant(0, x.get_element_type())
    return ops.select(ops.constant(mask.numpy()), x, zero)


@OpenVinoEngine.op(aten.as_strided.default, check=dense)
def as_strided(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Any:
    count = torch.Size(shape_of(x)).numel()
    positions = torch.arange(count).as_strided(list(size), list(stride), offset or 0)
    return ops.gather(_shaped(x, [-1]), ops.constant(positions.numpy(), openvino.Type.i64), integers(0))
