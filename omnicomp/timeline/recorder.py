"""The recorder: one append-only timeline per process, thread-safe.

Nothing in the compiler reads it to decide anything; sinks and views read it afterwards. A sink that fails is
reported once and dropped: recording never breaks the user's program.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any, Protocol

from omnicomp.forks import new_lock
from omnicomp.privacy import cleaner, logger
from omnicomp.timeline.events import Event

__all__ = ["Sink", "Timeline", "current", "drafting", "rank"]

log = logger("omnicomp.timeline")


class Sink(Protocol):
    """Receives every event, in order, under the timeline's lock."""

    def write(self, record: dict[str, Any]) -> None:
        """Take the JSON form of one event.

        Raises:
            OSError: the sink can't be written; the timeline drops it and warns once.
        """
        ...

    def close(self) -> None:
        """Release what the sink holds."""
        ...


def rank() -> int:
    """The process' rank in a distributed job as its launcher says (`RANK`), or 0."""
    try:
        return int(os.environ.get("RANK", "0"))
    except ValueError:
        return 0


class Timeline:
    """Append-only list of events with sinks."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._events: list[Event] = []
        self._sinks: dict[str, Sink] = {}
        self._dropped: set[str] = set()
        self._graphs = itertools.count()
        self._pid = os.getpid()

    def __len__(self) -> int:
        with self._lock:
            return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events())

    def events(self, graph: str | None = None) -> tuple[Event, ...]:
        """A snapshot of the events, of all graphs or of one."""
        with self._lock:
            return tuple(e for e in self._events if graph is None or e.graph == graph)

    def next_graph(self) -> str:
        """A fresh graph id, unique in this process."""
        return f"g{next(self._graphs)}"

    def append(self, event: Event) -> Event:
        """Remove secrets from an event, stamp it with time and position, store it, and pass it to the sinks.

        Returns:
            The stamped event.
        """
        event = cleaner().value(event)
        with self._lock:
            if self._pid != os.getpid():
                self._after_fork()
            stamped = dataclasses.replace(event, time=time.time(), seq=len(self._events))
            self._events.append(stamped)
            if self._sinks:
                self._write(stamped)
            return stamped

    def add_sink(self, key: str, sink: Sink) -> None:
        """Add a sink; a second sink with the same key is closed and ignored, so that options can be repeated."""
        with self._lock:
            if key in self._sinks:
                sink.close()
            else:
                self._sinks[key] = sink

    def gave_up(self, key: str) -> bool:
        """Whether a sink of that key failed, and was dropped with a warning."""
        with self._lock:
            return key in self._dropped

    def has_sink(self, key: str) -> bool:
        """Whether a sink of that key is (still) being written to."""
        with self._lock:
            return key in self._sinks

    def clear(self) -> None:
        """Forget all events and close all sinks; graph ids go on counting. For tests and long-lived servers."""
        with self._lock:
            for sink in self._sinks.values():
                sink.close()
            self._sinks.clear()
            self._dropped.clear()
            self._events.clear()

    def _write(self, event: Event) -> None:
        record: dict[str, Any] | None = None
        for key, sink in list(self._sinks.items()):
            try:
                if record is None:
                    record = event.to_dict()
                    record.update(pid=self._pid, rank=rank(), thread=threading.current_thread().name)
                sink.write(record)
            except Exception as error:  # noqa: BLE001 - logged; a sink may be anyone's
                self._sinks.pop(key, None)
                self._dropped.add(key)
                log.warning(
                    "the timeline can't be written to %s (%s); the program goes on without it, "
                    "and the events stay in memory for omnicomp.audit()",
                    cleaner().text(key),
                    cleaner().text(str(error)),
                )

    def _after_fork(self) -> None:
        """A forked child keeps its parent's events; a sink whose path has `%p` opens a file of its own."""
        self._pid = os.getpid()


_current = Timeline()
_drafts: contextvars.ContextVar[Timeline | None] = contextvars.ContextVar("omnicomp.timeline", default=None)


def current() -> Timeline:
    """The timeline of this process, or the one that `drafting` put in its place."""
    draft = _drafts.get()  # an empty one is false
    return _current if draft is None else draft


@contextlib.contextmanager
def drafting(draft: Timeline) -> Generator[None]:
    """Record what this thread does inside to another timeline, so that trials stay out of the process' own."""
    token = _drafts.set(draft)
    try:
        yield
    finally:
        _drafts.reset(token)
