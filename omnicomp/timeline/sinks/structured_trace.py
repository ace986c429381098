"""The timeline in torch's structured trace: tlparse shows a page of it for each compilation.

For each compile id there are two kinds of artefacts: `omnicomp_audit`, the report as text, and `omnicomp_events`, what
was decided since the last one, as JSON. Both are written when a compilation is over, and at the end of the process for
what only ran since. What goes wrong at run time is written at once.
"""

import atexit
import json
import os
from collections.abc import Callable
from typing import Any, Final

from omnicomp._torch import structured as trace
from omnicomp.errors import harmless
from omnicomp.timeline import Event
from omnicomp.timeline.recorder import Timeline, rank

_KEY: Final = "the structured trace of torch"
# Of each call, and no decisions.
_SAMPLES: Final = ("memory", "timing")
_URGENT: Final = ("retreat", "verification")
Page = Callable[[tuple[Event, ...]], str]


class TraceSink:
    """Notes which graphs have new events, and writes these to the trace on `flush`."""

    def __init__(self, timeline: Timeline, page: Page) -> None:
        """Make a sink for a timeline."""
        self._timeline = timeline
        self._page = page
        self._places: dict[str, trace.Place | None] = {}
        self._written: dict[str, int] = {}
        self._new: set[str] = set()
        self._pid = os.getpid()

    def write(self, record: dict[str, Any]) -> None:
        """Note which graph an event belongs to."""
        if self._pid != os.getpid():  # a forked child has a trace of its own, in which its parent's graphs are not
            self._pid = os.getpid()
            self._new.clear()
        kind, graph = record["type"], record["graph"]
        if kind in _SAMPLES:
            return
        place = trace.here()
        # A variant that is compiled in a later call belongs to the compilation of its graph.
        known = self._places.get(graph) or self._places.get(graph.split(":")[0])
        self._places[graph] = known or place
        self._new.add(graph)
        if kind in _URGENT and place is None:
            trace.artifact(f"omnicomp_{kind}", "json", json.dumps(record, default=str), self._places[graph])

    def flush(self) -> None:
        """Write what is new of each graph."""
        if self._pid != os.getpid():
            return
        graphs, self._new = sorted(self._new), set()
        for graph in graphs:
            events = self._timeline.events(graph)
            start = self._written.get(graph, -1)
            new = [_record(event) for event in events if event.seq > start and event.type not in _SAMPLES]
            if not new:
                continue
            self._written[graph] = events[-1].seq
            place = self._places.get(graph)
            trace.artifact("omnicomp_events", "json", json.dumps(new, default=str), place)
            trace.artifact("omnicomp_audit", "string", self._page(events), place)

    def close(self) -> None:
        """Write what is left."""
        with harmless("the decisions in torch's structured trace"):
            self.flush()


def _record(event: Event) -> dict[str, Any]:
    return {**event.to_dict(), "pid": os.getpid(), "rank": rank()}


_sink: TraceSink | None = None


def attach(timeline: Timeline, page: Page) -> None:
    """Add the sink, if somebody takes torch's structured trace; for `page` see `TraceSink`."""
    global _sink
    if not trace.tracing() or timeline.has_sink(_KEY):
        return
    if _sink is None:
        atexit.register(flush)
    _sink = TraceSink(timeline, page)
    timeline.add_sink(_KEY, _sink)


def flush() -> None:
    """Write the events since the last flush to torch's structured trace, if it is being recorded."""
    if _sink is not None and _sink._new:
        _sink.close()
