"""What is registered with Inductor and Dynamo for a device, Inductor's C++ compiler, and Dynamo's backends."""

import importlib
from typing import Any

from torch._dynamo import list_backends
from torch._dynamo.backends.registry import lookup_backend as lookup_backend
from torch._dynamo.device_interface import get_interface_for_device
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._inductor.codegen.common import (
    device_op_overrides_dict,
    get_device_op_overrides,
    get_scheduling_for_device,
    get_wrapper_codegen_for_device,
    init_backend_registration,
)
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler


def inductor_registrations(device: str) -> dict[str, str]:
    """What Inductor needs of a device, by name: `scheduling`, `wrapper`, `op overrides`, `interface`.

    The value is what is registered, as a person can look it up, or empty if nothing is.
    """
    init_backend_registration()
    get_device_op_overrides("cpu")  # fills the table
    # Asking for a device that is not in it raises, or (torch 2.11) registers the CPU's for it.
    known = device in device_op_overrides_dict
    overrides: Any = type(get_device_op_overrides(device)) if known else None
    try:
        interface: Any = get_interface_for_device(device)
    except NotImplementedError:
        interface = None
    found: dict[str, Any] = {
        "scheduling": get_scheduling_for_device(device),
        "wrapper": get_wrapper_codegen_for_device(device),
        "op overrides": overrides,
        "interface": interface,
    }
    return {name: "" if value is None else _name(value) for name, value in found.items()}


def cpp_compiler() -> str:
    """The C++ compiler that Inductor calls, or empty if it finds none."""
    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler:
        return ""


def backend_names() -> tuple[str, ...]:
    """The names that `torch.compile(backend=...)` takes here, entry points included."""
    return tuple(list_backends(exclude_tags=()))


def default_backend() -> Any:
    """The backend of a `torch.compile` call that names none: newer versions let it be set, older ones take Inductor."""
    registry = importlib.import_module("torch._dynamo.backends.registry")
    get = getattr(registry, "get_default_backend", None)
    return get() if get is not None else "inductor"


def settle_dynamo() -> None:
    """Let Dynamo build its tables of torch's functions now, while `torch.compile` still is torch's own.

    It builds them on its first trace; one built from a replaced function would not know the original any more.
    """
    TorchInGraphFunctionVariable._get_handlers()
    get_torch_obj_rule_map()


def _name(value: Any) -> str:
    name = getattr(value, "__qualname__", type(value).__name__)
    # torch registers its own schedulings as lambdas, whose name says nothing.
    return "registered" if "<" in name else f"{getattr(value, '__module__', '')}.{name}"
