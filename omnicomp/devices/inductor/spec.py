"""What Inductor has to know of a device from outside, in one declaration."""

import dataclasses
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import omnicomp
from omnicomp import records
from omnicomp._torch.inductor.versions import describe
from omnicomp.errors import DeviceError


class RegistrationError(DeviceError):
    """A device can't be registered with Inductor as it was declared.

    Attributes:
        problems: each thing that is missing or wrong, with what to do about it.
    """

    def __init__(self, name: str, problems: tuple[str, ...]) -> None:
        self.problems = problems
        listed = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"the device {name!r} can't be registered with Inductor:{listed}")


@records.dataclass(frozen=True, kw_only=True)
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


@records.dataclass(frozen=True, kw_only=True)
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
            `triton`, a class, or a function as torch has for `cpu` and `cuda`, which chooses a class by a setting: it
            is called with Inductor's scheduler, or with None for its features, and returns an object.
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
    scheduling: Literal["cpp", "triton"] | type | Callable[[Any], Any]
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


def code_digest(classes: Iterable[type], values: Iterable[Any], files: Iterable[str] = ()) -> str:
    """Hash of omnicomp's version, of the sources of classes, and of values.

    Args:
        classes: those that generate code; with their bases outside torch, each by its file and by the code of its
            members, as a class may have been made while the program ran.
        values: settings, limits and texts; functions by their code.
        files: further sources.
    """
    value = hashlib.sha256(omnicomp.__version__.encode())
    seen: set[str] = set(files)
    waiting, met = list(classes), set[type]()
    while waiting:
        cls = waiting.pop(0)
        if cls in met or cls.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing"):
            continue
        met.add(cls)
        waiting += [*cls.__mro__[1:], *(member for member in cls.__dict__.values() if isinstance(member, type))]
        value.update(f"{cls.__module__}.{cls.__qualname__}".encode())
        for name, member in sorted(cls.__dict__.items()):
            if name not in ("__dict__", "__weakref__", "__doc__", "_abc_impl"):
                value.update(f"{name}={describe(_plain(member))}\n".encode())
        try:
            seen.add(inspect.getfile(cls))
        except (TypeError, OSError):
            continue  # made at run time, by code that is in its members
    for path in sorted(seen):
        if Path(path).is_file():
            value.update(Path(path).name.encode() + b"\0" + Path(path).read_bytes())
    for each in values:
        value.update(f"{describe(each)}\n".encode())
    return value.hexdigest()[:32]


def _plain(member: Any) -> Any:
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


@functools.cache
def package_sources(name: str) -> str:
    """Hash of the sources of a package, as what compiles is often beside the class that calls it."""
    value = hashlib.sha256()
    for folder in getattr(sys.modules.get(name), "__path__", ()) if name != "omnicomp" else ():
        for path in sorted(Path(folder).rglob("*.py")):
            value.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return value.hexdigest()
