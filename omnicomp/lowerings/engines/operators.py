"""The registry of an engine's operators: a decorator fills it, and its entries decide what is supported."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

__all__ = ["Operator", "Operators"]


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        """Declare ATen operators by name, such as `relu add.Tensor`; those that this torch lacks are left out.

        Args:
            names: separated by blanks; without an overload the default one is meant.
            options: of `add`.
        """
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
