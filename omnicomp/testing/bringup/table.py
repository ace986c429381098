"""The results of a bring-up, and which kernels to write next, most valuable first."""

import dataclasses
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from rich.console import Console
from rich.text import Text

from omnicomp.audit.views.layout import FittingTable, asset, cell
from omnicomp.safety.escapes import html_text as e
from omnicomp.safety.escapes import printable
from omnicomp.testing.bringup.calls import check_name
from omnicomp.testing.bringup.ladder import STEPS
from omnicomp.testing.isolated import Outcome, run_isolated

SCHEMA: Final = 1
_SUITE: Final = "omnicomp.testing.bringup.ladder:jobs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One distinct call of the model."""

    operator: str  # `aten::add.Tensor`
    dtypes: tuple[str, ...]  # of its tensors
    shapes: tuple[str, ...]  # classes of their shapes
    calls: int  # how often the model calls it
    parts: tuple[str, ...] = ()  # `forward`, `backward` or `inference`; empty if it runs outside of the captured graphs
    # `yes`, `no` or an empty string (not reached) for each of `STEPS`.
    steps: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    kernel: str = ""  # what eager on the device has: `native`, `composite`, `fallback`, `missing`, `wrong` or `crashed`
    # The operators whose kernels decide, with how often one call of this takes each.
    needs: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    required: tuple[str, ...] = ()  # those of them, and the operator itself, that torch has no kernel of for any device
    lowering: str = ""  # what ran the compiled call
    reason: str = ""  # what is wrong, or empty

    @property
    def matched(self) -> bool:
        """Whether the compiled call equals the CPU's."""
        return self.steps.get("matched") == "yes"

    @property
    def ok(self) -> bool:
        """Whether it matched, and where it runs in eager it is right there too."""
        outside = self.steps.get("captured") == "no"
        return self.matched and not (outside and self.kernel in ("missing", "wrong", "crashed"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Next:
    """A kernel to write."""

    operator: str  # `aten::add.out`
    state: str  # `missing`, `wrong`, `crashed`, `fallback` (runs on the CPU) or `compiled` (missing in eager only)
    # How many calls of the model do not come through without it; for `fallback` and `compiled`, how many calls it
    # serves.
    blocks: int
    required: bool  # whether torch has no kernel for any device
    of: tuple[str, ...]  # the operators of the model that need it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bringup:
    """How far a device is with a model."""

    model: str
    device: str
    training: bool
    graphs: int
    note: str
    rows: tuple[Row, ...]
    whole: Mapping[str, Any]
    census: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    @property
    def ok(self) -> bool:
        """Whether every call and the model as a whole match the CPU."""
        return all(row.ok for row in self.rows) and bool(self.whole["matched"])

    @property
    def calls(self) -> int:
        """Operator calls of one run of the model."""
        return sum(row.calls for row in self.rows)

    def kernels(self) -> dict[str, int]:
        """Calls of the model by what eager on the device has for them."""
        counts: Counter[str] = Counter()
        for row in self.rows:
            counts[row.kernel] += row.calls
        return dict(counts)

    def next(self) -> tuple[Next, ...]:
        """Kernels to write: first those without which calls do not come through, by how many; then the fallbacks."""
        blocks: dict[tuple[str, str], int] = {}
        origins: dict[tuple[str, str], dict[str, None]] = {}
        required: dict[str, bool] = {}
        for row in self.rows:
            state = _state(row)
            if not state:
                continue
            for operator, times in (row.needs or {row.operator: 1}).items():
                key = (operator, state)
                blocks[key] = blocks.get(key, 0) + row.calls * (times if state == "fallback" else 1)
                origins.setdefault(key, {})[row.operator] = None
                required[operator] = required.get(operator, False) or operator in row.required
        order = {state: rank for rank, state in enumerate(_ORDER)}
        keys = sorted(blocks, key=lambda key: (order[key[1]] >= order["fallback"], -blocks[key], key))
        return tuple(
            Next(operator=key[0], state=key[1], blocks=blocks[key], required=required[key[0]], of=tuple(origins[key]))
            for key in keys
        )

    def to_json(self) -> str:
        """`{"schema": 1, "model", "device", "ok", "next": [...], "rows": [...], "whole": {...}, ...}`."""
        body = {
            "schema": SCHEMA,
            "model": self.model,
            "device": self.device,
            "torch": torch.__version__,
            "training": self.training,
            "ok": self.ok,
            "graphs": self.graphs,
            "note": self.note,
            "calls": self.calls,
            "kernels": self.kernels(),
            "next": [dataclasses.asdict(each) for each in self.next()],
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "whole": dict(self.whole),
            "census": dict(self.census),
        }
        return json.dumps(body, indent=2) + "\n"

    def summary(self) -> str:
        """One line."""
        done = sum(row.calls for row in self.rows if row.ok)
        blocked = sum(1 for each in self.next() if each.state not in ("fallback", "compiled"))
        fallbacks = sum(1 for each in self.next() if each.state == "fallback")
        told = [f"{done} of {self.calls} operator calls match the CPU"]
        told += [f"{blocked} {'operator is' if blocked == 1 else 'operators are'} missing or wrong"] if blocked else []
        told += [f"in eager, {fallbacks} {'runs' if fallbacks == 1 else 'run'} on the CPU"] if fallbacks else []
        told.append("the whole model matches" if self.whole["matched"] else "the whole model does not match")
        return f"{self.model} on {self.device}: {'; '.join(told)}"


_ORDER: Final = ("missing", "wrong", "crashed", "fallback", "compiled")


def _state(row: Row) -> str:
    if row.kernel == "crashed":
        return "crashed"
    if not row.ok:
        return "missing" if row.kernel == "missing" else "wrong"
    if row.kernel in ("missing", "wrong"):
        return "compiled"
    return "fallback" if row.kernel == "fallback" else ""


def bringup(
    model: str,
    device: str,
    *,
    size: str = "tiny",
    training: bool = False,
    lowerings: Sequence[str] = (),
    setup: str = "",
    seconds: float = 300.0,
    say: Callable[[Row], None] | None = None,
) -> Bringup:
    """Take every distinct call of a model through the steps on a device, each in a process that may crash.

    Args:
        model: a key of `omnicomp.testing.models.MODELS`, `file.py:function` or `module:function`.
        device: a device type.
        size: of omnicomp's own models.
        training: whether the backward is taken as well.
        lowerings: omnicomp's option of that name; nothing for what the device has.
        setup: `file.py:function` or `module:function` that is called first in the process.
        seconds: that one call may take.
        say: gets each row as it comes.

    Raises:
        OmnicompError: there is no such model or device, or building the model raises.
    """
    check_name(model, size)
    arguments = {"model": model, "device": device, "size": size, "training": training, "setup": setup}
    running = run_isolated(_SUITE, {**arguments, "lowerings": list(lowerings)}, seconds=seconds)
    first = next(running)
    listed: dict[str, Any] = first.result or {"calls": [], "graphs": 0, "note": first.crashed or first.raised}
    rows: list[Row] = []
    whole: Mapping[str, Any] = {"matched": False, "reason": "", "summary": "", "fallbacks": {}}
    for outcome in running:
        if outcome.name == "model":
            whole = outcome.result or {**whole, "reason": outcome.problem}
            continue
        row = _row(listed["calls"][int(outcome.name.split()[1])], outcome)
        rows.append(row)
        if say is not None:
            say(row)
    return Bringup(
        model=model,
        device=device,
        training=training,
        graphs=listed["graphs"],
        note=listed["note"],
        rows=tuple(rows),
        whole=whole,
        census=listed.get("census", {}),
    )


def _row(call: Mapping[str, Any], outcome: Outcome) -> Row:
    head: dict[str, Any] = {
        "operator": call["name"],
        "dtypes": tuple(call["dtypes"]),
        "shapes": tuple(call["shapes"]),
        "calls": call["count"],
        "parts": tuple(call["parts"]),
    }
    if outcome.result is None:
        steps = {**dict.fromkeys(STEPS, ""), "captured": "yes" if call["captured"] else "no"}
        kernel = "crashed" if outcome.crashed else "wrong"
        return Row(**head, steps=steps, kernel=kernel, needs={call["name"]: 1}, reason=outcome.problem)
    body: dict[str, Any] = {**head, **outcome.result, "required": tuple(outcome.result["required"])}
    return Row(**body)


def cells(row: Row) -> Iterator[str]:
    """Texts of a row for every view: operator, dtypes, shapes, calls, kernel, one mark a step, what ran, reason."""
    yield row.operator.removeprefix("aten::")
    yield ", ".join(_runs(row.dtypes))
    yield ", ".join(_runs(row.shapes))
    yield str(row.calls)
    yield row.kernel
    yield from (row.steps[step] for step in STEPS)
    yield row.lowering
    yield row.reason


def _runs(words: Sequence[str]) -> Iterator[str]:
    """`float32 x3` for a word that comes three times in a row."""
    place = 0
    while place < len(words):
        end = place
        while end < len(words) and words[end] == words[place]:
            end += 1
        yield words[place] if end == place + 1 else f"{words[place]} x{end - place}"
        place = end


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
    names = ("operator", "dtypes", "shapes", "calls", "kernel", *(step[:4] for step in STEPS), "ran by")
    spare = ("shapes", "dtypes", "ran by", "calls")
    table = FittingTable(f"{found.model} on {found.device}", *names, right=("calls",), spare=spare)
    for row in found.rows:
        operator, dtypes, shapes, calls, kernel, *rest = (printable(cell) for cell in cells(row))
        marks = [Text(_MARKS[state], style=_TONES[state]) for state in rest[: len(STEPS)]]
        table.add_row(*map(Text, (operator, dtypes, shapes, calls, kernel)), *marks, Text(rest[len(STEPS)]))
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
    table = FittingTable("To write next", "kernel", "state", "calls", "needed", "for", right=("calls",))
    for each in found.next():
        of = [name for name in each.of if name != each.operator]
        told = (each.operator, each.state, each.blocks, _what(each), ", ".join(of))
        table.add_row(*map(cell, told))
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
