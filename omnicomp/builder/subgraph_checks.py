"""Checks that apply to a whole subgraph, such as an engine's minimum size."""

from collections.abc import Sequence

from torch.fx import Node

from omnicomp.lowerings import Lowering, LoweringContext
from omnicomp.lowerings.engines.program import EngineLowering
from omnicomp.timeline import Reason

__all__ = ["described", "taken_together"]


def taken_together(
    lowering: Lowering, nodes: Sequence[Node], context: LoweringContext
) -> tuple[frozenset[str], Reason | None]:
    """Whether a lowering takes a run of nodes as one subgraph.

    Args:
        lowering: that takes each of the nodes.
        nodes: neighbours in program order.
        context: where they belong.

    Returns:
        Names of nodes in front of which the run is to be cut, as no value flows across, and the reason why the run as
        a whole is not taken; None if it is.
    """
    if not isinstance(lowering, EngineLowering):
        return frozenset(), None
    if lowering.engine.clustering_for(context).strict:
        boundaries = _where_nothing_flows(nodes)
        if boundaries:
            return boundaries, None
    return frozenset(), lowering.accepts(nodes, context)


def _where_nothing_flows(nodes: Sequence[Node]) -> frozenset[str]:
    """The nodes at which the run can be cut without a value that crosses the cut."""
    position = {node: index for index, node in enumerate(nodes)}
    reach = 0
    found: set[str] = set()
    for index, node in enumerate(nodes):
        if index and reach < index:
            found.add(node.name)
        reach = max([reach, *(position[user] for user in node.users if user in position)])
    return frozenset(found)


def described(name: str, device_type: str) -> tuple[str, str]:
    """The name of the compiler behind a lowering, and the lever if it fails."""
    if name == "device":
        return (
            f"the compiler of {device_type}",
            "register an override for the operator, or teach it to Device.compile_subgraph",
        )
    return f"the engine {name}", f"report the error, or take {name} out of options={{'lowerings': [...]}}"
