"""The answers to a question as text: facts, lines of source, and the chain step by step."""

import io
from collections.abc import Iterator
from typing import Final

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from omnicomp.audit.views.excerpts import Excerpt, Excerpts
from omnicomp.audit.views.tree import STYLES
from omnicomp.audit.views.why import Answer, Step, Why
from omnicomp.timeline.printable import one_line

__all__ = ["renderables", "to_text"]

_WIDTH: Final = 120
_TONES: Final = {"bad": "bold red", "warn": "yellow", "good": "green", "": "default"}


def to_text(found: Why) -> str:
    """Plain text, 120 columns wide, without colours."""
    stream = io.StringIO()
    console = Console(file=stream, width=_WIDTH, no_color=True, force_terminal=False, legacy_windows=False)
    console.print(*renderables(found), sep="\n", highlight=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).rstrip() + "\n"


def renderables(found: Why) -> Iterator[RenderableType]:
    """Each answer, with a line between them."""
    excerpts = Excerpts()
    for number, answer in enumerate(found.answers):
        if number:
            yield Text()
        yield Text(one_line(answer.title), style=f"bold {STYLES.get(answer.lowering, '')}".strip())
        facts = _grid()
        for name, value in answer.facts:
            if value:
                facts.add_row(Text(name, style="dim"), Text(one_line(value)))
        if answer.source:
            facts.add_row(Text("source", style="dim"), Text(one_line(answer.source)))
        if facts.row_count:
            yield Padding(facts, (0, 0, 0, 2))
        excerpt = excerpts.of(answer.source, answer.time)
        if excerpt is not None:
            yield Padding(_lines(excerpt), (0, 0, 0, 4))
        yield Padding(_steps(answer), (0, 0, 0, 2))
        if answer.places:
            yield Text(f"  the same holds for {len(answer.places)} more:" if len(answer.places) > 1 else "  likewise:")
            for place in answer.places:
                yield Padding(Text(one_line(place), style="dim"), (0, 0, 0, 4))


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _lines(excerpt: Excerpt) -> Text:
    text = Text()
    width = len(str(excerpt.first + len(excerpt.lines)))
    for number, line, meant in excerpt.numbered():
        mark = ">" if meant else " "
        text.append(f"{mark} {number:>{width}} | {line}\n", style="bold" if meant else "dim")
    if excerpt.changed:
        text.append("  (the file was changed after the run)\n", style="yellow")
    text.rstrip()
    return text


def _steps(answer: Answer) -> Table:
    grid = _grid()
    for number, step in enumerate(answer.steps, 1):
        grid.add_row(Text(f"{number}."), _step(step, answer))
    return grid


def _step(step: Step, answer: Answer) -> RenderableType:
    head = Text(one_line(step.what), style=_TONES[step.tone])
    reason = step.reason
    if reason is None:
        return head
    head.append(f": {one_line(reason.sentence)}", style="default").append(one_line(f" [{reason.code}]"), style="dim")
    rows = {
        "observed": reason.observed,
        "needed": reason.needed,
        "at": reason.node,
        "caused by": reason.cause,
        "source": reason.source if reason.source != answer.source else "",
        "to change": reason.lever,
    }
    grid = _grid()
    for name, value in rows.items():
        if value:
            grid.add_row(Text(name, style="dim"), Text(one_line(value), style="italic" if name == "to change" else ""))
    whole = Table.grid()
    whole.add_row(head)
    if grid.row_count:
        whole.add_row(Padding(grid, (0, 0, 0, 2)))
    return whole
