"""What overrides need of torch's internals: custom operators as torch keeps them, and where Dynamo found an input."""

import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import _dynamo
from torch._library import custom_ops, simple_registry
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.fx import Node

# Under these keys a derivative is registered; a composite operator is differentiated through its body.
_AUTOGRAD_KEYS: Final = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")

_ANY_DEVICE: Final = tuple(
    f"Composite{kind}" for kind in ("ExplicitAutograd", "ExplicitAutogradNonFunctional", "ImplicitAutograd")
)


def operator_of(value: Any) -> OpOverload | None:
    """The operator of a custom operator's definition, or the operator itself; None for anything else."""
    if isinstance(value, custom_ops.CustomOpDef):
        return value._opoverload
    return value if isinstance(value, OpOverload) else None


def python_function(value: Any) -> Callable[..., Any]:
    """The Python function of a custom operator's definition; other callables as they are."""
    return value._init_fn if isinstance(value, custom_ops.CustomOpDef) else value


def functions_of(value: Any) -> tuple[Callable[..., Any], ...]:
    """The Python functions that a custom operator's definition is made of: kernels, fake kernel, backward."""
    if not isinstance(value, custom_ops.CustomOpDef):
        return (value,)
    found = [value._init_fn, value._abstract_fn, value._setup_context_fn, value._backward_fn]
    return tuple(item for item in found if item is not None)


def has_backward(operator: OpOverload) -> bool:
    """Whether a derivative was registered for an operator (`torch.library.register_autograd`, or in C++)."""
    # A definition registers an autograd kernel of its own in any case, which raises if there is no backward.
    name = operator._schema.name
    definition: Any = custom_ops.OPDEFS.get(name)
    if definition is not None:
        return definition._backward_fn is not None
    full = f"{name}.{operator._overloadname}" if operator._overloadname != "default" else name
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(full, key) for key in _AUTOGRAD_KEYS)


def is_python(operator: OpOverload, device_type: str) -> bool:
    """Whether the kernel that an operator has for a device is a Python function."""
    name = operator._schema.name
    full = f"{name}.{operator._overloadname}" if operator._overloadname != "default" else name
    local = full.replace("::", "/")
    for key in (torch._C._dispatch_key_for_device(device_type), *_ANY_DEVICE):
        if torch._C._dispatch_has_kernel_for_dispatch_key(full, key):
            return f"{local}/{key}" in torch.library._impls
    return True  # there is none


_kernels: Final[dict[tuple[str, str], Callable[..., Any]]] = {}


def put_kernel(library: torch.library.Library, name: str, function: Callable[..., Any], key: str) -> None:
    """Register a Python kernel of an operator, for which torch has no look-up, and keep it for `body_of`."""
    library.impl(name, function, key)
    _kernels[f"{library.ns}::{name}", key] = function


def put_fake(library: torch.library.Library, name: str, function: Callable[..., Any]) -> None:
    """Register an operator's fake kernel; `torch.library.register_fake` looks up the file of each module, for 30 ms."""
    entry = simple_registry.singleton.find(f"{library.ns}::{name}")
    library._registration_handles.append(entry.fake_impl.register(function, __name__, lib=library))


def body_of(operator: OpOverload, device_type: str) -> Callable[..., Any] | None:
    """The Python function that an operator runs on a device; None if it is not known."""
    name = operator._schema.name
    definition: Any = custom_ops.OPDEFS.get(name)
    if definition is not None:
        return definition._backend_fns.get(device_type) or definition._init_fn
    keys = (torch._C._dispatch_key_for_device(device_type), *_ANY_DEVICE)
    return next((_kernels[name, key] for key in keys if (name, key) in _kernels), None)


def mutated_arguments(operator: OpOverload) -> tuple[str, ...]:
    """Names of the arguments that an operator's schema says it writes to."""
    return tuple(a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def source_name(node: Node) -> str:
    """How the program reaches the value of a graph's input, as Dynamo writes it; empty if it did not say.

    For example `L['self']._modules['mlp']._parameters['weight']`.
    """
    source = getattr(node, "_dynamo_source", None)
    return str(source.name) if source is not None else ""


def breaks_inside_modules() -> bool:
    """Whether Dynamo may break a graph in the middle of a module, so that a graph can hold a piece of one."""
    return bool(getattr(_dynamo.config, "nested_graph_breaks", False))


def tell_inspect(*modules: str) -> None:
    """Tell `inspect` the files of modules that are about to define operators.

    For each definition torch asks it which module a line of code is of, and for a file that it does not know it reads
    the paths of all modules of the process.
    """
    known: dict[str, str] = getattr(inspect, "modulesbyfile", {})
    for name in (*modules, "torch._library.custom_ops"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            known.setdefault(os.path.normcase(os.path.abspath(spec.origin)), name)
