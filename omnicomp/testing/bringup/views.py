"""The table for a terminal, and as one HTML file in the style of the audit."""

import io
from collections.abc import Iterable
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from omnicomp.audit.views.rows import printable
from omnicomp.audit.views.style import asset
from omnicomp.escapes import html_text as e
from omnicomp.testing.bringup.ladder import STEPS
from omnicomp.testing.bringup.table import Bringup, Next, Row, cells

__all__ = ["print_table", "to_html", "to_text"]

_MARKS: Final = {"yes": "✓", "no": "✗", "": "·"}
_TONES: Final = {"yes": "green", "no": "bold red", "": "dim"}
_STATES: Final = {
    "missing": "nothing computes it on the device",
    "wrong": "computes something else than the CPU, or raises",
    "crashed": "ends the interpreter",
    "fallback": "runs on the CPU, with copies there and back",
    "compiled": "compiled for the device; eager has none",
}


def _what(each: Next) -> str:
    return "required" if each.required else "optional: torch has one for any device"


def print_table(found: Bringup, console: Console) -> None:
    """Print the table, what to write next, and the summary."""
    table = Table(title=f"{found.model} on {found.device}", title_justify="left", pad_edge=False, expand=False)
    for column in ("operator", "dtypes", "shapes"):
        table.add_column(column, overflow="fold")
    table.add_column("calls", justify="right")
    table.add_column("kernel")
    for step in STEPS:
        table.add_column(step[:4], justify="center")
    table.add_column("ran by")
    for row in found.rows:
        operator, dtypes, shapes, calls, kernel, *rest = (printable(cell) for cell in cells(row))
        marks = [Text(_MARKS[state], style=_TONES[state]) for state in rest[: len(STEPS)]]
        table.add_row(operator, dtypes, shapes, calls, kernel, *marks, rest[len(STEPS)])
    console.print(table)
    wrong = {row.operator: row.reason for row in found.rows if row.reason and not row.ok}
    for operator, reason in wrong.items():
        console.print(Text(f"{operator}: {printable(reason)}"))
    if found.next():
        _print_next(found, console)
    if found.note:
        console.print(Text(f"not one graph: {printable(found.note)}"))
    if found.whole["reason"]:
        console.print(Text(f"the whole model: {printable(found.whole['reason'])}"))
    if found.census:
        console.print(Text(_census(found)))
    console.print(Text(found.summary()))


def _census(found: Bringup) -> str:
    told = ", ".join(f"{count} {kernel}" for kernel, count in found.census.items())
    return f"all of torch's operators on {found.device}: {told}"


def _print_next(found: Bringup, console: Console) -> None:
    table = Table(title="To write next", title_justify="left", pad_edge=False)
    for column in ("kernel", "state", "calls", "", "for"):
        table.add_column(column, justify="right" if column == "calls" else "left", overflow="fold")
    for each in found.next():
        of = [name for name in each.of if name != each.operator]
        table.add_row(each.operator, each.state, str(each.blocks), _what(each), ", ".join(of))
    console.print(table)


def to_text(found: Bringup, width: int = 150) -> str:
    """What `print_table` prints, without colours."""
    stream = io.StringIO()
    print_table(found, Console(file=stream, width=width, no_color=True, legacy_windows=False))
    return stream.getvalue()


_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>omnicomp bring-up</title>
<style>
{style}.yes {{ color: var(--inductor); }} .no {{ color: var(--bad); font-weight: 600; }}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def to_html(found: Bringup) -> str:
    """One file: no network, no script, light or dark as the reader's system asks."""
    body = "\n".join(part for part in (_header(found), _next(found), _rows(found), _whole(found)) if part)
    return _PAGE.format(style=asset("base.css"), body=body)


def _code(value: object) -> str:
    return f"<code>{e(value)}</code>" if value else ""


def _header(found: Bringup) -> str:
    steps = {step: sum(row.calls for row in found.rows if row.steps[step] == "yes") for step in STEPS}
    pill = '<span class="pill good">matched</span>' if found.ok else '<span class="pill bad">not there yet</span>'
    tiles = "".join(f'<div class="tile"><b>{count}</b>{e(step)}</div>' for step, count in steps.items())
    kernels = ", ".join(f"{count} {kernel}" for kernel, count in sorted(found.kernels().items()))
    return (
        f"<header>\n<h1>omnicomp bring-up {pill}</h1>\n"
        f'<p class="summary">{e(found.summary())}</p>\n<div class="tiles">{tiles}</div>\n'
        f'<p class="note">Calls of {found.calls}; in eager on the device: {e(kernels)}.<br>'
        f"{e(_census(found)) if found.census else ''}</p></header>"
    )


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], note: str = "") -> str:
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    if not lines:
        return ""
    head = "".join(f"<th>{e(column)}</th>" for column in columns)
    foot = f"<p class=note>{e(note)}</p>" if note else ""
    return (
        f"<section><details open><summary><h2>{e(title)}</h2></summary>\n"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + f"\n</tbody></table></div>{foot}</details></section>"
    )


def _number(value: object) -> str:
    return f'<span class="number">{e(value)}</span>'


def _next(found: Bringup) -> str:
    rows = (
        (
            _code(each.operator),
            f'<span class="badge">{e(each.state)}</span> {e(_STATES[each.state])}',
            _number(each.blocks),
            e(_what(each)),
            " ".join(_code(name) for name in each.of if name != each.operator),
        )
        for each in found.next()
    )
    note = (
        "Required: torch has no kernel of it for any device. What blocks most comes first, then what runs on the CPU."
    )
    return _table("To write next", ("kernel", "state", "calls", "", "for"), rows, note)


def _rows(found: Bringup) -> str:
    def row(each: Row) -> list[str]:
        operator, dtypes, shapes, calls, kernel, *rest = cells(each)
        marks = [f'<span class="{state or "dim"}">{_MARKS[state]}</span>' for state in rest[: len(STEPS)]]
        lowering, reason = rest[len(STEPS) :]
        what = f"{e(kernel)}{'<br><span class=dim>required</span>' if each.operator in each.required else ''}"
        parts = ", ".join(each.parts) or "outside of graphs"
        return [
            f"{_code(operator)}<br><span class=dim>{e(parts)}</span>",
            e(dtypes),
            e(shapes),
            _number(calls),
            what,
            *marks,
            e(lowering),
            e(reason),
        ]

    columns = ("operator", "dtypes", "shapes", "calls", "kernel", *STEPS, "ran by", "what is wrong")
    return _table("Operators", columns, (row(each) for each in found.rows), found.note)


def _whole(found: Bringup) -> str:
    whole: Any = found.whole
    fell = ", ".join(f"{name} x{count}" for name, count in whole["fallbacks"].items())
    facts = (
        ("matches the CPU", "yes" if whole["matched"] else "no"),
        ("what is wrong", whole["reason"]),
        ("what ran", whole["summary"]),
        ("ran on the CPU", fell),
    )
    return _table("The whole model", ("", ""), ((e(name), e(value)) for name, value in facts if value))
