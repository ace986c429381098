"""What Inductor has to know of a device from outside, in one declaration."""

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal

from omnicomp.errors import DeviceError

__all__ = ["DeviceSpec", "LaunchLimits", "RegistrationError"]


class RegistrationError(DeviceError):
    """A device can't be registered with Inductor as it was declared.

    Attributes:
        problems: each thing that is missing or wrong, with what to do about it.
    """

    def __init__(self, name: str, problems: tuple[str, ...]) -> None:
        self.problems = problems
        listed = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"the device {name!r} can't be registered with Inductor:{listed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchLimits:
    """How a device launches Triton's kernels.

    Attributes:
        max_grid: a grid with at most so many programs in a dimension is launched as it is.
        grid_multiple: the programs of a larger one are rounded up to a multiple of this. Those that were added find
            nothing to do. Without it, a larger grid is an error.
        num_warps: the number of warps of every kernel, instead of what Inductor would try.
        warp_size: threads in a warp.
    """

    max_grid: int | None = None
    grid_multiple: int | None = None
    num_warps: int | None = None
    warp_size: int | None = None

    def problems(self) -> tuple[str, ...]:
        """What is wrong with the numbers."""
        found: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (not isinstance(value, int) or value < 1):
                found.append(f"launch.{field.name} is a positive number, not {value!r}")
        for name in ("num_warps", "warp_size"):
            value = getattr(self, name)
            if isinstance(value, int) and value >= 1 and value & (value - 1):
                found.append(f"launch.{name} is a power of two, as Triton compiles for no other, not {value}")
        return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A device as Inductor has to know it.

    Attributes:
        name: torch's name of the device type, for example `gxu`.
        module: what `torch.<name>` is; registered as that if torch has nothing there yet, and if the key for devices
            from outside has no name yet, it gets this one.
        op_overrides: pieces of host code, by the names of the members of Inductor's `DeviceOpOverrides`: a text, in
            which `{device_idx}` stands for that parameter, or a function of the member's parameters; or an object or a
            class of that type. What is left out is made of the device module's conventional names, where it can be.
        scheduling: what generates kernels: `cpp` (C++, for a device whose memory the compiled code can address),
            `triton`, or a class.
        wrapper: a class that generates host code in Python: a subclass of `DeviceWrapper`, which is the default, or of
            Inductor's `PythonWrapperCodegen` with a `create` of its own.
        cpp_wrapper: a class that generates host code in C++; without it, `cpp_wrapper` and AOTInductor raise an
            error that says so.
        fx_wrapper: a class that generates host code as an FX graph; Inductor's own by default.
        kernel_call: for C++ kernels: what a `DeviceWrapper` calls with a kernel and its arguments, for example
            `torch.gxu.launch`; by default it calls the kernel itself.
        properties: of a device: a function of its index, an object, or values by name; by default the device module's
            `get_device_properties`. Inductor wants `multi_processor_count`.
        interface: a class of Dynamo's type `DeviceInterface`; made of the device module's functions by default.
        launch: limits for Triton's kernels on this device.
        triton_backend: what Triton calls what it compiles for (`cuda`, `hip`), if not `name`.
        custom_pass: called with each graph of the device after autograd; may change it.
        config: entries of Inductor's config that hold while a graph of this device is compiled.
        sources: files that the device's generated code depends on besides the modules of its classes.
    """

    name: str
    module: ModuleType | type | None = None
    op_overrides: Mapping[str, str | Callable[..., Any]] | Any = dataclasses.field(default_factory=dict[str, Any])
    scheduling: Literal["cpp", "triton"] | type
    wrapper: type | None = None
    cpp_wrapper: type | None = None
    fx_wrapper: type | None = None
    kernel_call: str = ""
    properties: Callable[[int], Any] | Mapping[str, Any] | Any = None
    interface: type | None = None
    launch: LaunchLimits | None = None
    triton_backend: str = ""
    custom_pass: Callable[[Any], Any] | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    sources: tuple[str, ...] = ()
