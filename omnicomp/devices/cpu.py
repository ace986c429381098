"""The CPU."""

import os
import platform
import resource

import torch

from omnicomp.devices.base import Capabilities

__all__ = ["CpuDevice"]


class CpuDevice:
    """The host processor, compiled for by Inductor's C++ code generation."""

    type = "cpu"
    lowerings = ("override", "inductor", "eager")

    def is_available(self) -> bool:
        """Always."""
        return True

    def unavailable_reason(self) -> str:
        """Never unavailable."""
        return ""

    def capabilities(self) -> Capabilities:
        """float32 and float64 always; bfloat16 and float16 are fast where oneDNN has instructions for them."""
        mkldnn = torch.backends.mkldnn.is_available()
        fast = tuple(
            dtype
            for dtype, probe in (
                (torch.bfloat16, "_is_mkldnn_bf16_supported"),
                (torch.float16, "_is_mkldnn_fp16_supported"),
            )
            if mkldnn and getattr(torch.ops.mkldnn, probe)() and _has_matrix_instructions(dtype)
        )
        floats = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        return Capabilities(
            compute_dtypes=floats,
            storage_dtypes=(*floats, torch.complex64, torch.complex128, torch.int64, torch.int32, torch.bool),
            fast_dtypes=fast,
            inductor=True,
            attention_kernels=("flash",),
            device_count=1,
            name=platform.processor() or platform.machine(),
        )

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def memory(self) -> dict[str, int]:
        """Peak resident set of the process and free physical memory, in bytes."""
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "free": free}


def _has_matrix_instructions(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies in `dtype` itself, rather than converting to float32 first."""
    capability = torch.backends.cpu.get_cpu_capability()
    flags = _cpu_flags()
    if dtype is torch.bfloat16:
        return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"}) and capability != "NO AVX"
    return bool(flags & {"amx_fp16", "avx512_fp16", "asimdhp"})


def _cpu_flags() -> frozenset[str]:
    """Flags of the first processor as Linux lists them; empty elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            for line in stream:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        return frozenset()
    return frozenset()
