"""Inductor's registries of devices: what is registered, registering, and settings of a device's own."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch._inductor.config
from torch._inductor.codegen.common import DeviceOpOverrides as DeviceOpOverrides
from torch._inductor.codegen.common import (
    device_codegens,
    device_op_overrides_dict,
    get_custom_backend_pass_for_device,
    get_device_op_overrides,
    get_scheduling_for_device,
    get_wrapper_codegen_for_device,
    init_backend_registration,
    register_backend_for_device,
    register_device_op_overrides,
)
from torch._inductor.codegen.cpp import CppScheduling as CppScheduling
from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu as CppWrapperGpu
from torch._inductor.codegen.simd import SIMDScheduling as SIMDScheduling
from torch._inductor.codegen.triton import TritonScheduling as TritonScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen as PythonWrapperCodegen
from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen as WrapperFxCodegen
from torch._inductor.compile_fx import _InProcessFxCompile
from torch._inductor.custom_graph_pass import CustomGraphModulePass
from torch._inductor.scheduler import BaseScheduling as BaseScheduling
from torch.utils._pytree import tree_leaves


class DevicePass(CustomGraphModulePass):
    """What runs on each graph of a device after autograd, and what Inductor's cache keys know the device's code by."""

    def __init__(
        self, name: str, digest: Callable[[], str], function: Callable[[torch.fx.GraphModule], Any] | None
    ) -> None:
        self.name, self.digest, self.function = name, digest, function

    def __call__(self, gm: torch.fx.GraphModule) -> None:  # type: ignore[override]
        """Apply the device's own pass, if it has one."""
        if self.function is not None:
            self.function(gm)

    def uuid(self) -> Any:
        """Part of every key, since Inductor does not look into the classes that generate a device's code."""
        return f"{self.name}:{self.digest()}"


# ---- texts of a device in host code ----------------------------------------------------------------------------------


@functools.cache
def members() -> Mapping[str, tuple[str, ...]]:
    """The members of this torch's `DeviceOpOverrides`, each with the names of its parameters."""
    found = inspect.getmembers(DeviceOpOverrides, inspect.isfunction)
    return {
        name: tuple(inspect.signature(function).parameters)[1:] for name, function in found if not name.startswith("_")
    }


