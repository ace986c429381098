"""Torch's decompositions of single operators, for engines that have forms of what they are made of."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._decomp import get_decompositions

__all__ = ["decompositions_of"]


def decompositions_of(names: Iterable[str]) -> dict[Any, Callable[..., Any]]:
    """The decomposition of each functional overload of some ATen operators.

    Args:
        names: such as `glu`; a name that this torch lacks is left out.
    """
    aten = torch.ops.aten
    packets = [getattr(aten, name) for name in names if hasattr(aten, name)]
    found: dict[Any, Callable[..., Any]] = get_decompositions(packets)
    return {target: made for target, made in found.items() if not target._schema.is_mutable}
