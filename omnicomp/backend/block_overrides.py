"""Overrides of whole modules and of what searches find, put in before the passes."""

from torch.fx import GraphModule

from omnicomp.backend.capture import CapturedGraph
from omnicomp.lowerings.overrides import registry as overrides
from omnicomp.lowerings.overrides.search import apply_searches
from omnicomp.lowerings.overrides.tag import apply_blocks
from omnicomp.timeline import Option, Reason, current

__all__ = ["override_blocks"]


def override_blocks(gm: GraphModule, graph: CapturedGraph) -> CapturedGraph:
    """Insert overrides into the graph; returns its record, with the matches that were declined."""
    if "override" in graph.policy.lowerings:
        for name, error in overrides.broken().items():
            _record_broken(graph, name, error)
    context = graph.context("", {})
    declined = apply_blocks(gm, context, training=graph.training)
    return graph.with_record(declined=declined + apply_searches(gm, context, training=graph.training))


def _record_broken(graph: CapturedGraph, name: str, error: str) -> None:
    current().append(
        Option(
            graph=graph.id,
            key=f"entry point {overrides.GROUP}: {name}",
            requested="its overrides",
            effective="none",
            reason=Reason(
                code="option_ineffective",
                by="override",
                sentence=f"the plugin {name} can't be loaded, and its overrides are not there: {error}",
                lever="repair or uninstall the package that declares it",
            ),
        )
    )
