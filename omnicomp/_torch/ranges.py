"""Named ranges of time, as torch's profiler and NVIDIA's tools show them."""

import torch
import torch._C._profiler
from torch.cuda import nvtx

__all__ = ["Range", "nvtx_range"]

Range = torch._C._profiler._RecordFunctionFast
"""A context manager for one range of `torch.profiler`, made from its name; it can be entered again and again."""


def nvtx_range(name: str) -> "nvtx.range":  # type: ignore[valid-type]
    """The same for Nsight; None of it is there without CUDA."""
    return nvtx.range(name)
