"""A folder of timelines as text and as one HTML page without script; every name passes through an escape."""

import html
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.box import ASCII_DOUBLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omnicomp.audit.fleet.runs import Fleet, Group, Process, ranges_of
from omnicomp.audit.views.summary import percent
from omnicomp.timeline.printable import printable

__all__ = ["to_html", "to_text"]

_WIDTH: Final = 120
# Lines of processes that a view shows; equal ranks are in the table of groups.
_MOST: Final = 500

_GROUPS: Final = ("report", "processes", "ranks", "example", "what it says")
_PROCESSES: Final = ("rank", "process", "file", "report", "graphs", "subgraphs", "work", "issues", "compiled", "caches")
_STYLE: Final = """\
:root { color-scheme: light dark; --line: #8884; --dim: #777; --bad: #c0392b; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1320px; padding: 24px; }
h1 { font-size: 20px; } h2 { font-size: 15px; margin-top: 28px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 4px 10px; border-bottom: 1px solid var(--line); }
th { font-size: 12px; color: var(--dim); white-space: nowrap; }
td { overflow-wrap: anywhere; }
.bad { color: var(--bad); } .dim { color: var(--dim); } ul { list-style: none; padding: 0; }
li { font: 12.5px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
"""

Rows = Iterable[Sequence[str]]


def _name(number: int) -> str:
    """`A` for the first group, `B`, …, `Z`, `AA`."""
    letters = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters


def _group_rows(found: Fleet) -> Iterator[Sequence[str]]:
    for group in found.groups:
        says = group.summary.removeprefix("omni: ")
        yield _name(group.number), str(group.processes), ranges_of(group.ranks), group.example, says


def _process_rows(found: Fleet) -> Iterator[Sequence[str]]:
    for process in found.processes[:_MOST]:
        yield (
            str(process.rank),
            str(process.pid or ""),
            process.path,
            _name(process.group),
            str(process.graphs),
            str(process.subgraphs),
            ", ".join(f"{name or 'unplanned'} {percent(share)}" for name, share in process.shares.items()),
            _issues(process),
            f"{process.seconds:.1f} s",
            ", ".join(f"{verdict} {count}" for verdict, count in process.caches.items()),
        )


def _issues(process: Process) -> str:
    counts = {
        "not as planned": process.mismatches,
        "fallbacks": process.fallbacks,
        "retreats": process.retreats,
    }
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def _differences(group: Group) -> list[str]:
    """Facts that a group has beside the first one's, and those that it lacks."""
    lines = [f"+ {fact}" for fact in group.added] + [f"- {fact}" for fact in group.missing]
    more = group.differences - len(lines)
    if group.differences < 0:
        lines.append("not compared: there are more kinds of reports than are held on to")
    elif more > 0:
        lines.append(f"and {more} more")
    return lines


def _more(found: Fleet) -> str:
    hidden = len(found.processes) - _MOST
    return f"and {hidden} more processes; the JSON form has them all" if hidden > 0 else ""


def to_text(found: Fleet) -> str:
    """Plain text, 120 columns wide, without colours."""
    stream = io.StringIO()
    console = Console(file=stream, width=_WIDTH, no_color=True, force_terminal=False, legacy_windows=False)
    console.print(_text(found.summary()), highlight=False)
    tables = (_table("Reports", _GROUPS, _group_rows(found)), _table("Processes", _PROCESSES, _process_rows(found)))
    for table in tables:
        console.print(Text(), table, sep="\n")
    if _more(found):
        console.print(_text(_more(found)))
    for group in found.groups[1:]:
        console.print(Text(), _text(f"Report {_name(group.number)} against {_name(0)}"), sep="\n")
        for line in _differences(group):
            console.print(_text(f"  {line}"))
    for path, error in found.unreadable:
        console.print(_text(f"{path}: {error}"))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).rstrip() + "\n"


def _text(value: str) -> Text:
    return Text(printable(value))


def _table(title: str, columns: Sequence[str], rows: Rows) -> Table:
    table = Table(title=title, title_justify="left", box=ASCII_DOUBLE_HEAD, expand=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def to_html(found: Fleet) -> str:
    """The whole page."""
    body = [f"<h1>omnicomp audit</h1>\n<p>{_e(found.summary().removeprefix('omni: '))}</p>"]
    body += [_html_table("Reports", _GROUPS, _group_rows(found))]
    for group in found.groups[1:]:
        items = "".join(f"<li>{_e(line)}</li>" for line in _differences(group))
        title = f"Report {_name(group.number)} against {_name(0)}"
        body.append(f"<section><h2>{_e(title)}</h2>\n<ul>{items}</ul></section>")
    body.append(_html_table("Processes", _PROCESSES, _process_rows(found)))
    body += [f'<p class="dim">{_e(_more(found))}</p>'] if _more(found) else []
    if found.unreadable:
        items = "".join(f"<li>{_e(path)}: {_e(error)}</li>" for path, error in found.unreadable)
        body.append(f'<section><h2 class="bad">Could not be read</h2>\n<ul>{items}</ul></section>')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>omnicomp audit</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _e(value: object) -> str:
    return html.escape(printable(value), quote=True)


def _html_table(title: str, columns: Sequence[str], rows: Rows) -> str:
    head = "".join(f"<th>{_e(column)}</th>" for column in columns)
    body = "\n".join(f"<tr>{''.join(f'<td>{_e(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<section><h2>{_e(title)}</h2>\n<div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div></section>"
    )
