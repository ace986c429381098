"""The data of the HTML page, as JSON for its script; each reason is in it once."""

import base64
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from omnicomp.audit.model import GraphAudit, Merge, PartAudit, Report, SubgraphAudit
from omnicomp.audit.views import rows
from omnicomp.audit.views.findings import KINDS, Finding, counted, findings
from omnicomp.audit.views.layout import asset, tones
from omnicomp.audit.views.rows import cause, graph_breaks, missing, percent, plural, summary
from omnicomp.audit.views.slices import Lane, Moment, Slice, lanes, moments
from omnicomp.audit.views.tree import BASES, basis_of
from omnicomp.audit.views.why import Excerpts
from omnicomp.safety.escapes import html_text as e
from omnicomp.safety.escapes import printable
from omnicomp.timeline import Candidate, NearMiss, Reason, Rewrite

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
    """Everything that the page shows."""
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
            "missing": rows.missing(audit),
            "torn lines": audit.skipped,
            "later graphs, left out": audit.left_out,
        },
        **_lists(audit, reasons),
        "findings": [_finding(found, reasons) for found in findings(audit)],
        "attention": f"{len(audit.sites.fused)} of {len(audit.sites.fused) + len(audit.sites.near_misses)}",
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
        "timing": [timing.calls, timing.mean, timing.fastest, timing.device, rows.speed(row)] if timing else [],
        "memory": [memory.calls, memory.before_bytes, memory.peak_bytes, memory.device] if memory else [],
        "graphs": [rows.recording_line(each) for each in row.recordings],
        "attempts": [
            [a.lowering, a.ok, a.selected, reasons.number(a.reason), a.skipped, a.seconds, a.artefact]
            for a in row.attempts
        ],
        "retreats": [[r.source_lowering, r.target_lowering, reasons.number(r.reason)] for r in row.retreats],
        "runs": list(dict.fromkeys((ran.lowering, ran.evidence) for ran in row.runs)),
        "kernels": row.kernels,
        "repeated": rows.repeated(row),
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


def _finding(found: Finding, reasons: _Reasons) -> list[Any]:
    source = next(iter(found.sources), "")
    what = [found.kind, found.title, found.count, source, found.lowering]
    return [*what, reasons.all(found.reasons), found.ids, found.graphs]


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
    target, detail = ("", rows.near_miss_text(site)) if missed else (_target(site), rows.rewrite_text(site))
    why = reasons.number(site.reason) if missed else -1
    return [number, site.name, site.kind, site.node, site.source, site.module, target, detail, why]


def _target(site: Rewrite) -> str:
    return f"{site.target}, as called" if site.kept else site.target


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


_STYLES: Final = ("base.css", "page.css")
# Causes that the page shows at once, and those that can be opened below them.
_AT_ONCE: Final = 3
_MOST_CARDS: Final = 40
# In the order in which they build on one another.
_SCRIPTS: Final = (
    *("dom.js", "model.js", "table.js", "icicle.js", "detail.js"),
    *("graph.js", "drawn.js", "views.js", "app.js"),
)


def to_html(audit: Report, *, excerpts: bool = True) -> str:
    """The whole page.

    Args:
        audit: the report.
        excerpts: whether to show lines of the user's source around the places that it names, where the files are here.
    """
    found = findings(audit)
    style = "\n".join(asset(name) for name in _STYLES)
    script = "(() => {\n" + "\n".join(asset(name).replace('"use strict";\n', "") for name in _SCRIPTS) + "\n})();\n"
    script = f'"use strict";\n{script}'
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    data = to_script(page_data(audit, excerpts=excerpts))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{e(_title(audit, found))}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<main>\n{_header(audit, found)}\n"
        "<noscript><p>The tables below this line are drawn by the page's own script, which is switched off. "
        "<code>omnicomp audit FILE</code> prints the same as text.</p></noscript>\n"
        f'<div id="app"></div>\n</main>\n<script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _title(audit: Report, found: Sequence[Finding]) -> str:
    """What is wrong, as far as there is room in a browser's tab, then the summary."""
    text = summary(audit)
    first = "unfinished" if audit.unfinished else counted(found)
    return f"omni: {first}; {text.removeprefix('omni: ')}" if first else text


def _header(audit: Report, found: Sequence[Finding]) -> str:
    verdict, tone = _verdict(audit, found)
    text = summary(audit).removeprefix("omni: ")
    lacking = "".join(f'<p class="summary bad">{e(line)}</p>\n' for line in missing(audit))
    return (
        f'<header>\n<h1>omni <span class="pill {tone}">{e(verdict)}</span></h1>\n'
        f'<p class="summary">{e(text)}</p>\n{lacking}{_bar(audit)}{_tiles(audit)}</header>\n{_findings(found)}'
    )


