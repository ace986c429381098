"""Apple GPUs, which torch calls `mps`. Written to torch's interface; it has not run on the hardware."""

import torch

from omnicomp.devices.base import MEMORY_KEYS, Capabilities, Device


class MpsDevice(Device):
    """An Apple GPU, compiled for by Inductor through Metal. It has no float64 and no complex128 at all."""

    type = "mps"

    def is_available(self) -> bool:
        """Whether torch sees one; False, not an error, elsewhere."""
        return torch.backends.mps.is_available()

    def unavailable_reason(self) -> str:
        """What is missing."""
        if self.is_available():
            return ""
        if not torch.backends.mps.is_built():
            return "this build of torch has no MPS; install torch for macOS on Apple silicon"
        return "torch sees no Apple GPU; it needs macOS 14 or newer on Apple silicon"

    def capabilities(self) -> Capabilities:
        """The dtypes of Metal, completely: others raise in torch."""
        floats = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
        integers = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        return Capabilities(
            compute_dtypes=floats,
            storage_dtypes=(*floats, *integers, torch.bool),
            fast_dtypes=(torch.float16, torch.bfloat16),
            inductor=True,
            compiler="Metal",
            warp_sizes=(32,),
            memory_bytes=torch.mps.recommended_max_memory(),
            device_count=torch.mps.device_count(),
            name="Apple GPU",
            exhaustive=True,
        )

    def memory_stats(self) -> dict[str, int | None]:
        """What tensors hold and what the driver gave; torch keeps no peak here."""
        values = (
            torch.mps.current_allocated_memory(),
            None,
            torch.mps.driver_allocated_memory(),
            torch.mps.recommended_max_memory(),
        )
        return dict(zip(MEMORY_KEYS, values, strict=True))

    def available_memory(self) -> int:
        """What Metal recommends not to exceed, less what the driver gave already."""
        return max(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory(), 0)
