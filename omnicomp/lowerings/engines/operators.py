"""The registry of an engine's operators: a decorator fills it, and its entries decide what is supported."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional

from omnicomp import records


@records.dataclass(frozen=True, kw_only=True)
class Operator:
    """One ATen operator that an engine takes.

    Attributes:
        target: the overload.
        convert: what makes the engine's own form of it; its signature is the engine's business. None where the
            engine's library reads FX graphs itself.
        train: whether graphs of training may contain it; `forward` and `backward` alike.
        devices: device types, or None for all that the engine serves.
        dtypes: of every tensor that it reads and makes, or None for all that the engine takes.
        check: given the node, one sentence on why it is not taken all the same; empty if it is.
    """

    target: torch._ops.OpOverload
    convert: Callable[..., Any] | None = None
    train: bool = True
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    check: Callable[[Node], str] | None = None


class Operators:
    """The operators of one engine."""

    def __init__(self, inherited: "Iterable[Operator]" = ()) -> None:
        self._entries = {entry.target: entry for entry in inherited}

    def add(
        self,
        *targets: torch._ops.OpOverload,
        convert: Callable[..., Any] | None = None,
        train: bool = True,
        devices: tuple[str, ...] | None = None,
        dtypes: tuple[torch.dtype, ...] | None = None,
        check: Callable[[Node], str] | None = None,
    ) -> None:
        """Declare operators; the arguments are the fields of `Operator`. A later declaration replaces an earlier one.

        Raises:
            TypeError: a target is no overload of an operator, such as `torch.ops.aten.relu` without `.default`.
        """
        for target in targets:
            if not isinstance(target, torch._ops.OpOverload):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{target} is no overload; name one, such as torch.ops.aten.relu.default")
            self._entries[target] = Operator(
                target=target, convert=convert, train=train, devices=devices, dtypes=dtypes, check=check
            )

    def take(self, names: str, **options: Any) -> None:
        """Declare ATen operators by name, such as `relu add.Tensor`; those that this torch lacks are left out."""
        for name in names.split():
            packet, _, overload = name.partition(".")
            found: Any = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if found is not None:
                self.add(found, **options)

    def get(self, target: Any) -> Operator | None:
        """The entry of a node's target, if there is one."""
        return self._entries.get(target)

    def __iter__(self) -> Iterator[Operator]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)


aten = torch.ops.aten


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    return -functional.softplus(-x), torch.exp(-x.abs())


def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.where(x > 0, x, functional.elu(x / alpha) * alpha)


def _nan_to_num(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    if not x.dtype.is_floating_point:
        return x.clone()
    limits = torch.finfo(x.dtype)
    x = torch.where(x == math.inf, limits.max if posinf is None else posinf, x)
    x = torch.where(x == -math.inf, limits.min if neginf is None else neginf, x)
    return torch.where(x.isnan(), 0.0 if nan is None else nan, x)


def _slice_scatter(
    x: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    dim, size = dim % x.ndim, x.shape[dim]
    first, last = _bounded(0 if start is None else start, size), _bounded(size if end is None else end, size)
    count = max(0, -((first - last) // step))
    if not count:
        return x.clone()
    src = src.expand([*x.shape[:dim], count, *x.shape[dim + 1 :]]).to(x.dtype)
    if step == 1:
        parts = [x.narrow(dim, 0, first), src, x.narrow(dim, first + count, size - first - count)]
        parts = [part for part in parts if part.shape[dim]]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone()
    # What lies between two elements of the source is filled up, and not taken.
    taken = torch.ones_like(src, dtype=torch.bool)
    return torch.where(_stretched(taken, dim, first, step, size), _stretched(src, dim, first, step, size), x)


def _bounded(index: int, size: int) -> int:
    return min(max(index + size if index < 0 else index, 0), size)


def _stretched(x: Tensor, dim: int, first: int, step: int, size: int) -> Tensor:
    """The elements of a dimension at every so manieth place of a longer one, from the first on."""
    count, rest = x.shape[dim], 2 * (x.ndim - dim - 1)
    wide = functional.pad(x.unsqueeze(dim + 1), [0] * rest + [0, step - 1])
    flat = wide.reshape([*x.shape[:dim], count * step, *x.shape[dim + 1 :]]).narrow(dim, 0, (count - 1) * step + 1)
    return functional.pad(flat, [0] * rest + [first, size - first - flat.shape[dim]])


DECOMPOSITIONS: Final[Mapping[Any, Callable[..., Any]]] = {
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.celu.default: _celu,
    aten.nan_to_num.default: _nan_to_num,
    aten.slice_scatter.default: _slice_scatter,
}
"""By operator; for fixed sizes, as all are that an engine with `dynamic="classes"` is handed."""
