"""What Inductor needs of a device: what of a declaration is missing or wrong, and which pieces are registered."""

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch

from omnicomp import records
from omnicomp._torch.devices import interface as device_interface
from omnicomp._torch.devices import privateuse, registry
from omnicomp.devices.inductor.spec import DeviceSpec
from omnicomp.errors import nearest

MODULE_FUNCTIONS: Final = ("current_device", "device_count", "is_available", "set_device", "synchronize")
# What Inductor finds in a device's module by itself, if nothing is registered; each must be a class.
_DISCOVERED: Final = ("PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")
_PYTHON_MEMBERS: Final = ("import_get_raw_stream_as", "set_device", "synchronize", "device_guard")
# Of torch's own C++ wrapper for GPUs; what a later torch adds is asked for when it is needed.
CPP_MEMBERS: Final = (
    "aoti_get_stream",
    "cpp_aoti_device_guard",
    "cpp_aoti_stream_guard",
    "cpp_device_guard",
    "cpp_device_ptr",
    "cpp_getStreamFromExternal",
    "cpp_kernel_type",
    "cpp_stream_guard",
    "cpp_stream_type",
    "kernel_driver",
    "kernel_header",
)
_SAMPLE: Final = {"name": "get_raw_stream", "device_idx": 0, "stream_name": "stream"}


def problems(spec: DeviceSpec) -> tuple[str, ...]:
    """Everything that keeps a device from being registered; empty if nothing does. Registers nothing."""
    return (
        *_name_problems(spec),
        *(module_problems(spec.name, spec.module if spec.module is not None else getattr(torch, spec.name, None))),
        *_class_problems(spec),
        *_member_problems(spec),
        *(spec.launch.problems() if spec.launch is not None else ()),
        *_setting_problems(spec),
    )


def _name_problems(spec: DeviceSpec) -> list[str]:
    if not spec.name.isidentifier():
        return [f"name: a device type is one word, not {spec.name!r}"]
    if privateuse.is_known(spec.name):
        return []
    taken = privateuse.device_name()
    if taken != "privateuseone":
        how = f"torch has room for one device from outside, and in this process it is {taken!r}"
    elif spec.module is None:
        how = f"torch.utils.rename_privateuse1_backend({spec.name!r}) first, or give DeviceSpec a module"
    else:
        return []
    return [f"name: torch knows no device type {spec.name!r}; {how}"]


def module_problems(name: str, module: Any) -> list[str]:
    """What the module of a device lacks, or has in another form than Inductor takes it."""
    if module is None:
        return [f"module: there is no torch.{name}; torch._register_device_module({name!r}, module), or give it here"]
    found = [f"module: torch.{name} has no {each}()" for each in MODULE_FUNCTIONS if not hasattr(module, each)]
    for each in _DISCOVERED:
        value = getattr(module, each, None)
        if value is not None and not isinstance(value, type):
            found.append(f"module: {_not_a_class(each, value)}; torch.{name}.{each} has to be the class itself")
    return found


def _not_a_class(what: str, value: Any) -> str:
    kind = "function" if inspect.isroutine(value) else type(value).__name__
    return f"{what} must be a class, got {kind}"


def class_problem(what: str, value: Any, base: type) -> str | None:
    """Why a value can't be the class that `what` names."""
    if not isinstance(value, type):
        return f"{what}: {_not_a_class(what, value)}"
    if not issubclass(value, base):
        return f"{what}: {value.__name__} is no subclass of {base.__module__}.{base.__name__}"
    return None


def scheduling_problem(what: str, value: Any) -> str | None:
    """Why a value can't be what generates kernels: a class, or a function that makes an object of one."""
    if isinstance(value, type) or not callable(value):
        return class_problem(what, value, registry.BaseScheduling)
    asks = f"{what}: Inductor calls the function with its scheduler, and with None to ask for features;"
    try:
        made = value(None)
    except Exception as error:  # noqa: BLE001 - a device's own code; what it says is the problem
        return f"{asks} with None it raises {type(error).__name__}: {error}"
    if isinstance(made, registry.BaseScheduling):
        return None
    return f"{asks} it returns a {type(made).__name__}, no {registry.BaseScheduling.__name__}"


def wrapper_problem(what: str, value: Any) -> str | None:
    """Why a value can't be a class that generates host code."""
    wrong = class_problem(what, value, registry.PythonWrapperCodegen)
    if wrong is not None:
        return wrong
    created = inspect.getattr_static(value, "create", None)
    owner = next((each for each in value.__mro__ if "create" in each.__dict__), object)
    if owner is not value and not isinstance(created, classmethod) and owner.__module__.startswith("torch."):
        if value.__module__.startswith("torch."):
            return None
        return (
            f"{what}: {value.__name__} has no create() of its own, and the one of {owner.__name__}, through which "
            f"Inductor makes it, makes a {owner.__name__}"
        )
    return None


