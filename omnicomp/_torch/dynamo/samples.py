"""Values of a graph's inputs for a process that compiles it: small tensors as they are, large ones as their statistics.

What a compiler looks at (masks) is small. What it measures on may be large, but how long a call takes does not depend
on the values of weights; random numbers of their mean and deviation take their place.
"""

import io
import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from omnicomp._torch.dynamo.late_compile import is_fake, is_subclass

_SMALL: Final = 2**16
"""Bytes of a weight or buffer that is taken as it is: those of normalisation, which must stay positive, are."""
_LARGE: Final = 2**22
"""Bytes of another input that is."""
_MOST: Final = 2**24
"""Bytes of all that are."""
_PROBES: Final = 4096


def packed(inputs: Sequence[Any], static: Sequence[bool], *, whole: bool) -> bytes:
    """The values of a call, as bytes.

    Args:
        inputs: tensors, sizes and numbers; fake tensors are left out.
        static: which of them stay what they are from call to call, as weights do.
        whole: whether all of them are wanted, so that something can be measured on them; else those that are small
            and not static, which masks are among.
    """
    kept: dict[int, Any] = {}
    left = _MOST
    for index, (value, fixed) in enumerate(zip(inputs, static, strict=True)):
        if not isinstance(value, torch.Tensor) or not _is_plain(value) or (fixed and not whole):
            continue
        extent = _extent(value.shape, value.stride())
        size = extent * value.itemsize
        if size <= min(_SMALL if fixed else _LARGE, left):
            left -= size
            kept[index] = value.detach().as_strided((extent,), (1,)).cpu().clone()
        elif whole and value.is_floating_point():
            kept[index] = _statistics(value.detach())
    stream = io.BytesIO()
    torch.save(kept, stream)
    return stream.getvalue()


def unpacked(data: bytes, fakes: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs of a graph with the values that were packed; fake ones stay where there are none."""
    kept = torch.load(io.BytesIO(data), weights_only=True)
    return tuple(_made(kept.get(index), fake) for index, fake in enumerate(fakes))


def like(fake: Any, mean: float = 0.0, deviation: float = 0.05) -> Any:
    """A real tensor with the layout of a fake one, and random numbers; other values as they are."""
    if not isinstance(fake, torch.Tensor) or not fake.is_floating_point():
        return fake
    sizes, strides = _layout(fake)
    made = torch.empty(_extent(sizes, strides), dtype=torch.float32, device=fake.device).normal_(mean, deviation)
    return made.to(fake.dtype).as_strided(sizes, strides).requires_grad_(fake.requires_grad)


def _made(kept: Any, fake: Any) -> Any:
    if kept is None or not isinstance(fake, torch.Tensor):
        return fake
    if not isinstance(kept, torch.Tensor):
        return like(fake, *kept)
    sizes, strides = _layout(fake)
    if kept.dtype != fake.dtype or kept.numel() != _extent(sizes, strides):
        return fake
    return kept.to(fake.device).as_strided(sizes, strides).requires_grad_(fake.requires_grad)


def _is_plain(value: torch.Tensor) -> bool:
    strange = is_fake(value) or is_subclass(value) or value.is_conj() or value.is_neg()
    return value.layout is torch.strided and not strange


def _layout(fake: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(map(_number, fake.shape)), tuple(map(_number, fake.stride()))


def _extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of memory a tensor lies in."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if all(sizes) else 0


def fits(value: Any, fake: torch.Tensor) -> bool:
    """Whether a tensor has the sizes and the dtype of a fake one, in the call that is compiled for."""
    same = isinstance(value, torch.Tensor) and value.dtype == fake.dtype
    return same and tuple(map(_number, value.shape)) == tuple(map(_number, fake.shape))


def _number(size: Any) -> int:
    return size if type(size) is int else int(size.node.hint)


def _statistics(value: torch.Tensor) -> tuple[float, float]:
    """Mean and deviation of some elements."""
    picked = value
    for dim, size in enumerate(value.shape):
        picked = picked[(slice(None),) * dim + (slice(None, None, max(1, size * value.dim() * 8 // _PROBES)),)]
    deviation, mean = torch.std_mean(picked.to(torch.float32), correction=0)
    found = float(mean), float(deviation)
    return found if all(map(math.isfinite, found)) else (0.0, 0.05)
