"""Copies and constants made of parameters: how many there are, how much memory they take, and whether they still hold.

docs/dtypes.md is for users.
"""

from omnicomp.weights.cast_copies import Copies, changed, clear, copies

__all__ = ["Copies", "bytes", "changed", "clear", "copies", "count"]


def bytes() -> int:
    """Memory of all low-precision copies of parameters in this process."""
    return sum(low.numel() * low.element_size() for _, low in copies())


def count() -> int:
    """How many there are."""
    return len(copies())
