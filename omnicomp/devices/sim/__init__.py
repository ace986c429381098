"""A simulated accelerator: a device `sim` with memory, kernels and faults of its own, on any machine.

    import omnicomp.devices.sim

    omnicomp.devices.sim.enable()
    x = torch.randn(3, device="sim")

Importing this package builds nothing and registers nothing; `enable` does, once in a process. What it then offers is
`torch.sim`, documented in `omnicomp.devices.sim.module`.
"""

import importlib
import sys
from types import ModuleType

from omnicomp.errors import DeviceError
from omnicomp.safety.forks import new_lock

__all__ = ["enable", "is_enabled", "unavailable_reason"]

_lock = new_lock()
_with_inductor: list[bool] = []


def enable(*, inductor: bool = True) -> ModuleType:
    """Build the simulated device if it was never built, and register it as torch's device type `sim`.

    It becomes torch's accelerator (`torch.accelerator`) in this process, and that can't be undone. Environment
    variables are read here: `OMNICOMP_SIM_DEVICES` (number of devices, 2), `OMNICOMP_SIM_MEMORY` (bytes of each, 8
    GiB), `OMNICOMP_SIM_DTYPES` (the dtypes that it is to have, see `omnicomp.devices.sim.device`) and
    `OMNICOMP_SIM_PROTECT`
    (1: the host can't touch its memory outside of kernels and copies).

    Args:
        inductor: whether to register it with Inductor too, which imports Inductor; a later call can still do it.

    Returns:
        `torch.sim`.

    Raises:
        DeviceError: it can't be built, with what is missing; or another device from outside is there already.
    """
    with _lock:
        if not is_enabled():
            from omnicomp._torch.devices import privateuse

            name = privateuse.device_name()
            if name not in ("privateuseone", "sim"):
                raise DeviceError(f"torch has room for one device from outside, and in this process it is {name!r}")
            try:
                privateuse.register("sim", importlib.import_module("omnicomp.devices.sim.module"))
            except RuntimeError as error:
                raise DeviceError(f"the simulated device can't be registered: {error}") from error
        if inductor and not _with_inductor:
            importlib.import_module("omnicomp.devices.sim.inductor").enable()
            _with_inductor.append(True)
        return sys.modules["torch.sim"]


def is_enabled() -> bool:
    """Whether `enable` was called in this process."""
    module = sys.modules.get("torch.sim")
    return module is not None and module.__name__ == "omnicomp.devices.sim.module"


def unavailable_reason() -> str:
    """One sentence on why the device can't be used now; empty if it can. Builds nothing."""
    if is_enabled():
        return ""
    from omnicomp.devices.sim import build

    if not build.is_built() and (lacking := build.missing()):
        return f"the simulated device can't be built here: {'; '.join(lacking)}"
    return "the simulated device is not enabled in this process; call omnicomp.devices.sim.enable() first"
