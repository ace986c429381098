"""Reading JSON Lines timelines, also those of processes that were killed."""

import codecs
import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, Final, get_args, get_origin

from omnicomp import records
from omnicomp.errors import TimelineError
from omnicomp.safety.privacy import logger
from omnicomp.timeline.events import EVENT_TYPES, SCHEMA_VERSION, Event, NodePlacement, Process
from omnicomp.timeline.reasons import Reason

log = logger("omnicomp.timeline")

ROTATED: Final = ".1"
"""What follows the name of a file that grew beyond its limit, and that the named one goes on from."""

_BEGINNING: Final = b'{"schema":'  # of each event
# No event is longer; a file without line ends is not read into memory as a whole.
_LONGEST: Final = 64 * 2**20
_DIGITS: Final = re.compile(rb"\d{19}")
_BITS: Final = 64
# So many pieces of the greatest length, or a thousand times as many lines, and no event before them, are no timeline.
_PATIENCE: Final = 100
_LINE: Final = 0.001
# Unknown types that are told apart, and characters of a detail that are kept.
_KINDS_KEPT: Final = 16
_TOLD: Final = 200


@records.dataclass(frozen=True, kw_only=True)
class Unread:
    """Lines of a file that no event was read from, for one cause.

    Attributes:
        kind: a key of `KINDS`.
        count: how many.
        first: where the first of them is: `run.jsonl, line 12`.
        detail: what is wrong with that one.
    """

    kind: str
    count: int
    first: str = ""
    detail: str = ""

    def __str__(self) -> str:
        """`2 lines of a newer version (the first: run.jsonl, line 12, its schema is 2 …)`."""
        noun = KINDS.get(self.kind, self.kind)
        name = noun if self.count == 1 else noun.replace("line", "lines", 1).replace("event ", "events ", 1)
        where = ", ".join(piece for piece in (self.first, self.detail) if piece)
        return f"{self.count} {name} ({'the first: ' if self.count > 1 else ''}{where})" if where else name


KINDS: Final[dict[str, str]] = {
    "torn": "torn line",
    "foreign": "foreign line",
    "broken": "broken line",
    "newer": "line of a newer version",
    "unknown": "event of an unknown type",
}
"""What a line can be that no event is read from: cut short, as by the end of a process; no JSON object of ours; with a
field that is missing or of the wrong kind; of a newer schema; or of a type that this version does not know."""


class _NotReadError(ValueError):
    """Why no event is read from a line."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class TimelineReader:
    """The events of one timeline file, with those of the rotated file that it goes on from, one at a time.

    A line that no event can be read from is skipped and counted, by its cause. A file without any event besides such
    lines is no timeline.
    """

    def __init__(self, path: str | Path, opened: BinaryIO | None = None) -> None:
        """Name the file; it is opened when it is read.

        Args:
            path: of the file, or of a rotated one, which is read alone then.
            opened: the same, where it was opened already and can't be a second time, as a pipe; it is read once.
        """
        self.path = Path(path)
        self._opened = opened
        self._unread: dict[str, Unread] = {}
        self.ends_torn = False
        """Whether the last line so far is cut short."""
        self._events = 0
        self._wasted = 0.0
        self._first = ""

    @property
    def unread(self) -> tuple[Unread, ...]:
        """What was skipped so far."""
        return tuple(self._unread.values())

    @property
    def torn(self) -> int:
        """Lines so far that were cut short."""
        return self._unread["torn"].count if "torn" in self._unread else 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing in the file, so far."""
        return not self._events and not self._unread

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Event]]:
        """Each event with its JSON form, which also tells the process, the rank and the thread.

        Raises:
            TimelineError: the file is missing, unreadable, or has no event that this version reads; the message names
                the first line.
        """
        self._unread = {}
        self._events = 0
        self._wasted = 0.0
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
        rest = [str(each) for each in self.unread if each.kind != "torn"]
        if rest:
            log.warning("%s: left out: %s", _shown(self.path), "; ".join(rest))

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
        self.ends_torn = False
        try:
            return _parsed(line)
        except _NotReadError as error:
            self._skip(file, number, error, line)
        self._wasted += 1 if len(line) >= _LONGEST else _LINE
        if not self._events and self._wasted >= _PATIENCE:
            raise TimelineError(self._first)
        return None

    def _skip(self, file: Path, number: int, error: _NotReadError, line: bytes) -> None:
        self.ends_torn = error.kind == "torn"
        if error.kind == "unknown":
            self._events += 1  # of a newer version
        elif not (
            self.ends_torn and not line.endswith(b"\n") and (line.startswith(_BEGINNING) or _BEGINNING.startswith(line))
        ):  # a first event that is cut short is one of a process that was killed
            self._first = self._first or _no_event(file, number, str(error))
        kind = f"unknown {error}" if error.kind == "unknown" and len(self._unread) < _KINDS_KEPT else error.kind
        before = self._unread.get(kind)
        if before is not None:
            self._unread[kind] = dataclasses.replace(before, count=before.count + 1)
            return
        place = f"{_shown(file.name)}, line {number}"
        detail = "" if error.kind == "torn" else _shown(str(error))[:_TOLD]
        self._unread[kind] = Unread(kind=error.kind, count=1, first=place, detail=detail)


