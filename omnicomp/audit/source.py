"""Reports of a file, a timeline or a report in JSON, and of this process."""

import codecs
import contextlib
import dataclasses
import io
import json
import re
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Final

from omnicomp.audit.model import ProcessAudit, Report
from omnicomp.audit.report import Audit, fold
from omnicomp.audit.views.jsonform import from_json, to_dict
from omnicomp.errors import ReportError, TimelineError
from omnicomp.timeline import Boundary, Capture, Event, current
from omnicomp.timeline.files import TimelineReader, Unread
from omnicomp.timeline.recorder import Collector, run_id

_BEGINNING: Final = 2**16
# A report is read as a whole, and takes ten times its size; a timeline is not.
_LARGEST: Final = 2**28
# Names of graphs that are told apart; the report leaves later graphs out in any case.
_NAMES: Final = 100_000
_LATER: Final = "later graphs"
_KEYS: Final = re.compile(rb'\{\s*"(\w+)"(?:\s*:\s*\d+\s*,\s*"(\w+)")?')
_REPORT: Final = frozenset(to_dict(Report()))


class Events:
    """The events of a timeline file, one at a time; where a graph id comes back, it becomes `g0@2`.

    It comes back in a second run, or in another process that writes to the same file.

    Attributes:
        torn: lines that were skipped so far, because a process was killed in them.
    """

    def __init__(self, path: str | PathLike[str], opened: BinaryIO | None = None) -> None:
        self._reader = TimelineReader(Path(path), opened)

    @property
    def torn(self) -> int:
        """Lines that were skipped so far, because a process was killed in them."""
        return self._reader.torn

    @property
    def unread(self) -> tuple[Unread, ...]:
        """All lines that were skipped so far, by their cause."""
        return self._reader.unread

    @property
    def broken_off(self) -> bool:
        """Whether the file is empty, or its last line so far is cut short."""
        return self._reader.empty or self._reader.ends_torn

    def __iter__(self) -> Iterator[Event]:
        """Each event, in order.

        Raises:
            TimelineError: the file is missing, unreadable, or no timeline.
        """
        names: dict[tuple[str, str], str] = {}
        latest: dict[str, str] = {}
        taken: dict[str, int] = {}
        for record, event in self._reader:
            pid = f"{record.get('rank') or 0}/{record.get('pid')}"
            if isinstance(event, Capture):
                if len(names) < _NAMES or (pid, event.graph) in names:
                    taken[event.graph] = taken.get(event.graph, 0) + 1
                    count = taken[event.graph]
                    name = event.graph if count == 1 else f"{event.graph}@{count}"
                    latest[event.graph] = names[pid, event.graph] = name
                elif event.graph in latest:
                    latest[event.graph] = _LATER
            # A forked child runs graphs that its parent captured.
            name = names.get((pid, event.graph)) or latest.get(event.graph, event.graph)
            yield _renamed(event, name) if name != event.graph else event


def read(path: str | PathLike[str]) -> Iterator[Event]:
    """The events of a timeline file, as `Events` gives them.

    Raises:
        TimelineError: the file is missing, unreadable, or no timeline.
    """
    return iter(Events(path))


def load(path: str | PathLike[str]) -> Audit:
    """The report of a file: of a JSON Lines timeline, or the one that `Audit.to_json` wrote.

    A timeline is read event by event, and none is held on to. The file may be a pipe, such as `/dev/stdin`.

    Raises:
        TimelineError: the file is missing or unreadable, or looks like a timeline and is none.
        ReportError: the file looks like a report and is none, or is one of a newer version.
    """
    file = Path(path)
    try:
        opened = file.open("rb")
    except (OSError, ValueError):
        return _of_events(Events(file))  # which says what is wrong
    with opened:
        try:
            beginning = opened.read(_BEGINNING)
            if not _is_report(beginning):
                # What can be read once only, as a pipe, goes on from there.
                again = None if opened.seekable() else io.BufferedReader(_Rejoined(beginning, opened))
                return _of_events(Events(file, again))
            data = beginning + opened.read(_LARGEST)
            if len(data) > _LARGEST:
                raise ReportError(f"{file} has more than {_LARGEST >> 20} MiB; give the timeline that it was made of")
            text = data.decode("utf-8-sig", "replace")
        except OSError as error:
            raise TimelineError(f"{file} can't be read ({error.strerror}); give a timeline or a report") from None
    return Audit.of(from_json(text, str(file)))


