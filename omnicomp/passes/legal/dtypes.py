"""Which dtype takes the place of one that a device lacks."""

from typing import Final

import torch

from omnicomp import records
from omnicomp.devices import Capabilities

_FLOATS: Final = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.float8_e5m2fnuz,
    torch.float8_e4m3fnuz,
)
_COMPLEX: Final = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
INTEGERS: Final = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
_UNSIGNED: Final = frozenset((torch.uint16, torch.uint32, torch.uint64))  # torch has few operators for them
_KINDS: Final = (_FLOATS, tuple(_COMPLEX), INTEGERS)


@records.dataclass(frozen=True, kw_only=True)
class Legal:
    """The dtypes of a device whose declaration is complete.

    Booleans are there on every device. Dtypes that are neither a float, complex nor an integer of whole bytes
    (quantised ones, four bits) are no concern of this.
    """

    compute: frozenset[torch.dtype]  # floats and complex numbers that any operator computes in
    storage: frozenset[torch.dtype]  # dtypes that a tensor may have; integers among them are computed in, too

    @classmethod
    def of(cls, capabilities: Capabilities) -> "Legal | None":
        """The dtypes of a device; None if it does not say that it has no others."""
        if not capabilities.exhaustive:
            return None
        stored = frozenset(capabilities.storage_dtypes)
        return cls(compute=frozenset(capabilities.compute_dtypes) | (stored & set(INTEGERS)), storage=stored)

    def computes(self, dtype: torch.dtype) -> bool:
        """Whether operators may compute in it."""
        return dtype in self.compute or not any(dtype in kind for kind in _KINDS)

    def stores(self, dtype: torch.dtype) -> bool:
        """Whether a tensor may have it; it can be moved and cast then."""
        return dtype in self.storage or self.computes(dtype)

    def nearest(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype to compute in instead: itself, the nearest wider one, else the nearest narrower one, or None.

        Wider is what has every value of `dtype`; the nearest takes least memory, and of equals has most precision.
        Among narrower ones range counts before precision, as an infinity or a wrapped integer is worse than rounding.
        Unsigned integers of more than one byte are never chosen.
        """
        if self.computes(dtype):
            return dtype
        kind = next(kind for kind in _KINDS if dtype in kind)
        known = [other for other in kind if other in self.compute and other not in _UNSIGNED]
        wider = [other for other in known if contains(other, dtype)]
        if wider:
            return min(wider, key=lambda other: (other.itemsize, _eps(other)))
        signed = [other for other in known if other is not torch.uint8]
        return max(signed, key=lambda other: (largest(other), -_eps(other)), default=None)


def contains(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every finite value of `narrow` is one of `wide`; both are floats, both complex, or both integers."""
    if narrow in INTEGERS:
        a, b = torch.iinfo(wide), torch.iinfo(narrow)
        return a.min <= b.min and a.max >= b.max
    a, b = _finfo(wide), _finfo(narrow)
    # The smallest subnormal decides on underflow; its exponent is that of the smallest normal number times eps.
    return a.max >= b.max and a.eps <= b.eps and a.tiny * a.eps <= b.tiny * b.eps


def loses_range(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether `source` has finite values beyond those of `target`."""
    return not contains(target, source) and (source in INTEGERS or largest(target) < largest(source))


def largest(dtype: torch.dtype) -> float:
    """The largest finite value; of complex numbers, of a part. Exact for integers."""
    return torch.iinfo(dtype).max if dtype in INTEGERS else _finfo(dtype).max


def explain(source: torch.dtype, target: torch.dtype, *, stored: bool) -> str:
    """Why `target` takes the place of `source`, in one sentence."""
    lacks = "the device stores but does not compute in" if stored else "the device lacks"
    if contains(target, source):
        return f"{lacks} {short(source)}; {short(target)} is the nearest that has all its values"
    nearest = f"{lacks} {short(source)}; nothing wider is there, and {short(target)} is the nearest narrower"
    if source in INTEGERS:
        return f"{nearest}, up to {largest(target)}"
    return f"{nearest}: eps {_eps(target):.2g} instead of {_eps(source):.2g}, up to {largest(target):.2g}"


def short(dtype: torch.dtype) -> str:
    """The dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def real(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a complex number's parts."""
    return _COMPLEX[dtype]


def _finfo(dtype: torch.dtype) -> torch.finfo:
    return torch.finfo(_COMPLEX.get(dtype, dtype))


def _eps(dtype: torch.dtype) -> float:
    return 0.0 if dtype in INTEGERS else _finfo(dtype).eps
