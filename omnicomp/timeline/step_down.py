"""The record of a step down: a graph, a part or a subgraph moved from one way of running to another."""

from typing import TypedDict

from omnicomp.timeline.events import Attempt, Ran, Retreat
from omnicomp.timeline.reasons import Reason
from omnicomp.timeline.recorder import Timeline

__all__ = ["Where", "record_step_down"]


class Where(TypedDict):
    """The ids that events have of what they are about."""

    graph: str
    part: str
    subgraph: str


def record_step_down(
    timeline: Timeline,
    where: Where,
    source: str,
    target: str,
    reason: Reason,
    *,
    attempts: bool = True,
    ran: tuple[str, dict[str, int]] | None = None,
) -> None:
    """Record that something is run another way from now on.

    Args:
        timeline: gets the events.
        where: what moves.
        source: the lowering that is left.
        target: the lowering that takes its place; the same one if it goes on in another way.
        reason: why.
        attempts: whether to record both as attempts at the subgraph, which show as its rows in the audit; not if they
            are recorded elsewhere, or if the source is used again.
        ran: evidence and kernels of what took its place, if that has run already.
    """
    timeline.append(Retreat(**where, source_lowering=source, target_lowering=target, reason=reason))
    if attempts:
        timeline.append(Attempt(**where, lowering=source, ok=False, reason=reason))
        timeline.append(Attempt(**where, lowering=target, ok=True, selected=True))
    if ran is not None:
        evidence, kernels = ran
        timeline.append(Ran(**where, lowering=target, evidence=evidence, kernels=kernels))
