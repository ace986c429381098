"""Cumulative sums of short rows, by NumPy."""

import torch
from torch import Tensor

import omnicomp
from omnicomp.timeline import Reason

MAX_ROW = 4096


def _check(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Reason | None:
    size = x.shape[dim] if x.dim() else 1
    if isinstance(size, int) and size <= MAX_ROW:
        return None
    return Reason(
        code="override_refused",
        by="numpy_cumsum",
        sentence="numpy_cumsum scans only rows of a fixed, small length",
        observed=f"{size} elements",
        needed=f"at most {MAX_ROW}",
        lever="split the rows, or mark the dimension as static",
    )


@omnicomp.override(op=torch.ops.aten.cumsum.default, devices=("cpu",), dtypes=(torch.float32,), check=_check)
def numpy_cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Cumulative sum of short rows."""
    result = torch.empty_like(x)
    result.copy_(torch.from_numpy(x.numpy().cumsum(axis=dim)))
    return result if dtype is None else result.to(dtype)
