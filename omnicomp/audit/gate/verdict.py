"""The verdict on a report by a fallback budget: its data, and as text, JSON and an error message."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from omnicomp.audit.model import Report, Unfinished
from omnicomp.audit.views.jsonform import encode
from omnicomp.audit.views.rows import missing, percent, plural, reason_text, short_source
from omnicomp.options.fallback_limits import FallbackBudget
from omnicomp.safety.escapes import json_text, one_line
from omnicomp.timeline import Reason

STATES: Final[dict[str, str]] = {
    "counts": "counts against the budget",
    "allowed": "the budget allows it",
    "acknowledged": "the project acknowledges it",
    "known": "the baseline has it, too",
    "chosen": "no compiler was asked, or eager was measured to be faster",
}
"""What a fallback can be; only the first one counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fallen:
    """An operator, a subgraph or a graph that is on eager although a compiler was asked first."""

    state: str  # a key of `STATES`
    graph: str  # id of the Dynamo graph
    part: str  # `forward`, `backward`, `inference`, or empty for a whole graph
    why: str = ""  # the selector or the acknowledgement that makes it not count, or empty
    node: str = ""  # name of the node, or empty for a subgraph
    subgraph: str = ""  # id of its subgraph, or empty if that is not known
    # Count of each operator; of a subgraph, of those alone that are of this state.
    ops: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    nodes: int = 1  # how many operators it is
    source: str = ""  # `file:line`, or empty
    module: str = ""  # module path, or empty
    reasons: tuple[Reason, ...] = ()  # why it is on eager, one for each lowering that was asked before

    @property
    def name(self) -> str:
        """The operator that there is most of, or what fell back if its operators are not known."""
        most = sorted(self.ops, key=lambda op: (-self.ops[op], op))
        return most[0] if most else self.subgraph or self.graph


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a budget says of one report."""

    name: str  # of the report: its file, or empty
    audit: Report  # the report
    budget: FallbackBudget  # the bounds
    fallen: tuple[Fallen, ...] = ()  # everything that is on eager, what counts first
    nodes: int = 0  # how many operators count
    # Their part of the work, from 0 to 1; that of a subgraph counts as a whole if any operator of it does.
    share: float = 0.0
    basis: str = "none"  # what the work is counted in, `flops` or `nodes`; `none` if it is not known
    notes: tuple[str, ...] = ()  # what is wrong with the list of acknowledgements, and what of it is about nothing here
    compared: bool = False  # whether only what a baseline does not have counts
    allow_unfinished: bool = False  # whether a report passes of which something has no end

    @property
    def unfinished(self) -> tuple[Unfinished, ...]:
        """What began and has no end, whether or not that is allowed."""
        return self.audit.unfinished

    @property
    def failed(self) -> bool:
        """Whether it is over the budget, or unfinished where that is not allowed."""
        return self.over or self.is_unfinished

    @property
    def is_unfinished(self) -> bool:
        """Whether something has no end, and that is not allowed."""
        return bool(self.unfinished) and not self.allow_unfinished

    @property
    def headline(self) -> str:
        """`over the fallback budget`, `unfinished, and within the fallback budget`, …."""
        head = "over the fallback budget" if self.over else "within the fallback budget"
        allowed = " (allowed)" if self.allow_unfinished else ""
        return f"unfinished{allowed}, and {head} so far" if self.unfinished else head

    @property
    def counted(self) -> tuple[Fallen, ...]:
        """What counts against the budget."""
        return tuple(item for item in self.fallen if item.state == "counts")

    @property
    def over_nodes(self) -> bool:
        """Whether more operators count than may."""
        return self.budget.max_nodes is not None and self.nodes > self.budget.max_nodes

    @property
    def over_share(self) -> bool:
        """Whether they have more of the work than they may."""
        return self.budget.max_flops_share is not None and self.share > self.budget.max_flops_share

    @property
    def over(self) -> bool:
        """Whether it is over the budget."""
        return self.over_nodes or self.over_share

    def summary(self) -> str:
        """One line."""
        counts: dict[str, int] = {}
        for item in self.fallen:
            if item.state != "counts":
                counts[item.state] = counts.get(item.state, 0) + item.nodes
        rest = [f"{count} {state}" for state, count in counts.items()]
        told = (*bounds(self), *rest) if self.audit.graphs else ("no graph was compiled",)
        return f"omni: {self.headline}: {', '.join(told)}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON form that `docs/audit.md` describes, as plain dictionaries and lists."""
        return {
            "schema": CHECK_SCHEMA,
            "name": self.name,
            "summary": self.summary(),
            "over": self.over,
            "over_nodes": self.over_nodes,
            "over_share": self.over_share,
            "failed": self.failed,
            "allow_unfinished": self.allow_unfinished,
            "unfinished": encode(self.unfinished),
            "compared": self.compared,
            "budget": encode(self.budget),
            "nodes": self.nodes,
            "share": self.share,
            "basis": self.basis,
            "fallen": [encode(item) for item in self.fallen],
            "notes": list(self.notes),
        }


