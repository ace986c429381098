"""The driver of the simulated device, built if need be when this is imported."""

from typing import Any, Final, cast

import torch

from omnicomp.devices.sim.build import load_driver

DRIVER: Final[Any] = load_driver()


def device_index(device: Any = None) -> int:
    """Index of a device given as index, `torch.device` or string; the current one for None and negative indices.

    Raises:
        ValueError: it is another type of device.
        RuntimeError: there is no device of that index.
    """
    if device is None:
        return DRIVER.current_device()
    if isinstance(device, int):
        # Here, as the driver counts devices in 8 bits: 257 would be 1.
        if device >= DRIVER.device_count():
            known = f"there are {DRIVER.device_count()} devices (OMNICOMP_SIM_DEVICES)"
            raise RuntimeError(f"sim: invalid device ordinal {device}, {known}")
        return device if device >= 0 else DRIVER.current_device()
    found = torch.device(device)
    if found.type != "sim":
        raise ValueError(f"expected a sim device, got {found}")
    return int(DRIVER.current_device() if cast("int | None", found.index) is None else found.index)
