"""Sinks of the timeline: JSON Lines files, and the reader that is their inverse."""

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from omnicomp.errors import TimelineError
from omnicomp.timeline.events import Event
from omnicomp.timeline.reading import event_from_dict
from omnicomp.timeline.recorder import Timeline, rank

__all__ = ["ENVIRONMENT_VARIABLE", "JsonLinesSink", "attach", "expand", "read_events", "read_records"]

log = logging.getLogger("omnicomp.timeline")

ENVIRONMENT_VARIABLE: Final = "OMNICOMP_TIMELINE"

_unwritable: set[str] = set()
_unwritable_lock = threading.Lock()


def expand(path: str) -> Path:
    """Replace `%p` by the process id and `%r` by the rank (`RANK`, else 0), and `~` by the home folder."""
    return Path(path.replace("%p", str(os.getpid())).replace("%r", str(rank()))).expanduser()


class JsonLinesSink:
    """Appends one JSON object a line and flushes it, so that a killed process loses at most its last line.

    A forked child opens a file of its own if the path has `%p`, and else appends to the same file: single `write`
    calls in append mode do not tear.
    """

    def __init__(self, path: str) -> None:
        """Open the file for appending.

        Args:
            path: with `%p` and `%r` as in `expand`; missing folders are made.

        Raises:
            OSError: the file can't be opened for writing.
        """
        self._pattern = path
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        self._pid = os.getpid()
        target = expand(self._pattern)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Write one event."""
        if self._pid != os.getpid():
            self._file = self._open()
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=str)
        self._file.write(line.encode("utf-8", "backslashreplace") + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def attach(timeline: Timeline, path: str | None = None) -> None:
    """Add the JSON Lines sink named by `path`, or by the environment if it is None.

    A path that can't be written warns once a path and is left: a run is never lost to its log.
    """
    pattern = path if path is not None else os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not pattern or timeline.has_sink(pattern):
        return
    with _unwritable_lock:
        if pattern in _unwritable:
            return
        try:
            sink = JsonLinesSink(pattern)
        except OSError as error:
            _unwritable.add(pattern)
            log.warning(
                "the timeline can't be written to %s (%s); the program goes on without it: "
                "name a writable path in options={'timeline': ...} or %s",
                pattern,
                error.strerror or error,
                ENVIRONMENT_VARIABLE,
            )
            return
    timeline.add_sink(pattern, sink)


def read_events(path: str | Path) -> Iterator[Event]:
    """Read a JSON Lines timeline.

    A last line without its newline (a process was killed while writing) is skipped with a log message.

    Raises:
        TimelineError: the file is missing, unreadable, or a line is no event; the message names the line.
    """
    return (event for _, event in read_records(path))


def read_records(path: str | Path) -> Iterator[tuple[dict[str, Any], Event]]:
    """Like `read_events`, each event with its JSON form, which also tells the process, the rank and the thread."""
    file = Path(path)
    try:
        stream = file.open("rb")
    except OSError as error:
        raise TimelineError(f"{file} can't be read ({error.strerror}); give the path of a timeline file") from None
    with stream:
        try:
            for number, line in enumerate(stream, start=1):
                record = _parse(file, number, line)
                if record is not None:
                    yield record
        except OSError as error:
            raise TimelineError(f"{file} can't be read ({error.strerror}); give the path of a timeline file") from None


def _parse(file: Path, number: int, line: bytes) -> tuple[dict[str, Any], Event] | None:
    if not line.strip():
        return None
    try:
        data = json.loads(line)
        if not isinstance(data, dict):
            raise TypeError("it is no JSON object")
        event = event_from_dict(data)
        return None if event is None else (data, event)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if not line.endswith(b"\n") and number > 1:
            log.warning("%s: the last line is incomplete and was skipped", file)
            return None
        detail = "it is not JSON" if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) else error
        raise TimelineError(
            f"{file}, line {number} is no timeline event ({detail}); give a file that "
            f"{ENVIRONMENT_VARIABLE} or options={{'timeline': ...}} wrote"
        ) from None
