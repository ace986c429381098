"""The memory layout that a subgraph's neighbours were built for, and bringing a result into it."""

from collections.abc import Sequence
from typing import Any

import torch

from omnicomp import records
from omnicomp._torch.symbols import free_unbacked_symbols


@records.dataclass(frozen=True, kw_only=True)
class Layout:
    """What a consumer may rely on: strides that are numbers, or the order of the dimensions of dense memory."""

    strides: tuple[int, ...] | None = None  # the strides, or None where they are symbolic
    order: tuple[int, ...] = ()  # the dimensions from the outermost to the innermost, where the strides are symbolic


def layout_of(value: Any) -> Layout | None:
    """The layout of a fake tensor; None for other values, or where it is unknown. Adds no guard."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    strides: tuple[Any, ...] = value.stride()
    if all(type(step) is int for step in strides):
        return Layout(strides=strides)
    order = _dense_order(value)
    return Layout(order=order) if order is not None else None


def depends_on_data(value: Any) -> bool:
    """Whether a fake tensor has strides that only its data decides; Inductor doesn't keep to what it predicts there."""
    return isinstance(value, torch.Tensor) and any(map(free_unbacked_symbols, value.stride()))


def restride(value: Any, layout: Layout | None) -> Any:
    """Copy a result whose layout is not the predicted one: Inductor's code reads memory by the predicted strides."""
    # By type first, which is the usual case: torch's own `isinstance` takes longer than a small operator.
    if layout is None or (type(value) is torch.Tensor and value.stride() == layout.strides):
        return value
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return value
    if layout.strides is None:
        ordered = value.permute(layout.order)
        if ordered.is_contiguous():
            return value
        return ordered.contiguous().permute([layout.order.index(dim) for dim in range(value.dim())])
    if _same(value, layout.strides):
        return value
    result = torch.empty_strided(value.shape, layout.strides, dtype=value.dtype, device=value.device)
    target = result
    for dim, step in enumerate(layout.strides):
        if step == 0:  # expanded: every position along it is the same memory, and is written once
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)
    return result


def _same(value: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether the strides are equal; that of a dimension of size 1 says nothing."""
    actual = value.stride()
    return actual == strides or all(
        size == 1 or step == predicted for size, step, predicted in zip(value.shape, actual, strides, strict=True)
    )


def _dense_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from the outermost to the innermost if the tensor is dense, as expressions, else None."""
    left, order = list(range(value.dim())), list[int]()
    # Of a size that data decides torch can't know that it isn't 0, and puts Max(1, size) into the strides.
    expected: Any = 1
    expected_by_max: Any = 1
    while left:
        known = (_expression(expected), _expression(expected_by_max))
        dim = next((d for d in reversed(left) if _expression(value.stride(d)) in known), None)
        if dim is None:
            return None
        left.remove(dim)
        order.append(dim)
        expected = expected * value.shape[dim]
        expected_by_max = expected_by_max * torch.sym_max(1, value.shape[dim])
    return tuple(reversed(order))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
