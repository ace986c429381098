"""What of a declaration is missing or wrong: all of it at once, each by its name."""

import inspect
from typing import Any, Final

import torch

from omnicomp._torch.devices import privateuse, registry
from omnicomp.devices.inductor.spec import DeviceSpec
from omnicomp.errors import nearest

__all__ = ["CPP_MEMBERS", "MODULE_FUNCTIONS", "class_problem", "module_problems", "problems", "wrapper_problem"]

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
        *(module_problems(spec.name, _module(spec))),
        *_class_problems(spec),
        *_member_problems(spec),
        *(spec.launch.problems() if spec.launch is not None else ()),
        *_setting_problems(spec),
    )


def _module(spec: DeviceSpec) -> Any:
    return spec.module if spec.module is not None else getattr(torch, spec.name, None)


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
            found.append(f"scheduling: `cpp`, `triton` or a class, not {spec.scheduling!r}")
    else:
        found.append(class_problem("scheduling", spec.scheduling, registry.BaseScheduling))
    for what in ("wrapper", "cpp_wrapper", "fx_wrapper"):
        value = getattr(spec, what)
        found.append(None if value is None else wrapper_problem(what, value))
    if spec.interface is not None:
        from omnicomp._torch.devices.interface import DeviceInterface

        found.append(class_problem("interface", spec.interface, DeviceInterface))
    if spec.launch is not None and not _is_triton(spec.scheduling):
        found.append("launch: limits apply to Triton's kernels, and scheduling is not Triton's")
    if spec.custom_pass is not None and not callable(spec.custom_pass):
        found.append(f"custom_pass: a function of a graph module, not {type(spec.custom_pass).__name__}")
    return [problem for problem in found if problem is not None]


def _is_triton(scheduling: Any) -> bool:
    if isinstance(scheduling, str):
        return scheduling == "triton"
    return isinstance(scheduling, type) and issubclass(scheduling, registry.TritonScheduling)


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
