"""NVIDIA GPUs (and AMD ones, which torch also calls `cuda`)."""

import importlib.util

import torch

from omnicomp.devices.base import Capabilities, Device


class CudaDevice(Device):
    """A CUDA device, compiled for by Inductor through Triton."""

    type = "cuda"

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
        triton = importlib.util.find_spec("triton") is not None
        card = torch.cuda.get_device_properties()
        return Capabilities(
            compute_dtypes=(torch.float32, torch.float64, *fast),
            storage_dtypes=tuple(stored),
            fast_dtypes=tuple(fast),
            tf32=not hip and major >= 8,
            inductor=True,
            compiler="Triton" if triton else "",
            triton=triton,
            graph_mode=True,
            attention_kernels=tuple(kernels),
            # A limit of the programming model, the same for every card since compute capability 3.0.
            max_grid=(2**31 - 1, 65535, 65535),
            warp_sizes=(card.warp_size,),
            memory_bytes=card.total_memory,
            device_count=torch.cuda.device_count(),
            name=card.name,
        )
