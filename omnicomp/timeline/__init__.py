"""The timeline: one list of events per process, to which every stage of a compilation appends."""

from typing import Any

from omnicomp.timeline import events as _types
from omnicomp.timeline.events import *  # noqa: F403 - every event is public
from omnicomp.timeline.events import Event
from omnicomp.timeline.files import read_events
from omnicomp.timeline.levels import backend_timeline as _levels
from omnicomp.timeline.reasons import CODES, Reason
from omnicomp.timeline.recorder import Sink, Timeline, current, rank
from omnicomp.timeline.sinks.jsonl import JsonLinesSink, attach

__all__ = [
    "CODES",
    "JsonLinesSink",
    "Reason",
    "Sink",
    "Timeline",
    "attach",
    "backend_timeline",
    "clear",
    "current",
    "events",
    "rank",
    "read_events",
]
__all__ += _types.__all__


def events() -> tuple[Event, ...]:
    """A snapshot of this process' events."""
    return current().events()


def backend_timeline() -> list[dict[str, Any]]:
    """The three-level record of every subgraph of this process; see `omnicomp.timeline.levels`."""
    return _levels(current().events())


def clear() -> None:
    """Forget this process' events and close its sinks."""
    current().clear()
