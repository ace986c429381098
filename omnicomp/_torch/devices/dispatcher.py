"""What the dispatcher has for an operator on a device: a kernel, a composition of other operators, a fallback, nothing.

The order is the dispatcher's own: a kernel registered for the device's key, torch's kernels for any device
(`CompositeExplicitAutogradNonFunctional`, `CompositeExplicitAutograd`), a composition that is differentiated through
(`CompositeImplicitAutograd`), and last what the device registered for all operators it has no kernel for.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from omnicomp import records

Kernel = Literal["native", "composite", "fallback", "missing"]
Heard = Callable[[Any, Sequence[Any], Mapping[str, Any]], None]

_IMPLICIT: Final = "CompositeImplicitAutograd"
_EXPLICIT: Final = "CompositeExplicitAutograd"
_STRUCTURED: Final = "CompositeExplicitAutogradNonFunctional"


@records.dataclass(frozen=True)
class Standing:
    """What a call of an operator meets on a device."""

    # `native` (registered for the device, or its `out` form is), `composite` (torch makes it of other operators, or has
    # a kernel for any device), `fallback` (what the device registered for everything else) or `missing`.
    kernel: Kernel
    writes: str  # the operator whose kernel decides: itself, or the `out` form that torch makes it of


def qualified_name(operator: OpOverload) -> str:
    """`aten::add.Tensor`; the default overload has no suffix."""
    schema = operator._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def is_registered(name: str) -> bool:
    """Whether this process has an operator of a qualified name."""
    return not _is_missing(name)


@functools.cache
def key_of(device_type: str) -> str:
    """The dispatch key of a device type, for example `CUDA`; `PrivateUse1` for one from outside.

    Raises:
        RuntimeError: torch knows no such type.
    """
    return torch._C._dispatch_key_for_device(device_type)


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _is_missing(name: str) -> bool:
    return not torch._C._dispatch_has_kernel(name)


def kernel_of(name: str, device_type: str) -> Standing:
    """What the dispatcher calls for an operator on a device.

    A kernel that a device registers for one operator and that copies to the CPU is `native` here: only the run tells.

    Raises:
        RuntimeError: torch knows no such device type.
    """
    key = key_of(device_type)
    if _is_missing(name):
        return Standing("missing", name)
    if _has(name, key):
        return Standing("native", name)
    if _has(name, _STRUCTURED):
        target = out_form(name)
        if target == name:
            return Standing("composite", name)
        below = kernel_of(target, device_type)
        # Torch checks the arguments and makes the result; the numbers are the out form's.
        return Standing(below.kernel, target)
    if _has(name, _EXPLICIT) or _has(name, _IMPLICIT):
        return Standing("composite", name)
    if torch._C._dispatch_has_backend_fallback(getattr(torch._C.DispatchKey, key)):
        return Standing("fallback", name)
    return Standing("missing", name)


@functools.cache
def out_form(name: str) -> str:
    """The `out` overload that torch makes a structured operator of, or the name itself if there is none."""
    base, _, overload = name.partition(".")
    namespace, _, short = base.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short, None)
    own = None if packet is None else getattr(packet, overload or "default", None)
    if own is None:
        return name
    functional = packet
    if short.endswith("_") and not short.endswith("__"):
        functional = getattr(getattr(torch.ops, namespace), short[:-1], None)
    wanted = [str(argument.type) for argument in own._schema.arguments]
    for other in functional.overloads() if functional is not None else ():
        candidate = getattr(functional, other)
        arguments = candidate._schema.arguments
        if not any(argument.is_out for argument in arguments):
            continue
        if [str(argument.type) for argument in arguments if not argument.is_out] == wanted:
            return qualified_name(candidate)
    return name


def is_required(name: str) -> bool:
    """Whether a device has to bring a kernel, as torch has none for any device.

    These are the operators that `RegistrationDeclarations.h` lists with `"dispatch": "True"` and `"default": "False"`,
    and whatever this process has no kernel of at all.
    """
    return _is_missing(name) or not any(_has(name, key) for key in (_STRUCTURED, _EXPLICIT, _IMPLICIT))


def census(device_type: str) -> dict[str, int]:
    """How many of torch's own operators (`aten`) are `native`, `composite`, `fallback` and `missing` on a device."""
    counts: dict[str, int] = dict.fromkeys(("native", "composite", "fallback", "missing"), 0)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel(name):
            counts[kernel_of(name, device_type).kernel] += 1
    return counts


def draws_random_numbers(operator: OpOverload) -> bool:
    """Whether its result depends on the seed."""
    return torch.Tag.nondeterministic_seeded in operator.tags


class _Hearing(TorchDispatchMode):
    def __init__(self, heard: Heard) -> None:
        super().__init__()
        self.heard = heard

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled under it; torch.compile would step aside otherwise."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.heard(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def hearing(heard: Heard) -> Generator[None]:
    """Call `heard(operator, args, kwargs)` before each operator that reaches a device's kernels, also in backward."""
    with _Hearing(heard):
        yield


@contextlib.contextmanager
def unheard() -> Generator[None]:
    """Within it, `hearing` hears nothing."""
    with _disable_current_modes():
        yield
