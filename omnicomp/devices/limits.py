"""How fast a device's memory and its units for products are: measured once, kept beside the caches for its model.

What a kernel takes is compared with these, and not with the numbers of a data sheet, which no program reaches.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from omnicomp import records
from omnicomp._torch.devices.timer import versions
from omnicomp._torch.inductor.store import JsonStore, key_of
from omnicomp.devices.cpu import processor

# Bytes of a copy, and the size and dtype of the matrices of a product.
_WORK: Final = {"cuda": (2**30, 8192, torch.bfloat16), "cpu": (2**27, 1024, torch.float32)}
_CALLS: Final = 5
_ROUNDS: Final = 5


@records.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a device reaches."""

    bytes: float  # a second that a copy within the device reads and writes, both counted
    flops: float  # a second of a product of two square matrices
    dtype: str = "bfloat16"  # of these matrices

    def __str__(self) -> str:
        """One phrase for people."""
        return f"a copy moves {self.bytes / 1e12:.3g} TB/s, {self.dtype} products {self.flops / 1e12:.3g} TFLOP/s"


def _load(data: Any) -> Limits:
    found = Limits(**data)
    if not (found.bytes > 0 and found.flops > 0):
        raise ValueError("a rate that is not positive")
    return found


STORE: Final = JsonStore[Limits]("limits", dataclasses.asdict, _load)


def limits(type: str) -> Limits:
    """The limits of the CPU, or of the current CUDA device, measured unless kept (0.1 s; seconds on a CPU).

    Raises:
        RuntimeError: the device has no room for 2 GiB, or no bfloat16.
    """
    return known(type) or STORE.settle(_key(type), _measured(type))[0]


def known(type: str) -> Limits | None:
    """The same if they are kept from before; nothing is measured."""
    return STORE.read(_key(type))[0] if type in _WORK else None


def _key(type: str) -> str:
    if type == "cpu":
        about: tuple[object, ...] = (processor(), torch.__version__, torch.get_num_threads())
    else:
        about = versions(torch.device(type, torch.cuda.current_device()))
    return key_of(*about)


def _measured(type: str) -> Limits:
    copy, size, dtype = _WORK[type]
    with torch.no_grad():
        both = torch.zeros(2, copy, dtype=torch.uint8, device=type)
        copied = _seconds(type, lambda: both[0].copy_(both[1]))
        generator = torch.Generator(type).manual_seed(0)  # the rate depends on the values
        left = torch.randn(size, size, device=type, dtype=dtype, generator=generator)
        multiplied = _seconds(type, lambda: left @ left)
    return Limits(bytes=2 * copy / copied, flops=2 * size**3 / multiplied, dtype=str(dtype).removeprefix("torch."))


def _seconds(type: str, call: Callable[[], Any]) -> float:
    """Of one call: the best of some rounds, by the device's clock, or by the host's for the CPU."""
    call()
    found: list[float] = []
    for _ in range(_ROUNDS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if type == "cuda" else []
        start = time.perf_counter()
        for mark in marks[:1]:
            mark.record()
        for _ in range(_CALLS):
            call()
        for mark in marks[1:]:
            mark.record()
            mark.synchronize()
        seconds = marks[0].elapsed_time(marks[1]) / 1e3 if marks else time.perf_counter() - start
        found.append(seconds / _CALLS)
    return min(found)
