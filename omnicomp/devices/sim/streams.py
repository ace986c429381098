"""Streams and events of the simulated device. All work is done when the call that asked for it returns."""

from typing import Any

import torch

from omnicomp.devices.sim.driver import device_index


def _device(device: Any = None) -> torch.device:
    """The device meant, with its index."""
    return torch.device("sim", device_index(device))


class Stream(torch.Stream):
    """A stream of a simulated device; see `torch.Stream` for what it can do.

    Args:
        device: the device, or its index; the current one by default.
        priority: ignored.
    """

    def __new__(cls, device: Any = None, priority: int = 0, **identity: Any) -> "Stream":
        """Take a stream from the device, or stand for the one that is identified."""
        if identity:
            return super().__new__(cls, **identity)
        return super().__new__(cls, device=_device(device), priority=priority)


class _EventType(type):
    """Torch takes nothing but its own class where two events meet, so that is made; this still recognises it."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == "sim"


class Event(torch.Event, metaclass=_EventType):
    """An event of the simulated devices: a `torch.Event` of the current device.

    Args:
        enable_timing: whether `elapsed_time` may be asked for.
        blocking: ignored.
        interprocess: not supported.

    Raises:
        RuntimeError: `interprocess`.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        """Make torch's own event, of the current device."""
        if interprocess:
            raise RuntimeError("events of sim can't be shared between processes")
        return torch.Event(device=_device(), enable_timing=enable_timing, blocking=blocking)


def _wrap(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Any = None) -> Stream:
    """The current stream of a device, the current device by default."""
    return _wrap(torch.accelerator.current_stream(_device(device)))


def default_stream(device: Any = None) -> Stream:
    """The stream that a device has from the start."""
    return Stream(
        stream_id=0, device_index=_device(device).index, device_type=torch.accelerator.current_stream().device_type
    )


def set_stream(stream: torch.Stream) -> None:
    """Make it the current one of its device, and that device the current one."""
    torch.accelerator.set_stream(stream)


class stream:
    """Within it, the stream is the current one of its device, which is the current device. None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._device = torch.accelerator.current_device_index()
            self._before = torch.accelerator.current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *exception: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self._before)
            torch.accelerator.set_device_index(self._device)
