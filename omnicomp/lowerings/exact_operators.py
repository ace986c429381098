"""Operators of which Inductor's code gives eager's bits; bench/sweep_numerics.py writes this."""

from typing import Final

EXACT_OPERATORS: Final[dict[str, tuple[str, ...]]] = {
    "aten.add": ("float32", "bfloat16", "int64"),
    "aten.add number": ("float32", "int64"),
    "aten.sub number": ("float32", "int64"),
    "aten.mul number": ("float32", "int64"),
    "aten.mul": ("float32", "bfloat16", "int64"),
    "aten.sub": ("float32", "int64"),
    "aten.relu": ("float32",),
    "aten.neg": ("float32",),
    "aten.div": ("float32",),
}