CHECK_SCHEMA: Final = 1
_SHOWN: Final = 8
_IN_TEXT: Final = 200
_BASES: Final = {"flops": "FLOPs", "nodes": "operators"}


@dataclasses.dataclass(frozen=True)
class Line:
    """Fallbacks of one state, operator and cause, which a view shows as one."""

    items: tuple[Fallen, ...]  # all of them, at least one

    @property
    def first(self) -> Fallen:
        """What is shown of them."""
        return self.items[0]

    @property
    def nodes(self) -> int:
        """How many operators they are."""
        return sum(item.nodes for item in self.items)

    @property
    def what(self) -> str:
        """`aten.topk.default x3`, or `g0.forward.2 (aten.mm.default and 2 more)` of a subgraph."""
        item = self.first
        if item.node:
            return item.name if self.nodes == 1 else f"{item.name} x{self.nodes}"
        more = f" and {len(item.ops) - 1} more" if len(item.ops) > 1 else ""
        ops = f" ({item.name}{more})" if item.ops else ""
        return f"{item.subgraph or item.graph}{ops}, {plural(self.nodes, 'operator')}"

    @property
    def places(self) -> tuple[str, ...]:
        """Where they come from: source lines, or modules where no line is known."""
        return tuple(dict.fromkeys(item.source or item.module for item in self.items if item.source or item.module))

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that they come from."""
        return tuple(dict.fromkeys(item.module for item in self.items if item.module))

    def where(self, places: Iterable[str]) -> str:
        """` at model.py:12 and 2 more in layers.0.attn and 5 more`."""
        listed = list(places)
        found = f" at {listed[0]}" if listed else ""
        found += f" and {len(listed) - 1} more" if len(listed) > 1 else ""
        modules = self.modules if any(item.source for item in self.items) else ()
        found += f" in {modules[0]}" if modules else ""
        found += f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        return f"{found} (backward)" if self.first.part == "backward" else found


def lines(fallen: Iterable[Fallen]) -> list[Line]:
    """Fallbacks, equal ones of several places as one line."""
    grouped: dict[object, list[Fallen]] = {}
    for item in fallen:
        reasons = tuple((reason.code, reason.by, reason.sentence, reason.lever) for reason in item.reasons)
        which = tuple(sorted(item.ops)) if item.node else item.subgraph
        grouped.setdefault((item.state, item.why, which, item.part, reasons), []).append(item)
    return [Line(tuple(items)) for items in grouped.values()]


def bounds(verdict: Verdict) -> tuple[str, ...]:
    """What counts against each bound: `2 operators run eager (at most 0)`, `5.0 % of FLOPs (at most 1.0 %)`."""
    budget = verdict.budget
    told = plural(verdict.nodes, "new operator" if verdict.compared else "operator")
    verb = "runs" if verdict.nodes == 1 else "run"
    limit = "" if budget.max_nodes is None else f" (at most {budget.max_nodes})"
    found = [f"{told} {verb} eager{limit}"]
    if budget.max_flops_share is not None:
        basis = _BASES.get(verdict.basis, "the work")
        found.append(f"{percent(verdict.share)} of {basis} (at most {percent(budget.max_flops_share)})")
    return tuple(found)


def why(reasons: Sequence[Reason]) -> str:
    """What each lowering that was asked said."""
    return "; ".join(f"{reason.by}: {reason_text(reason)}" if reason.by else reason_text(reason) for reason in reasons)


def levers(reasons: Sequence[Reason]) -> str:
    """What the reader can change."""
    return "; or ".join(dict.fromkeys(reason.lever for reason in reasons if reason.lever))


def _line(line: Line) -> str:
    reasons = line.first.reasons
    text = f"{line.what}{line.where(line.places)}: {why(reasons) or 'no reason was recorded'}"
    return f"{text}. To change this: {levers(reasons)}" if levers(reasons) else text


def message(verdict: Verdict, graph: str) -> str:
    """What the error says, where a graph is compiled: what is over, each operator with its line and lever."""
    found = lines(verdict.counted)
    head = f"{graph} is over the fallback budget: {', '.join(bounds(verdict))}"
    body = [f"  - {one_line(_line(line))}" for line in found[:_SHOWN]]
    more = [f"  - and {plural(len(found) - _SHOWN, 'more line')} in omnicomp.audit()"] if len(found) > _SHOWN else []
    last = "To let one pass, name it in options={'fallback': {'allow': [...]}}, or acknowledge it in pyproject.toml."
    return "\n".join([one_line(head), *body, *more, last])


def _of_one(verdict: Verdict) -> Iterator[str]:
    yield one_line(verdict.summary())
    yield from (f"  - {one_line(line)}" for line in missing(verdict.audit))
    found = lines(verdict.fallen)
    for line in found[:_IN_TEXT]:
        if line.first.state == "counts":
            # Indented alone, a name such as `::error::` would be a command to GitHub, which trims lines.
            yield f"  - {one_line(_line(line))}"
            continue
        because = f": {line.first.why}" if line.first.why else ""
        yield one_line(f"  - {line.first.state}: {what_and_where(line)} ({STATES[line.first.state]}{because})")
    if len(found) > _IN_TEXT:
        yield f"  - and {plural(len(found) - _IN_TEXT, 'more line')}; the format json has them all"


def to_text(verdicts: Sequence[Verdict]) -> str:
    """Plain text: for each report a line, what counts, what does not, and what is wrong with the acknowledgements.

    Reports that say the same are told of once, with the name of the first.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for verdict in verdicts:
        alike.setdefault(tuple(_of_one(verdict)), []).append(one_line(verdict.name))
    text: list[str] = []
    for (head, *rest), names in alike.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text.append(f"{names[0]}{more}: {head}" if len(verdicts) > 1 else head)
        text += rest
    text += [f"note: {one_line(note)}" for note in notes(verdicts)]
    return "\n".join(text) + "\n"


def notes(verdicts: Sequence[Verdict]) -> list[str]:
    """What is wrong with the acknowledgements: of several reports, what holds for all of them."""
    first = verdicts[0].notes if verdicts else ()
    return [note for note in first if all(note in verdict.notes for verdict in verdicts)]


def what_and_where(line: Line) -> str:
    """`aten.topk.default x3 at model.py:12 and 2 more in layers.0`, on one line."""
    return one_line(f"{line.what}{line.where(map(short_source, line.places))}")


def to_json(verdicts: Sequence[Verdict]) -> str:
    """The JSON form: whether any report is over the budget, or unfinished, and the verdicts."""
    over = any(verdict.over for verdict in verdicts)
    unfinished = any(verdict.is_unfinished for verdict in verdicts)
    data = {
        "schema": CHECK_SCHEMA,
        "over": over,
        "unfinished": unfinished,
        "verdicts": [verdict.to_dict() for verdict in verdicts],
    }
    return json_text(data) + "\n"
