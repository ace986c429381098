"""The override lowering: nodes that call a registered override's custom operator.

Inside an Inductor subgraph such a node is opaque to Inductor, which calls the operator. Only where a part is cut can
the operator stand alone; then this lowering runs it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from omnicomp._torch.fx import boxed
from omnicomp.graphs import op_name
from omnicomp.lowerings.base import Executable, LoweringContext, Support
from omnicomp.lowerings.overrides.registry import Override, registered
from omnicomp.lowerings.overrides.tag import matched_block
from omnicomp.timeline import Reason

__all__ = ["OverrideLowering", "override_of", "reference_of"]


def override_of(node: Node) -> Override | None:
    """The override whose operator the node calls, or None."""
    if node.op != "call_function":
        return None
    return next((item for item in registered() if node.target in item.operators), None)


def reference_of(node: Node) -> Callable[..., Any] | None:
    """What a call of an override computes, as a function of the call's arguments: its `reference`, or what it replaced.

    None for other nodes, and where it is not known any more, as in a graph that comes from a cache.
    """
    item = override_of(node)
    if item is None or node.target not in (item.operators[0], *(item.operators if item.form == "pattern" else ())):
        return None
    if item.reference is not None:
        return item.reference
    return item.op if item.form == "operator" else matched_block(item, node)


class OverrideLowering:
    """Takes the nodes that overrides were put in place of."""

    name = "override"

    def supports(self, node: Node, context: LoweringContext) -> Support:
        """Yes for an override's operator."""
        if override_of(node) is not None:
            return None
        return Reason(
            code="no_override",
            by=self.name,
            sentence=f"no override is registered for {op_name(node)}",
            lever="register a kernel with @omnicomp.override",
        )

    def lower(self, module: GraphModule, inputs: Sequence[Any], context: LoweringContext) -> Executable:
        """Run the operators one by one; each is a kernel of its own."""
        items = [item for node in module.graph.nodes if (item := override_of(node)) is not None]
        functions = [f"{item.function.__module__}.{item.function.__qualname__}" for item in items]
        kernels = {str(operator): 1 for item in items for operator in item.operators}
        return Executable(lowering="override", call=boxed(module), attest=lambda: (", ".join(functions), kernels))
