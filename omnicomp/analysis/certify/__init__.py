"""Certificates: whether a graph computes what another one does, decided by a checker that knows no pass.

Call `check(before, after)` with two graphs; the `Certificate` says what is known, by which methods, and under which
`Assumption`s.
"""

from omnicomp.analysis.certify.certificate import (
    ASSUMED,
    BLOCKS,
    DRAWS,
    DTYPES,
    FILL_HIDES,
    FINITE_INPUTS,
    KINDS,
    MASK_CLASS,
    MASK_CLASSES,
    NO_EMPTY_ROW,
    NO_OVERFLOW,
    PROVED,
    PROVED_FOR_SIZES,
    REFUTED,
    ROUNDING,
    SIZES,
    STRIDES,
    TESTED,
    VERDICTS,
    Assumption,
    Certificate,
    Difference,
    Method,
    Witness,
)
from omnicomp.analysis.certify.check import check

__all__ = [
    "ASSUMED",
    "BLOCKS",
    "DRAWS",
    "DTYPES",
    "FILL_HIDES",
    "FINITE_INPUTS",
    "KINDS",
    "MASK_CLASS",
    "MASK_CLASSES",
    "NO_EMPTY_ROW",
    "NO_OVERFLOW",
    "PROVED",
    "PROVED_FOR_SIZES",
    "REFUTED",
    "ROUNDING",
    "SIZES",
    "STRIDES",
    "TESTED",
    "VERDICTS",
    "Assumption",
    "Certificate",
    "Difference",
    "Method",
    "Witness",
    "check",
]
