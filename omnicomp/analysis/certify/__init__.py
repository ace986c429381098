"""Certificates: whether a graph computes what another one does, decided by a checker that knows no pass.

Call `check(before, after)` with two graphs; the `Certificate` says what is known, by which methods, and under which
`Assumption`s.
"""

from typing import TYPE_CHECKING, Any

from omnicomp.analysis.certify.certificate import (
    ASSUMED,
    BLOCKS,
    DRAWS,
    DTYPES,
    FILL_HIDES,
    FINITE_INPUTS,
    FINITE_RESULTS,
    KINDS,
    MASK_CLASS,
    MASK_CLASSES,
    NO_EMPTY_ROW,
    NO_GRADIENTS,
    NO_OVERFLOW,
    ONES,
    PROVED,
    PROVED_FOR_SIZES,
    REFUTED,
    ROUNDING,
    SIGNED_ZERO,
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

if TYPE_CHECKING:
    from omnicomp.analysis.certify.checker import check

__all__ = [
    "ASSUMED",
    "BLOCKS",
    "DRAWS",
    "DTYPES",
    "FILL_HIDES",
    "FINITE_INPUTS",
    "FINITE_RESULTS",
    "KINDS",
    "MASK_CLASS",
    "MASK_CLASSES",
    "NO_EMPTY_ROW",
    "NO_GRADIENTS",
    "NO_OVERFLOW",
    "ONES",
    "PROVED",
    "PROVED_FOR_SIZES",
    "REFUTED",
    "ROUNDING",
    "SIGNED_ZERO",
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


def __getattr__(name: str) -> Any:
    """The checker, which is imported when it is first asked for: most processes check nothing."""
    if name != "check":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from omnicomp.analysis.certify.checker import check

    globals()[name] = check
    return check
