"""What a report says of decisions, as sentences that are the same in every process that decided the same."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from omnicomp.audit.model import Audit, GraphAudit
from omnicomp.audit.views.summary import plural
from omnicomp.timeline import Retreat

__all__ = ["facts_of"]

# What may differ from process to process, and changes nothing that is compiled.
_OWN: Final = ("timeline", "timeline_max_bytes", "progress", "summary", "ranges", "fallback", "device")


def facts_of(audit: Audit) -> frozenset[str]:
    """The facts of a report: without numbers of graphs, times, paths, ranks and verdicts of caches.

    Args:
        audit: the report of one process.
    """
    return frozenset(_counted(_facts(audit)))


def _counted(facts: Iterable[str]) -> Iterator[str]:
    for fact, count in Counter(facts).items():
        yield fact if count == 1 else f"{fact} ({count} times)"


def _facts(audit: Audit) -> Iterator[str]:
    for name, version in audit.environment.versions.items():
        yield f"{name} has version {version}"
    for graph in audit.graphs:
        yield f"{graph.identity} was captured for {graph.device} {graph.device_name}".rstrip()
        for setting in graph.settings:
            if setting.key not in _OWN and setting.origin != "default":
                yield f"{graph.identity}: option {setting.key} is {setting.effective or setting.requested}"
        for run in graph.passes:
            if run.modified:
                yield f"{graph.identity}: {run.name} rewrote {plural(run.rewrites, 'place')}"
        for miss in graph.near_misses:
            yield f"{graph.identity}: {miss.name} left a candidate: {miss.reason.code}"
        for retreat in graph.retreats:
            yield f"{graph.identity}: {_moved(retreat)}"
        yield from _facts_of_rows(graph)


def _facts_of_rows(graph: GraphAudit) -> Iterator[str]:
    for part in graph.parts:
        for node in part.declined:
            why = ", ".join(reason.code for reason in node.chain)
            yield f"{graph.identity}: {part.name} has {node.op} on {node.lowering}: {why}"
        for row in part.subgraphs:
            ran = "given up" if row.superseded else f"ran on {row.ran}" if row.ran else "was not called"
            yield f"{row.identity}: planned for {row.planned or 'nothing'}, {ran}"
            for retreat in row.retreats:
                yield f"{row.identity}: {_moved(retreat)}"
            for found in row.verifications:
                if found.state == "wrong":
                    yield f"{row.identity}: {found.name} was wrong, {found.direction}"


def _moved(retreat: Retreat) -> str:
    return f"{retreat.source_lowering} gave way to {retreat.target_lowering}: {retreat.reason.code}"
