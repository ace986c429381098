"""Weights cast once: what a compiled graph is called with, and how much memory the copies take.

`omnicomp.weight_copies` makes them and says when they hold; docs/dtypes.md is for users.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from omnicomp._torch import inductor, parameters
from omnicomp._torch.fx import copy_module
from omnicomp._torch.release import forget_tensors
from omnicomp.capture import CapturedGraph
from omnicomp.dtypes import parse_dtype_policy
from omnicomp.once import Once
from omnicomp.passes.dtypes.weights import Lifted, lift_casts
from omnicomp.timeline import Weights, current
from omnicomp.weight_copies import Copies, changed, clear, copies

__all__ = ["Copies", "bytes", "changed", "clear", "copies", "count", "with_copies"]


def with_copies(
    module: GraphModule,
    inputs: Sequence[Any],
    graph: CapturedGraph,
    compile: Callable[[GraphModule, Sequence[Any], CapturedGraph], Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile a graph, with the casts of parameters outside of it where the policy and the graph allow that.

    Args:
        module: a Dynamo graph behind the passes.
        inputs: real or fake tensors and symbolic sizes, one a placeholder.
        graph: what it belongs to.
        compile: compiles what is left in the graph.

    Returns:
        A function of the graph's inputs.
    """
    policy = parse_dtype_policy(graph.policy.dtype_policy)
    once = policy.changes and policy.weights == "once"
    if graph.training or not once or inductor.freezing(graph.policy.inductor):
        return compile(module, inputs, graph)
    # Dynamo reads the inputs of its graph again after the backend.
    narrow = copy_module(module)
    lifted = lift_casts(narrow, inputs, layouts="inductor" in graph.policy.lowerings)
    if lifted is None:
        forget_tensors(narrow)
        return compile(module, inputs, graph)
    return _Following(compile(narrow, lifted.inputs, graph), lifted, graph.id).__call__


class _Following:
    """Calls a compiled graph with the copies that it reads."""

    def __init__(self, target: Callable[..., Any], lifted: Lifted, graph: str) -> None:
        self._target, self._graph = target, graph
        self._wanted, self._order = parameters.picker(lifted.sources), parameters.picker(lifted.order)
        self._copies = Copies(lifted.forms, lifted.devices)
        self._once = Once(self._record)

    def __call__(self, *args: Any) -> Any:
        result = self._target(*self._order(args + self._copies(self._wanted(args))))
        self._once()
        return result

    def _record(self) -> None:
        made, shared = self._copies.bytes()
        current().append(
            Weights(graph=self._graph, copies=self._copies.count(), bytes=made, shared=shared, total=bytes())
        )


def bytes() -> int:
    """Memory of all low-precision copies of parameters in this process."""
    return sum(low.numel() * low.element_size() for _, low in copies())


def count() -> int:
    """How many there are."""
    return len(copies())
