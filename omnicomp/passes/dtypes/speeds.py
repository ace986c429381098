"""How fast this machine multiplies in a low-precision dtype, measured once and kept.

An instruction set says what a processor may be fast in, not whether the libraries that torch calls make use of it. So
one product is timed in float32 and in the dtype, by turns, for some milliseconds; the shortest times are kept in the
process, and on disk next to omnicomp's other caches. What else the machine does only adds to a time.
"""

import dataclasses
import hashlib
import platform
import time
from typing import Any, Final

import torch

from omnicomp._torch.dtypes import undisturbed
from omnicomp.devices.cpu import cpu_flags
from omnicomp.forks import new_lock
from omnicomp.options.dtype_policy import short
from omnicomp.store import JsonStore

__all__ = ["SIZE", "Speed", "forget", "measured"]

SIZE: Final = 256
_ROUNDS: Final = (5, 25)
_SECONDS: Final = 0.05
_lock = new_lock()
_known: Final[dict[str, "Speed"]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """The time of one product of two square matrices on the CPU.

    Attributes:
        dtype: the low-precision dtype, without `torch.`.
        wide_ms: shortest time in float32.
        low_ms: shortest time in the dtype.
        threads: how many threads torch had.
    """

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
    """The speed of matrix work in `dtype` on the CPU, measured now or before.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.
    """
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
    parts = (torch.__version__, processor, torch.get_num_threads(), str(dtype), SIZE)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _load(data: Any) -> Speed:
    speed = Speed(**data)
    if not (speed.low_ms > 0 and speed.wide_ms > 0):
        raise ValueError("a time is not positive")
    return speed


STORE: Final = JsonStore[Speed]("speeds", dataclasses.asdict, _load)
