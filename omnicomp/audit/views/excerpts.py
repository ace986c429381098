"""Lines of the user's source around a `file:line` of a report, read when a view is made.

A report may come from elsewhere, and what it names is not trusted: only Python files are read, and what looks like a
credential in them is hidden as it is in the timeline.
"""

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from omnicomp.escapes import printable
from omnicomp.privacy import cleaner

__all__ = ["Excerpt", "Excerpts"]

_LARGEST: Final = 4 * 2**20
_LONGEST_LINE: Final = 240
_PLACE: Final = re.compile(r"^(?P<file>.+\.pyw?):(?P<line>\d{1,7})$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Excerpt:
    """Lines of a file.

    Attributes:
        source: `file:line` as the report has it.
        line: number of the line that is meant, from 1.
        first: number of the first line of `lines`.
        lines: the line that is meant and those around it, without their ends.
        changed: whether the file was written to after the run.
    """

    source: str
    line: int
    first: int
    lines: tuple[str, ...]
    changed: bool = False

    def numbered(self) -> Iterator[tuple[int, str, bool]]:
        """Each line with its number, and whether it is the one that is meant."""
        for offset, text in enumerate(self.lines):
            number = self.first + offset
            yield number, text, number == self.line


class Excerpts:
    """Reads each file once."""

    def __init__(self, *, around: int = 2) -> None:
        """Read files when they are asked for.

        Args:
            around: lines before and after the one that is meant.
        """
        self._around = around
        self._files: dict[str, tuple[list[str], float] | None] = {}

    def of(self, source: str, since: float = 0.0) -> Excerpt | None:
        """The lines around a place; None where there is no such file or line here.

        Args:
            source: `file:line`.
            since: when the program ran, in seconds since the epoch; 0 if unknown.
        """
        place = _PLACE.match(source)
        if place is None:
            return None
        found = self._file(place["file"])
        line = int(place["line"])
        if found is None or not 1 <= line <= len(found[0]):
            return None
        first = max(1, line - self._around)
        lines = found[0][first - 1 : line + self._around]
        return Excerpt(
            source=source,
            line=line,
            first=first,
            lines=tuple(printable(cleaner().text(text[:_LONGEST_LINE]).expandtabs(4)) for text in lines),
            changed=0 < since < found[1],
        )

    def _file(self, name: str) -> tuple[list[str], float] | None:
        if name not in self._files:
            self._files[name] = _read(name)
        return self._files[name]


def _read(name: str) -> tuple[list[str], float] | None:
    """Lines of a file and when it was changed; None where it is missing, too large, or no regular file."""
    try:
        path = Path(os.path.expanduser(name)).resolve()
        if path.suffix not in (".py", ".pyw"):  # a link leads elsewhere
            return None
        state = path.stat()
        if not path.is_file() or state.st_size > _LARGEST:
            return None
        return path.read_text(encoding="utf-8", errors="replace").splitlines(), state.st_mtime
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # it is not here: the report comes from another machine, or the file is gone
        return None
