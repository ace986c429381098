"""Torch's decompositions of single operators, for engines that have forms of what they are made of."""

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
import torch._refs  # pyright: ignore[reportUnusedImport] - it fills the table
from torch._decomp import decomposition_table, get_decompositions

__all__ = ["decompositions_but", "decompositions_of"]


def decompositions_of(names: Iterable[str]) -> dict[Any, Callable[..., Any]]:
    """The decomposition of each functional overload of some ATen operators.

    Args:
        names: such as `glu`; a name that this torch lacks is left out.
    """
    aten = torch.ops.aten
    packets = [getattr(aten, name) for name in names if hasattr(aten, name)]
    found: dict[Any, Callable[..., Any]] = get_decompositions(packets)
    return {target: made for target, made in found.items() if not target._schema.is_mutable}


def decompositions_but(kept: Container[Any]) -> dict[Any, Callable[..., Any]]:
    """All of torch's decompositions of functional overloads, which end in primitives, but for those of some operators.

    Args:
        kept: operators that are not decomposed.
    """
    return {
        target: made
        for target, made in decomposition_table.items()
        if isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable and target not in kept
    }
