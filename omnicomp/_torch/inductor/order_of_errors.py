"""Inductor keeps the order of writes to inputs and of operators that raise errors of the program's.

It calls an operator that it does not know as early or as late as suits it: nothing that it computes depends on whether
the operator raises. What the program sees of that are its tensors behind the error.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Final

from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V

from omnicomp._torch.repairs.needed import Exchange
from omnicomp._torch.user_code import raises


def _ordered(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """The method, told of an order beside that of the data."""

    def compute_dependencies(self: Any) -> None:
        if any(_may_raise(node) for node in self.nodes):
            _add_order(self.nodes)
        original(self)

    return compute_dependencies


def _add_order(nodes: list[Any]) -> None:
    """Errors come in the order of the graph, and a write to an input before or behind each, as in the graph."""
    inputs = set(V.graph.graph_inputs)
    last: list[str] = []
    since: list[str] = []
    for node in nodes:
        outputs = node.get_outputs()
        writes = [buffer.get_name() for buffer in outputs if not inputs.isdisjoint(buffer.get_mutations())]
        if _may_raise(node):
            V.graph.additional_buffer_deps[node.get_name()].update([*last, *since])
            last, since = [buffer.get_name() for buffer in outputs[:1]], []
        elif writes:
            V.graph.additional_buffer_deps[node.get_name()].update(last)
            since += writes


def _may_raise(node: Any) -> bool:
    """Whether a node of the scheduler calls an operator of the program, or checks what the program asserted."""
    inner = node.node
    if inner is None:
        return False
    operator = getattr(inner, "op_overload", None)
    if operator is not None:
        return raises(operator)
    return any(raises(origin.target) for origin in inner.get_origins() if str(origin.target).startswith("aten._"))


_ORDER: Final = Exchange(Scheduler, "compute_dependencies", _ordered)


def errors_in_order() -> contextlib.AbstractContextManager[None]:
    """While Inductor schedules a graph: what may raise keeps its place among the writes to inputs."""
    return _ORDER
