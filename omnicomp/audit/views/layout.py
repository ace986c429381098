"""The layout of text: plain output of a width, and tables that cut no word."""

import functools
import io
import os
import re
import shutil
import sys
import textwrap
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Final

from rich.box import ASCII2
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from omnicomp.safety.escapes import printable


def width_of() -> int:
    """The width of the terminal, or what `COLUMNS` says; 120 where there is neither."""
    return shutil.get_terminal_size((120, 24)).columns


def plain(*renderables: RenderableType, width: int | None = 120) -> str:
    """Text without colours or trailing blanks, for files and pipes; as wide as the terminal if no width is given."""
    stream = io.StringIO()
    size = max(width_of() if width is None else width, 20)
    console = Console(file=stream, width=size, no_color=True, force_terminal=False, legacy_windows=False)
    console.print(*renderables, sep="\n", highlight=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).rstrip() + "\n"


def cell(value: object, style: str = "") -> Text:
    """Text that shows markup and control characters instead of obeying them."""
    return Text(printable(value), style=style)


class Facts:
    """Names with values beside them; a word that is longer than the line, such as a path, is broken at a separator."""

    def __init__(self, *pairs: tuple[str, Text], indent: int = 0) -> None:
        self.pairs = list(pairs)
        self.indent = indent

    def add(self, name: str, value: Text) -> None:
        """Add a name and its value."""
        self.pairs.append((name, value))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = max((cell_len(name) for name, _ in self.pairs), default=0)
        room = max(options.max_width - self.indent - names - 2, 1)
        found = Table.grid(padding=(0, 2))
        found.add_column(no_wrap=True)
        found.add_column(overflow="fold")
        for name, value in self.pairs:
            found.add_row(Text(name, style="dim"), _broken(value, room))
        if self.pairs:
            yield Padding(found, (0, 0, 0, self.indent))


def _broken(text: Text, width: int) -> Text:
    """The same with words that are longer than a line broken after a separator: a slash if there is one."""
    breaks: list[int] = []
    for word in re.finditer(rf"\S{{{width + 1},}}", text.plain):
        start = word.start()
        while word.end() - start > width:
            line = text.plain[start : start + width]
            ends = [found.end() for found in re.finditer(r"[/\\]", line)] or [
                found.end() for found in re.finditer(r"[.,_=-]", line)
            ]
            start += ends[-1] if ends else width
            breaks.append(start)
    return Text("\n").join(text.divide(breaks)) if breaks else text


def fitted(text: str) -> str:
    """Lines as wide as the terminal, or as `COLUMNS` says, continued below where their last column begins.

    Without either they are left as they are: a log is searched by lines. A line that GitHub would read as a command
    (`::error::`) can't begin by it.
    """
    if not ((sys.stdout is not None and sys.stdout.isatty()) or os.environ.get("COLUMNS")):
        return text
    lines: list[str] = []
    width = width_of()
    for line in text.splitlines():
        columns = re.match(r"\s*(?:(?:- |-> )|(?:\S(?: ?\S)* {2,})*)", line)
        indent = columns.end() if columns and columns.end() < len(line) else 2
        indent = max(0, min(indent, width // 2, width - max(map(len, line.split()), default=0)))
        whole = _broken(Text(line), width - indent).plain.replace("\n", " ")
        kept = textwrap.wrap(whole, width, subsequent_indent=" " * indent, break_on_hyphens=False)
        safe = not any(piece.lstrip().startswith("::") for piece in kept[1:])
        lines += kept if len(line) > width and safe else [line]
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


class FittingTable:
    """A table that cuts no word where it is too wide: it leaves columns out, and then stacks its rows.

    Its rules are ASCII, the same in a log file, a pager and a terminal without Unicode. Columns without any text are
    left out as well.

    Args:
        title: the line above it, or empty.
        names: the columns.
        right: those with numbers.
        spare: those that may be left out, in this order.
    """

    def __init__(self, title: str, *names: str, right: Collection[str] = (), spare: Sequence[str] = ()) -> None:
        self.title = title
        self.names = names
        self.right = right
        self.spare = spare
        self.rows: list[tuple[Text, ...]] = []

    def add_row(self, *cells: Text) -> None:
        """Add a row of as many cells as there are columns."""
        self.rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="bold")
        kept = [index for index in range(len(self.names)) if any(row[index].plain for row in self.rows)]
        for left in range(len(self.spare) + 1):
            names = [index for index in kept if self.names[index] not in self.spare[:left]]
            widths = self._widths(names, options.max_width)
            if widths:
                yield self._ruled(names, widths)
                return
        yield from self._stacked(kept)

    def _ruled(self, kept: Sequence[int], widths: Sequence[int]) -> Table:
        found = Table(box=ASCII2, show_edge=False, pad_edge=False)
        for index, width in zip(kept, widths, strict=True):
            justify = "right" if self.names[index] in self.right else "left"
            found.add_column(self.names[index], justify=justify, overflow="fold", width=width)
        for row in self.rows:
            found.add_row(*(row[index] for index in kept))
        return found

    def _widths(self, kept: Sequence[int], limit: int) -> list[int]:
        """Widths of columns that cut no word, as even as that allows; empty if there are none."""
        texts = [[self.names[index], *(row[index].plain for row in self.rows)] for index in kept]
        widths = [max(cell_len(line) for text in column for line in text.splitlines() or [""]) for column in texts]
        least = [
            width
            if self.names[index] in self.right
            else max(cell_len(word) for text in column for word in text.split() or [""])
            for index, width, column in zip(kept, widths, texts, strict=True)
        ]
        room = limit - 3 * (len(kept) - 1)
        if sum(least) > room:
            return []
        while sum(widths) > room:
            widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])
            widths[widest] -= 1
        return widths

    def _stacked(self, kept: Sequence[int]) -> Iterator[RenderableType]:
        for row in self.rows:
            filled = [index for index in kept if row[index].plain]
            yield row[filled[0]] if filled else Text()
            yield Facts(*((self.names[index], row[index]) for index in filled[1:]), indent=2)


@functools.cache
def asset(name: str) -> str:
    """The text of a file in `omnicomp/audit/page`."""
    return files("omnicomp.audit").joinpath("page").joinpath(name).read_text(encoding="utf-8")


ENGINES: Final = 6
"""How many colours there are for engines: the classes `engine-0`, … of `page/base.css`."""

_KNOWN: Final = ("inductor", "override", "eager")


def tones(lowerings: Iterable[str]) -> dict[str, str]:
    """The style class of each lowering.

    An engine's is chosen by a hash of its name, so that it has one colour in every report. Of two engines of one report
    for which that is the same, the second in order of name takes the next one that is free, as long as there are some.
    """
    found = {name: name for name in _KNOWN}
    taken: set[int] = set()
    for name in sorted({name for name in lowerings if name} - found.keys()):
        first = zlib.crc32(name.encode("utf-8", "backslashreplace")) % ENGINES
        free = (number % ENGINES for number in range(first, first + ENGINES) if number % ENGINES not in taken)
        number = next(free, first)
        taken.add(number)
        found[name] = f"engine-{number}"
    return found
