"""Graph breaks: the code there runs in Python between two graphs, and no lowering ever sees it."""

import re
from collections.abc import Iterator
from typing import Any, Final

from omnicomp._torch.dynamo.graph_breaks import end_of
from omnicomp.errors import harmless
from omnicomp.timeline import NearMiss, Reason, Timeline

__all__ = ["record_graph_break"]

_FIELD: Final = re.compile(r"^\s*(Explanation|Hint|Developer debug context): (.+)$")
_BRANCH: Final = "generic_jump"


def record_graph_break(gm: Any, graph: str, timeline: Timeline) -> None:
    """Record why a graph ends before its function does, if it does.

    Args:
        gm: the graph as Dynamo handed it over.
        graph: its id.
        timeline: what to record it in.
    """
    with harmless("why a graph ends"):
        found = end_of(gm)
        if found is not None:
            text, source = found
            reason = _reason(text, source)
            node = reason.observed or "the end of the graph"
            timeline.append(
                NearMiss(graph=graph, name="dynamo", kind="graph_break", node=node, source=source, reason=reason)
            )


def _reason(text: str, source: str) -> Reason:
    """Dynamo's text is a headline, then lines with an explanation, hints and what it saw; the lines may be missing."""
    headline = text.strip().partition("\n")[0].strip().rstrip(".")
    if headline.startswith(_BRANCH):
        return Reason(
            code="graph_break",
            by="dynamo",
            sentence="a branch depends on the values of a tensor",
            source=source,
            lever="choose with torch.where or torch.cond, or decide outside of the compiled function",
        )
    fields: dict[str, list[str]] = {}
    for name, value in _fields(text):
        fields.setdefault(name, []).append(value.strip())
    explanation = " ".join(fields.get("Explanation", ())).rstrip(".")
    return Reason(
        code="graph_break",
        by="dynamo",
        sentence=explanation or headline,
        observed=next(iter(fields.get("Developer debug context", ())), ""),
        source=source,
        lever=_lever(fields.get("Hint", [])),
    )


def _fields(text: str) -> Iterator[tuple[str, str]]:
    return ((found[1], found[2]) for line in text.splitlines() if (found := _FIELD.match(line)))


def _lever(hints: list[str]) -> str:
    """The hints as one sentence, in an imperative's lower case."""
    said = "; or ".join(hint.rstrip(".") for hint in hints if "report an issue" not in hint)
    return said[:1].lower() + said[1:]
