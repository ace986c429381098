"""The driver of the simulated device, built if need be when this is imported."""

from typing import Any, Final, cast

import torch

from omnicomp.sim.build import load_driver

__all__ = ["DRIVER", "device_index"]

DRIVER: Final[Any] = load_driver()


def device_index(device: Any = None) -> int:
    """Index of a device given as index, `torch.device` or string; the current one for None and negative indices.

    Raises:
        ValueError: it is another type of device.
    """
    if device is None:
        return DRIVER.current_device()
    if isinstance(device, int):
        return device if device >= 0 else DRIVER.current_device()
    found = torch.device(device)
    if found.type != "sim":
        raise ValueError(f"expected a sim device, got {found}")
    return int(DRIVER.current_device() if cast("int | None", found.index) is None else found.index)