def _class_problems(spec: DeviceSpec) -> list[str]:
    found: list[str | None] = []
    if isinstance(spec.scheduling, str):
        if spec.scheduling not in ("cpp", "triton"):
            found.append(f"scheduling: `cpp`, `triton`, a class or a function, not {spec.scheduling!r}")
    else:
        found.append(scheduling_problem("scheduling", spec.scheduling))
    for what in ("wrapper", "cpp_wrapper", "fx_wrapper"):
        value = getattr(spec, what)
        found.append(None if value is None else wrapper_problem(what, value))
    if spec.interface is not None:
        from omnicomp._torch.devices.interface import DeviceInterface

        found.append(class_problem("interface", spec.interface, DeviceInterface))
    if spec.launch is not None and not _is_triton(spec.scheduling):
        found.append("launch: limits apply to Triton's kernels, and scheduling is not Triton's")
    elif callable(spec.scheduling) and not isinstance(spec.scheduling, type):
        found += [
            f"{what}: it becomes part of a class, and scheduling is a function; give `triton` or a class there"
            for what in ("launch", "triton_backend")
            if getattr(spec, what)
        ]
    if spec.custom_pass is not None and not callable(spec.custom_pass):
        found.append(f"custom_pass: a function of a graph module, not {type(spec.custom_pass).__name__}")
    return [problem for problem in found if problem is not None]


def _is_triton(scheduling: Any) -> bool:
    if isinstance(scheduling, str):
        return scheduling == "triton"
    if scheduling_problem("", scheduling) is not None:
        return False
    return issubclass(registry.made_by(scheduling), registry.TritonScheduling)


def _member_problems(spec: DeviceSpec) -> list[str]:
    given = spec.op_overrides
    gpu_wrapper = isinstance(spec.cpp_wrapper, type) and issubclass(spec.cpp_wrapper, registry.CppWrapperGpu)
    needed = (*_PYTHON_MEMBERS, *(CPP_MEMBERS if gpu_wrapper else ()))
    if isinstance(given, (registry.DeviceOpOverrides, type)):
        wrong = class_problem(
            "op_overrides", given if isinstance(given, type) else type(given), registry.DeviceOpOverrides
        )
        if wrong is not None:
            return [wrong]
        instance = given() if isinstance(given, type) else given
        return [
            f"op_overrides: {type(instance).__name__} does not implement {member}()"
            for member in needed
            if not _implements(instance, member)
        ]
    if not hasattr(given, "keys"):
        return [f"op_overrides: texts by member, or a DeviceOpOverrides, not {type(given).__name__}"]
    known = registry.members()
    found = [
        f"op_overrides: DeviceOpOverrides has no {member!r}{nearest(member, known)}"
        for member in given
        if member not in known and member not in CPP_MEMBERS
    ]
    if gpu_wrapper:
        lacking = [member for member in CPP_MEMBERS if member not in given]
        found += [f"op_overrides: {member} is missing, which the C++ wrapper needs" for member in lacking]
    if _is_triton(spec.scheduling) and "import_get_raw_stream_as" not in given:
        found.append(
            "op_overrides: import_get_raw_stream_as is missing, which Triton's kernels are launched by: a line that "
            f"imports a function of an index as {{name}}, for example 'from {spec.name} import stream as {{name}}'"
        )
    return found


def _implements(overrides: Any, member: str) -> bool:
    values = [_SAMPLE.get(parameter, 0) for parameter in registry.members()[member]]
    try:
        getattr(overrides, member)(*values)
    except NotImplementedError:
        return False
    return True


def _setting_problems(spec: DeviceSpec) -> list[str]:
    known = registry.inductor_settings()
    return [f"config: Inductor has no setting {key!r}{nearest(key, known)}" for key in spec.config if key not in known]


@records.dataclass(frozen=True, kw_only=True)
class Piece:
    """One thing that Inductor needs of a device."""

    name: str
    ok: bool
    found: str
    lever: str = ""


