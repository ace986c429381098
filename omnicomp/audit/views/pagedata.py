"""The data of the HTML page, as JSON for its script; each reason is in it once."""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from omnicomp.audit.model import GraphAudit, Merge, PartAudit, Report, SubgraphAudit
from omnicomp.audit.views import rows
from omnicomp.audit.views.excerpts import Excerpts
from omnicomp.audit.views.rows import summary
from omnicomp.audit.views.slices import Lane, Moment, Slice, lanes, moments
from omnicomp.audit.views.style import tones
from omnicomp.audit.views.tree import BASES, basis_of
from omnicomp.escapes import printable
from omnicomp.timeline import Candidate, NearMiss, Reason, Rewrite

__all__ = ["page_data", "to_script", "tones_of"]

_MOST_EXCERPTS: Final = 600
_OPEN: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def to_script(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or opens a comment."""
    return json.dumps(_clean(data), ensure_ascii=True, separators=(",", ":"), allow_nan=False).translate(_OPEN)


def _clean(value: Any) -> Any:
    """The same with control characters replaced, and without numbers that JSON does not know."""
    if isinstance(value, str):
        return value if value.isprintable() else printable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_clean(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value


class _Reasons:
    """Each reason once, by number; the places where it holds are apart from it."""

    def __init__(self) -> None:
        self.numbers: dict[Reason, int] = {}

    def number(self, reason: Reason | None) -> int:
        return -1 if reason is None else self.numbers.setdefault(reason, len(self.numbers))

    def all(self, reasons: Iterable[Reason]) -> list[int]:
        return [self.number(reason) for reason in reasons]


def page_data(audit: Report, *, excerpts: bool = True) -> dict[str, Any]:
    """Everything that the page shows.

    Args:
        audit: the report.
        excerpts: whether to read lines of source around the places that reasons name, where the files are here.
    """
    reasons = _Reasons()
    environment = audit.environment
    known = audit.shares_by
    data: dict[str, Any] = {
        "summary": summary(audit).removeprefix("omni: "),
        "basis": basis_of(audit),
        "bases": {name: title for name, title in BASES.items() if known.get(name)},
        "tones": tones_of(audit),
        "graphs": [_graph(graph, reasons) for graph in audit.graphs],
        "rows": [
            _row(row, graph, number, reasons)
            for number, graph in enumerate(audit.graphs)
            for part in graph.parts
            for row in part.subgraphs
        ],
        "facts": {
            "versions": environment.versions,
            "devices": environment.devices,
            "platforms": environment.platforms,
            "processes": environment.processes,
            "ranks": environment.ranks,
            "events": audit.events,
            "torn lines": audit.skipped,
            "later graphs, left out": audit.left_out,
        },
        **_lists(audit, reasons),
        "lanes": [_lane(lane) for lane in lanes(audit)],
        "moments": [_moment(moment) for moment in moments(audit)],
    }
    data["reasons"] = [reason.to_dict() for reason in reasons.numbers]
    data["excerpts"] = _excerpts(audit, list(reasons.numbers)) if excerpts else {}
    return data


def tones_of(audit: Report) -> dict[str, str]:
    """The style class of each lowering on the page."""
    found = {name for row in audit.subgraphs for name in (row.lowering, row.planned)}
    found |= {each.lowering for row in audit.subgraphs for each in (*row.attempts, *row.runs)}
    found |= {each.lowering for graph in audit.graphs for part in graph.parts for each in part.declined}
    found |= {attempt.lowering for graph in audit.graphs for attempt in graph.attempts}
    return tones(found)


def _graph(graph: GraphAudit, reasons: _Reasons) -> dict[str, Any]:
    return {
        "id": graph.id,
        "function": graph.function,
        "line": rows.graph_line(graph),
        "identity": graph.identity,
        "module": graph.module,
        "device": " ".join(piece for piece in (graph.device, graph.device_name) if piece),
        "versions": graph.versions,
        "compile_seconds": graph.compile_seconds,
        "parts": [{"name": p.name, "placement": p.placement, "note": p.note} for p in graph.parts],
        "left_out": graph.left_out,
        "settings": [
            [s.key, s.requested, s.effective, s.origin, s.changed_by, reasons.number(s.reason)] for s in graph.settings
        ],
    }


def _row(row: SubgraphAudit, graph: GraphAudit, number: int, reasons: _Reasons) -> dict[str, Any]:
    """One subgraph; what is empty or false is left out, since there may be thousands."""
    timing, memory = row.timing, row.memory
    data: dict[str, Any] = {
        "id": row.id,
        "g": number,
        "part": row.part,
        "parent": row.parent,
        "planned": row.planned,
        "ran": row.ran or "",
        "lowering": row.lowering,
        "state": rows.status(row),
        "difference": row.difference,
        "superseded": row.superseded,
        "nodes": row.nodes,
        "ops": sorted(row.ops.items(), key=lambda item: (-item[1], item[0])),
        "flops": row.flops,
        "flops_hint": row.flops_hint,
        "bytes": row.bytes,
        "bytes_hint": row.bytes_hint,
        "io": [row.inputs, row.outputs] if row.inputs or row.outputs else [],
        "at": row.module or (row.modules[0] if row.parent and len(row.modules) == 1 else graph.module),
        "modules": row.modules,
        "sources": row.sources,
        "shares": {name: value for name, value in dataclasses.asdict(row.shares).items() if value is not None},
        "build": row.seconds,
        "timing": [timing.calls, timing.mean, timing.fastest, timing.device] if timing else [],
        "memory": [memory.calls, memory.before_bytes, memory.peak_bytes, memory.device] if memory else [],
        "attempts": [
            [a.lowering, a.ok, a.selected, reasons.number(a.reason), a.skipped, a.seconds, a.artefact]
            for a in row.attempts
        ],
        "retreats": [[r.source_lowering, r.target_lowering, reasons.number(r.reason)] for r in row.retreats],
        "runs": list(dict.fromkeys((ran.lowering, ran.evidence) for ran in row.runs)),
        "kernels": row.kernels,
        "checks": [[v.name, v.state, v.direction, v.detail] for v in row.verifications],
        "refused": row.refused,
        "reasons": reasons.all(row.reasons),
        "identity": row.identity,
        "left_out": row.left_out,
    }
    return {key: value for key, value in data.items() if value or key in ("id", "g", "nodes")}


def _lists(audit: Report, reasons: _Reasons) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {
        name: [] for name in ("nodes", "retreats", "sites", "passes", "boundaries", "merges", "candidates", "guesses")
    }
    found["caches"] = []
    for number, graph in enumerate(audit.graphs):
        for part in graph.parts:
            found["nodes"] += _declined(part, number, reasons)
            found["boundaries"] += [
                [number, part.name, b.source, b.target, b.tensors, b.bytes_hint, b.copies, b.casts]
                for b in part.boundaries
            ]
            found["merges"] += [_merge(merge, part.name, number, reasons) for merge in part.merges]
        whole = [(r.subgraph, r.source_lowering, r.target_lowering, r.reason) for r in graph.retreats]
        whole += [(a.subgraph, a.lowering, "", a.reason) for a in graph.attempts if a.reason is not None]
        found["retreats"] += [[number, id, one, other, reasons.number(why)] for id, one, other, why in whole]
        found["sites"] += [_site(miss, number, reasons) for miss in graph.near_misses]
        found["sites"] += [_site(site, number, reasons) for site in graph.rewrites]
        found["passes"] += [
            [
                number,
                run.name,
                rows.pass_result(run),
                run.rewrites,
                run.seconds,
                rows.node_diff(run.node_diff),
                run.note,
            ]
            for run in graph.passes
        ]
        found["candidates"] += [_candidate(candidate, number, reasons) for candidate in graph.candidates]
        found["guesses"] += [[number, *rows.speculation(event), event.source] for event in graph.speculations]
        found["caches"] += [
            [number, c.part, c.subgraph, c.cache, c.verdict, c.key, rows.cache_note(c)] for c in graph.caches
        ]
    return found


def _declined(part: PartAudit, number: int, reasons: _Reasons) -> list[Any]:
    of = {name: row.id for row in part.subgraphs for name in row.refused}
    return [
        [number, part.name, n.node, n.op, n.lowering, n.source, n.module, reasons.all(n.chain), of.get(n.node, "")]
        for n in part.declined
    ]


def _merge(merge: Merge, part: str, number: int, reasons: _Reasons) -> list[Any]:
    three = [merge.left, merge.between, merge.right]
    rest = [merge.lowering, merge.sentence, merge.tensors, merge.bytes_hint, reasons.all(merge.reasons)]
    return [number, part, *three, *rest]


def _candidate(found: Candidate, number: int, reasons: _Reasons) -> list[Any]:
    which = [found.candidate, found.subgraph, found.lowerings, found.selected, found.source, found.clock]
    speed = [found.seconds, found.fastest, found.spread, found.speed, found.rounds]
    return [number, *which, *speed, found.error, found.own, found.build_seconds, reasons.number(found.reason)]


def _site(site: NearMiss | Rewrite, number: int, reasons: _Reasons) -> list[Any]:
    missed = isinstance(site, NearMiss)
    target, detail = ("", rows.near_miss_text(site)) if missed else (site.target, site.detail)
    why = reasons.number(site.reason) if missed else -1
    return [number, site.name, site.kind, site.node, site.source, site.module, target, detail, why]


def _lane(lane: Lane) -> dict[str, Any]:
    return {"pid": lane.pid, "rank": lane.rank, "number": lane.number, "slices": [_slice(s) for s in lane.slices]}


def _slice(found: Slice) -> list[Any]:
    inside = [_slice(each) for each in found.inside]
    told = {**found.detail, **({"place": "in order; only its length was measured"} if found.inferred else {})}
    head = [found.name, found.kind, found.start, found.end, found.graph, found.subgraph, found.lowering]
    return [*head, found.ok, told, inside]


def _moment(moment: Moment) -> list[Any]:
    head = [moment.name, moment.kind, moment.time, moment.pid, moment.rank, moment.graph, moment.subgraph]
    return [*head, moment.tone, moment.detail]


def _excerpts(audit: Report, reasons: Sequence[Reason]) -> dict[str, list[Any]]:
    """Lines of source by place: what fell back or was left alone first, then the other rows."""
    reader = Excerpts(around=3)
    found: dict[str, list[Any]] = {}
    since = min((graph.time for graph in audit.graphs if graph.time > 0), default=0.0)
    places = [node.source for graph in audit.graphs for part in graph.parts for node in part.declined]
    places += [reason.source for reason in reasons]
    places += [site.source for graph in audit.graphs for site in (*graph.near_misses, *graph.rewrites)]
    places += [source for row in audit.subgraphs for source in row.sources[:1]]
    for source in dict.fromkeys(places):
        if len(found) >= _MOST_EXCERPTS:
            break
        excerpt = reader.of(source, since) if source else None
        if excerpt is not None:
            found[source] = [excerpt.line, excerpt.first, excerpt.lines, excerpt.changed]
    return found
