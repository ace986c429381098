"""Names of the functions that nodes of a graph call."""

import functools
import importlib
import math
import operator
from collections.abc import Sequence
from typing import Any, Final

import torch

_PLACES: Final[dict[str, Any]] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch._C._nn": torch._C._nn,  # pyright: ignore[reportAttributeAccessIssue]
    "torch.Tensor": torch.Tensor,
    "operator": operator,
    "math": math,
}
_PACKAGES: Final = ("torch", "omnicomp")
_OPERATORS: Final = "torch.ops"
_OWN: Final = ("aten", "prims", "prim")


def is_torchs(target: Any) -> bool:
    """Whether torch's or omnicomp's version says what a function computes, and no program or graph."""
    if isinstance(target, torch._ops.OpOverload):
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        return target.namespace in _OWN or not target.has_kernel_for_dispatch_key(composite)
    return not isinstance(target, torch._ops.HigherOrderOperator) and name_target(target) is not None


def base_name(target: torch._ops.OpOverload) -> str:
    """An operator's name without overload: `mm` for `aten::mm.out`, and `fbgemm::mm` for one that is not torch's."""
    namespace, _, name = target._schema.name.partition("::")
    return name if namespace in _OWN else target._schema.name


@functools.lru_cache(maxsize=1024)
def name_target(target: Any) -> tuple[str, ...] | None:
    """Where `find_target` finds a function of torch or omnicomp; None if it is of another package, or nowhere."""
    name = getattr(target, "__name__", "")
    names: list[tuple[str, ...]] = [(place, name) for place in _PLACES]
    if isinstance(target, torch._ops.OpOverload):
        names = [(_OPERATORS, *target._schema.name.split("::"), target._overloadname)]
    elif isinstance(target, torch._ops.HigherOrderOperator):
        names = [(_OPERATORS, "higher_order", name)]
    elif isinstance(module := getattr(target, "__module__", None), str) and module.split(".")[0] in _PACKAGES:
        names.append((module, *getattr(target, "__qualname__", name).split(".")))
        names.append((module, name))  # functions of pybind11 may be qualified by `PyCapsule`
    for each in names:
        try:
            if find_target(each) is target:
                return each
        except (AttributeError, ImportError):
            continue
    return None


def find_target(names: Sequence[str]) -> Any:
    """The function of a name from `name_target`.

    Raises:
        AttributeError: there is none.
        ImportError: its module is not there, or no part of torch or omnicomp.
    """
    place, *path = names
    found: Any = torch.ops if place == _OPERATORS else _PLACES.get(place)
    if found is None:
        if place.split(".")[0] not in _PACKAGES:
            raise ImportError(f"{place} is no part of torch or omnicomp")
        found = importlib.import_module(place)
    for name in path:
        found = getattr(found, name)
    return found
