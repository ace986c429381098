"""The event of a choice that was measured: one candidate, what it took, and why it lost."""

import dataclasses

from omnicomp.timeline.events import Event
from omnicomp.timeline.reasons import Reason

__all__ = ["Candidate"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate(Event):
    """One way of compiling a graph that was looked at when the lowerings are chosen by measuring.

    Attributes:
        candidate: its name, such as `inductor`, `frozen` or `openvino`.
        subgraph: id of the subgraph that it was measured for; empty where it was the whole graph.
        lowerings: the order of lowerings that it stands for.
        selected: whether it was chosen.
        source: `measured` in this process, or `kept`: measured by an earlier one on this machine.
        clock: `wall`, or `cpu` for the time that the process used with one thread, which is read where the machine is
            busy with other work.
        seconds: median time of a call; 0 if it was not timed.
        fastest: time of the fastest call that was timed.
        spread: half width of the range that the ratio to the first candidate lies in, as a share of it.
        speed: time of the first candidate over its own, so that more than 1 is faster; 0 if it was not timed.
        rounds: how often it was timed, in turn with the best one so far.
        error: relative error of its results to a higher precision; -1 if it was not looked at.
        own: eager's.
        build_seconds: how long it took to build.
        reason: why it was not chosen; None if it was.
    """

    candidate: str
    subgraph: str = ""
    lowerings: tuple[str, ...] = ()
    selected: bool = False
    source: str = "measured"
    clock: str = ""
    seconds: float = 0.0
    fastest: float = 0.0
    spread: float = 0.0
    speed: float = 0.0
    rounds: int = 0
    error: float = -1.0
    own: float = -1.0
    build_seconds: float = 0.0
    reason: Reason | None = None