def registration(name: str) -> tuple[Piece, ...]:
    """The pieces of a device type, in the order in which they are needed. Registers nothing, and never raises."""
    steps: tuple[tuple[str, str, Callable[[str], str]], ...] = (
        ("device type", f"torch.utils.rename_privateuse1_backend({name!r})", _device_type),
        ("device module", f"torch._register_device_module({name!r}, module)", _module),
        ("device count", "see that the driver finds a device", _count),
        ("op overrides", f"{_BY} op_overrides", _op_overrides),
        ("scheduling", f"{_BY} scheduling", _scheduling),
        ("python wrapper", f"{_BY} wrapper, or leave it to scheduling", lambda each: _wrapper(each, "python")),
        ("c++ wrapper", f"{_BY} cpp_wrapper", lambda each: _wrapper(each, "cpp")),
        ("fx wrapper", f"{_BY} fx_wrapper", lambda each: _wrapper(each, "fx")),
        ("cache key", f"{_BY} any; without it, edited classes serve what the old ones generated", _cache_key),
        ("interface", f"{_BY} interface, or a module with {', '.join(MODULE_FUNCTIONS)}", _interface),
        ("device properties", f"{_BY} properties, with multi_processor_count", _properties),
        ("triton backend", f"install triton with a backend for {name}, or {_BY} triton_backend", _triton),
    )
    pieces: list[Piece] = []
    for piece, lever, look in steps:
        try:
            pieces.append(Piece(name=piece, ok=True, found=look(name)))
        except _Missing as missing:
            pieces.append(Piece(name=piece, ok=False, found=str(missing), lever=lever))
        except Exception as error:  # noqa: BLE001 - a device's own code; what it says is the finding
            pieces.append(Piece(name=piece, ok=False, found=f"{type(error).__name__}: {error}", lever=lever))
    return tuple(pieces)


_BY = "omnicomp.devices.inductor.register(DeviceSpec(...)) with"


class _Missing(Exception):
    pass


def _device_type(name: str) -> str:
    if privateuse.is_known(name):
        return f"torch.device({name!r})"
    taken = privateuse.device_name()
    raise _Missing(f"torch knows no device type {name!r}; the key for devices from outside is called {taken!r}")


def _module(name: str) -> str:
    module = getattr(torch, name, None)
    wrong = module_problems(name, module)
    if wrong:
        raise _Missing("; ".join(each.removeprefix("module: ") for each in wrong))
    return f"torch.{name}"


def _count(name: str) -> str:
    count = getattr(torch, name).device_count() if hasattr(torch, name) else 0
    if not count:
        raise _Missing("there is no device")
    return str(count)


def _op_overrides(name: str) -> str:
    overrides = registry.op_overrides(name)
    if overrides is None:
        raise _Missing("no DeviceOpOverrides is registered")
    return f"{overrides.set_device(0)}; {overrides.synchronize()}; {overrides.device_guard(0)}"


def _scheduling(name: str) -> str:
    found = registry.scheduling(name)
    if found is None:
        raise _Missing("no class that generates kernels is registered")
    wrong = scheduling_problem("scheduling", found)
    if wrong:
        raise _Missing(wrong)
    if not (isinstance(found, type) or registry.takes_function(name)):
        raise _Missing(f"{_qualified(found)}, a function, of which torch asserts for {name} that it is a class")
    made = registry.made_by(found)
    return _qualified(found) if made is found else f"{_qualified(made)}, made by {_qualified(found)}"


def _wrapper(name: str, kind: str) -> str:
    found = registry.wrapper(name, kind)
    if found is None:
        raise _Missing(f"no class that generates host code ({kind}) is registered")
    wrong = wrapper_problem(f"{kind} wrapper", found)
    if wrong:
        raise _Missing(wrong)
    return "none: cpp_wrapper and AOTInductor raise an error" if getattr(found, "absent", False) else _qualified(found)


def _cache_key(name: str) -> str:
    found = registry.custom_pass(name)
    if found is not None:
        return str(found.uuid())
    scheduling: Any = registry.scheduling(name)
    if scheduling is None or str(registry.made_by(scheduling).__module__).startswith("torch."):
        return "torch's own"
    raise _Missing("no pass with a uuid is registered")


def _interface(name: str) -> str:
    found = device_interface.interface(name)
    if found is None:
        raise _Missing("Dynamo has no DeviceInterface for it")
    return _qualified(found)


def _properties(name: str) -> str:
    if name == "cpu":
        return "not asked for"
    if not getattr(torch, name).device_count():
        return "no device to ask"
    return str(device_interface.inductor_properties(name))


def _triton(name: str) -> str:
    scheduling = registry.scheduling(name)
    if scheduling is None or not registry.generates_triton(scheduling):
        return "not needed"
    if importlib.util.find_spec("triton") is None:
        raise _Missing("the package triton is not installed")
    interface = device_interface.interface(name)
    if interface is None:
        raise _Missing("Dynamo has no DeviceInterface for it, which knows whether triton serves it")
    interface.raise_if_triton_unavailable()
    return "there"


def _qualified(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