def _verdict(audit: Report, found: Sequence[Finding]) -> tuple[str, str]:
    if audit.unfinished:
        return "unfinished", "bad"
    if audit.mismatches:
        return f"{plural(len(audit.mismatches), 'subgraph')} did not run as planned", "bad"
    if found:
        return f"as planned, with {counted(found)}", "warn"
    if not any(row.ran for row in audit.subgraphs):
        return "nothing ran yet", "muted"
    return "as planned", "good"


def _findings(found: Sequence[Finding]) -> str:
    """What can be changed, before anything that is as it should be; the tab of findings has them all."""
    if not found:
        return ""
    cards = [_card(each) for each in found[:_MOST_CARDS]]
    more = f'<details class="rest"><summary>{plural(len(found) - _AT_ONCE, "more cause")}</summary>\n'
    last = f'<p><a href="#tab=reasons">all {len(found)} causes</a></p>' if len(found) > _MOST_CARDS else ""
    if len(found) > _AT_ONCE + 1:
        cards = [*cards[:_AT_ONCE], more, *cards[_AT_ONCE:], f"{last}</details>"]
    return f'<section class="findings" aria-label="What can be changed">\n{"".join(cards)}</section>\n'


def _soft(text: str) -> str:
    """Text in which a long name may be broken after a separator."""
    return re.sub(r"\S{25,}", lambda word: re.sub(r"(?<=[/._])(?=\w)", "<wbr/>", word[0]), e(text))


def _card(found: Finding) -> str:
    body = ""
    for reason in found.reasons:
        body += f'<p class="why">{_soft(cause(reason))}</p>\n'
        body += f'<p class="lever"><b>To change this:</b> {_soft(reason.lever)}</p>\n' if reason.lever else ""
    body = body or '<p class="why">no reason was recorded</p>\n'
    rest = found.title.removeprefix(KINDS[found.kind])
    tone = "bad" if found.kind == "mismatch" else "warn"
    return f'<article><h2><b class="{tone}">{e(KINDS[found.kind])}</b>{_soft(rest)}</h2>\n{body}</article>\n'


def _bar(audit: Report) -> str:
    """Shares of the work; drawn as SVG, whose sizes are attributes and need no style of their own."""
    shares = sorted(audit.shares.items(), key=lambda item: (item[0] == "eager", -item[1]))
    if not shares:
        return ""
    basis = "operators" if audit.share_basis == "nodes" else "FLOPs"
    classes = tones_of(audit)
    pieces, at = "", 0.0
    for name, share in shares:
        pieces += (
            f'<rect class="{classes.get(name, "none")}" x="{at:.4f}%" width="{100 * share:.4f}%" height="12"></rect>'
        )
        at += 100 * share
    legend = "".join(
        f'<li><span class="dot {classes.get(name, "none")}"></span>{e(name)} <b>{e(percent(share))}</b></li>'
        for name, share in shares
    )
    label = ", ".join(f"{name} {percent(share)}" for name, share in shares)
    return (
        f'<svg class="shares" role="img" aria-label="{e(label)}" width="100%" height="12">{pieces}</svg>\n'
        f'<ul class="legend">{legend}<li class="of">of {basis}</li></ul>\n'
    )


def _tiles(audit: Report) -> str:
    """Counts that lead to their tabs; what is zero is left out."""
    sites = audit.sites
    missed = len(sites.near_misses)
    counts = [
        ("subgraph not as planned", len(audit.mismatches), "bad", "tab=subgraphs&only=mismatch"),
        ("fallback", len(audit.fallbacks), "warn", "tab=reasons"),
        ("retreat", len(audit.retreats), "warn", "tab=subgraphs&only=retreat"),
        ("graph break", len(graph_breaks(audit)), "warn", "tab=reasons"),
        ("graph", len(audit.graphs), "", "tab=about"),
        ("subgraph", sum(1 for row in audit.subgraphs if not row.parent), "", "tab=subgraphs"),
    ]
    tiles = [(*plural(count, name).partition(" ")[::2], tone, view) for name, count, tone, view in counts if count]
    if sites.fused or missed:
        tone = "warn" if missed else "good"
        share = f"{len(sites.fused)} of {len(sites.fused) + missed}"
        tiles.insert(0, (share, "attention sites fused", tone, "tab=sites"))
    cells = "".join(
        f'<a class="tile {tone}" href="#{e(view)}"><b>{e(value)}</b> {e(name)}</a>' for value, name, tone, view in tiles
    )
    return f'<div class="tiles">{cells}</div>\n'
