"""Registers a declared device with Inductor and Dynamo."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final

import torch

from omnicomp._torch.devices import interface, privateuse, registry
from omnicomp._torch.devices.codegen import DeviceCppScheduling, DeviceWrapper, no_cpp_wrapper, python_wrapper
from omnicomp.devices.inductor.report import problems, registration
from omnicomp.devices.inductor.spec import DeviceSpec, LaunchLimits, RegistrationError, code_digest
from omnicomp.errors import DeviceError
from omnicomp.safety.privacy import logger

log = logger("omnicomp.devices")

# A package of a device can be imported where the device is not.
_OF_THE_MACHINE: Final = ("device count", "triton backend")
# The C++ generator makes nothing of loops that were reordered to fit others, which is why Inductor leaves them as they
# are where the device is the CPU, by its name. Reindexing takes the C++ generator's groups of loops for sizes.
_CPP_CONFIG: Final[dict[str, Any]] = {
    "loop_ordering_after_fusion": False,
    "loop_reindexing_after_fusion": False,
    "loop_index_inversion_in_fusion": False,
}
# Kernels whose programs wait for each other, or count themselves, which a larger grid would upset. And of several sizes
# of block, Inductor finds the fastest by the clocks of the GPUs that it knows.
_LIMITED_CONFIG: Final[dict[str, Any]] = {
    "triton.cooperative_reductions": False,
    "triton.force_cooperative_reductions": False,
    "triton.mix_order_reduction": False,
    "triton.native_matmul": False,
    "triton.autotune_pointwise": False,
}


def register(spec: DeviceSpec) -> None:
    """Register a device with Inductor: device module, pieces of host code, code generators, interface, cache keys.

    It replaces an earlier registration of that device type, and changes nothing of other device types.

    Args:
        spec: the device. Everything is looked at before anything is registered.

    Raises:
        RegistrationError: something is missing or of the wrong form; it names all of it.
    """
    found = problems(spec)
    if found:
        raise RegistrationError(spec.name, found)
    if spec.module is not None:
        _register_module(spec)
    module: Any = getattr(torch, spec.name)
    scheduling = _scheduling(spec)
    triton = registry.generates_triton(scheduling)
    overrides = _overrides(spec)
    wrapper = spec.wrapper or DeviceWrapper
    if issubclass(wrapper, DeviceWrapper):
        wrapper = python_wrapper(spec.name, spec.kernel_call, wrapper)
    cpp_wrapper = spec.cpp_wrapper or no_cpp_wrapper(spec.name, lambda: _no_cpp(spec.name))
    fx_wrapper = spec.fx_wrapper or registry.WrapperFxCodegen
    config = functools.cache(functools.partial(_config, spec))
    classes = [wrapper, cpp_wrapper, fx_wrapper, type(overrides)]

    @functools.cache
    def digest(made: type) -> str:
        return code_digest(
            [made, *classes, *([type(spec.custom_pass)] if spec.custom_pass is not None else [])],
            [
                spec.op_overrides,
                spec.custom_pass,
                spec.properties,
                sorted(config(made).items()),
                spec.kernel_call,
                repr(spec.launch),
                *([] if made is scheduling else [scheduling]),
            ],
            spec.sources,
        )

    registry.register_op_overrides(spec.name, overrides)
    registry.register_codegen(
        spec.name,
        scheduling,
        wrapper,
        cpp_wrapper,
        fx_wrapper,
        registry.DevicePass(spec.name, lambda: digest(registry.made_by(scheduling)), spec.custom_pass),
    )
    registry.set_config(spec.name, lambda: config(registry.made_by(scheduling)))
    interface.register(spec.name, spec.interface or _interface(spec, module, triton=triton))
    lacking = [piece for piece in registration(spec.name) if not piece.ok]
    for piece in lacking:
        if piece.name in _OF_THE_MACHINE:
            log.warning("%s is registered with Inductor, but here: %s; %s", spec.name, piece.found, piece.lever)
    wrong = tuple(f"{p.name}: {p.found}; {p.lever}" for p in lacking if p.name not in _OF_THE_MACHINE)
    if wrong:
        raise RegistrationError(spec.name, wrong)


def _register_module(spec: DeviceSpec) -> None:
    name, module = spec.name, spec.module
    if getattr(torch, name, None) is module:
        return
    if hasattr(torch, name):
        raise RegistrationError(name, (f"module: torch.{name} is another one already; leave it out here",))
    try:
        if privateuse.is_known(name):
            privateuse.register_module(name, module)  # type: ignore[arg-type]
        else:
            privateuse.register(name, module)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise RegistrationError(name, (f"module: {error}",)) from error


def _no_cpp(name: str) -> DeviceError:
    return DeviceError(
        f"the device {name!r} has no C++ wrapper, so neither cpp_wrapper nor AOTInductor can be used with it; "
        "give its DeviceSpec a cpp_wrapper, or compile it without"
    )


def _scheduling(spec: DeviceSpec) -> Callable[[Any], Any]:
    if spec.scheduling == "cpp":
        return DeviceCppScheduling
    given: Any = registry.TritonScheduling if spec.scheduling == "triton" else spec.scheduling
    if not isinstance(given, type) or (spec.launch is None and not spec.triton_backend):
        return given
    from omnicomp._torch.devices.launch_limits import triton_scheduling

    limits = spec.launch or LaunchLimits()
    return triton_scheduling(
        spec.name,
        max_grid=limits.max_grid,
        grid_multiple=limits.grid_multiple,
        num_warps=limits.num_warps,
        target=spec.triton_backend,
        base=given,
    )


def _overrides(spec: DeviceSpec) -> Any:
    given = spec.op_overrides
    if isinstance(given, type):
        return given()
    if not isinstance(given, Mapping):
        return given
    at = f"torch.{spec.name}"
    texts: dict[str, Any] = {
        "import_get_raw_stream_as": "def {name}(index):\n    return 0\n",
        "set_device": f"{at}.set_device({{device_idx}})",
        "synchronize": f"{at}.synchronize()",
        "device_guard": f"{at}.device({{device_idx}})" if hasattr(getattr(torch, spec.name), "device") else None,
        "current_stream": f"{at}.current_stream()",
        "cpp_kernel_type": "void*",
        **({"aten_device_type": "at::kPrivateUse1"} if privateuse.device_name() == spec.name else {}),
        **given,
    }
    if texts["device_guard"] is None:
        texts["device_guard"] = "torch.accelerator.device_index({device_idx})"
    return registry.op_overrides_class(spec.name, texts, lambda member: _no_member(spec.name, member))()


def _no_member(name: str, member: str) -> DeviceError:
    return DeviceError(
        f"Inductor needs the text {member} of the device {name!r}; give it in its DeviceSpec.op_overrides"
    )


def _config(spec: DeviceSpec, scheduling: type) -> dict[str, Any]:
    known = registry.inductor_settings()
    own: dict[str, Any] = {}
    if issubclass(scheduling, registry.CppScheduling):
        own = _CPP_CONFIG
    elif spec.launch is not None:
        own = _LIMITED_CONFIG
    return {**{key: value for key, value in own.items() if key in known}, **spec.config}


def _interface(spec: DeviceSpec, module: Any, *, triton: bool) -> Any:
    given: Any = spec.properties
    properties: Callable[[int], Any]
    if given is None:
        properties = getattr(module, "get_device_properties", lambda index: SimpleNamespace())
    elif isinstance(given, Mapping):
        properties = lambda index: SimpleNamespace(**given)  # noqa: E731
    else:
        properties = given if inspect.isroutine(given) or inspect.isfunction(given) else lambda index: given
    own: dict[str, Any] = {}
    if spec.launch is not None and spec.launch.warp_size is not None:
        own["warp_size"] = spec.launch.warp_size
    return interface.make(spec.name, module, properties, triton=triton, target=spec.triton_backend, given=own)