def _parsed(line: bytes) -> tuple[dict[str, Any], Event]:
    """The event of a line.

    Raises:
        _NotReadError: there is none.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        begun = line.removeprefix(codecs.BOM_UTF8).lstrip(b"\0 \t")  # some file systems leave zeros
        kind = "torn" if begun[:1] in (b"{", b"\n", b"") else "foreign"
        raise _NotReadError(kind, "it is not JSON") from None
    if not isinstance(data, dict):
        raise _NotReadError("foreign", "it is no JSON object")
    schema = data.get("schema")
    if not isinstance(schema, int) or not isinstance(data.get("type"), str):
        raise _NotReadError("foreign", f"it has no {'type' if isinstance(schema, int) else 'integer field schema'}")
    try:
        check_numbers(data, line)
        event = event_from_dict(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _NotReadError("newer" if schema > SCHEMA_VERSION else "broken", str(error)) from None
    if event is None:
        raise _NotReadError("unknown", str(data["type"]))
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
    """Read the events of graphs from a JSON Lines timeline, with the rotated file that it goes on from.

    What can't be read is skipped; at the end a log message says how many lines that were, and why.

    Raises:
        TimelineError: the file is missing, unreadable, or has no event; the message names the first line.
    """
    return (event for _, event in read_records(path) if not isinstance(event, Process))


def read_records(path: str | Path) -> Iterator[tuple[dict[str, Any], Event]]:
    """Like `read_events`, each event with its JSON form, which also tells the process, the rank and the thread."""
    return iter(TimelineReader(path))


# What JSON has no number for is written as text.
_NO_NUMBERS: Final = ("inf", "-inf", "nan")


def _node_placement(data: dict[str, Any]) -> NodePlacement:
    chain = tuple(Reason.from_dict(reason) for reason in data.get("chain", ()))
    known = {field.name for field in dataclasses.fields(NodePlacement)} - {"chain"}
    return NodePlacement(**{key: str(value) for key, value in data.items() if key in known}, chain=chain)


@records.dataclass(frozen=True)
class _Field:
    """The types that a field's value may have, and its items, if these are text or integers."""

    name: str
    kinds: frozenset[type]
    items: type | None
    required: bool


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
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        found.append(_Field(field.name, frozenset(kinds), inner if inner in (str, int) else None, required))
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
        elif Reason in field.kinds and type(value) is dict:
            value = Reason.from_dict(value)
        elif float in field.kinds and value in _NO_NUMBERS:
            value = float(value)
        _check(field, value)
        values[name] = value
    missing = [repr(field.name) for field in _fields(cls) if field.required and field.name not in values]
    if missing:
        raise TypeError(f"it has no {', '.join(missing)}")
    return cls(**values)