def op_overrides_class(
    name: str, texts: Mapping[str, str | Callable[..., Any]], missing: Callable[[str], Exception]
) -> type[DeviceOpOverrides]:
    """A `DeviceOpOverrides` with these texts.

    Args:
        name: the device type.
        texts: by member, the text, in which `{parameter}` stands for the value of a parameter, or a function of the
            parameters that returns it.
        missing: makes the error that is raised where a member is asked for that neither `texts` nor torch has.
    """

    def text_of(member: str, parameters: tuple[str, ...], text: str) -> Callable[..., str]:
        def method(self: Any, *values: Any, **named: Any) -> str:
            filled = text
            for parameter, value in {**dict(zip(parameters, values, strict=False)), **named}.items():
                filled = filled.replace(f"{{{parameter}}}", str(value))
            return filled

        method.__name__ = member
        return method

    def function_of(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *values, **named: function(*values, **named)

    def torchs_own(member: str) -> Callable[..., Any]:
        def method(self: Any, *values: Any, **named: Any) -> Any:
            try:
                return getattr(DeviceOpOverrides, member)(self, *values, **named)
            except NotImplementedError:
                raise missing(member) from None

        return method

    methods: dict[str, Any] = {"__module__": __name__}
    for member, parameters in members().items():
        text = texts.get(member)
        if text is None:
            methods[member] = torchs_own(member)
        else:
            methods[member] = text_of(member, parameters, text) if isinstance(text, str) else function_of(text)
    return type(f"{name}OpOverrides", (DeviceOpOverrides,), methods)


def op_overrides(name: str) -> DeviceOpOverrides | None:
    """What is registered for a device type, or None."""
    get_device_op_overrides("cpu")  # loads torch's own; asked for a name that it lacks, torch 2.11 registers the CPU's
    return device_op_overrides_dict.get(name)


def register_op_overrides(name: str, overrides: DeviceOpOverrides) -> None:
    """Register the texts of a device type; torch's own are loaded first, so that they are not found to be missing."""
    op_overrides(name)
    register_device_op_overrides(name, overrides)


# ---- classes that generate code --------------------------------------------------------------------------------------


def scheduling(name: str) -> Any:
    """What is registered to generate kernels for a device type, or None: a class, or a function that chooses one."""
    init_backend_registration()
    found: Any = get_scheduling_for_device(name)
    return getattr(found, "chooses", found)


def made_by(scheduling: Any) -> type:
    """The class that generates kernels: what is registered, or what a function makes now, as torch asks for features.

    Torch registers functions for `cpu` and `cuda`, which choose a class by a setting.
    """
    return scheduling if isinstance(scheduling, type) else type(scheduling(None))


def generates_triton(scheduling: Any) -> bool:
    """Whether what is registered generates Triton: a class, or a function that chooses one, or one that delegates."""
    if isinstance(scheduling, type) and issubclass(scheduling, SIMDScheduling):
        return issubclass(scheduling, TritonScheduling)
    made = scheduling(None)
    return any(isinstance(each, TritonScheduling) for each in (made, *vars(made).values()))


def wrapper(name: str, kind: str = "python") -> Any:
    """What is registered to generate host code for a device type, or None; `kind` is `python`, `cpp` or `fx`."""
    init_backend_registration()
    return get_wrapper_codegen_for_device(name, kind == "cpp", kind == "fx")


def custom_pass(name: str) -> Any:
    """The pass registered for a device type, or None."""
    return get_custom_backend_pass_for_device(name)


def register_codegen(
    name: str,
    scheduling: Callable[[Any], Any],
    wrapper: type,
    cpp_wrapper: type | None,
    fx_wrapper: type,
    device_pass: DevicePass,
) -> None:
    """Register what generates code for a device type, in place of what was registered before."""
    register_backend_for_device(name, _class_of(name, scheduling), wrapper, cpp_wrapper, fx_wrapper, device_pass)


def takes_function(name: str) -> bool:
    """Whether torch takes the function that is registered for a device type."""
    return name in ("cpu", "cuda", "xpu") or hasattr(get_scheduling_for_device(name), "chooses")


@functools.cache
def _calling(name: str, made: type, function: Callable[[Any], Any]) -> type:
    own = {"__new__": lambda cls, scheduler: function(scheduler), "chooses": staticmethod(function)}
    return type(f"{name}Scheduling", (made,), {**own, "__module__": __name__})


def _class_of(name: str, scheduling: Callable[[Any], Any]) -> type:
    """A class that stands for a function: torch takes functions of `cpu`, `cuda` and `xpu` alone.

    Of any other device `torch._inductor.ir.is_triton` asserts that it is a class, from 2.11 on (seen up to 2.13).
    """
    return scheduling if isinstance(scheduling, type) else _calling(name, made_by(scheduling), scheduling)


# ---- settings --------------------------------------------------------------------------------------------------------

_configs: Final[dict[str, Callable[[], Mapping[str, Any]]]] = {}


def inductor_settings() -> frozenset[str]:
    """Names of the entries of Inductor's config."""
    return frozenset(torch._inductor.config.get_config_copy())


def set_config(name: str, entries: Callable[[], Mapping[str, Any]]) -> None:
    """Settings of Inductor that hold while a graph with tensors of a device is compiled, and for no other graph.

    Torch keeps a config for each device, but only hashes it; so the one function that compiles a graph is wrapped, and
    does for graphs of other devices what it did.
    """
    _configs[name] = entries
    if not hasattr(_InProcessFxCompile.codegen_and_compile, "omnicomp"):
        _InProcessFxCompile.codegen_and_compile = _with_config(_InProcessFxCompile.codegen_and_compile)


def _with_config(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def codegen_and_compile(self: Any, gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        entries: dict[str, Any] = {}
        for device_type in _device_types(gm):
            codegen = device_codegens.get(device_type)
            if codegen is not None and hasattr(codegen.scheduling, "chooses"):
                codegen.scheduling = _class_of(device_type, scheduling(device_type))  # of what it chooses now
            entries |= _configs[device_type]() if device_type in _configs else {}
        if not entries:
            return original(self, gm, *args, **kwargs)
        with torch._inductor.config.patch(entries):
            return original(self, gm, *args, **kwargs)

    codegen_and_compile.omnicomp = True  # type: ignore[attr-defined]
    return codegen_and_compile


def _device_types(gm: torch.fx.GraphModule) -> set[str]:
    values = tree_leaves([node.meta.get("val") for node in gm.graph.nodes])
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}
