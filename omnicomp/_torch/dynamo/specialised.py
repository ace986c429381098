"""Whether a Dynamo graph for any size computes, at certain sizes, just what a graph for those sizes alone does."""

import operator
from collections.abc import Mapping
from typing import Any, Final

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from omnicomp._torch.symbols import expression

_SYMBOLIC: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CONSTANTS: Final = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def sizes_of(general: GraphModule, fixed: GraphModule) -> dict[int, int] | None:
    """The sizes at which a graph for any size is one that was traced for fixed sizes.

    Operators, constants, and what inputs are apart from their sizes have to be the same. What Dynamo guards on for the
    former then holds in each of its calls, and all that is left to compare is the sizes.

    Args:
        general: a graph as Dynamo passed it, with sizes among its inputs.
        fixed: one without.

    Returns:
        The sizes by position among the inputs; None if the graphs differ, or if one of them writes to an input.
    """
    ours, theirs = _inputs(general), _inputs(fixed)
    bound = _bound([value for value in ours if not isinstance(value, torch.SymInt)], theirs)
    if bound is None:
        return None
    sizes = {i: _number(value, bound) for i, value in enumerate(ours) if isinstance(value, torch.SymInt)}
    if not sizes or any(type(size) is not int for size in sizes.values()):
        return None
    lines = _lines(general, bound)
    return sizes if lines is not None and lines == _lines(fixed, {}) else None


def _inputs(module: GraphModule) -> list[Any]:
    return [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]


def _bound(tensors: list[Any], fixed: list[Any]) -> dict[Any, Any] | None:
    """What the symbols of some inputs are, if these are as the inputs of fixed sizes."""
    if len(tensors) != len(fixed) or any(type(value) is not FakeTensor for value in (*tensors, *fixed)):
        return None
    bound: dict[Any, Any] = {}
    pairs: list[tuple[Any, Any]] = []
    for ours, theirs in zip(tensors, fixed, strict=True):
        # Dynamo ran the graph's writes on these.
        if ours.layout is not torch.strided or _kind(ours) != _kind(theirs) or ours._version or theirs._version:
            return None
        pairs += zip((*ours.shape, *ours.stride()), (*theirs.shape, *theirs.stride()), strict=True)
    if any(type(number) is not int for _, number in pairs):
        return None
    for size, number in pairs:
        if isinstance(symbol := expression(size), sympy.Symbol):
            bound.setdefault(symbol, sympy.Integer(number))
    return bound if all(_number(size, bound) == number for size, number in pairs) else None


def _kind(value: torch.Tensor) -> tuple[Any, ...]:
    flags = (value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg(), value.is_inference())
    return value.dtype, value.device, value.layout, value.dim(), isinstance(value, torch.nn.Parameter), flags


def _number(value: Any, bound: Mapping[Any, Any]) -> Any:
    """A number with plain ones in the place of its symbols; an expression where some are left."""
    found = expression(value)
    if isinstance(found, sympy.Basic):
        found = found.xreplace(dict(bound))
        return int(found) if isinstance(found, sympy.Integer) else found
    return found


def _lines(module: GraphModule, bound: Mapping[Any, Any]) -> list[Any] | None:
    """What a graph computes, one item a node, at known sizes; None where nothing can be said."""
    lines: list[Any] = []
    values: dict[Node, Any] = {}  # what stands for a node where it is used

    def plain(value: Any) -> Any:
        if isinstance(value, Node):
            return values[value]
        if value is None or value is ... or isinstance(value, _CONSTANTS):
            return type(value), repr(value)  # 0.0 equals -0.0
        return type(value), id(value)

    for node in module.graph.nodes:
        known, target = node.meta.get("example_value"), node.target
        if isinstance(known, _SYMBOLIC):
            number = _number(known, bound)
            if not isinstance(number, (int, float)):
                return None
            values[node] = plain(number)
            continue
        if node.op == "get_attr":
            held = operator.attrgetter(target)(module)
            if isinstance(held, GraphModule):
                return None
            target = id(held)
        elif node.op == "placeholder":
            target = ""
        elif node.op not in ("call_function", "call_method", "output"):
            return None
        values[node] = ("node", len(lines))
        lines.append((node.op, target, map_aggregate(node.args, plain), map_aggregate(node.kwargs, plain)))
    return lines
