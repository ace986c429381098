"""The words, numbers and cells that all views of a report share, and the report in one line."""

import dataclasses
import io
from collections.abc import Collection, Iterator
from typing import Final

from rich.box import ASCII_DOUBLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from omnicomp.audit.model import Fallback, GraphAudit, Report, SubgraphAudit
from omnicomp.escapes import one_line, printable
from omnicomp.timeline import Cache, Calibration, NearMiss, PassRun, Reason, Retreat, Speculation

__all__ = [
    "NOTHING",
    "ReasonRow",
    "basis_note",
    "cache_note",
    "calibration",
    "cell",
    "counts",
    "duration",
    "graph_breaks",
    "graph_line",
    "near_miss_text",
    "node_diff",
    "pass_result",
    "percent",
    "plain",
    "plural",
    "printable",
    "reason_rows",
    "reason_text",
    "short_source",
    "speculation",
    "status",
    "step_of",
    "summary",
    "table",
    "to_line",
    "what",
    "with_lever",
]

NOTHING = "omni: nothing was compiled yet; call the compiled function first"


def plain(*renderables: RenderableType, width: int = 120) -> str:
    """Text without colours or trailing blanks, for files and pipes."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, no_color=True, force_terminal=False, legacy_windows=False)
    console.print(*renderables, sep="\n", highlight=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).rstrip() + "\n"


def cell(value: object, style: str = "") -> Text:
    """Text that shows markup and control characters instead of obeying them."""
    return Text(printable(value), style=style)


def table(title: str, *columns: str, right: Collection[str] = ()) -> Table:
    """An empty table whose rules are ASCII: the same in a log file, a pager and a terminal without Unicode."""
    found = Table(title=title, title_justify="left", title_style="bold", box=ASCII_DOUBLE_HEAD, expand=False)
    for column in columns:
        found.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return found


def summary(audit: Report) -> str:
    """One line: shares of the work, attention, retreats, and whether what ran is what was planned."""
    if not audit.events:
        return NOTHING
    rows = [row for row in audit.subgraphs if not row.parent and not row.superseded]
    head = f"omni: {plural(len(audit.graphs), 'graph')}, {plural(len(rows), 'subgraph')}"
    clauses = [_shares(audit)] if audit.subgraphs else ["nothing was built"]
    sites = audit.sites
    if sites.total:
        clauses.append(f"attention {len(sites.fused)} of {plural(sites.total, 'site')} fused")
    ineffective = [option.key for graph in audit.graphs for option in graph.ineffective]
    if ineffective:
        keys = ", ".join(dict.fromkeys(ineffective))
        clauses.append(f"{plural(len(set(ineffective)), 'option')} not as requested ({keys})")
    broken = graph_breaks(audit)
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        clauses.append(f"{plural(len(broken), 'graph break')} ({short_source(broken[0])}{more})")
    if audit.retreats:
        clauses.append(plural(len(audit.retreats), "retreat"))
    if audit.subgraphs:
        clauses.append(_verdict(audit))
    return f"{head}: {'; '.join(clause for clause in clauses if clause)}"


def to_line(audit: Report) -> str:
    """The summary as the text of a file."""
    return f"{one_line(summary(audit))}\n"


def graph_breaks(audit: Report) -> list[str]:
    """The places at which Dynamo broke off, each once; a break in a called function ends the graph of each caller."""
    found = (miss for graph in audit.graphs for miss in graph.near_misses if miss.reason.code == "graph_break")
    return list(dict.fromkeys(miss.source or miss.node for miss in found))


def _shares(audit: Report) -> str:
    basis = {"flops": "FLOPs", "nodes": "operators"}.get(audit.share_basis, "")
    shares = audit.shares
    pieces: list[str] = []
    for lowering in sorted(shares, key=lambda name: (name == "eager", -shares[name], name)):
        piece = f"{lowering or 'unplanned'} {percent(shares[lowering])}"
        if not pieces and basis:
            piece += f" of {basis}"
        where = _where(audit.fallbacks) if lowering == "eager" else ""
        pieces.append(f"{piece} ({where})" if where else piece)
    return ", ".join(pieces)


def _where(fallbacks: tuple[Fallback, ...]) -> str:
    """The first fallback and how many more places there are."""
    places = list(dict.fromkeys((f.op.split(", ")[0] or f.subgraph, f.source) for f in fallbacks))
    if not places:
        return ""
    op, source = places[0]
    first = f"{op} at {short_source(source)}" if source else op
    return f"{first} and {len(places) - 1} more" if len(places) > 1 else first


def _verdict(audit: Report) -> str:
    wrong = list(audit.mismatches)
    if wrong:
        more = f", and {len(wrong) - 1} more did not run as planned" if len(wrong) > 1 else ""
        return f"ERROR: {wrong[0].id} was {wrong[0].difference}{more}"
    live = [row for row in audit.subgraphs if not row.superseded]
    idle = sum(1 for row in live if row.ran is None)
    if idle == len(live):
        return "nothing ran yet"
    return f"nothing that ran differs from the plan{f'; {idle} not called yet' if idle else ''}"


def percent(share: float | None) -> str:
    """A share as `98.7 %`; one that is not 0 or 1 is never rounded to it."""
    if share is None:
        return ""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1 - 1e-12:
        return "> 99.9 %"
    return f"{100 * share:.1f} %"


def plural(count: int, noun: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def short_source(source: str) -> str:
    """`model.py:12` of `/home/me/model.py:12`."""
    return source.replace("\\", "/").rsplit("/", 1)[-1]


@dataclasses.dataclass(frozen=True)
class ReasonRow:
    """A node or subgraph with its lowering, the first place where it is, why, and how many places are like it."""

    what: str
    source: str
    reasons: tuple[Reason, ...]
    count: int = 1

    @property
    def where(self) -> str:
        """`model.py:12 and 3 more`."""
        more = f"and {self.count - 1} more" if self.count > 1 else ""
        return " ".join(piece for piece in (short_source(self.source), more) if piece)


def counts(values: dict[str, int], limit: int = 4) -> str:
    """The most frequent first: `aten.add.Tensor x20, aten.mm.default x10`."""
    ordered = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    shown = [name if count == 1 else f"{name} x{count}" for name, count in ordered[:limit]]
    more = [f"{len(ordered) - limit} more"] if len(ordered) > limit else []
    return ", ".join(shown + more)


def node_diff(values: dict[str, int]) -> str:
    """Operators that a pass added and removed: `-2 torch.matmul, +1 sdpa`."""
    return ", ".join(
        f"{count:+d} {name}" for name, count in sorted(values.items(), key=lambda item: (item[1], item[0]))
    )


def duration(seconds: float) -> str:
    """`12.5 s`, `250 ms`, or empty where nothing was measured."""
    if seconds <= 0:
        return ""
    if seconds < 0.001:
        return "< 1 ms"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def status(row: SubgraphAudit) -> str:
    """A remark on the lowering that ran."""
    if row.mismatch:
        return "ERROR: differs from the plan"
    if row.superseded:
        return "given up: its graph retreated"
    if row.retreats:
        return "retreated"
    return ""


_TORCHS_OWN: Final = ("inductor", "eager", "override")


def what(row: SubgraphAudit) -> list[str]:
    """What a row consists of: operators, modules or source lines, external kernels; what another compiler made."""
    where = row.modules or tuple(short_source(source) for source in row.sources)
    lines = [counts(row.ops), ", ".join(where[:3]) + (f", {len(where) - 3} more" if len(where) > 3 else "")]
    if row.kernels:
        lines.append(f"kernels: {counts(row.kernels)}")
    if row.ran is not None and row.ran not in _TORCHS_OWN and not row.mismatch:
        lines.append(row.evidence)
    if not row.flops.lstrip("-").isdigit() and 0 < len(row.flops) <= 80:
        lines.append(f"FLOPs: {row.flops}")
    return [line for line in lines if line]


def graph_line(graph: GraphAudit) -> str:
    """One line on a graph: what it is, where it is for, and how it was compiled."""
    facts = [
        f"compile id {graph.compile_id}" if graph.compile_id else "",
        f"device {graph.device}" if graph.device else "",
        "" if graph.mode == "default" else f"mode {graph.mode}",
        f"the {graph.variant} variant" if graph.variant else "",
        "training" if graph.training else "",
        "dynamic shapes" if graph.dynamic else "",
        plural(graph.nodes, "operator"),
        *(calibration(event) for event in graph.calibrations),
        *(f"copies of weights {(copy.bytes + copy.shared) / 2**20:.1f} MiB" for copy in graph.weights),
    ]
    title = f"{graph.id} {graph.function}".rstrip()
    return f"{title}: {', '.join(fact for fact in facts if fact)}"


def calibration(event: Calibration) -> str:
    """The result of a calibration: `error 1.2e-03 of at most 1.0e-02 with 1 of 5 operators kept wide, else 3.1e-02`."""
    if event.state == "refused":
        return f"error not measured: {plural(event.kept, 'operator')} kept wide"
    text = f"error {event.after:.1e} of at most {event.bound:.1e}"
    if not event.kept:
        return text
    before = f"{event.before:.1e}" if event.before >= 0 else "infinite"
    return f"{text} with {event.kept} of {plural(event.lowered, 'operator')} kept wide, else {before}"


def reason_text(reason: Reason) -> str:
    """The sentence with what was seen and needed; place and lever have cells of their own."""
    seen = f"observed {reason.observed}" if reason.observed else ""
    need = f"needed {reason.needed}" if reason.needed else ""
    inside = "; ".join(piece for piece in (seen, need) if piece)
    return f"{reason.sentence} ({inside})" if inside else reason.sentence


def reason_rows(audit: Report) -> list[ReasonRow]:
    """Rows for everything that has reasons; equal ones of several places are one, with a count."""
    grouped: dict[object, ReasonRow] = {}
    for row in _reason_rows(audit):
        key = (row.what, tuple(_without_place(reason) for reason in row.reasons))
        same = grouped.get(key)
        grouped[key] = row if same is None else dataclasses.replace(same, count=same.count + 1)
    return list(grouped.values())


def _without_place(reason: Reason) -> tuple[tuple[str, str], ...]:
    return tuple((key, text) for key, text in reason.to_dict().items() if key not in ("node", "source", "cause"))


def step_of(retreat: Retreat) -> str:
    """A retreat in a few words."""
    source, target = retreat.source_lowering, retreat.target_lowering
    if source != target:
        return f"{source} gave way to {target}"
    if retreat.reason.code == "weights_changed":
        return f"{source} reads weights as inputs"
    return f"{source} builds it in pieces only"


def _reason_rows(audit: Report) -> Iterator[ReasonRow]:
    for graph in audit.graphs:
        for retreat in graph.retreats:
            yield ReasonRow(f"{retreat.subgraph}: {step_of(retreat)}", retreat.reason.source, (retreat.reason,))
        for miss in graph.near_misses:
            if miss.reason.code == "graph_break":
                yield ReasonRow(f"{graph.id} is broken off by dynamo", miss.source, (miss.reason,))
            if miss.reason.code == "error_bound":
                which = miss.node if miss.reason.node else "operators"
                yield ReasonRow(f"{graph.id}: {which} kept wide", miss.source, (miss.reason,))
        for attempt in graph.attempts:
            if attempt.reason is not None:
                what = f"{attempt.subgraph}: {attempt.lowering} failed"
                yield ReasonRow(what, attempt.reason.source, (attempt.reason,))
        for part in graph.parts:
            for node in part.declined:
                source = node.source or next((reason.source for reason in node.chain if reason.source), "")
                yield ReasonRow(f"{graph.id}.{part.name} {node.op} on {node.lowering}", source, node.chain)
            for row in part.subgraphs:
                if row.reasons or row.mismatch:
                    what = f"{row.id}: {row.difference}" if row.mismatch else f"{row.id} on {row.lowering}"
                    source = next((reason.source for reason in row.reasons if reason.source), "")
                    yield ReasonRow(what, source or next(iter(row.sources), ""), row.reasons)


def with_lever(reason: Reason) -> str:
    """The reason and its lever in one cell."""
    text = reason_text(reason)
    return f"{text}. To change this: {reason.lever}" if reason.lever else text


def near_miss_text(miss: NearMiss) -> str:
    """Why a site was left alone, and where the match ended."""
    text = reason_text(miss.reason)
    if miss.reason.node:
        text += f"; the match ended at {miss.reason.node}"
    return f"{text}. To change this: {miss.reason.lever}" if miss.reason.lever else text


def pass_result(run: PassRun) -> str:
    """What a pass did to the graph."""
    return "changed the graph" if run.modified else "no change" if run.applied else "skipped"


_STATES: Final = {
    "assumed": "checked at each call",
    "held": "held in a call",
    "failed": "did not hold in a call",
    "compiled": "compiled",
    "stopped": "not checked any more",
    "captured": "could not be checked",
}


def speculation(event: Speculation) -> tuple[str, str, str, str]:
    """What was assumed, what became of it, the variant, and more."""
    inputs = f"reads {', '.join(event.inputs)}" if event.inputs else ""
    saves = f"saves {event.saves}" if event.saves else ""
    why = with_lever(event.reason) if event.reason else ""
    detail = "; ".join(piece for piece in (saves, inputs, why) if piece)
    return event.sentence, _STATES.get(event.state, event.state), event.variant, detail


def cache_note(event: Cache) -> str:
    """Why a cache missed or was bypassed: `changed: option dtype_policy: 'keep' → 'bf16'`."""
    shown = "; ".join(event.changed[:8])
    more = f"; and {len(event.changed) - 8} more" if len(event.changed) > 8 else ""
    changed = f"changed: {shown}{more}" if shown else ""
    return "; ".join(
        piece for piece in (event.note, changed, with_lever(event.reason) if event.reason else "") if piece
    )


def basis_note(audit: Report) -> str:
    """What the shares count, said where it is not FLOPs."""
    if audit.share_basis == "nodes":
        return "Shares count operators: the FLOPs are unknown or zero."
    return ""
