"""Memory of the simulated device."""

from collections.abc import Sequence
from typing import Any

import torch

from omnicomp.devices.sim.declared import declared_dtypes
from omnicomp.devices.sim.driver import DRIVER, device_index

__all__ = [
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_dtypes",
]


def memory_stats(device: Any = None) -> dict[str, int]:
    """The allocator's statistics, with the keys of `torch.accelerator.memory_stats`."""
    return torch.accelerator.memory_stats(device_index(device))


def memory_allocated(device: Any = None) -> int:
    """Bytes in use."""
    return torch.accelerator.memory_allocated(device_index(device))


def max_memory_allocated(device: Any = None) -> int:
    """Most bytes that were in use since the start, or since `reset_peak_memory_stats`."""
    return torch.accelerator.max_memory_allocated(device_index(device))


def memory_reserved(device: Any = None) -> int:
    """Bytes that the allocator took from the device, in use or not."""
    return torch.accelerator.memory_reserved(device_index(device))


def max_memory_reserved(device: Any = None) -> int:
    """Most bytes that were taken since the start, or since `reset_peak_memory_stats`."""
    return torch.accelerator.max_memory_reserved(device_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    """What is in use now is the peak."""
    torch.accelerator.reset_peak_memory_stats(device_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are free, and bytes that there are."""
    return DRIVER.total_memory() - memory_allocated(device), DRIVER.total_memory()


def empty_cache() -> None:
    """Give back what is not in use at the end of the devices' memory."""
    torch.accelerator.empty_cache()


def set_dtypes(dtypes: Sequence[torch.dtype] | None) -> None:
    """Make the devices hold tensors of these dtypes only, as smaller accelerators do; None for all.

    Making a tensor of another one raises TypeError; those that are there stay as they are.
    """
    if dtypes is None:
        DRIVER.all_dtypes()
    else:
        DRIVER.set_dtypes(dtypes)


if (_declared := declared_dtypes()) is not None:
    set_dtypes(_declared[1])
