"""What is registered of a device, piece by piece, with what to do about a piece that is missing."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from omnicomp._torch.devices import interface as device_interface
from omnicomp._torch.devices import privateuse, registry
from omnicomp.devices.inductor.checks import MODULE_FUNCTIONS, class_problem, module_problems, wrapper_problem

__all__ = ["Piece", "registration"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """One thing that Inductor needs of a device.

    Attributes:
        name: what it is.
        ok: whether it is there, in the form that Inductor takes it.
        found: what is there, or what is wrong.
        lever: what to do about it; empty if it is there.
    """

    name: str
    ok: bool
    found: str
    lever: str = ""


def registration(name: str) -> tuple[Piece, ...]:
    """The pieces of a device type, in the order in which they are needed. Registers nothing, and never raises.

    Args:
        name: the device type, also one that is not there at all.
    """
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
    wrong = class_problem("scheduling", found, registry.BaseScheduling) if name not in _TORCHS_OWN else None
    if wrong:
        raise _Missing(wrong)
    return _qualified(found)


# Registered by torch as functions that choose by a setting.
_TORCHS_OWN = ("cpu", "cuda", "xpu", "tpu")


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
    if scheduling is None or str(getattr(scheduling, "__module__", "")).startswith("torch."):
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
    if not _generates_triton(registry.scheduling(name)):
        return "not needed"
    if importlib.util.find_spec("triton") is None:
        raise _Missing("the package triton is not installed")
    interface = device_interface.interface(name)
    if interface is None:
        raise _Missing("Dynamo has no DeviceInterface for it, which knows whether triton serves it")
    interface.raise_if_triton_unavailable()
    return "there"


def _generates_triton(scheduling: Any) -> bool:
    """Whether what is registered generates Triton: a class, or a function that chooses one, or one that delegates."""
    if scheduling is None:
        return False
    if isinstance(scheduling, type) and issubclass(scheduling, registry.SIMDScheduling):
        return issubclass(scheduling, registry.TritonScheduling)
    made = scheduling(None)  # as torch makes one to ask for its features
    return any(isinstance(each, registry.TritonScheduling) for each in (made, *vars(made).values()))


def _qualified(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
