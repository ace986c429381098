"""All checks of a device as jobs for a process of their own."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from omnicomp.devices import Device, device_names, primary_device, resolve_device
from omnicomp.testing.conformance import (
    compiling,
    contract,
    faults,
    models,
    module,
    tensors,
)
from omnicomp.testing.conformance.base import CHECKS, Session, run_check
from omnicomp.testing.conformance.operators import check_operator, operator_names
from omnicomp.testing.named import find_function

__all__ = ["GROUPS", "check_names", "jobs", "ready"]

# Importing them declares their checks.
_DECLARING: Final = (contract, faults, module, tensors, compiling, models)

GROUPS: Final = ("contract", "errors", "module", "tensors", "inductor", "omni", "framework", "models")
"""The groups of checks beside `operators`, in the order in which they run."""


def ready(name: str, setup: str = "") -> Device:
    """Make a device usable in this process.

    Args:
        name: a device type; `sim` is enabled, and built if it never was.
        setup: `file.py:function` or `module:function` that is called first, for example to import the device's package.

    Returns:
        Its contract; what torch itself offers, if omnicomp has no contract for a type that torch knows.

    Raises:
        DeviceError: it is unknown, or not available here.
    """
    if setup:
        find_function(setup)()
    base = name.split(":", 1)[0]
    if base == "sim":
        import omnicomp.devices.sim

        omnicomp.devices.sim.enable()
    if base in device_names() or base in ("auto", "meta"):
        return resolve_device(name)
    try:
        torch.device(base)
        torch.empty(1, device=base)
    except (RuntimeError, NotImplementedError, AssertionError):
        return resolve_device(name)  # raises, and says what is known
    return primary_device([base])


def check_names(quick: bool = True, operators: str = "", groups: Sequence[str] | None = None) -> list[str]:
    """Names of the checks of a choice, in the order in which they run; the arguments are those of `jobs`."""
    chosen = (*GROUPS, "operators") if groups is None else groups
    found = [
        each.name
        for group in GROUPS
        for each in CHECKS.values()
        if group in chosen and each.name.startswith(f"{group}.") and (each.quick or not quick)
    ]
    if "operators" in chosen:
        found += [f"operators.{name}" for name in operator_names(quick, operators)]
    return found


def jobs(
    device: str,
    quick: bool = True,
    setup: str = "",
    operators: str = "",
    groups: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
) -> dict[str, Callable[[], dict[str, Any]]]:
    """The checks of a device.

    Raises:
        DeviceError: as of `ready`.
    """
    session = Session(device=ready(device, setup), quick=quick)
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in check_names(quick, operators, groups):
        if only is not None and name not in only:
            continue
        if name in CHECKS:
            found[name] = _timed(lambda name=name: run_check(CHECKS[name], session))
        else:
            found[name] = _timed(lambda name=name: check_operator(session, name.removeprefix("operators.")))
    return found


def _timed(run: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def timed() -> dict[str, Any]:
        start = time.perf_counter()
        torch.manual_seed(0)
        return {**run(), "seconds": round(time.perf_counter() - start, 3)}

    return timed
