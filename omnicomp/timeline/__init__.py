"""One timeline a process: every stage appends what it decided and what ran; views are made from it afterwards."""

from typing import Any

from omnicomp.timeline.boundaries import Boundary
from omnicomp.timeline.candidates import Candidate
from omnicomp.timeline.durations import Stage, Timing
from omnicomp.timeline.events import (
    SCHEMA_VERSION,
    Attempt,
    Cache,
    Calibration,
    Capture,
    Event,
    Memory,
    NearMiss,
    NodePlacement,
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
from omnicomp.timeline.kinds import EVENT_TYPES
from omnicomp.timeline.levels import backend_timeline as _levels
from omnicomp.timeline.reasons import CODES, Reason
from omnicomp.timeline.recorder import Sink, Timeline, current, rank
from omnicomp.timeline.sinks.jsonl import JsonLinesSink, attach, read_events

__all__ = [
    "CODES",
    "EVENT_TYPES",
    "SCHEMA_VERSION",
    "Attempt",
    "Boundary",
    "Cache",
    "Calibration",
    "Candidate",
    "Capture",
    "Event",
    "JsonLinesSink",
    "Memory",
    "NearMiss",
    "NodePlacement",
    "Option",
    "PassRun",
    "Placement",
    "Ran",
    "Reason",
    "Retreat",
    "Rewrite",
    "Sink",
    "Speculation",
    "Stage",
    "Subgraph",
    "Timeline",
    "Timing",
    "Verification",
    "Weights",
    "attach",
    "backend_timeline",
    "clear",
    "current",
    "events",
    "rank",
    "read_events",
]


def events() -> tuple[Event, ...]:
    """A snapshot of this process' events."""
    return current().events()


def backend_timeline() -> list[dict[str, Any]]:
    """The three-level record of every subgraph of this process; see `omnicomp.timeline.levels`."""
    return _levels(current().events())


def clear() -> None:
    """Forget this process' events and close its sinks."""
    current().clear()
