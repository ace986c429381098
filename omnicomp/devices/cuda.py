"""NVIDIA GPUs (and AMD ones, which torch also calls `cuda`)."""

import importlib.util

import torch

from omnicomp.devices.base import Capabilities

__all__ = ["CudaDevice"]


class CudaDevice:
    """A CUDA device, compiled for by Inductor through Triton."""

    type = "cuda"
    lowerings = ("override", "inductor", "eager")

    def is_available(self) -> bool:
        """Whether torch sees a GPU; False, not an error, where the driver or the build is missing."""
        return torch.cuda.is_available()

    def unavailable_reason(self) -> str:
        """What is missing."""
        if self.is_available():
            return ""
        if torch.version.cuda is None and torch.version.hip is None:
            return "this build of torch has no CUDA; install a CUDA build of torch"
        return "torch sees no GPU; check the driver with nvidia-smi and CUDA_VISIBLE_DEVICES"

    def capabilities(self) -> Capabilities:
        """Read from the current device's compute capability."""
        major, minor = torch.cuda.get_device_capability()
        hip = torch.version.hip is not None
        bf16 = hip or major >= 8
        fast = [torch.float16, *([torch.bfloat16] if bf16 else [])]
        kernels = [
            *(["cudnn"] if not hip and major >= 9 else []),
            *(["flash"] if hip or major >= 8 else []),
            "efficient",
        ]
        stored = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64]
        if hip or (major, minor) >= (8, 9):
            stored += [torch.float8_e4m3fn, torch.float8_e5m2]
        return Capabilities(
            compute_dtypes=(torch.float32, torch.float64, *fast),
            storage_dtypes=tuple(stored),
            fast_dtypes=tuple(fast),
            tf32=not hip and major >= 8,
            inductor=True,
            triton=importlib.util.find_spec("triton") is not None,
            graph_mode=True,
            attention_kernels=tuple(kernels),
            device_count=torch.cuda.device_count(),
            name=torch.cuda.get_device_name(),
        )

    def synchronize(self) -> None:
        """Wait for the current device."""
        torch.cuda.synchronize()

    def memory(self) -> dict[str, int]:
        """Bytes allocated by torch now and at most, and free on the card."""
        free, _ = torch.cuda.mem_get_info()
        return {"allocated": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated(), "free": free}
