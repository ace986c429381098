"""Memory of the simulated device."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import torch

from omnicomp.devices.sim.device import declared_dtypes
from omnicomp.devices.sim.driver import DRIVER, device_index


def memory_stats(device: Any = None) -> dict[str, int]:
    """The allocator's statistics, with the keys of `torch.accelerator.memory_stats`."""
    return torch.accelerator.memory_stats(device_index(device))


def memory_allocated(device: Any = None) -> int:
    """Bytes in use."""
    return torch.accelerator.memory_allocated(device_index(device))


def max_memory_allocated(device: Any = None) -> int:
    """Most bytes that were in use since the start, or since `reset_peak_memory_stats`."""
    return torch.accelerator.max_memory_allocated(device_index(device))


def memory_reserved(device: Any = None) -> int:
    """Bytes that the allocator took from the device, in use or not."""
    return torch.accelerator.memory_reserved(device_index(device))


def max_memory_reserved(device: Any = None) -> int:
    """Most bytes that were taken since the start, or since `reset_peak_memory_stats`."""
    return torch.accelerator.max_memory_reserved(device_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    """What is in use now is the peak."""
    torch.accelerator.reset_peak_memory_stats(device_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are free, and bytes that there are."""
    return DRIVER.total_memory() - memory_allocated(device), DRIVER.total_memory()


def empty_cache() -> None:
    """Give back what is not in use at the end of the devices' memory."""
    torch.accelerator.empty_cache()


def set_dtypes(dtypes: Sequence[torch.dtype] | None) -> None:
    """Make the devices hold tensors of these dtypes only, as smaller accelerators do; None for all.

    Making a tensor of another one raises TypeError; those that are there stay as they are.
    """
    if dtypes is None:
        DRIVER.all_dtypes()
    else:
        DRIVER.set_dtypes(dtypes)


if (_declared := declared_dtypes()) is not None:
    set_dtypes(_declared[1])


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
