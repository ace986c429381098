"""The types of events that a timeline can hold, by the name that they have in a file."""

from typing import Final

from omnicomp.timeline.boundaries import Boundary
from omnicomp.timeline.candidates import Candidate
from omnicomp.timeline.durations import Stage, Timing
from omnicomp.timeline.events import (
    Attempt,
    Cache,
    Calibration,
    Capture,
    Event,
    Memory,
    NearMiss,
    Option,
    PassRun,
    Placement,
    Ran,
    Retreat,
    Rewrite,
    Speculation,
    Subgraph,
    Verification,
    Weights,
)

__all__ = ["EVENT_TYPES"]

EVENT_TYPES: Final[dict[str, type[Event]]] = {
    cls.type: cls
    for cls in (
        *(Capture, Option, PassRun, Rewrite, NearMiss, Speculation, Placement, Subgraph, Boundary, Attempt, Retreat),
        *(Ran, Verification, Cache, Weights, Calibration, Memory, Stage, Timing, Candidate),
    )
}
