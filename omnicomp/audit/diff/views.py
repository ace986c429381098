"""Views of what differs between two reports: one line, a terminal, JSON, Markdown."""

import io
import json
from collections.abc import Iterator
from typing import Any, Final

from rich.box import ASCII_DOUBLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from omnicomp.audit.diff.changes import DIFF_SCHEMA, AuditDiff, Change, Measure
from omnicomp.audit.diff.measuring import shown
from omnicomp.audit.views import rows
from omnicomp.audit.views.form import encode
from omnicomp.audit.views.summary import plural

__all__ = ["renderables", "summary", "to_dict", "to_json", "to_markdown", "to_text"]

_WIDTH: Final = 120
_ESCAPES: Final = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "@": "&#64;", **{char: f"\\{char}" for char in "\\`*_[]~#"}}
)
_LABELS: Final = {"near_miss_gone": "near miss gone", "not_called": "called"}
_STYLES: Final = {"fell_back": "yellow", "mismatch": "bold red", "wrong": "bold red", "recovered": "green"}


def summary(diff: AuditDiff) -> str:
    """One line: how many changes of which kind."""
    counts: dict[str, int] = {}
    for change in diff.changes:
        if change.significant:
            counts[change.kind] = counts.get(change.kind, 0) + change.count
    if not counts:
        return "omni: nothing differs"
    pieces = [f"{label(kind)} {count}" for kind, count in counts.items()]
    return f"omni: {plural(sum(counts.values()), 'difference')}: {', '.join(pieces)}"


def label(kind: str) -> str:
    """A kind of change for a person."""
    return _LABELS.get(kind, kind.replace("_", " "))


def to_text(diff: AuditDiff) -> str:
    """Plain text, 120 columns wide, without colours."""
    stream = io.StringIO()
    console = Console(file=stream, width=_WIDTH, no_color=True, force_terminal=False, legacy_windows=False)
    console.print(*renderables(diff), sep="\n", highlight=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).rstrip() + "\n"


def renderables(diff: AuditDiff) -> Iterator[RenderableType]:
    """The line, what both reports say of themselves if anything differs, the changes, and what was measured."""
    yield _text(summary(diff), "bold")
    if diff.changes:
        yield _text(f"before: {diff.before.removeprefix('omni: ')}", "dim")
        yield _text(f"after:  {diff.after.removeprefix('omni: ')}", "dim")
        yield Text()
        yield _changes(diff)
    if diff.measures:
        yield Text()
        yield _measured(diff)
        yield _text(_rule(diff), "dim")


def _changes(diff: AuditDiff) -> Table:
    table = Table(title="Differences", title_justify="left", title_style="bold", box=ASCII_DOUBLE_HEAD)
    for column in ("kind", "what differs", "where", "why"):
        table.add_column(column, overflow="fold")
    for change in diff.changes:
        table.add_row(
            _text(label(change.kind), _STYLES.get(change.kind, "")),
            _text(_sentence(change)),
            _text(_where(change)),
            _text("\n".join(map(rows.with_lever, change.reasons))),
        )
    return table


def _measured(diff: AuditDiff) -> Table:
    table = Table(title="Measured", title_justify="left", title_style="bold", box=ASCII_DOUBLE_HEAD)
    for column in ("what", "before", "after", "growth"):
        table.add_column(column, justify="left" if column == "what" else "right", overflow="fold")
    for measure in diff.measures:
        table.add_row(*map(_text, _cells(measure)))
    return table


def _rule(diff: AuditDiff) -> str:
    limits = {"time": diff.time_threshold, "memory": diff.memory_threshold}
    told = [f"growth of {name} beyond {100 * limit:g} %" for name, limit in limits.items() if limit is not None]
    return f"{' or '.join(told)} is a difference" if told else "none of it is a difference: no threshold was given"


def _cells(measure: Measure) -> tuple[str, str, str, str]:
    growth = "" if measure.growth is None else f"{100 * measure.growth:+.0f} %"
    return measure.name, shown(measure.before, measure.unit), shown(measure.after, measure.unit), growth


def _sentence(change: Change) -> str:
    return change.sentence if change.significant else f"{change.sentence} (for information)"


def _where(change: Change) -> str:
    """`forward: layers.0.attn, layers.1.attn and 30 more`."""
    left = change.count - len(change.places)
    places = ", ".join(change.places[:3]) if change.places else ""
    more = left + max(len(change.places) - 3, 0) if change.places else 0
    places += f" and {more} more" if more > 0 else ""
    if not places and change.count > 1:
        places = f"{change.count} places"
    return ": ".join(piece for piece in (change.part, places) if piece)


def _text(value: object, style: str = "") -> Text:
    return Text(rows.printable(value), style=style)


def to_dict(diff: AuditDiff) -> dict[str, Any]:
    """The JSON form as plain dictionaries and lists."""
    measured = [{**encode(measure), "growth": measure.growth} for measure in diff.measures]
    body = encode(diff)
    return {"schema": DIFF_SCHEMA, "summary": summary(diff), "differs": diff.differs, **body, "measures": measured}


def to_json(diff: AuditDiff) -> str:
    """The JSON form as text."""
    return json.dumps(to_dict(diff), indent=2, ensure_ascii=False) + "\n"


def to_markdown(diff: AuditDiff) -> str:
    """Markdown for a comment on a pull request; names from a model are shown and not obeyed."""
    lines = [f"**{_escaped(summary(diff))}**", ""]
    if diff.changes:
        lines += [f"before: {_escaped(diff.before)}<br>", f"after: {_escaped(diff.after)}", ""]
        lines += ["| | what differs | where | why |", "|---|---|---|---|"]
        for change in diff.changes:
            why = "<br>".join(_escaped(rows.with_lever(reason)) for reason in change.reasons)
            lines.append(
                f"| {label(change.kind)} | {_escaped(_sentence(change))} | {_escaped(_where(change))} | {why} |"
            )
        lines.append("")
    if diff.measures:
        lines += [f"<details><summary>Measured; {_rule(diff)}</summary>", ""]
        lines += ["| | before | after | growth |", "|---|---:|---:|---:|"]
        lines += [f"| {' | '.join(_cells(measure))} |" for measure in diff.measures]
        lines += ["", "</details>", ""]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Text in which nothing is Markdown, HTML, a mention or a link."""
    return " ".join(rows.printable(text).split()).translate(_ESCAPES)
