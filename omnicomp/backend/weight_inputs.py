"""Parameters that are cast once: their copies become inputs of the compiled graph."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from omnicomp import weights
from omnicomp._torch import parameters
from omnicomp._torch.fx import copy_module, forget_tensors
from omnicomp._torch.inductor import compile_fx
from omnicomp.backend.capture import CapturedGraph
from omnicomp.errors import Once
from omnicomp.options.dtype_policy import parse_dtype_policy
from omnicomp.passes.dtypes.weights import Lifted, lift_casts
from omnicomp.timeline import Weights, current
from omnicomp.weights.cast_copies import Copies

__all__ = ["with_copies"]


def with_copies(
    module: GraphModule,
    inputs: Sequence[Any],
    graph: CapturedGraph,
    compile: Callable[[GraphModule, Sequence[Any], CapturedGraph], Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile a graph, with the casts of parameters moved out of it where the policy and the graph allow that.

    Args:
        module: a Dynamo graph behind the passes.
        inputs: real or fake tensors and symbolic sizes, one a placeholder.
        graph: what it belongs to.
        compile: compiles the rest of the graph.

    Returns:
        A function of the graph's inputs.
    """
    policy = parse_dtype_policy(graph.policy.dtype_policy)
    once = policy.changes and policy.weights == "once"
    if graph.training or not once or compile_fx.freezing(graph.policy.inductor):
        return compile(module, inputs, graph)
    # Dynamo reads the inputs of its graph again after the backend.
    narrow = copy_module(module)
    lifted = lift_casts(narrow, inputs, layouts="inductor" in graph.policy.lowerings)
    if lifted is None:
        forget_tensors(narrow)
        return compile(module, inputs, graph)
    return _Following(compile(narrow, lifted.inputs, graph), lifted, graph.id).__call__


class _Following:
    """Calls a compiled graph with the copies as additional inputs."""

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
            Weights(graph=self._graph, copies=self._copies.count(), bytes=made, shared=shared, total=weights.bytes())
        )
