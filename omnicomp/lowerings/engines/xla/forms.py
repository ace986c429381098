"""XLA's forms of torch's primitives, and of the ATen operators that are not decomposed to them.

A primitive computes in the dtype of its operands and broadcasts nothing: `torch._refs`, which decomposes ATen operators
to primitives, has written out the casts, the broadcasts and the rules of each operator. Most are a function of JAX.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from omnicomp.analysis.nodes import fake_value, op_name
from omnicomp.errors import EngineError
from omnicomp.lowerings.engines.xla.library import as_jax, jax, jnp, lax, precision_of

aten, prims = torch.ops.aten, torch.ops.prims

FORMS: Final[dict[Any, Callable[..., Any]]] = {}
"""Form by operator; each takes the operator's arguments, and the fake result as `like`."""


def _form(*targets: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the form of operators by name, such as `aten.max.dim`; those that this torch lacks are left out."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in targets:
            library, packet, overload = (*name.split("."), "default")[:3]
            found = getattr(getattr(getattr(torch.ops, library), packet, None), overload, None)
            if found is not None:
                FORMS[found] = function
        return function

    return declare


def computed(module: GraphModule, inputs: Mapping[Node, Any]) -> dict[Node, Any]:
    """Compute the values of a graph of these operators.

    Raises:
        EngineError: there is no form of an operator, or a value does not have torch's shape.
    """
    values = dict(inputs)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            tensor = operator.attrgetter(str(node.target))(module).detach().cpu()
            values[node] = jnp.asarray(tensor.tolist(), as_jax(tensor.dtype)).reshape(tuple(tensor.shape))
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if node.target is operator.getitem:
                values[node] = args[0][args[1]]
                continue
            if node.target not in FORMS:
                raise EngineError(f"there is no form of {op_name(node)}")
            fake = fake_value(node)
            made = FORMS[node.target](*tree_map(_wide, args), like=fake, **tree_map(_wide, kwargs))
            values[node] = _settled(node, made, fake)
    return values


def _wide(value: Any) -> Any:
    """Half precision is computed in float32, as in torch's kernels, and rounded once."""
    half = isinstance(value, jax.Array) and value.dtype in (jnp.float16, jnp.bfloat16)
    return value.astype(jnp.float32) if half else value


def _settled(node: Node, value: Any, fake: Any) -> Any:
    """A result in torch's dtype, once it has torch's shape."""
    if isinstance(fake, (tuple, list)):
        return tuple(_settled(node, each, expected) for each, expected in zip(value, fake, strict=True))
    if value is None or not isinstance(fake, Tensor):
        return value
    if jnp.shape(value) != tuple(fake.shape):
        raise EngineError(f"{op_name(node)} made the shape {jnp.shape(value)} instead of {tuple(fake.shape)}")
    return jnp.asarray(value).astype(as_jax(fake.dtype))


# What JAX has a function for with the same operands.
_NAMED: Final = {
    **{
        name: f"numpy.{name}"
        for name in (
            "abs acos acosh asin asinh atan atan2 atanh cos cosh ceil exp exp2 expm1 floor fmax fmin fmod hypot log"
            " log1p log2 log10 maximum minimum reciprocal remainder round signbit sin sinh sqrt tan tanh trunc"
            " bitwise_and bitwise_or bitwise_xor bitwise_not isfinite add multiply where"
        ).split()
    },
    **{name: f"lax.{name}" for name in ("erf", "erfc", "erf_inv", "lgamma", "digamma", "rsqrt")},
    **{"eq": "numpy.equal", "ne": "numpy.not_equal", "lt": "numpy.less", "le": "numpy.less_equal"},
    **{"gt": "numpy.greater", "ge": "numpy.greater_equal", "neg": "numpy.negative", "mul": "numpy.multiply"},
    **{"sub": "numpy.subtract", "shift_left": "numpy.left_shift", "shift_right_arithmetic": "numpy.right_shift"},
    **{"pow": "numpy.power", "clone": "numpy.asarray"},
}


def _named(path: str) -> Callable[..., Any]:
    def call(*operands: Any, like: Any, **_: Any) -> Any:
        return operator.attrgetter(path)(jax)(*operands)

    return call


for _name, _path in _NAMED.items():
    _form(f"prims.{_name}")(_named(_path))


@_form("aten.add_.Scalar")
def _add(x: Any, y: Any, like: Any) -> Any:
    """Of a decomposition, which goes on with the result."""
    return x + y


@_form("prims.sign")
def _sign(x: Any, like: Any) -> Any:
    return x if x.dtype == bool else jnp.sign(x)


@_form("prims.div")
def _div(x: Any, y: Any, like: Any) -> Any:
    return jnp.true_divide(x, y) if like.dtype.is_floating_point else lax.div(*jnp.broadcast_arrays(x, y))


@_form(
    *("prims.collapse_view", "prims.split_dim", "prims.squeeze", "prims.view_of", "prims.expand_dims", "prims.reshape"),
    *("aten.view", "aten._unsafe_view", "aten.alias", "aten.detach", "aten.clone", "aten.lift_fresh_copy"),
    *("prims.convert_element_type", "aten._to_copy"),
)
def _reshaped(x: Any, *_: Any, like: Any, **__: Any) -> Any:
    return jnp.reshape(x, tuple(like.shape))


@_form("prims.broadcast_in_dim")
def _broadcast(x: Any, shape: Any, dims: Sequence[int], like: Any) -> Any:
    return lax.broadcast_in_dim(x, tuple(like.shape), tuple(dims))


@_form("aten.expand")
def _expand(x: Any, *_: Any, like: Any, **__: Any) -> Any:
    return jnp.broadcast_to(x, tuple(like.shape))


@_form("prims.transpose", "aten.permute")
def _transposed(x: Any, dims: Sequence[int], like: Any) -> Any:
    return jnp.transpose(x, dims)


@_form("prims.rev")
def _reversed(x: Any, dims: Sequence[int], like: Any) -> Any:
    return jnp.flip(x, tuple(dims))


@_form("prims.cat")
def _cat(tensors: Sequence[Any], dim: int, like: Any) -> Any:
    return jnp.concatenate(tensors, dim)


@_form("prims.iota")
def _iota(length: int, *, start: int, step: int, like: Any, **_: Any) -> Any:
    return jnp.arange(length, dtype=as_jax(like.dtype)) * step + start


@_form("aten.full", "aten.full_like", "aten.new_full", "aten.scalar_tensor", "prims.scalar_tensor")
def _full(*args: Any, like: Any, **_: Any) -> Any:
    return jnp.full(tuple(like.shape), args[-1], as_jax(like.dtype))


@_form("prims.empty_strided", "prims.empty_permuted", "aten.empty.memory_format", "aten.empty_permuted")
def _empty(*_: Any, like: Any, **__: Any) -> Any:
    return jnp.zeros(tuple(like.shape), as_jax(like.dtype))


def _reduction(name: str) -> Callable[..., Any]:
    def call(x: Any, dims: Sequence[int] | None = None, *, like: Any, **_: Any) -> Any:
        return getattr(jnp, name)(x, axis=None if dims is None or not x.ndim else tuple(dims))

    return call


for _name, _function in {"sum": "sum", "prod": "prod", "amax": "max", "amin": "min"}.items():
    _form(f"prims.{_name}")(_reduction(_function))


@_form("prims.var")
def _var(x: Any, dims: Sequence[int] | None, correction: float = 1, *, like: Any, **_: Any) -> Any:
    """Of fewer elements than the correction it is NaN or infinite, as in torch."""
    along = tuple(range(x.ndim) if dims is None else dims)
    left = max(math.prod(x.shape[each] for each in along) - correction, 0)
    away = x - jnp.mean(x, axis=along, keepdims=True)
    return jnp.sum(away * away, axis=along) / jnp.asarray(left, x.dtype)


def _axis(x: Any, dim: int | None) -> int | None:
    return dim if x.ndim else None


@_form("aten.argmax")
def _argmax(x: Any, dim: int | None = None, keepdim: bool = False, *, like: Any) -> Any:
    return jnp.argmax(x, axis=_axis(x, dim), keepdims=keepdim)


@_form("aten.argmin")
def _argmin(x: Any, dim: int | None = None, keepdim: bool = False, *, like: Any) -> Any:
    return jnp.argmin(x, axis=_axis(x, dim), keepdims=keepdim)


@_form("aten.max", "aten.max.dim")
def _max(x: Any, dim: int | None = None, keepdim: bool = False, *, like: Any) -> Any:
    largest = jnp.max(x, axis=_axis(x, dim), keepdims=keepdim)
    return largest if dim is None else (largest, _argmax(x, dim, keepdim, like=None))


@_form("aten.min", "aten.min.dim")
def _min(x: Any, dim: int | None = None, keepdim: bool = False, *, like: Any) -> Any:
    smallest = jnp.min(x, axis=_axis(x, dim), keepdims=keepdim)
    return smallest if dim is None else (smallest, _argmin(x, dim, keepdim, like=None))


@_form("aten.cumsum")
def _cumsum(x: Any, dim: int, *, like: Any, **_: Any) -> Any:
    return jnp.cumsum(x.astype(as_jax(like.dtype)), axis=dim) if x.ndim else x


@_form("aten.cumprod")
def _cumprod(x: Any, dim: int, *, like: Any, **_: Any) -> Any:
    return jnp.cumprod(x.astype(as_jax(like.dtype)), axis=dim) if x.ndim else x


def _sorted(x: Any, dim: int, descending: bool) -> tuple[Any, Any]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order


@_form("aten.sort")
def _sort(x: Any, dim: int = -1, descending: bool = False, *, like: Any) -> Any:
    return _sorted(x, dim, descending)


@_form("aten.sort.stable")
def _sort_stable(x: Any, *, stable: Any, dim: int = -1, descending: bool = False, like: Any) -> Any:
    return _sorted(x, dim, descending)


@_form("aten.argsort")
def _argsort(x: Any, dim: int = -1, descending: bool = False, *, like: Any) -> Any:
    return _sorted(x, dim, descending)[1]


@_form("aten.topk")
def _topk(x: Any, count: int, dim: int = -1, largest: bool = True, ordered: bool = True, *, like: Any) -> Any:
    values, order = _sorted(x, dim, largest)
    if not x.ndim:
        return values, order
    picked = _part(x, dim, slice(count))
    return values[picked], order[picked]


def _part(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    return (slice(None),) * (dim % x.ndim) + (index,)


@_form("aten.slice.Tensor")
def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1, *, like: Any) -> Any:
    return x[_part(x, dim, slice(start, end, step))]


@_form("aten.select.int")
def _select(x: Any, dim: int, index: int, like: Any) -> Any:
    return x[_part(x, dim, index)]


@_form("aten.slice_backward")
def _slice_backward(grad: Any, sizes: Any, dim: int, start: int, end: int, step: int, like: Any) -> Any:
    zeros = jnp.zeros(tuple(like.shape), grad.dtype)
    return zeros.at[_part(zeros, dim, slice(start, end, step))].set(grad)


@_form("aten.select_backward")
def _select_backward(grad: Any, sizes: Any, dim: int, index: int, like: Any) -> Any:
    zeros = jnp.zeros(tuple(like.shape), grad.dtype)
    return zeros.at[_part(zeros, dim, index)].set(grad)


@_form("aten.split_with_sizes", "aten.split.Tensor")
def _split(x: Any, sizes: Any, dim: int = 0, *, like: Any) -> Any:
    ends = [0]
    for each in like:
        ends.append(ends[-1] + int(each.shape[dim]))
    return tuple(x[_part(x, dim, slice(a, b))] for a, b in itertools.pairwise(ends))


@_form("aten.unbind.int")
def _unbind(x: Any, dim: int = 0, *, like: Any) -> Any:
    return tuple(x[_part(x, dim, index)] for index in range(len(like)))


@_form("aten.diagonal")
def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1, *, like: Any) -> Any:
    return jnp.diagonal(x, offset, dim1, dim2)


