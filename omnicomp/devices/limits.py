"""How fast a GPU's memory and its matrix units are: measured once, and kept beside the caches for its model.

What a kernel takes is compared with these, and not with the numbers of a data sheet, which no program reaches.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any, Final

import torch

from omnicomp._torch.autograd.sdpa_bench import versions
from omnicomp._torch.inductor.store import JsonStore

_COPY: Final = 2**30
_SIZE: Final = 8192
_CALLS: Final = 5
_ROUNDS: Final = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a device reaches.

    Attributes:
        bytes: a second that a copy within the device reads and writes, both counted.
        flops: a second of a product of two square matrices of bfloat16.
    """

    bytes: float
    flops: float

    def __str__(self) -> str:
        """One phrase for people."""
        return f"a copy moves {self.bytes / 1e12:.2f} TB/s, bfloat16 products {self.flops / 1e12:.0f} TFLOP/s"


def _load(data: Any) -> Limits:
    found = Limits(**data)
    if not (found.bytes > 0 and found.flops > 0):
        raise ValueError("a rate that is not positive")
    return found


STORE: Final = JsonStore[Limits]("limits", dataclasses.asdict, _load)


def limits(device: torch.device) -> Limits:
    """The limits of a CUDA device, measured now if they are not kept from before; takes a tenth of a second.

    Raises:
        RuntimeError: the device has no room for 2 GiB, or no bfloat16.
    """
    key = hashlib.sha256(repr(versions(device)).encode()).hexdigest()[:32]
    found, _ = STORE.read(key)
    return found or STORE.settle(key, _measured(device))[0]


def _measured(device: torch.device) -> Limits:
    with torch.cuda.device(device), torch.no_grad():
        both = torch.zeros(2, _COPY, dtype=torch.uint8, device=device)
        copied = _seconds(lambda: both[0].copy_(both[1]))
        generator = torch.Generator(device).manual_seed(0)  # the rate depends on the values
        left = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16, generator=generator)
        multiplied = _seconds(lambda: left @ left)
    return Limits(bytes=2 * _COPY / copied, flops=2 * _SIZE**3 / multiplied)


def _seconds(call: Callable[[], Any]) -> float:
    """Of one call: the best of some rounds, by the device's clock."""
    call()
    found: list[float] = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / _CALLS)
    return min(found)
