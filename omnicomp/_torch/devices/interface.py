"""The interface through which Dynamo and Inductor ask a device from outside, made of its module's functions."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._dynamo.device_interface import DeviceInterface as DeviceInterface
from torch._dynamo.device_interface import (
    caching_worker_current_devices,
    caching_worker_device_properties,
    device_interfaces,
    get_interface_for_device,
    register_interface_for_device,
)
from torch._inductor.runtime.hints import DeviceProperties

_REQUIRED = ("current_device", "device_count", "is_available", "set_device", "synchronize")
_OPTIONAL = ("current_stream", "set_stream", "stream", "memory_allocated", "is_bf16_supported")


class _Properties:
    """A device's properties, with some given beside them."""

    def __init__(self, found: Any, given: dict[str, Any]) -> None:
        self.__dict__.update(given)
        self._found = found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)


def make(
    name: str,
    module: ModuleType | type,
    properties: Callable[[int], Any],
    *,
    triton: bool = False,
    target: str = "",
    given: dict[str, Any] | None = None,
) -> type[DeviceInterface]:
    """An interface of the functions of a device module.

    Args:
        name: the device type.
        module: has `current_device`, `device_count`, `is_available`, `set_device` and `synchronize`; what else a device
            module has by convention is used where it is there.
        properties: of the device with an index.
        triton: whether Triton's kernels run on it.
        target: what Triton calls it, if it is not `name`.
        given: properties that hold whatever `properties` says.
    """

    def index(device: Any) -> int:
        if device is None:
            return made.Worker.current_device()
        if isinstance(device, int):
            return device
        found: Any = torch.device(device).index
        return made.Worker.current_device() if found is None else found

    def exchange(device: int) -> int:
        before = module.current_device()
        if device >= 0:
            module.set_device(device)
        return before

    def properties_of(device: Any = None) -> Any:
        if name not in caching_worker_device_properties:
            caching_worker_device_properties[name] = [
                _Properties(properties(i), given or {}) for i in range(module.device_count())
            ]
        return caching_worker_device_properties[name][index(device)]

    def capability(device: Any = None) -> Any:
        found: Any = properties_of(device)
        for attribute in ("cc", "compute_capability", "major"):
            if hasattr(found, attribute):
                return getattr(found, attribute)
        ask = getattr(module, "get_device_capability", None)
        return 0 if ask is None else ask(index(device))

    def raise_if_triton_unavailable(device: Any = None) -> None:
        if not triton:
            raise RuntimeError(f"the kernels of {name} are not Triton's")
        from triton.backends import backends  # type: ignore[import-not-found]
        from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]

        wanted = GPUTarget(target or name, 0, 32)
        if not any(backend.compiler.supports_target(wanted) for backend in backends.values()):
            there = ", ".join(sorted(backends)) or "none"
            raise RuntimeError(f"triton has no backend that compiles for {target or name!r}, only {there}")

    class Worker:
        @staticmethod
        def set_device(device: int) -> None:
            caching_worker_current_devices[name] = device

        @staticmethod
        def current_device() -> int:
            if name in caching_worker_current_devices:
                return caching_worker_current_devices[name]
            return module.current_device()

        get_device_properties = staticmethod(properties_of)

    functions: dict[str, Any] = {
        "device": getattr(module, "device", None) or _guard(module),
        "Event": _class(module, "Event", torch.Event),
        "Stream": _class(module, "Stream", torch.Stream),
        "Worker": Worker,
        "exchange_device": staticmethod(getattr(module, "exchange_device", exchange)),
        "maybe_exchange_device": staticmethod(getattr(module, "maybe_exchange_device", exchange)),
        "get_device_properties": staticmethod(properties_of),
        "get_compute_capability": staticmethod(capability),
        "get_raw_stream": staticmethod(getattr(module, "get_raw_stream", lambda index: 0)),
        "is_triton_capable": staticmethod(lambda device=None: triton),
        "raise_if_triton_unavailable": staticmethod(raise_if_triton_unavailable),
        "__module__": __name__,
    }
    functions |= {each: staticmethod(getattr(module, each)) for each in _REQUIRED}
    functions |= {each: staticmethod(getattr(module, each)) for each in _OPTIONAL if hasattr(module, each)}
    made: Any = type(f"{name}Interface", (DeviceInterface,), functions)
    return made


def _class(module: ModuleType | type, name: str, base: type) -> type:
    """The module's class if Dynamo can capture it."""
    found = getattr(module, name, None)
    return found if isinstance(found, type) and issubclass(found, base) else base


def _guard(module: ModuleType | type) -> type:
    class device:
        def __init__(self, index: int) -> None:
            self.index, self.before = index, -1

        def __enter__(self) -> None:
            self.before = module.current_device()
            module.set_device(self.index)

        def __exit__(self, *exception: object) -> None:
            module.set_device(self.before)

    return device


def register(name: str, made: type[DeviceInterface]) -> None:
    """Make it the interface of a device type, with what was remembered of an earlier one forgotten."""
    caching_worker_device_properties.pop(name, None)
    caching_worker_current_devices.pop(name, None)
    DeviceProperties.create.cache_clear()  # type: ignore[attr-defined]
    register_interface_for_device(name, made)
    for index in range(made.device_count()):
        register_interface_for_device(f"{name}:{index}", made)


def interface(name: str) -> type[DeviceInterface] | None:
    """The interface of a device type, or None."""
    try:
        return get_interface_for_device(name)
    except NotImplementedError:
        return device_interfaces.get(name)


def inductor_properties(name: str) -> DeviceProperties:
    """What Inductor's kernels will be told of the first device.

    Raises:
        Exception: whatever the device's own functions raise.
    """
    return DeviceProperties.create(torch.device(name, 0))
