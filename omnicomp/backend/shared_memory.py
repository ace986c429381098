"""Graphs that write to inputs, called with inputs that share memory otherwise than when they were compiled."""

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from omnicomp._torch.dynamo import control_flow
from omnicomp._torch.dynamo.overlaps import Sharing
from omnicomp._torch.repairs.recomputed_draws import eager_calls
from omnicomp.backend.capture import CapturedGraph
from omnicomp.backend.retreat import graph_compiler, record_eager, retreat_to_eager
from omnicomp.backend.saved import carried
from omnicomp.errors import CompilerFaultError, Once
from omnicomp.timeline import Reason


def refused(plain: GraphModule, graph: CapturedGraph) -> Callable[..., Any]:
    """Run a graph eager that writes to inputs that share memory, and returns views of them.

    Raises:
        CompilerFaultError: it may not run eager.
    """
    error = CompilerFaultError("the graph writes to inputs that share memory, and returns views of them")
    if graph.policy.on_error == "raise":
        raise error
    return retreat_to_eager(plain, graph, error)


def checked(
    compiled: Callable[..., Any], plain: GraphModule, sharing: Sharing, graph: CapturedGraph
) -> Callable[..., Any]:
    """Run the graph eager in the calls whose inputs share memory otherwise than when it was compiled."""
    if not sharing.compared:
        return compiled
    eager = eager_calls(plain)
    once: Once | None = None

    def call(*arguments: Any) -> Any:
        nonlocal once
        if sharing.holds(arguments):
            return compiled(*arguments)
        once = once or record_eager(graph.id, graph_compiler(graph), _reason(graph))
        results = eager(*arguments)
        once()
        return results

    return carried(compiled, control_flow.disable(call, reason="omnicomp looks whether inputs share memory"))


def _reason(graph: CapturedGraph) -> Reason:
    return Reason(
        code="shared_memory",
        by="inputs",
        sentence="the graph writes to inputs, which share memory otherwise than when it was compiled",
        source=graph.record.sources[0] if graph.record.sources else "",
        lever="pass copies, or call torch.compiler.reset() before inputs share memory in another way",
    )
