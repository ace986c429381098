"""Devices: those of `BUILT_IN`, and those that other packages declare by the entry-point group `omnicomp.devices`."""

import functools
import importlib.metadata
from collections.abc import Iterable
from typing import Final

from omnicomp.devices.base import MEMORY_KEYS, Capabilities, Device, Expectations, GenericDevice
from omnicomp.devices.cpu import CpuDevice
from omnicomp.devices.cuda import CudaDevice
from omnicomp.devices.mps import MpsDevice
from omnicomp.devices.npu import NpuDevice
from omnicomp.devices.sim.device import SimDevice
from omnicomp.devices.xpu import XpuDevice
from omnicomp.errors import DeviceError, nearest
from omnicomp.safety.privacy import logger

__all__ = [
    "GROUP",
    "MEMORY_KEYS",
    "Capabilities",
    "Device",
    "Expectations",
    "device_names",
    "load_errors",
    "primary_device",
    "resolve_device",
]

log = logger("omnicomp.devices")

GROUP: Final = "omnicomp.devices"
BUILT_IN: Final[tuple[type[Device], ...]] = (CpuDevice, CudaDevice, XpuDevice, MpsDevice, NpuDevice, SimDevice)


@functools.cache
def _discover() -> tuple[dict[str, Device], dict[str, str]]:
    """Devices by torch's device type, and what went wrong while loading the others."""
    found: dict[str, Device] = {cls.type: cls() for cls in BUILT_IN}
    errors: dict[str, str] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.value.startswith("omnicomp."):  # an older installation declared its own devices, too
            continue
        try:
            if entry.name in (cls.type for cls in BUILT_IN):
                raise ValueError("the name belongs to a device built into omnicomp")
            device = entry.load()()
            if not isinstance(device, Device):
                raise TypeError("it is no subclass of omnicomp.devices.Device")
            if device.type in found:
                raise ValueError(f"there already is a device of type {device.type!r}")
            found[device.type] = device
        except Exception as error:  # noqa: BLE001 - someone else's package; kept as its reason, shown by the doctor
            errors[f"{entry.name} ({entry.value})"] = f"{type(error).__name__}: {error}"
            log.warning("the device %s can't be loaded: %s", entry.name, errors[f"{entry.name} ({entry.value})"])
    return found, errors


def device_names() -> tuple[str, ...]:
    """Device types that omnicomp knows, available or not."""
    return tuple(_discover()[0])


def load_errors() -> dict[str, str]:
    """Entry points that could not be loaded, with the reason."""
    return dict(_discover()[1])


def resolve_device(name: str = "auto") -> Device:
    """The device of a torch device type; an index behind a colon is of no account.

    Args:
        name: a device type, as `cuda` or `cuda:1`; `auto` is the first accelerator that is available, else the CPU.

    Raises:
        DeviceError: omnicomp knows no such device, or it is not available here.
    """
    found, errors = _discover()
    if name == "auto":
        others = (device for key, device in found.items() if key != "cpu")
        return next((device for device in others if _there(device)[0]), found["cpu"])
    base = name.split(":", 1)[0]
    device = found.get(base)
    if device is None:
        broken = next((f"; {entry} can't be loaded: {why}" for entry, why in errors.items() if base in entry), "")
        known = f"; known devices are {', '.join(found)}{nearest(base, found)}"
        raise DeviceError(f"unknown device {name!r}{broken or known}")
    there, raised = _there(device)
    if not there:
        raise DeviceError(f"device {name!r} is not available: {raised or device.unavailable_reason()}")
    return device


def _there(device: Device) -> tuple[bool, str]:
    """Whether a device is available, and what its contract raised instead of saying so."""
    try:
        return bool(device.is_available()), ""
    except Exception as error:  # noqa: BLE001 - someone else's class; kept as the reason
        told = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return False, f"{type(device).__name__}.is_available() raises {told}, and has to return False instead"


def primary_device(types: Iterable[str]) -> Device:
    """The device that a graph runs on: the first accelerator among the device types of its tensors, else the CPU.

    A type that omnicomp has no device for is served by what torch itself offers for it.
    """
    name = next((t for t in types if t not in ("cpu", "meta")), "cpu")
    return _discover()[0].get(name) or GenericDevice(name)
