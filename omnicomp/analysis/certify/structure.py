"""Whether two graphs call the same operators on the same operands, whatever their nodes are called.

Each value gets a number by its operator and the numbers of its operands, so that equal computations have equal numbers,
once or many times, called in a body of `invoke_subgraph` or written out. What writes to memory or draws random numbers
has to come in the same order, and nothing that is computed behind it is taken for what was computed before.
"""

import operator
from collections.abc import Hashable, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp import records
from omnicomp.analysis.nodes import op_name
from omnicomp.analysis.random_state import draws_at_random

_IN_ORDER: Final = (
    "rand", "dropout", "bernoulli", "multinomial", "normal_", "rrelu", "gumbel", "attention", "seed", "set_grad",
    "autocast", "assert", "_check", "set_",
)  # fmt: skip
_PLAIN: Final = (
    operator.and_,
    operator.or_,
    operator.not_,
    operator.invert,
    operator.index,
    operator.is_,
    operator.is_not,
)


def same(before: GraphModule, after: GraphModule) -> bool:
    """Whether two graphs are the same but for names, for values that are computed again, and for how bodies are called.

    Args:
        before: a graph.
        after: one with the same placeholders in the same order.
    """
    known: dict[Hashable, _Value] = {}
    sides = [_Numbering(known) for _ in range(2)]
    return sides[0].of(before) == sides[1].of(after)


@records.dataclass(frozen=True)
class _Value:
    """What a node computes: equal ones have equal numbers."""

    number: int


class _Numbering:
    def __init__(self, known: dict[Hashable, _Value]) -> None:
        self._known = known
        self._order: list[_Value] = []

    def of(self, module: GraphModule) -> Any:
        """What a graph returns, and what has an order in it."""
        inputs = [self._value(("input", place)) for place, _ in enumerate(module.graph.find_nodes(op="placeholder"))]
        return self._run(module, inputs), self._order

    def _value(self, key: Hashable) -> _Value:
        return self._known.setdefault(key, _Value(len(self._known)))

    def _run(self, module: GraphModule, inputs: Sequence[Any]) -> Any:
        values: dict[Node, Any] = {}
        given = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "output":
                return self._read(node.args[0], values)
            elif node.op in ("get_attr", "call_module"):
                held = operator.attrgetter(str(node.target))(module)
                values[node] = held if isinstance(held, GraphModule) else self._value(("held", id(held)))
                if node.op == "call_module":
                    values[node] = self._call(node, values[node], values)
            else:
                values[node] = self._call(node, node.target, values)
        return None

    def _call(self, node: Node, target: Any, values: dict[Node, Any]) -> Any:
        first = values.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if isinstance(first, GraphModule) and op_name(node).endswith("invoke_subgraph"):
            return self._run(first, [self._read(each, values) for each in node.args[2:]])
        if target is operator.getitem and isinstance(first, tuple) and isinstance(node.args[1], int):
            return first[1:][node.args[1]]
        made = self._value(
            (target, self._read(node.args, values), self._read(dict(node.kwargs), values), *self._order[-1:])
        )
        if is_in_order(node):
            made = self._value((made, len(self._order)))
            self._order.append(made)
        return made

    def _read(self, value: Any, values: dict[Node, Any]) -> Any:
        """An operand, so that equal ones are equal."""
        if isinstance(value, Node):
            value = values[value]
            if not isinstance(value, GraphModule):
                return value
        if isinstance(value, GraphModule):
            free = [self._value(("free", place)) for place, _ in enumerate(value.graph.find_nodes(op="placeholder"))]
            return "graph", self._run(value, free)
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *(self._read(each, values) for each in value))
        if isinstance(value, dict):
            return ("dict", *((key, self._read(each, values)) for key, each in sorted(value.items())))
        if isinstance(value, slice):
            return ("slice", *(self._read(each, values) for each in (value.start, value.stop, value.step)))
        return type(value), repr(value)


def is_in_order(node: Node) -> bool:
    """Whether a node may write, draw random numbers, or switch a mode, any of which has its place in the program."""
    target = node.target
    if node.op == "call_module":
        return True
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or draws_at_random(node)
    name = op_name(node).rpartition(".")[2]
    bare = name.strip("_")
    in_place = (name.endswith("_") and not name.endswith("__")) or bare == "setitem"
    in_place |= bare.startswith("i") and hasattr(operator, bare)
    in_place &= target not in _PLAIN
    told = "out" in node.kwargs or bool(node.kwargs.get("inplace"))
    return in_place or told or any(word in name for word in _IN_ORDER)
