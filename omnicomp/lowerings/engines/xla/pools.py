"""XLA's forms of pooling."""

from collections.abc import Sequence
from typing import Any

import torch

from omnicomp.lowerings.engines.conversion import form
from omnicomp.lowerings.engines.xla.engine import XlaEngine
from omnicomp.lowerings.engines.xla.library import jax, jnp, lax

aten = torch.ops.aten


@XlaEngine.op(aten.max_pool2d_with_indices.default)
@form(like=True)
def max_pool2d(
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    like: Any,
) -> tuple[Any, Any]:
    """Values, and the place of each in its plane; the first of equal ones, as torch has it."""
    kernel, padding, dilation = (_pair(each) for each in (kernel, padding, dilation))
    stride = _pair(stride) if len(stride) else kernel
    height, width = x.shape[-2:]
    rows, columns = (int(size) for size in like[0].shape[-2:])
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    pads = [
        (pad, max((count - 1) * step + spread * (reach - 1) + 1 - size - pad, 0), 0)
        for pad, count, step, spread, reach, size in zip(
            padding, (rows, columns), stride, dilation, kernel, (height, width), strict=True
        )
    ]
    wide = lax.pad(x, jnp.asarray(lowest, x.dtype), [(0, 0, 0)] * (x.ndim - 2) + pads)
    parts: list[Any] = []
    places: list[Any] = []
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            down, across = i * dilation[0], j * dilation[1]
            parts.append(
                wide[
                    ...,
                    down : down + (rows - 1) * stride[0] + 1 : stride[0],
                    across : across + (columns - 1) * stride[1] + 1 : stride[1],
                ]
            )
            row = jnp.arange(rows)[:, None] * stride[0] + down - padding[0]
            column = jnp.arange(columns) * stride[1] + across - padding[1]
            places.append(
                jnp.where((row < 0) | (row >= height) | (column < 0) | (column >= width), -1, row * width + column)
            )
    values, place = jnp.stack(parts), jnp.stack(places)
    # Padding is as small as the smallest element, but never the place of the largest one.
    inside = (place >= 0).reshape(len(parts), *(1,) * (x.ndim - 2), rows, columns)
    largest = jnp.max(values, axis=0)
    hit = inside & ((values == largest) | jnp.isnan(values))
    best = jnp.argmax(hit, axis=0, keepdims=True)
    where = jnp.take_along_axis(jnp.broadcast_to(place.reshape(inside.shape), values.shape), best, axis=0)[0]
    return largest, where


@XlaEngine.op(aten.max_pool2d_with_indices_backward.default)
@form("result", keep=("indices",))
def max_pool2d_backward(grad: Any, x: Any, *settings: Any) -> Any:
    indices = settings[-1]
    planes = jnp.zeros((*x.shape[:-2], x.shape[-2] * x.shape[-1]), grad.dtype).reshape(-1, x.shape[-2] * x.shape[-1])
    rows = jnp.arange(planes.shape[0])[:, None]
    made = planes.at[rows, indices.reshape(planes.shape[0], -1)].add(grad.reshape(planes.shape[0], -1))
    return made.reshape(x.shape)


@XlaEngine.op(aten.avg_pool2d.default)
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
    return _average(x, kernel, stride, padding, with_padding, divisor, tuple(map(int, like.shape[-2:])))


@XlaEngine.op(aten.avg_pool2d_backward.default)
@form("result")
def avg_pool2d_backward(
    grad: Any,
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    with_padding: bool,
    divisor: int | None,
) -> Any:
    def forward(x: Any) -> Any:
        return _average(x, kernel, stride, padding, with_padding, divisor, grad.shape[-2:])

    return jax.vjp(forward, x)[1](grad)[0]


@XlaEngine.op(aten._adaptive_avg_pool2d.default)
@form("result")
def adaptive_avg_pool2d(x: Any, sizes: Sequence[int]) -> Any:
    rows, columns = (_bins(size, count, x.dtype) for size, count in zip(x.shape[-2:], sizes, strict=True))
    return jnp.einsum("...hw,oh,pw->...op", x, rows, columns, precision=lax.Precision.HIGHEST)


@XlaEngine.op(aten._adaptive_avg_pool2d_backward.default)
@form("result")
def adaptive_avg_pool2d_backward(grad: Any, x: Any) -> Any:
    rows, columns = (_bins(size, count, grad.dtype) for size, count in zip(x.shape[-2:], grad.shape[-2:], strict=True))
    return jnp.einsum("...op,oh,pw->...hw", grad, rows, columns, precision=lax.Precision.HIGHEST)


def _average(
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    with_padding: bool,
    divisor: int | None,
    counts: Sequence[int],
) -> Any:
    """Sums of windows over the number of elements in each; what lies behind the padding never counts."""
    kernel, padding = _pair(kernel), _pair(padding)
    stride = _pair(stride) if len(stride) else kernel
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


def _bins(size: int, count: int, dtype: Any) -> Any:
    """The matrix [count, size] that takes averages of an adaptive pool: from floor(i s / c) to ceil((i + 1) s / c)."""
    bins, place = jnp.arange(count)[:, None], jnp.arange(size)
    first, last = bins * size // count, -((-(bins + 1) * size) // count)
    return jnp.asarray((place >= first) & (place < last), dtype) / jnp.asarray(last - first, dtype)


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return (values[0], values[-1])
