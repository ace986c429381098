"""What overrides need of torch's internals: custom operators as torch keeps them, and where Dynamo found an input."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import _dynamo
from torch._library import custom_ops
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "breaks_inside_modules",
    "functions_of",
    "has_backward",
    "mutated_arguments",
    "operator_of",
    "python_function",
    "source_name",
]

# Under these keys a derivative is registered; a composite operator is differentiated through its body.
_AUTOGRAD_KEYS: Final = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")


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
