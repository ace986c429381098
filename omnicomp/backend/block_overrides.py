"""Overrides of whole modules and of what searches find, put in before the passes."""

import dataclasses

from torch.fx import GraphModule

from omnicomp._torch.fx import copy_module
from omnicomp.backend.capture import CapturedGraph
from omnicomp.lowerings.overrides import registry as overrides
from omnicomp.lowerings.overrides.late import Choice, LateOverrides
from omnicomp.lowerings.overrides.rewrite import entering
from omnicomp.lowerings.overrides.search import apply_searches
from omnicomp.timeline import NodePlacement, Option, Reason, Timeline, current


def override_blocks(gm: GraphModule, graph: CapturedGraph) -> CapturedGraph:
    """Insert the overrides that are asked first into the graph.

    Returns:
        Its record, with the matches that were declined, and those of overrides that stand behind other lowerings.
    """
    if "override" in graph.policy.lowerings:
        for name, error in overrides.broken().items():
            _record_broken(graph, name, error)
    first, late = Choice(), Choice(late=True)
    declined = _apply(gm, graph, first, current())
    if first.waiting:
        _apply(copy_module(gm), graph, late, Timeline())
    return graph.with_record(declined=declined, late=tuple(late.matches))


def late_overrides(gm: GraphModule, graph: CapturedGraph, wanted: LateOverrides) -> CapturedGraph:
    """Insert the overrides that turned out to be wanted into a graph that `override_blocks` was through with."""
    chosen = {(match.override, match.node) for match in wanted.matches}
    declined = _apply(gm, graph, Choice(late=True, chosen=chosen), current())
    record = graph.record
    return graph.with_record(
        declined=record.declined + declined,
        late=tuple(match for match in record.late if match not in wanted.matches),
        given_up={**{match.override: chain for match, chain in wanted.matches.items()}, **record.given_up},
    )


def _apply(gm: GraphModule, graph: CapturedGraph, choice: Choice, timeline: Timeline) -> tuple[NodePlacement, ...]:
    before = copy_module(gm, lazy=True) if graph.policy.certifies else None
    own = timeline if before is None else Timeline()
    context = dataclasses.replace(graph.context("", {}), timeline=own)
    declined: tuple[NodePlacement, ...] = ()
    if entering(context, "tag"):
        from omnicomp.lowerings.overrides.tag import apply_blocks

        declined = apply_blocks(gm, context, choice, training=graph.training)
    declined += apply_searches(gm, context, choice, training=graph.training)
    if before is not None:
        from omnicomp.builder.certificates import certify_overrides
        from omnicomp.passes.certificates import with_verdicts

        found = certify_overrides(before, gm, graph.id, graph.policy)
        for event in with_verdicts((*own.events(), *found)):
            timeline.append(event)
    return declined


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
