"""What only a simulated device offers: counters of what it did, faults on request, and kernels from outside."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Final

import torch

from omnicomp.devices.sim.driver import DRIVER

__all__ = [
    "clear_faults",
    "counters",
    "fallbacks",
    "inject_fault",
    "kernel",
    "launch",
    "reset_counters",
    "reset_fallbacks",
]

_FAULTS: Final = ("allocate", "copy", "kernel", "synchronize")


def counters() -> dict[str, Any]:
    """What happened since the start, or since `reset_counters`.

    Returns:
        `h2d_copies`, `h2d_bytes` (host to device), `d2h_…`, `d2d_…`; `kernels` (calls of the device's own kernels), by
        operator in `natives`; `launches` (kernels from outside, such as generated code); `synchronizations`;
        `fallbacks` (calls on the host, by operator).
    """
    return DRIVER.counters()


def reset_counters() -> None:
    """Start counting anew, fallbacks included."""
    DRIVER.reset_counters()


def fallbacks() -> dict[str, int]:
    """Operators that the device has no kernel for and that ran on the host instead, with the number of calls."""
    return DRIVER.counters()["fallbacks"]


def reset_fallbacks() -> None:
    """Forget the fallbacks alone."""
    DRIVER.reset_fallbacks()


def inject_fault(kind: str, after: int = 0) -> None:
    """Make the driver fail once.

    Args:
        kind: `allocate` (raises `torch.OutOfMemoryError`), `copy`, `kernel` (the device's own and launched ones) or
            `synchronize` (these raise `torch.AcceleratorError`).
        after: how many operations of that kind go well before.

    Raises:
        ValueError: there is no such kind, or `after` is negative.
    """
    if kind not in _FAULTS:
        raise ValueError(f"a fault is one of {', '.join(_FAULTS)}, not {kind!r}")
    if after < 0:
        raise ValueError(f"after is a number of operations, not {after}")
    DRIVER.inject_fault(_FAULTS.index(kind), after)


def clear_faults() -> None:
    """Disarm all faults that did not happen yet."""
    for kind in range(len(_FAULTS)):
        DRIVER.inject_fault(kind, -1)


@contextlib.contextmanager
def kernel(name: str = "kernel") -> Generator[None]:
    """The bracket of a launch: within it, the host's instructions may touch the devices' memory, as the kernel does.

    Args:
        name: of the kernel, for messages.

    Raises:
        torch.AcceleratorError: a fault was injected.
    """
    token = DRIVER.begin_kernel(name)
    try:
        yield
    finally:
        DRIVER.end_kernel(token)


def launch(function: Callable[..., Any], *arguments: Any, raw: bool = False) -> Any:
    """Call a kernel that was brought from outside, such as one that Inductor generated, inside its bracket.

    Args:
        function: called with `arguments`. The bindings of Inductor's C++ kernels take tensors of any device and read
            their addresses.
        *arguments: of the kernel, in the devices' memory.
        raw: whether tensors are replaced by their addresses, as for ctypes.

    Returns:
        What the function returns.

    Raises:
        RuntimeError: with `raw`, a tensor of another type of device.
        torch.AcceleratorError: a fault was injected.
    """
    if raw:
        arguments = tuple(_address(value) if isinstance(value, torch.Tensor) else value for value in arguments)
    token = DRIVER.begin_kernel(getattr(function, "__name__", "kernel"))
    try:
        return function(*arguments)
    finally:
        DRIVER.end_kernel(token)


def _address(tensor: torch.Tensor) -> int:
    if tensor.device.type != "sim":
        raise RuntimeError(f"a kernel of sim was given a tensor on {tensor.device}")
    return tensor.data_ptr()
