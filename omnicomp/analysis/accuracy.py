"""How near a result is to the truth, judged by eager's own distance from it; and whether it is eager's in every bit.

Half precision is allowed what eager loses in it, and float32 what the order of its sums costs.
`torch._dynamo.utils.same` judges alike; here the errors are kept, because the audit shows them.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from omnicomp import records

PRECISIONS: Final = {"fp32": torch.float32, "fp64": torch.float64}
"""The dtypes of the reference, by the names that the option `reference` takes."""

# How much farther off than eager a result may be: kernels sum in another order, which may be a less lucky one.
_FACTOR: Final = 4.0
# And by how many roundings of its dtype, where eager's result is nearly exact.
_ROUNDINGS: Final = 16.0


@records.dataclass(frozen=True, kw_only=True)
class Judged:
    """The result of a comparison."""

    error: float
    own: float
    allowed: float
    worst: int | None


def judge(found: Sequence[Any], expected: Sequence[Any], exact: Sequence[Any]) -> Judged:
    """Compare results with eager's and with the truth; values other than tensors are skipped."""
    worst = Judged(error=0.0, own=0.0, allowed=0.0, worst=None)
    for index, (got, own, true) in enumerate(zip(found, expected, exact, strict=True)):
        if not isinstance(got, torch.Tensor) or not isinstance(own, torch.Tensor):
            continue
        if got.shape != own.shape or got.dtype != own.dtype:
            return Judged(error=float("inf"), own=0.0, allowed=0.0, worst=index)
        if not (got.is_floating_point() or got.is_complex()) or not got.numel():
            # Rounding may decide an index or a comparison otherwise; where eager and the reference agree it may not.
            certain = own == true.to(own.dtype)
            if bool((certain & (got != own)).any()):
                return Judged(error=float("inf"), own=0.0, allowed=0.0, worst=index)
            continue
        error, own_error = relative_error(got, true), relative_error(own, true)
        allowed = _FACTOR * own_error + _ROUNDINGS * torch.finfo(got.dtype).eps
        if not error <= allowed and not torch.equal(got.nan_to_num(), own.nan_to_num()):
            return Judged(error=error, own=own_error, allowed=allowed, worst=index)
        if error > worst.error:
            worst = Judged(error=error, own=own_error, allowed=allowed, worst=None)
    return worst


def relative_error(value: torch.Tensor, true: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth; infinite where one is no number, or infinite, and one is."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    value, true = value.detach().to(wide), true.detach().to(wide)
    finite = true.isfinite()
    if not torch.equal(finite, value.isfinite()):
        return float("inf")
    difference = torch.where(finite, value - true, 0).norm()
    return float(difference / torch.where(finite, true, 0).norm().clamp_min(torch.finfo(torch.float32).tiny))


def differences(found: Sequence[Any], expected: Sequence[Any]) -> list[int]:
    """The indices of results that are not eager's in every bit; a NaN is as good as another."""
    pairs = enumerate(zip(found, expected, strict=True))
    return [index for index, (got, own) in pairs if isinstance(own, torch.Tensor) and not _same_bits(got, own)]


def _same_bits(got: Any, own: torch.Tensor) -> bool:
    if not isinstance(got, torch.Tensor) or got.shape != own.shape or got.dtype != own.dtype:
        return False
    if own.layout is not torch.strided:
        return got.layout is own.layout and _same_bits(got.to_dense(), own.to_dense())
    got, own = got.detach().resolve_conj().resolve_neg(), own.detach().resolve_conj().resolve_neg()
    bits, wanted = (value.contiguous().reshape(-1).view(torch.uint8) for value in (got, own))
    if torch.equal(bits, wanted) or not own.is_floating_point():
        return torch.equal(bits, wanted)
    same = (got == own) & (got.signbit() == own.signbit()) | got.isnan() & own.isnan()
    return bool(same.all())


def copy_of(value: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy of a tensor, in another dtype if it is a floating-point one; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value.clone() if dtype is None or not value.is_floating_point() else value.to(dtype, copy=True)
