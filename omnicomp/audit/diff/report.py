"""What differs between two reports, and how it is shown; `omnicomp.audit.diff.compare` finds it."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from omnicomp.audit.views import rows
from omnicomp.audit.views.jsonform import encode
from omnicomp.audit.views.layout import FittingTable, cell, plain
from omnicomp.audit.views.rows import plural
from omnicomp.safety.escapes import json_text, markdown
from omnicomp.timeline import Reason

DIFF_SCHEMA: Final = 1

KINDS: Final[dict[str, str]] = {
    "unfinished": "began and has no end: a process, a graph, or a part that was never called",
    "fell_back": "runs eager now, though the policy has an earlier lowering",
    "mismatch": "did not run as planned, and no retreat says why",
    "wrong": "an override was found to compute something else than its reference",
    "retreat": "moved to another lowering after a failure",
    "finished": "has an end now",
    "recovered": "does not fall back to eager any more",
    "moved": "is on another lowering",
    "cut": "a part is cut otherwise",
    "appeared": "is there now",
    "disappeared": "is not there any more",
    "edited": "consists of other operators",
    "sizes": "was compiled for sizes of another class",
    "pass_stopped": "a pass rewrites fewer places",
    "pass_started": "a pass rewrites more places",
    "near_miss": "a pass has a near miss that it did not have before",
    "near_miss_gone": "a near miss is not there any more",
    "not_called": "was called in one of the two runs only",
    "option": "an option took effect with another value",
    "version": "another version",
    "device": "another device or platform",
    "time": "a time is beyond the threshold",
    "memory": "memory is beyond the threshold",
}
"""The kinds of changes, the most urgent first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that differs; equal ones of several places are one, with a count."""

    kind: str  # a key of `KINDS`
    what: str  # the operator, subgraph, pass, option or software
    sentence: str  # what differs, in one sentence
    graph: str = ""  # identity of the graph, or empty where it is about all
    part: str = ""  # `forward`, `backward`, `inference`, or empty
    before: str = ""  # how it was, as text; empty if it was not there
    after: str = ""  # how it is, likewise
    places: tuple[str, ...] = ()  # up to eight module paths, `file:line` or identities of subgraphs that it is about
    count: int = 1  # how many places it is about
    reasons: tuple[Reason, ...] = ()  # why it is as it is now, where that was recorded
    significant: bool = True  # whether it makes the two reports different; names of machines do not


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """Something measured in both runs; it differs from run to run, and so decides nothing without a threshold."""

    name: str
    unit: str
    before: float
    after: float

    @property
    def growth(self) -> float | None:
        """Growth relative to the value before; None if that was 0."""
        return self.after / self.before - 1 if self.before else None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AuditDiff:
    """What differs between two reports."""

    before: str  # the summary line of the first
    after: str  # the summary line of the second
    changes: tuple[Change, ...] = ()  # what differs, the most urgent first
    measures: tuple[Measure, ...] = ()  # times and memory of both
    time_threshold: float | None = None  # growth of a time that is a change, as a part of what it was; None for none
    memory_threshold: float | None = None  # likewise of memory

    @property
    def differs(self) -> bool:
        """Whether anything differs that is not the machine's name."""
        return any(change.significant for change in self.changes)

    def of_kind(self, kind: str) -> Iterator[Change]:
        """The changes of a kind."""
        return (change for change in self.changes if change.kind == kind)

    def summary(self) -> str:
        """One line."""
        counts: dict[str, int] = {}
        for change in self.changes:
            if change.significant:
                counts[change.kind] = counts.get(change.kind, 0) + change.count
        if not counts:
            return "omni: nothing differs"
        pieces = [f"{label(kind)} {count}" for kind, count in counts.items()]
        return f"omni: {plural(sum(counts.values()), 'difference')}: {', '.join(pieces)}"

    def to_text(self) -> str:
        """Plain text, 120 columns wide."""
        return plain(*renderables(self))

    def to_json(self) -> str:
        """The JSON form that `docs/audit.md` describes."""
        return json_text(self.to_dict()) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """The JSON form as plain dictionaries and lists."""
        measured = [{**encode(measure), "growth": measure.growth} for measure in self.measures]
        body = encode(self)
        return {"schema": DIFF_SCHEMA, "summary": self.summary(), "differs": self.differs, **body, "measures": measured}

    def to_markdown(self) -> str:
        """Markdown for a comment on a pull request."""
        lines = [f"**{markdown(self.summary())}**", ""]
        if self.changes:
            lines += [f"before: {markdown(self.before)}<br>", f"after: {markdown(self.after)}", ""]
            lines += ["| | what differs | where | why |", "|---|---|---|---|"]
            for change in self.changes:
                why = "<br>".join(markdown(rows.with_lever(reason)) for reason in change.reasons)
                lines.append(
                    f"| {label(change.kind)} | {markdown(_sentence(change))} | {markdown(_where(change))} | {why} |"
                )
            lines.append("")
        if self.measures:
            lines += [f"<details><summary>Measured; {_rule(self)}</summary>", ""]
            lines += ["| | before | after | growth |", "|---|---:|---:|---:|"]
            lines += [f"| {' | '.join(map(markdown, _cells(measure)))} |" for measure in self.measures]
            lines += ["", "</details>", ""]
        return "\n".join(lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from renderables(self)

    def __str__(self) -> str:
        return plain(*renderables(self), width=None)

    def __repr__(self) -> str:
        return self.summary()


_LABELS: Final = {"near_miss_gone": "near miss gone", "not_called": "called"}
_STYLES: Final = {"fell_back": "yellow", "mismatch": "bold red", "wrong": "bold red", "recovered": "green"}


def label(kind: str) -> str:
    """A kind of change for a person."""
    return _LABELS.get(kind, kind.replace("_", " "))


def renderables(diff: AuditDiff) -> Iterator[RenderableType]:
    """The line, what both reports say of themselves if anything differs, the changes, and what was measured."""
    yield cell(diff.summary(), "bold")
    if diff.changes:
        yield cell(f"before: {diff.before.removeprefix('omni: ')}", "dim")
        yield cell(f"after:  {diff.after.removeprefix('omni: ')}", "dim")
        yield Text()
        yield _changes(diff)
    if diff.measures:
        yield Text()
        yield _measured(diff)
        yield cell(_rule(diff), "dim")


def _changes(diff: AuditDiff) -> FittingTable:
    found = FittingTable("Differences", "kind", "what differs", "where", "why")
    for change in diff.changes:
        found.add_row(
            cell(label(change.kind), _STYLES.get(change.kind, "")),
            cell(_sentence(change)),
            cell(_where(change)),
            cell("\n".join(map(rows.with_lever, change.reasons))),
        )
    return found


def _measured(diff: AuditDiff) -> FittingTable:
    found = FittingTable("Measured", "what", "before", "after", "growth", right=("before", "after", "growth"))
    for measure in diff.measures:
        found.add_row(*map(cell, _cells(measure)))
    return found


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


def shown(value: float, unit: str) -> str:
    """A measured value for a person: `1.25 s`, `12.0 MiB`, `3`."""
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
    if unit == "bytes":
        return f"{value / 2**20:.1f} MiB"
    return f"{value:g}"
