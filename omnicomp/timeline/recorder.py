"""The recorder: one append-only timeline per process, thread-safe.

Nothing in the compiler reads it to decide anything; sinks and views read it afterwards. A sink that fails is
reported once and dropped: recording never breaks the user's program.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol, TypedDict

from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import cleaner, logger
from omnicomp.timeline.events import Attempt, Event, Ran, Retreat
from omnicomp.timeline.reasons import Reason

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


_run = (0, "")


def run_id() -> str:
    """The name of this process: no other one that writes to the same files has it, even with the same id."""
    global _run
    pid = os.getpid()
    if _run[0] != pid:
        _run = (pid, f"{pid}-{time.time_ns():x}")
    return _run[1]


class Collector:
    """The events of graphs that were captured, or that ran, while it was open; see `Timeline.collecting`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.graphs: set[str] = set()


_open: contextvars.ContextVar[tuple[Collector, ...]] = contextvars.ContextVar("omnicomp.collectors", default=())


def _family(event: Event) -> str:
    """The id that the variants of a graph share."""
    return event.graph.partition(":")[0]


class Timeline:
    """Append-only list of events with sinks."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._events: list[Event] = []
        self._sinks: dict[str, Sink] = {}
        self._dropped: set[str] = set()
        self._graphs = itertools.count()
        self._pid = os.getpid()
        self._reset_at = 0
        self._collectors: list[Collector] = []

    def __len__(self) -> int:
        with self._lock:
            return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events())

    def events(self, graph: str | None = None) -> tuple[Event, ...]:
        """A snapshot of the events, of all graphs or of one."""
        with self._lock:
            return tuple(e for e in self._events if graph is None or e.graph == graph)

    def mark_reset(self) -> None:
        """Note that compiled code was forgotten; `since_reset` gives what was captured after it."""
        with self._lock:
            self._reset_at = len(self._events)

    def since_reset(self) -> tuple[Event, ...]:
        """The events of the graphs that were captured since the last reset."""
        with self._lock:
            older = {_family(event) for event in self._events[: self._reset_at]}
            return tuple(event for event in self._events[self._reset_at :] if _family(event) not in older)

    @contextlib.contextmanager
    def collecting(self, collector: Collector) -> Generator[None]:
        """Inside, the collector gets all events of graphs that are captured, or that run, there.

        A thread that has a collector open itself fills that one. What other threads record goes to the collectors that
        have its graph, or to all of them where none has it.
        """
        with self._lock:
            self._collectors.append(collector)
        token = _open.set((*_open.get(), collector))
        try:
            yield
        finally:
            _open.reset(token)
            with self._lock:
                self._collectors.remove(collector)

    def _collect(self, event: Event) -> None:
        family, own = _family(event), _open.get()
        having = [each for each in self._collectors if family in each.graphs]
        inside = [each for each in own if each in self._collectors]
        for collector in dict.fromkeys((*inside, *having)) or list(self._collectors):
            if family in collector.graphs:
                collector.events.append(event)
            else:
                collector.graphs.add(family)
                collector.events += [each for each in self._events if _family(each) == family]

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
            if self._collectors:
                self._collect(stamped)
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
            self._reset_at = 0

    def begin(self) -> None:
        """Have the files tell of this process, and of its end; see `Process`. Those that know of it do nothing."""
        with self._lock:
            for key, sink in list(self._sinks.items()):
                begin = getattr(sink, "begin", None)
                if begin is not None:
                    self._guarded(key, begin)

    def _write(self, event: Event) -> None:
        record: dict[str, Any] = {}

        def write(sink: Sink) -> None:
            if not record:
                told = {"pid": self._pid, "rank": rank(), "thread": threading.current_thread().name}
                record.update(event.to_dict(), **told)
            sink.write(record)

        for key, sink in list(self._sinks.items()):
            self._guarded(key, functools.partial(write, sink))

    def _guarded(self, key: str, act: Callable[[], None]) -> None:
        try:
            act()
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
