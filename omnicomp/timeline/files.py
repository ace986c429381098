"""Reading JSON Lines timelines, whatever became of the process that wrote them."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from omnicomp.errors import TimelineError
from omnicomp.timeline.events import Event
from omnicomp.timeline.reading import event_from_dict

__all__ = ["ROTATED", "TimelineReader", "read_events", "read_records"]

log = logging.getLogger("omnicomp.timeline")

ROTATED: Final = ".1"
"""What follows the name of a file that grew beyond its limit, and that the named one goes on from."""

# No event is longer; a file without line ends is not read into memory as a whole.
_LONGEST: Final = 64 * 2**20
# So many lines that are no JSON, and nothing else before them, are no timeline.
_PATIENCE: Final = 100


class TimelineReader:
    """The events of one timeline file, with those of the rotated file that it goes on from, one at a time.

    A line that is not JSON is one that a process was killed in: it is skipped and counted. A file without any event
    besides such lines is no timeline.
    """

    def __init__(self, path: str | Path, opened: BinaryIO | None = None) -> None:
        """Name the file; it is opened when it is read.

        Args:
            path: of the file, or of a rotated one, which is read alone then.
            opened: the same, where it was opened already and can't be a second time, as a pipe; it is read once.
        """
        self.path = Path(path)
        self._opened = opened
        self.torn = 0
        """Lines that were skipped so far."""
        self._events = 0
        self._first = ""

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Event]]:
        """Each event with its JSON form, which also tells the process, the rank and the thread.

        Raises:
            TimelineError: the file is missing, unreadable, no timeline, or of a newer version; the message names the
                line.
        """
        self.torn = self._events = 0
        self._first = ""
        rotated = Path(f"{self.path}{ROTATED}")
        for file in (rotated, self.path):
            if file is self.path or (self._opened is None and file.is_file()):
                yield from self._read(file)
        if self._first and not self._events:
            raise TimelineError(self._first)
        if self.torn:
            count = "one line is" if self.torn == 1 else f"{self.torn} lines are"
            log.warning("%s: %s incomplete, as of a process that was killed, and skipped", _shown(self.path), count)

    def _read(self, file: Path) -> Iterator[tuple[dict[str, Any], Event]]:
        try:
            with file.open("rb") if self._opened is None else self._opened as stream:
                number = 0
                while line := stream.readline(_LONGEST):
                    number += 1
                    record = self._parse(file, number, line)
                    if record is not None:
                        self._events += 1
                        yield record
        except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
            said = getattr(error, "strerror", None) or error
            raise TimelineError(f"{_shown(file)} can't be read ({said}); give the path of a timeline file") from None

    def _parse(self, file: Path, number: int, line: bytes) -> tuple[dict[str, Any], Event] | None:
        if not line.strip():
            return None
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            self.torn += 1
            self._first = self._first or _no_event(file, number, "it is not JSON")
            if not self._events and self.torn >= _PATIENCE:
                raise TimelineError(self._first) from None
            return None
        try:
            if not isinstance(data, dict):
                raise TypeError("it is no JSON object")
            event = event_from_dict(data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise TimelineError(_no_event(file, number, str(error))) from None
        if event is None:
            self._events += 1  # of a newer version
            return None
        return data, event


def _no_event(file: Path, number: int, detail: str) -> str:
    return (
        f"{_shown(file)}, line {number} is no timeline event ({_shown(detail)}); give a file that "
        "OMNICOMP_TIMELINE or options={'timeline': ...} wrote"
    )


def _shown(text: object) -> str:
    """A sentence is one line, and moves no terminal's cursor, whatever a file is called or holds."""
    return "".join(char if char.isprintable() else "\ufffd" for char in str(text))


def read_events(path: str | Path) -> Iterator[Event]:
    """Read a JSON Lines timeline, with the rotated file that it goes on from.

    A line that a process was killed in is skipped; at the end a log message says how many were.

    Raises:
        TimelineError: the file is missing, unreadable, or a line is no event; the message names the line.
    """
    return (event for _, event in read_records(path))


def read_records(path: str | Path) -> Iterator[tuple[dict[str, Any], Event]]:
    """Like `read_events`, each event with its JSON form, which also tells the process, the rank and the thread."""
    return iter(TimelineReader(path))
