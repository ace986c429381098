"""How fast this machine multiplies in a low-precision dtype, measured once and kept.

An instruction set says what a processor may be fast in, not whether the libraries that torch calls make use of it. So
one product is timed in float32 and in the dtype, by turns, for some milliseconds; the shortest times are kept in the
process, and on disk next to omnicomp's other caches. What else the machine does only adds to a time.
"""

import dataclasses
import platform
import time
from typing import Any, Final

import torch

from omnicomp._torch.dtypes import undisturbed
from omnicomp._torch.inductor.store import JsonStore, key_of
from omnicomp.devices import Device
from omnicomp.devices.cpu import cpu_flags, instruction_set
from omnicomp.options.dtype_policy import NAME, DtypePolicy, short
from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import logger
from omnicomp.timeline import Reason

SIZE: Final = 256
_ROUNDS: Final = (5, 25)
_SECONDS: Final = 0.05
_lock = new_lock()
_known: Final[dict[str, "Speed"]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """The time of one product of two square matrices on the CPU."""

    dtype: str
    wide_ms: float
    low_ms: float
    threads: int

    @property
    def ratio(self) -> float:
        """How many times as fast as float32 the dtype is."""
        return self.wide_ms / self.low_ms

    def __str__(self) -> str:
        """One phrase with the numbers."""
        return (
            f"a {SIZE} x {SIZE} product takes {self.low_ms:.2f} ms in {self.dtype} and {self.wide_ms:.2f} ms in "
            f"float32 on {self.threads} thread{'s' if self.threads != 1 else ''}"
        )


def measured(dtype: torch.dtype) -> Speed:
    """The speed of matrix work in `dtype` on the CPU, measured now or before."""
    key = _key(dtype)
    with _lock:
        if key not in _known:
            _known[key] = STORE.read(key)[0] or _measure(dtype, key)
        return _known[key]


def forget() -> None:
    """Forget what this process measured; the file stays."""
    with _lock:
        _known.clear()


def _measure(dtype: torch.dtype, key: str) -> Speed:
    times: dict[torch.dtype, list[float]] = {torch.float32: [], dtype: []}
    with undisturbed():
        # Random numbers would be drawn from the user's generator; the time of a product depends on no value but zeros
        # and denormal ones.
        operands = {kind: torch.full((SIZE, SIZE), 0.5, dtype=kind) for kind in times}
        for operand in operands.values():
            torch.mm(operand, operand)  # loads libraries and generates kernels
        begun = time.perf_counter()
        for index in range(_ROUNDS[1]):
            if index >= _ROUNDS[0] and time.perf_counter() - begun > _SECONDS:
                break
            for kind in list(times) if index % 2 else reversed(list(times)):
                start = time.perf_counter()
                torch.mm(operands[kind], operands[kind])
                times[kind].append(time.perf_counter() - start)
    wide, low = (min(values) * 1e3 for values in times.values())
    speed = Speed(dtype=short(dtype), wide_ms=wide, low_ms=low, threads=torch.get_num_threads())
    STORE.write(key, speed)
    return speed


def _key(dtype: torch.dtype) -> str:
    processor = (platform.machine(), torch.backends.cpu.get_cpu_capability(), sorted(cpu_flags()))
    return key_of(torch.__version__, processor, torch.get_num_threads(), str(dtype), SIZE)


def _load(data: Any) -> Speed:
    speed = Speed(**data)
    if not (speed.low_ms > 0 and speed.wide_ms > 0):
        raise ValueError("a time is not positive")
    return speed


STORE: Final = JsonStore[Speed]("speeds", dataclasses.asdict, _load)


log = logger("omnicomp")

# Below this, what casts cost is not earned back.
_WORTH: Final = 1.1
_warned: Final[set[torch.dtype]] = set()


def resolve(policy: DtypePolicy, device: Device, *, training: bool) -> tuple[DtypePolicy, Reason | None]:
    """The policy that a device makes of one that leaves `compute` to it; others as they are.

    bfloat16 is taken before float16, and float16 only for inference: it has float32's precision for neither small
    gradients nor large activations, and training in it needs a gradient scaler, which nothing here could see.

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
    speed = measured(dtype)
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
                speed = measured(dtype)
                cost = f": {speed}, {1 / speed.ratio:.1f} times as long"
            log.warning(
                "omni: dtype_policy computes in %s, which this %s is not faster in (%s)%s",
                *(short(dtype), "CPU" if device.type == "cpu" else f"{device.type} device", slow, cost),
            )
    return slow