@_form("aten.diagonal_backward")
def _diagonal_backward(grad: Any, sizes: Any, offset: int, dim1: int, dim2: int, like: Any) -> Any:
    shape = tuple(like.shape)
    places = jnp.arange(math.prod(shape)).reshape(shape)
    flat = jnp.zeros(math.prod(shape), grad.dtype)
    return flat.at[jnp.diagonal(places, offset, dim1, dim2)].set(grad).reshape(shape)


@_form("aten.unfold")
def _unfold(x: Any, dim: int, size: int, step: int, like: Any) -> Any:
    """Windows along a dimension; their elements become the last one."""
    if not x.ndim:
        return x.reshape(tuple(like.shape))
    dim %= x.ndim
    starts = jnp.arange(int(like.shape[dim]))[:, None] * step + jnp.arange(size)
    return jnp.moveaxis(jnp.take(x, starts, axis=dim), dim + 1, -1)


@_form("aten.constant_pad_nd")
def _pad(x: Any, pad: Sequence[int], value: float = 0, *, like: Any) -> Any:
    """From the last dimension on, two numbers each; a negative one cuts off."""
    widths = [(0, 0, 0)] * x.ndim
    for index in range(len(pad) // 2):
        widths[x.ndim - 1 - index] = (pad[2 * index], pad[2 * index + 1], 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), widths)


