"""Intel GPUs, which torch calls `xpu`. Written to torch's interface; it has not run on the hardware."""

import importlib.util

import torch

from omnicomp.devices.base import Capabilities, Device


class XpuDevice(Device):
    """An Intel GPU, compiled for by Inductor through Triton."""

    type = "xpu"

    def is_available(self) -> bool:
        """Whether torch sees one; False, not an error, where the driver or the build is missing."""
        return torch.xpu.is_available()

    def unavailable_reason(self) -> str:
        """What is missing."""
        return "" if self.is_available() else "torch sees no XPU; install an XPU build of torch and Intel's driver"

    def capabilities(self) -> Capabilities:
        """Read from the current device's properties."""
        card = torch.xpu.get_device_properties()
        triton = importlib.util.find_spec("triton") is not None
        fast = (torch.bfloat16, torch.float16)
        floats = (torch.float32, *fast, *((torch.float64,) if card.has_fp64 else ()))
        return Capabilities(
            compute_dtypes=floats,
            storage_dtypes=(*floats, torch.complex64, torch.int64, torch.int32, torch.bool),
            fast_dtypes=fast,
            inductor=True,
            compiler="Triton" if triton else "",
            triton=triton,
            warp_sizes=tuple(card.sub_group_sizes),
            memory_bytes=card.total_memory,
            device_count=torch.xpu.device_count(),
            name=card.name,
        )
