"""docs/known_bugs.md, made from what the programs did."""

from collections.abc import Iterable, Sequence
from typing import Any

from programs import Bug

_HEAD = """# Known bugs, replayed

Silent wrong results that people reported of `torch.compile`, as small programs: what Inductor, omni as it is, and omni
with `verify="always"` and `verify="inductor"` (*passes*) make of them today. `python bench/known_bugs` runs them, and
wrote this page; the programs are in [programs.py](../bench/known_bugs/programs.py). Issues are of pytorch/pytorch, with
their state and the versions they name as of November 2026. All of it ran on a CPU, faults that were seen on CUDA too.
"""

_LEGEND = """
`right` is what eager returns: values within 2e-5 (2e-2 in half precision), dtypes, shapes, what inputs hold afterwards,
whether there are gradients, and strides where these are the fault. Errors count: what eager refuses has to be refused.
*Planted* is the fault of then, put back into Inductor's graph where Inductor has it right today
([plants.py](../bench/known_bugs/plants.py)): what verification makes of it. *Passes* is empty where it was not run, as
where Inductor is right.
"""

_COLUMNS = ("inductor", "omni", "verify", "passes")


def page(bugs: Sequence[Bug], rows: Iterable[dict[str, Any]]) -> str:
    """The page, of the rows of one or several versions of torch."""
    found = {(row["issue"], row["torch"]): row for row in rows}
    versions = sorted({version for _, version in found}, key=lambda text: [int(part) for part in text.split(".")[:2]])
    lines = [_HEAD]
    for version in versions:
        lines += _summary(bugs, version, [found[b.issue, version] for b in bugs if (b.issue, version) in found])
    lines.append(_LEGEND)
    results = [f"{column}, {version}" for version in versions for column in _COLUMNS]
    heads = ["issue", "what was wrong", "named", *results, "planted"]
    lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for known in bugs:
        cells = [_issue(known), known.title.replace("|", "\\|"), _named(known)]
        planted = ""
        for version in versions:
            row = found.get((known.issue, version))
            cells += ["" if row is None else _cell(row, column) for column in _COLUMNS]
            planted = planted or ("" if row is None else _planted(row))
        lines.append(f"| {' | '.join((*cells, planted))} |")
    return "\n".join(lines) + "\n"


def _summary(bugs: Sequence[Bug], version: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    wrong = [row for row in rows if row["inductor"] != "right"]
    exact = {known.issue for known in bugs if known.exact}
    rounding = [row for row in wrong if row["issue"] in exact]
    rest = [row for row in wrong if row["issue"] not in exact]
    planted = [row["planted"] for row in rows if _took(row)]
    there = {row["issue"] for row in rows}
    closed = sum(known.closed is True for known in bugs if known.issue in there)
    return [
        f"## torch {version}",
        "",
        f"- {len(rows)} programs, {closed} of issues seen to be closed. "
        f"Inductor has {len(rows) - len(wrong)} right today.",
        f"- Of the {len(rest)} others, omni as it is has {_right(rest, 'omni')} right, and with verification "
        f"{_right(rest, 'verify')}; with Inductor's own passes checked {_right(rest, 'passes')}, and with one of both "
        f"{sum('right' in (row['verify'], row.get('passes')) for row in rest)}.",
        f"- {len(rounding)} more differ from eager by a rounding that eager makes and Inductor does not: that is no "
        'error for `verify`, and goes away with `numerics="eager"`.',
        f"- {len(planted)} faults that are gone were planted again: omni as it is has {_right(planted, 'omni')} right, "
        f"and with verification {_right(planted, 'verify')}.",
        "",
    ]


def _right(rows: Iterable[dict[str, Any]], column: str) -> int:
    return sum(row.get(column) == "right" for row in rows)


def _took(row: dict[str, Any]) -> bool:
    """Whether the planted fault showed."""
    return bool(row["planted"]) and row["planted"]["inductor"] != "right"


def _issue(known: Bug) -> str:
    state = {True: "", False: ", open", None: ", state unknown"}[known.closed]
    return f"[{known.issue}](https://github.com/pytorch/pytorch/issues/{known.issue}){state}"


def _named(known: Bug) -> str:
    return known.affected + (f", {known.device}" if known.device else "")


def _cell(row: dict[str, Any], column: str) -> str:
    said = row.get(f"{column} said", "")
    return f"{row[column]}, found" if said else row.get(column, "")


def _planted(row: dict[str, Any]) -> str:
    return _cell(row["planted"], "verify") if _took(row) else ""
