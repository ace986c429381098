"""Fallbacks that a project knows of and lives with for now: the list in its `pyproject.toml`.

    [[tool.omnicomp.acknowledge]]
    selector = "aten.topk"
    reason = "no kernel on this device before the next driver"
    expires = 2027-03-31

An entry needs all three. One that lacks something, or is past its date, is told as a problem and acknowledges nothing.
"""

import datetime
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from omnicomp import records
from omnicomp.errors import AcknowledgeError, nearest
from omnicomp.safety.escapes import one_line
from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import logger

log = logger("omnicomp")

FILE: Final = "pyproject.toml"
_TABLE: Final = "tool.omnicomp"
_KEYS: Final = ("selector", "reason", "expires")
_LONGEST: Final = 120
# Python 3.10 has no parser of its own.
_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


@records.dataclass(frozen=True, kw_only=True)
class Entry:
    """One acknowledgement.

    Attributes:
        selector: of operators, modules or nodes.
        reason: why it is lived with.
        expires: the last day on which it counts.
    """

    selector: str
    reason: str
    expires: datetime.date

    def expired(self, today: datetime.date) -> bool:
        """Whether the date has passed."""
        return today > self.expires


@records.dataclass(frozen=True, kw_only=True)
class Acknowledged:
    """What a project acknowledges.

    Attributes:
        entries: those that count today.
        expired: those that are past their date, and count no more.
        problems: a sentence for each entry that is incomplete or past its date, and for each key that nobody reads.
        source: the file, or empty.
    """

    entries: tuple[Entry, ...] = ()
    expired: tuple[Entry, ...] = ()
    problems: tuple[str, ...] = ()
    source: str = ""


def load(folder: Path | None = None, today: datetime.date | None = None) -> Acknowledged:
    """The list of the project that a folder belongs to; an empty one if there is none.

    Raises:
        AcknowledgeError: the file can't be read, or is no TOML.
    """
    file = find(folder)
    return Acknowledged() if file is None else read(file, today)


_told: set[str] = set()
_lock = new_lock()


def load_and_tell() -> Acknowledged:
    """The list of the project that the process runs in; each of its errors is logged once as a WARNING.

    A file that can't be read acknowledges nothing, and the program goes on.
    """
    try:
        found = load()
    except AcknowledgeError as error:
        found = Acknowledged(problems=(str(error),))
    for problem in found.problems:
        with _lock:
            known = problem in _told
            _told.add(problem)
        if not known:
            log.warning("omni: %s", one_line(problem))
    return found


def find(folder: Path | None = None) -> Path | None:
    """The nearest `pyproject.toml` upwards, not beyond the root of a repository; None if there is none."""
    try:
        here = (folder or Path()).absolute()
    except OSError:  # the current folder was removed
        return None
    for place in (here, *here.parents):
        if (place / FILE).is_file():
            return place / FILE
        if (place / ".git").exists():
            return None
    return None


def read(file: Path, today: datetime.date | None = None) -> Acknowledged:
    """The list of a file.

    Raises:
        AcknowledgeError: the file can't be read, or is no TOML.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise AcknowledgeError(f"{file} can't be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise AcknowledgeError(f"{file} is no TOML ({error.reason} at byte {error.start})") from None
    return parse(text, today or datetime.date.today(), str(file))


def parse(text: str, today: datetime.date, name: str = FILE) -> Acknowledged:
    """The list of a file's text.

    Raises:
        AcknowledgeError: the text is no TOML.
    """
    name = one_line(name)
    try:
        data = _toml.loads(text)
    except (ValueError, RecursionError) as error:
        raise AcknowledgeError(f"{name} is no TOML ({_short(error)})") from None
    table: Any = data.get("tool", {})
    table = table.get("omnicomp", {}) if isinstance(table, Mapping) else {}
    if not isinstance(table, Mapping):
        return Acknowledged(problems=(f"{name}: {_TABLE} is a table, not {_short(table)}",), source=name)
    problems = [f"{name}: nobody reads {_TABLE}.{_short(key)}{nearest(key, ['acknowledge'])}" for key in table]
    if "acknowledge" not in table:
        return Acknowledged(problems=tuple(problems), source=name)
    problems = [problem for key, problem in zip(table, problems, strict=True) if key != "acknowledge"]
    listed: Any = table["acknowledge"]
    if not isinstance(listed, list):
        problems.append(f"{name}: {_TABLE}.acknowledge is a list: begin each entry with [[{_TABLE}.acknowledge]]")
        listed = []
    entries: list[Entry] = []
    expired: list[Entry] = []
    for number, item in enumerate(listed, start=1):
        where = f"{name}: acknowledgement {number}"
        if isinstance(item, Mapping) and isinstance(item.get("selector"), str):
            where += f" ({_short(item['selector'])})"
        wrong = list(_wrong(item))
        problems += [f"{where} {sentence}" for sentence in wrong]
        if wrong:
            continue
        entry = Entry(selector=item["selector"].strip(), reason=item["reason"].strip(), expires=_date(item["expires"]))
        if entry.expired(today):
            problems.append(f"{where} expired on {entry.expires}, and what it was about counts again")
            expired.append(entry)
        else:
            entries.append(entry)
    return Acknowledged(entries=tuple(entries), expired=tuple(expired), problems=tuple(problems), source=name)


def _wrong(item: Any) -> Iterator[str]:
    """What keeps an entry from counting."""
    if not isinstance(item, Mapping):
        yield f"is a table with {', '.join(_KEYS)}, not {_short(item)}"
        return
    for key in item:
        if key not in _KEYS:
            yield f"has a key that nobody reads, {_short(key)}{nearest(key, _KEYS)}"
    for key in ("selector", "reason"):
        value = item.get(key)
        if not isinstance(value, str) or not value.strip():
            yield f"has no {key}, and acknowledges nothing: say {'which' if key == 'selector' else 'why'}"
    if "expires" not in item:
        yield "has no date, and acknowledges nothing: set expires = YYYY-MM-DD"
    elif _date(item["expires"]) is None:
        yield f"expires on a date such as 2027-03-31, not {_short(item['expires'])}"


def _date(value: Any) -> Any:
    """A date, of what TOML calls a date or of text; None if it is none."""
    if isinstance(value, datetime.datetime):
        return value.date()
    if isinstance(value, datetime.date):
        return value
    try:
        return datetime.datetime.strptime(value, "%Y-%m-%d").date() if isinstance(value, str) else None
    except ValueError:
        return None


def _short(value: object) -> str:
    text = one_line(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