def _indices(given: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if each is None else each for each in given)


@_form("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(x: Any, given: Sequence[Any], like: Any) -> Any:
    return x[_indices(given)]


@_form("aten.index_put", "aten._unsafe_index_put")
def _index_put(x: Any, given: Sequence[Any], values: Any, accumulate: bool = False, *, like: Any) -> Any:
    return _put(x.at[_indices(given)], values, accumulate)


def _put(place: Any, values: Any, accumulate: bool) -> Any:
    """JAX adds no booleans: of them, a sum is the larger one."""
    if not accumulate:
        return place.set(values)
    return place.max(values) if jnp.asarray(values).dtype == bool else place.add(values)


def _grid(dim: int, index: Any) -> tuple[Any, ...]:
    """The indices of the elements that an index along one dimension points to."""
    grid = list(jnp.meshgrid(*map(jnp.arange, index.shape), indexing="ij", sparse=True))
    grid[dim] = index
    return tuple(grid)


@_form("aten.gather")
def _gather(x: Any, dim: int, index: Any, *, like: Any, **_: Any) -> Any:
    return jnp.atleast_1d(x)[_grid(dim, jnp.atleast_1d(index))].reshape(index.shape)


def _scattered(x: Any, dim: int, index: Any, source: Any, accumulate: bool) -> Any:
    wide, index = jnp.atleast_1d(x), jnp.atleast_1d(index)
    if jnp.ndim(source):  # torch takes of it as much as there are indices
        source = source[tuple(map(slice, index.shape))]
    return _put(wide.at[_grid(dim, index)], source, accumulate).reshape(x.shape)


@_form("aten.scatter.src", "aten.scatter.value")
def _scatter(x: Any, dim: int, index: Any, source: Any, *, like: Any) -> Any:
    return _scattered(x, dim, index, source, accumulate=False)


@_form("aten.scatter_add")
def _scatter_add(x: Any, dim: int, index: Any, source: Any, *, like: Any) -> Any:
    return _scattered(x, dim, index, source, accumulate=True)


@_form("aten.mm", "aten.bmm")
def _matmul(x: Any, y: Any, like: Any = None) -> Any:
    return jnp.matmul(x, y, precision=precision_of("matmul"))


@_form("aten.convolution")
def _convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *,
    like: Any = None,
) -> Any:
    sizes = weight.shape[2:]
    rank = len(sizes)
    stride, padding, dilation, output_padding = (
        tuple(each) * (rank if len(each) == 1 else 1) for each in (stride, padding, dilation, output_padding)
    )
    pads = [(each, each) for each in padding]
    spread = (1,) * rank
    if transposed:
        # The gradient of a convolution: the input is spread out, the kernel is turned round and its channels swapped.
        reach = [step * (size - 1) for step, size in zip(dilation, sizes, strict=True)]
        pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
        stride, spread = spread, stride
        weight = jnp.flip(weight, tuple(range(2, 2 + rank)))
        weight = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).swapaxes(1, 2)
        weight = weight.reshape(-1, *weight.shape[2:])
    made = lax.conv_general_dilated(
        x,
        weight,
        stride,
        pads,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=precision_of("conv"),
    )
    return made if bias is None else made + bias.reshape(-1, *(1,) * rank)


