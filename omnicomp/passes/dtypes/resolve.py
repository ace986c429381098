"""What a policy comes to on a device: `auto` decided, dtypes that it lacks refused, slow ones told."""

import dataclasses
from typing import Final

import torch

from omnicomp.devices import Device
from omnicomp.devices.cpu import instruction_set
from omnicomp.forks import new_lock
from omnicomp.options.dtype_policy import DtypePolicy, short
from omnicomp.passes.dtypes import speeds
from omnicomp.privacy import logger
from omnicomp.timeline import Reason

__all__ = ["NAME", "resolve", "slowness", "unsupported", "warn_if_slow"]

log = logger("omnicomp")

NAME: Final = "dtype_policy"
# Below this, what casts cost is not earned back.
_WORTH: Final = 1.1
_lock = new_lock()
_warned: Final[set[torch.dtype]] = set()


def resolve(policy: DtypePolicy, device: Device, *, training: bool) -> tuple[DtypePolicy, Reason | None]:
    """The policy that a device makes of one that leaves `compute` to it; others as they are.

    bfloat16 is taken before float16, and float16 only for inference: it has float32's precision for neither small
    gradients nor large activations, and training in it needs a gradient scaler, which nothing here could see.

    Args:
        policy: the user's.
        device: where the graph runs.
        training: whether the graph will be differentiated.

    Returns:
        A policy with `auto` off, and why it keeps float32, if `auto` came to that.
    """
    if not policy.auto:
        return policy, None
    observed: list[str] = []
    for dtype in (torch.bfloat16,) if training else (torch.bfloat16, torch.float16):
        slow = slowness(dtype, device)
        if not slow:
            return dataclasses.replace(policy, auto=False, compute=dtype), None
        observed.append(slow)
    reason = Reason(
        code="not_profitable",
        by=NAME,
        sentence=f"the {device.type} device is not faster in low precision, and float32 is kept",
        observed="; ".join(observed),
        needed="instructions for bfloat16, and a product that is faster in it"
        if device.type == "cpu"
        else "a device that is fast in bfloat16",
        lever='choose dtype_policy="bf16" to have it nevertheless',
    )
    return dataclasses.replace(policy, auto=False, compute=None, fp8=None), reason


def slowness(dtype: torch.dtype, device: Device) -> str:
    """Why matrix work in `dtype` is not faster than in float32 on a device, as observed; empty if it is faster.

    On a CPU both count: its instructions, and a product that is measured.
    """
    fast = dtype in device.capabilities().fast_dtypes
    if device.type != "cpu":
        return "" if fast else f"{short(dtype)} is not among its fast dtypes"
    if not fast:
        return f"{short(dtype)}: {instruction_set(dtype)}"
    speed = speeds.measured(dtype)
    return "" if speed.ratio >= _WORTH else f"{instruction_set(dtype)}, but {speed}"


def unsupported(dtype: torch.dtype, device: Device) -> Reason | None:
    """Why nothing may be computed in `dtype` on a device; None if it has the dtype."""
    known = device.capabilities().compute_dtypes
    if dtype in known:
        return None
    return Reason(
        code="option_ineffective",
        by=NAME,
        sentence=f"the {device.type} device can't compute in the dtype that dtype_policy asks for",
        observed=f"dtype={short(dtype)}",
        needed=f"one of {', '.join(map(short, known))}",
        lever='choose dtype_policy="keep", or a dtype that the device has',
    )


def warn_if_slow(dtype: torch.dtype, device: Device) -> str:
    """Why a dtype is slow on a device, or empty; what it costs is logged once a process."""
    if dtype not in (torch.bfloat16, torch.float16):
        return ""
    slow = slowness(dtype, device)
    if slow:
        with _lock:
            new = dtype not in _warned
            _warned.add(dtype)
        if new:
            cost = ""
            if device.type == "cpu":
                speed = speeds.measured(dtype)
                cost = f": {speed}, {1 / speed.ratio:.1f} times as long"
            log.warning(
                "omni: dtype_policy computes in %s, which this %s is not faster in (%s)%s",
                *(short(dtype), "CPU" if device.type == "cpu" else f"{device.type} device", slow, cost),
            )
    return slow
