"""The CPU."""

import functools
import os
import platform
import resource
from pathlib import Path
from typing import Final

import torch

from omnicomp.devices.base import MEMORY_KEYS, Capabilities, Device
from omnicomp.safety.privacy import logger

log = logger("omnicomp.devices")


class CpuDevice(Device):
    """The host processor, compiled for by Inductor's C++ code generation."""

    type = "cpu"

    def is_available(self) -> bool:
        """Always."""
        return True

    def unavailable_reason(self) -> str:
        """Never unavailable."""
        return ""

    def capabilities(self) -> Capabilities:
        """float32 and float64 always; bfloat16 and float16 are fast where oneDNN has instructions for them."""
        fast = tuple(d for d in _MATRIX_INSTRUCTIONS if _uses_onednn(d) and _has_matrix_instructions(d))
        floats = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        return Capabilities(
            compute_dtypes=floats,
            storage_dtypes=(*floats, torch.complex64, torch.complex128, torch.int64, torch.int32, torch.bool),
            fast_dtypes=fast,
            inductor=True,
            compiler="C++",
            attention_kernels=("flash",),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            device_count=1,
            name=platform.processor() or platform.machine(),
        )

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def memory_stats(self) -> dict[str, int | None]:
        """Resident memory of the process, now and at most; torch's CPU allocator does not count what it hands out."""
        page = os.sysconf("SC_PAGE_SIZE")
        status = _process_status()
        peak = status.get("VmHWM", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        values = (status.get("VmRSS"), peak, None, os.sysconf("SC_PHYS_PAGES") * page)
        return dict(zip(MEMORY_KEYS, values, strict=True))

    def reset_memory_stats(self) -> None:
        """Reset the peak to the resident memory; only Linux can, and not in every container."""
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as stream:
                stream.write("5")
        except OSError as error:
            log.debug("the peak of resident memory can't be reset: %s", error)

    def available_memory(self) -> int:
        """Physical memory that no process uses."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _process_status() -> dict[str, int]:
    """Sizes that Linux tells of this process, in bytes; empty elsewhere."""
    try:
        with open("/proc/self/status", encoding="utf-8") as stream:
            lines = [line.split() for line in stream]
    except OSError:
        return {}
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[2:] == ["kB"]}


_MATRIX_INSTRUCTIONS: Final = {
    torch.bfloat16: frozenset(("amx_bf16", "avx512_bf16", "bf16")),
    torch.float16: frozenset(("amx_fp16", "avx512_fp16", "asimdhp")),
}


def instruction_set(dtype: torch.dtype) -> str:
    """The processor's vector instructions, and which of those that multiply in `dtype` it has, as text."""
    wanted = _MATRIX_INSTRUCTIONS[dtype]
    found = sorted(wanted & cpu_flags())
    capability = torch.backends.cpu.get_cpu_capability()
    if not found:
        return f"{capability} without {', '.join(sorted(wanted))}"
    unused = "" if _uses_onednn(dtype) else ", which oneDNN makes no use of"
    return f"{capability} with {', '.join(found)}{unused}"


def _uses_onednn(dtype: torch.dtype) -> bool:
    """Whether the library that torch multiplies half-precision matrices with takes `dtype` on this processor."""
    probe = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, probe)())


def _has_matrix_instructions(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies in `dtype` itself, rather than converting to float32 first."""
    return bool(_MATRIX_INSTRUCTIONS[dtype] & cpu_flags()) and torch.backends.cpu.get_cpu_capability() != "NO AVX"


def processor() -> str:
    """The model of the processor, as Linux tells it, or what Python knows."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Flags of the first processor as Linux lists them; empty elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            for line in stream:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        return frozenset()
    return frozenset()
