"""Reading JSON Lines timelines, also those of processes that were killed."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, Final, get_args, get_origin

from omnicomp.errors import TimelineError
from omnicomp.privacy import logger
from omnicomp.timeline.events import EVENT_TYPES, SCHEMA_VERSION, Event, NodePlacement
from omnicomp.timeline.reasons import Reason

__all__ = ["ROTATED", "TimelineReader", "check_numbers", "event_from_dict", "read_events", "read_records"]

log = logger("omnicomp.timeline")

ROTATED: Final = ".1"
"""What follows the name of a file that grew beyond its limit, and that the named one goes on from."""

# No event is longer; a file without line ends is not read into memory as a whole.
_LONGEST: Final = 64 * 2**20
_DIGITS: Final = re.compile(rb"\d{19}")
_BITS: Final = 64
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
            check_numbers(data, line)
            event = event_from_dict(data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise TimelineError(_no_event(file, number, str(error))) from None
        if event is None:
            self._events += 1  # of a newer version
            return None
        return data, event


def check_numbers(data: Any, text: str | bytes) -> None:
    """Refuse numbers that no float can hold: a view would fail on them, far from their line.

    Args:
        data: what `text` says as JSON; it is looked through only if the text has as many digits in a row.
        text: of the file.

    Raises:
        ValueError: there is one.
    """
    if _DIGITS.search(text if isinstance(text, bytes) else text.encode("utf-8", "replace")):
        _check_numbers(data)


def _check_numbers(data: Any) -> None:
    if isinstance(data, int) and data.bit_length() > _BITS:
        raise ValueError(f"a number of {data.bit_length()} bits is more than anything that is counted")
    if isinstance(data, (dict, list)):
        for item in data.values() if isinstance(data, dict) else data:
            _check_numbers(item)


def _no_event(file: Path, number: int, detail: str) -> str:
    return (
        f"{_shown(file)}, line {number} is no timeline event ({_shown(detail)}); give a file that "
        "OMNICOMP_TIMELINE or options={'timeline': ...} wrote"
    )


def _shown(text: object) -> str:
    """A name or a line of a file, without control characters."""
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


# What JSON has no number for is written as text.
_NO_NUMBERS: Final = ("inf", "-inf", "nan")


def _node_placement(data: dict[str, Any]) -> NodePlacement:
    chain = tuple(Reason.from_dict(reason) for reason in data.get("chain", ()))
    known = {field.name for field in dataclasses.fields(NodePlacement)} - {"chain"}
    return NodePlacement(**{key: str(value) for key, value in data.items() if key in known}, chain=chain)


@dataclasses.dataclass(frozen=True)
class _Field:
    """The types that a field's value may have, and its items, if these are text or integers."""

    name: str
    kinds: frozenset[type]
    items: type | None


@functools.cache
def _fields(cls: type[Event]) -> tuple[_Field, ...]:
    found: list[_Field] = []
    for field in dataclasses.fields(cls):
        hint: Any = field.type
        alternatives = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds: set[Any] = {get_origin(kind) or kind for kind in alternatives}
        inner = next((kind for kind in get_args(hint) if kind is not Ellipsis), None) if tuple in kinds else None
        if dict in kinds:
            inner = get_args(hint)[1]
        if float in kinds:
            kinds.add(int)
        found.append(_Field(field.name, frozenset(kinds), inner if inner in (str, int) else None))
    return tuple(found)


def _check(field: _Field, value: Any) -> None:
    """Raise TypeError for a value of another type: a view would fail on it, far from its line."""
    if type(value) not in field.kinds:
        raise TypeError(f"its field {field.name!r} can't be {type(value).__name__}")
    if field.items is not None and value:
        for item in value.values() if type(value) is dict else value:
            if not isinstance(item, field.items):
                kind = "text" if field.items is str else "whole numbers"
                raise TypeError(f"its field {field.name!r} must hold {kind}")


def event_from_dict(data: dict[str, Any]) -> Event | None:
    """Rebuild an event from its JSON form.

    Returns:
        The event, or None if its type is not known to this version.

    Raises:
        TypeError: a field is missing or of the wrong kind.
        ValueError: the schema is newer than this version reads.
    """
    schema = data.get("schema")
    if not isinstance(schema, int):
        raise TypeError("it has no integer field 'schema'")
    if schema > SCHEMA_VERSION:
        raise ValueError(f"its schema is {schema} and this version reads up to {SCHEMA_VERSION}; upgrade omnicomp")
    cls = EVENT_TYPES.get(str(data.get("type")))
    if cls is None:
        return None
    values: dict[str, Any] = {}
    for field in _fields(cls):
        name = field.name
        if name not in data:
            continue
        value = data[name]
        if name == "declined":
            value = tuple(_node_placement(item) for item in value)
        elif type(value) is list:
            value = tuple(value)
        elif name == "reason" and type(value) is dict:
            value = Reason.from_dict(value)
        elif float in field.kinds and value in _NO_NUMBERS:
            value = float(value)
        _check(field, value)
        values[name] = value
    return cls(**values)
