"""Calls timed on a CUDA device while a program is compiled, behind work that hides the host's launches."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

_ROUNDS: Final = range(3, 13)
# The two shortest rounds are so near each other if nothing else ran on the device in them.
_SPREAD: Final = 0.03
_SECONDS: Final = 0.001  # of a round
_CALLS: Final = range(2, 21)
# Cycles in a second, at most: sleeping longer than needed only costs time.
_CLOCK: Final = 2.0e9
_LONGEST_SLEEP: Final = 50_000_000


def measurable(device: torch.device) -> bool:
    """Whether work can be timed on a device now: it is one of CUDA, and no graph is being captured on it."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return not torch.cuda.is_current_stream_capturing() and not torch.are_deterministic_algorithms_enabled()


def versions(device: torch.device) -> tuple[str, ...]:
    """What a time depends on besides what is timed: the model of the device, libraries, settings."""
    properties = torch.cuda.get_device_properties(device)
    model = f"{properties.name} {properties.major}.{properties.minor} {properties.multi_processor_count}"
    libraries = (torch.__version__, str(torch.version.cuda), str(torch.backends.cudnn.version()))
    return (model, *libraries, torch.get_float32_matmul_precision())


class DeviceTimer:
    """Times calls, one after the other; a context manager, inside which tensors are real.

    Attributes:
        first: seconds that the first call of the last candidate took.
    """

    def __init__(self, device: torch.device, *, grad: bool = False) -> None:
        self.first = 0.0
        self._device, self._grad, self._stack = device, grad, contextlib.ExitStack()

    def __enter__(self) -> "DeviceTimer":
        """Leave the modes of the compilation.

        Raises:
            RuntimeError: a subclass has no room for its operands.
        """
        for context in (unset_fake_temporarily(), _disable_current_modes(), torch.inference_mode(False)):
            self._stack.enter_context(context)
        self._stack.enter_context(torch.set_grad_enabled(self._grad))
        self._stack.enter_context(torch.autocast("cuda", enabled=False))
        self._stack.enter_context(torch.cuda.device(self._device))
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.empty_cache()
        self._stack.close()

    def timed(self, call: Callable[[], Any]) -> float:
        """Milliseconds of a call, of the shortest round; another must agree, as other programs may use the device."""
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        self.first = time.perf_counter() - start
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        whole = time.perf_counter() - start
        calls = min(max(int(_SECONDS / whole), _CALLS.start), _CALLS.stop - 1)
        found: list[float] = []
        while len(found) < _ROUNDS.start or (len(found) < _ROUNDS.stop - 1 and not _agree(found)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(min(int(1.5 * host * calls * _CLOCK), _LONGEST_SLEEP))
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / calls)
        return min(found)

    def free(self) -> int:
        """Half of the device's memory that nobody has, in bytes."""
        free, _ = torch.cuda.mem_get_info(self._device)
        idle = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return (free + idle) // 2


def _agree(rounds: Sequence[float]) -> bool:
    first, second = sorted(rounds)[:2]
    return second <= first * (1 + _SPREAD)