def _of_events(events: Events) -> Audit:
    found = fold(events, whole=True)
    processes = found.processes
    if not processes and events.broken_off:
        # An earlier version, or a process that had no time to record anything.
        pid = next((graph.pid for graph in reversed(found.graphs)), 0)
        processes = (ProcessAudit(run="", pid=pid, last=found.graphs[-1].last if found.graphs else ""),)
    return dataclasses.replace(found, skipped=events.torn, unread=events.unread, processes=processes)


class _Rejoined(io.RawIOBase):
    """A stream, with its beginning that was read already put back."""

    def __init__(self, beginning: bytes, rest: io.BufferedReader) -> None:
        self._beginning, self._rest = beginning, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        piece = self._beginning[: len(buffer)] or self._rest.read1(len(buffer))
        self._beginning = self._beginning[len(piece) :]
        buffer[: len(piece)] = piece
        return len(piece)


def _is_report(beginning: bytes) -> bool:
    """Whether a file is one JSON object that is no event, by its beginning."""
    beginning = beginning.removeprefix(codecs.BOM_UTF8).lstrip()
    try:
        data = json.loads(beginning.partition(b"\n")[0])
    except (ValueError, RecursionError):
        # It goes on in the next line, or beyond what was read, or is torn: events and reports begin with other keys.
        keys = _KEYS.match(beginning)
        return keys is not None and keys[2] != b"type" and (keys[1] == b"schema" or keys[1].decode() in _REPORT)
    return isinstance(data, dict) and "graphs" in data and "type" not in data


def _renamed(event: Event, name: str) -> Event:
    changes = {"graph": name}
    for field in ("source", "target") if isinstance(event, Boundary) else ("subgraph",):
        id = getattr(event, field, None)
        if isinstance(id, str) and id.startswith(event.graph):
            changes[field] = name + id[len(event.graph) :]
    return dataclasses.replace(event, **changes)


def of_this_process(events: Sequence[Event], *, ended: bool = False) -> Audit:
    """The report of events of this process, which goes on, or whose program has ended."""
    runs = {event.run for event in events if isinstance(event, Capture)} | {run_id()}
    return fold(events, states=dict.fromkeys(runs, "ended" if ended else "running"))


class Recording:
    """What was captured or ran inside of a block: `with omnicomp.record() as run: ...`, then `run.audit()`.

    A graph that was captured before is in it with all that was recorded of it, if it ran inside for the first time. Of
    blocks in several threads each has what its own thread did, and what other threads did with its graphs; what a
    thread without a block did is in all that were open. A block inside of another one is part of it. After an exception
    the recording has what came before.
    """

    def __init__(self) -> None:
        self._collector = Collector()
        self._stack: list[contextlib.ExitStack] = []

    def __enter__(self) -> "Recording":
        """Begin, or go on."""
        stack = contextlib.ExitStack()
        stack.enter_context(current().collecting(self._collector))
        self._stack.append(stack)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop; an exception goes on."""
        self._stack.pop().close()

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events())

    def events(self) -> tuple[Event, ...]:
        """What was recorded so far, in order."""
        return tuple(self._collector.events)

    def audit(self) -> Audit:
        """The report of what was recorded so far."""
        return of_this_process(self.events())

    def __str__(self) -> str:
        return str(self.audit())

    def __repr__(self) -> str:
        return repr(self.audit())


def record() -> Recording:
    """Record what a block of code compiles and runs, apart from the rest of the process.

        with omnicomp.record() as run:
            model(x)
        print(run.audit())

    Returns:
        A context manager.
    """
    return Recording()