@_form("aten._native_batch_norm_legit_no_training")
def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float, like: Any) -> Any:
    shape = (1, -1, *(1,) * (x.ndim - 2))
    made = (x - mean.reshape(shape)) / jnp.sqrt(var.reshape(shape) + eps)
    made = made if weight is None else made * weight.reshape(shape)
    made = made if bias is None else made + bias.reshape(shape)
    if not like[1].numel():  # the CPU saves nothing
        return made, jnp.zeros((0,)), jnp.zeros((0,))
    return made, mean, lax.rsqrt(var + eps)


@_form("aten.native_group_norm")
def _group_norm(
    x: Any, weight: Any, bias: Any, batch: int, channels: int, size: int, groups: int, eps: float, like: Any
) -> tuple[Any, Any, Any]:
    rows = x.reshape(batch, groups, -1)
    mean, scale = jnp.mean(rows, -1), lax.rsqrt(jnp.var(rows, -1) + eps)
    made = ((rows - mean[..., None]) * scale[..., None]).reshape(x.shape)
    shape = (1, channels, *(1,) * (x.ndim - 2))
    made = made if weight is None else made * weight.reshape(shape)
    return made if bias is None else made + bias.reshape(shape), mean, scale


@_form("aten.convolution_backward")
def _convolution_backward(grad: Any, x: Any, weight: Any, bias_sizes: Any, *settings: Any, like: Any) -> Any:
    *rest, mask = settings
    _, pull = jax.vjp(lambda x, weight: _convolution(x, weight, None, *rest), x, weight)
    of_bias = jnp.sum(grad, axis=(0, *range(2, grad.ndim)))
    return tuple(made if wanted else None for made, wanted in zip((*pull(grad), of_bias), mask, strict=True))


