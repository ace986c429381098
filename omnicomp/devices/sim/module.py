"""`torch.sim`: what a device module offers by convention, and what only a simulated device can tell.

Importing it builds the driver if need be; `omnicomp.devices.sim.enable` makes it `torch.sim`.
"""

# ruff: noqa: F401
# pyright: reportUnusedImport=false

import dataclasses
from typing import Any

import torch

from omnicomp import records
from omnicomp.devices.sim.driver import DRIVER, device_index
from omnicomp.devices.sim.memory import (
    clear_faults,
    counters,
    empty_cache,
    fallbacks,
    inject_fault,
    kernel,
    launch,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_counters,
    reset_fallbacks,
    reset_peak_memory_stats,
    set_dtypes,
)
from omnicomp.devices.sim.random import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from omnicomp.devices.sim.streams import Event, Stream, current_stream, default_stream, set_stream, stream

_initialized = True
"""Asked by `torch.utils.checkpoint`, which otherwise leaves the device's random state out."""


def init() -> None:
    """Nothing is left to do: `omnicomp.devices.sim.enable` did it."""


def _lazy_init() -> None:  # pyright: ignore[reportUnusedFunction] - torch calls it
    """Torch takes a device that has this for initialized once it called it, which is when the first tensor is made."""


def is_initialized() -> bool:
    """Always: this module is only there once the driver is."""
    return True


def is_available() -> bool:
    """Always: this module is only there once the driver is."""
    return True


def _is_in_bad_fork() -> bool:  # pyright: ignore[reportUnusedFunction] - torch asks
    """Never: a forked process has its own copy of the devices' memory."""
    return False


def device_count() -> int:
    """How many devices there are: `OMNICOMP_SIM_DEVICES`."""
    return DRIVER.device_count()


def current_device() -> int:
    """Index of the device that is meant by `sim`, in this thread."""
    return DRIVER.current_device()


def set_device(device: Any) -> None:
    """Make it the device that is meant by `sim`, in this thread. A negative index changes nothing.

    Raises:
        RuntimeError: there is no such device.
    """
    DRIVER.exchange_device(device_index(device))


def exchange_device(device: int) -> int:
    """Set the current device, and return the one before; a negative index changes nothing."""
    return DRIVER.exchange_device(device_index(device))


def maybe_exchange_device(device: int) -> int:
    """The same: there is no context that it could create."""
    return exchange_device(device)


_exchange_device = exchange_device
_maybe_exchange_device = maybe_exchange_device


class device:
    """Within it, that device is the current one. None and a negative index change nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = DRIVER.exchange_device(self.idx)

    def __exit__(self, *exception: object) -> None:
        DRIVER.exchange_device(self.prev_idx)


class device_of(device):
    """Within it, the device of that tensor is the current one; a tensor of another device changes nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.get_device() if tensor.device.type == "sim" else -1)


@records.dataclass(frozen=True)
class DeviceProperties:
    """What there is to know of a device."""

    name: str  # for a person
    total_memory: int  # bytes
    multi_processor_count: int  # threads that its kernels run on
    protected: bool  # whether the host is kept from touching its memory


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Properties of a device.

    Raises:
        RuntimeError: there is no such device.
    """
    index = device_index(device)
    if not 0 <= index < device_count():
        raise RuntimeError(f"there is no device sim:{index}, only {device_count()} of them")
    return DeviceProperties(
        f"simulated accelerator {index}", DRIVER.total_memory(), torch.get_num_threads(), DRIVER.protected()
    )


def get_device_name(device: Any = None) -> str:
    """Name of a device, for a person."""
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Version of the simulated architecture."""
    get_device_properties(device)
    return (1, 0)


def synchronize(device: Any = None) -> None:
    """Wait for a device; nothing is ever in flight, so it only counts, and fails where a fault was injected.

    Raises:
        torch.AcceleratorError: a fault was injected.
    """
    current_stream(device).synchronize()  # torch.accelerator does not reach the driver before the first tensor


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Yes."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What `torch.autocast("sim", dtype)` takes."""
    return [torch.bfloat16, torch.float16, torch.float32]