@_form("aten._scaled_dot_product_flash_attention_for_cpu")
def _attention(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0,
    is_causal: bool = False,
    *,
    like: Any,
    attn_mask: Any = None,
    scale: Any = None,
) -> tuple[Any, Any]:
    """The result, and the logarithm of the sum of exponentials of each row, which the backward needs.

    Of a row that is masked as a whole it is zero, as torch's kernel has it, and the result too.
    """
    scores = _scores(q, k, is_causal, attn_mask, scale)
    total = jax.nn.logsumexp(scores, axis=-1)
    total = jnp.where(jnp.isneginf(total), 0, total)
    return _matmul(_weights(scores, total), v), total


@_form("aten._scaled_dot_product_flash_attention_for_cpu_backward")
def _attention_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    total: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    like: Any,
    attn_mask: Any = None,
    scale: Any = None,
) -> tuple[Any, Any, Any]:
    weights = _weights(_scores(q, k, is_causal, attn_mask, scale), total)
    of_weights = _matmul(grad, jnp.swapaxes(v, -1, -2))
    of_scores = weights * (of_weights - jnp.sum(grad * out, axis=-1, keepdims=True)) * _scale(q, scale)
    of_k = _matmul(jnp.swapaxes(of_scores, -1, -2), q)
    return _matmul(of_scores, k), of_k, _matmul(jnp.swapaxes(weights, -1, -2), grad)


def _scale(q: Any, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _scores(q: Any, k: Any, causal: bool, mask: Any, scale: float | None) -> Any:
    scores = _matmul(q, jnp.swapaxes(k, -1, -2)) * _scale(q, scale)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return scores if mask is None else scores + mask


def _weights(scores: Any, total: Any) -> Any:
    """The softmax of each row; zero in one that is masked as a whole, whose total is."""
    return jnp.exp(scores - total[..., None])


@_form("aten.avg_pool2d")
def _avg_pool2d(x: Any, *settings: Any, like: Any) -> Any:
    return _average(x, tuple(map(int, like.shape[-2:])), *settings)


@_form("aten.avg_pool2d_backward")
def _avg_pool2d_backward(grad: Any, x: Any, *settings: Any, like: Any) -> Any:
    return jax.vjp(lambda x: _average(x, grad.shape[-2:], *settings), x)[1](grad)[0]


def _average(
    x: Any,
    counts: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    with_padding: bool = True,
    divisor: int | None = None,
) -> Any:
    """Sums of windows over the number of elements in each; what lies behind the padding never counts."""
    kernel, padding = (kernel[0], kernel[-1]), (padding[0], padding[-1])
    stride = (stride[0], stride[-1]) if len(stride) else kernel
    ends = [
        max((count - 1) * step + reach - size - pad, 0)
        for count, step, reach, size, pad in zip(counts, stride, kernel, x.shape[-2:], padding, strict=True)
    ]
    ahead = [(0, 0)] * (x.ndim - 2)
    pads = [*ahead, *zip(padding, ends, strict=True)]
    window, steps = (1,) * (x.ndim - 2) + kernel, (1,) * (x.ndim - 2) + stride

    def sums(value: Any, pads: Any) -> Any:
        made = lax.reduce_window(value, value.dtype.type(0), lax.add, window, steps, pads)
        return made[..., : counts[0], : counts[1]]

    if divisor is not None:
        return sums(x, pads) / divisor
    ones = jnp.ones((1,) * (x.ndim - 2) + x.shape[-2:], x.dtype)
    if with_padding:
        ones = jnp.pad(ones, [*ahead, *((each, each) for each in padding)], constant_values=1)
        beyond = [(0, max(end - pad, 0)) for end, pad in zip(ends, padding, strict=True)]
        return sums(x, pads) / sums(ones, [*ahead, *beyond])
    return sums(x, pads) / sums(ones, pads)


# Primitives have no form of these two before torch 2.12.
@_form("aten.max_pool2d_with_indices")
def _max_pool2d(
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
    *,
    like: Any,
) -> tuple[Any, Any]:
    """The greatest element of each window, and its index in the plane."""
    stride = stride or kernel
    rows, columns = (
        jnp.arange(count)[:, None] * stride[at] - padding[at] + jnp.arange(kernel[at]) * dilation[at]
        for at, count in zip((0, -1), like[0].shape[-2:], strict=True)
    )
    height, width = x.shape[-2:]
    rows, columns = rows[:, None, :, None], columns[None, :, None, :]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    windows = jnp.where(inside, x[..., rows.clip(0, height - 1), columns.clip(0, width - 1)], least)
    windows = windows.reshape(*like[0].shape, -1)
    places = (rows * width + columns).reshape(*like[0].shape[-2:], -1)
    found = jnp.argmax(windows, -1)
    index = jnp.take_along_axis(jnp.broadcast_to(places, windows.shape), found[..., None], -1)
    return jnp.take_along_axis(windows, found[..., None], -1)[..., 0], index[..., 0]


@_form("aten.max_pool2d_with_indices_backward")
def _max_pool2d_backward(grad: Any, x: Any, *settings: Any, like: Any) -> Any:
    planes, index = math.prod(x.shape[:-2]), settings[-1]
    made = jnp.zeros((planes, x.shape[-2] * x.shape[-1]), grad.dtype)
    put = made.at[jnp.arange(planes)[:, None], index.reshape(planes, -1)]
    return put.add(grad.reshape(planes, -1)).reshape(x.shape)


@_form("aten._adaptive_avg_pool2d")
def _adaptive(x: Any, sizes: Sequence[int], like: Any = None) -> Any:
    rows, columns = (_bins(size, count, x.dtype) for size, count in zip(x.shape[-2:], sizes, strict=True))
    return jnp.einsum("...hw,oh,pw->...op", x, rows, columns, precision=lax.Precision.HIGHEST)


@_form("aten._adaptive_avg_pool2d_backward")
def _adaptive_backward(grad: Any, x: Any, like: Any) -> Any:
    return jax.vjp(lambda x: _adaptive(x, grad.shape[-2:]), x)[1](grad)[0]


def _bins(size: int, count: int, dtype: Any) -> Any:
    """The matrix [count, size] that takes averages of an adaptive pool: from floor(i s / c) to ceil((i + 1) s / c)."""
    bins, place = jnp.arange(count)[:, None], jnp.arange(size)
    first, last = bins * size // count, -((-(bins + 1) * size) // count)
    return jnp.asarray((place >= first) & (place < last), dtype) / jnp.asarray(last - first, dtype)
