"""The words, numbers and cells that all views of a report share, and the report in one line."""

from typing import Final

from omnicomp.audit.model import Fallback, GraphAudit, Report, Sites, SubgraphAudit
from omnicomp.safety.escapes import one_line
from omnicomp.timeline import (
    Background,
    Cache,
    Calibration,
    Certified,
    CudaGraph,
    NearMiss,
    PassRun,
    Reason,
    Retreat,
    Rewrite,
    Speculation,
)
from omnicomp.timeline.reasons import RECOMPILE_LIMIT

_MISSING: Final = 8
NOTHING = "omni: nothing was compiled yet; call the compiled function first"


def summary(audit: Report) -> str:
    """One line: what has no end, shares of the work, attention, retreats, and whether what ran is what was planned."""
    if not audit.events:
        return f"omni: {unfinished(audit)}; nothing was compiled yet" if audit.unfinished else NOTHING
    rows = [row for row in audit.subgraphs if not row.parent and not row.superseded]
    head = f"omni: {plural(len(audit.graphs), 'graph')}, {plural(len(rows), 'subgraph')}"
    clauses = [unfinished(audit), _shares(audit) if audit.subgraphs else "nothing was built"]
    sites = audit.sites
    if sites.total:
        clauses.append(f"attention {attention(sites)}")
    ineffective = [option.key for graph in audit.graphs for option in graph.ineffective]
    if ineffective:
        keys = ", ".join(dict.fromkeys(ineffective))
        clauses.append(f"{plural(len(set(ineffective)), 'option')} not as requested ({keys})")
    broken = graph_breaks(audit)
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        clauses.append(f"{plural(len(broken), 'graph break')} ({short_source(broken[0])}{more})")
    limited = [f.node for f in audit.fallbacks if any(r.code == RECOMPILE_LIMIT for r in f.reasons)]
    if limited:
        clauses.append(f"compiled too often, and eager in further calls: {', '.join(dict.fromkeys(limited))}")
    unread = sum(each.count for each in audit.unread)
    if unread:
        clauses.append(f"{plural(unread, 'line')} of the timeline left out")
    if audit.retreats:
        clauses.append(plural(len(audit.retreats), "retreat"))
    clauses += [f"artefacts {each.state}: {each.path}" for each in audit.artefacts if each.state != "saved"]
    if audit.subgraphs:
        clauses.append(_verdict(audit))
    return f"{head}: {'; '.join(clause for clause in clauses if clause)}"


def unfinished(audit: Report) -> str:
    """`UNFINISHED: g1 was captured and never built, …`; empty if everything came to its end."""
    found = [each.sentence for each in audit.unfinished]
    more = [f"and {len(found) - 2} more"] if len(found) > 2 else []
    return f"UNFINISHED: {', '.join((*found[:2], *more))}" if found else ""


def missing(audit: Report) -> list[str]:
    """What the report may lack, a line each: what has no end, and what was left out."""
    found = audit.unfinished
    lines = [
        f"{each.sentence}{f' ({each.place})' if each.place else ''}"
        f"{f'; the last that was recorded: {each.last}' if each.last else ''}"
        for each in found[:_MISSING]
    ]
    lines += [f"and {len(found) - _MISSING} more without an end"] if len(found) > _MISSING else []
    return [f"unfinished: {line}" for line in lines] + ([audit.gaps] if audit.gaps else [])


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


def attention(sites: Sites) -> str:
    """How many sites are fused, of those that are written out or were bettered; and how many calls stay as they are."""
    own = len(sites.fused) + len(sites.near_misses)
    found = [f"{len(sites.fused)} of {plural(own, 'site')} fused"] if own else []
    return ", ".join([*found, *([f"{plural(len(sites.called), 'site')} as called"] if sites.called else [])])


def plural(count: int, noun: str) -> str:
    """`1 graph`, `2 graphs`, `2 processes`."""
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def short_source(source: str) -> str:
    """`model.py:12` of `/home/me/model.py:12`."""
    return source.replace("\\", "/").rsplit("/", 1)[-1]


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


def recording_line(event: CudaGraph) -> str:
    """Whether calls are recorded as CUDA graphs, what that saves, costs and holds, or why they are not."""
    at = f" for the sizes {', '.join(map(str, event.sizes))}" if event.sizes else ""
    took = (
        f"{1e6 * event.plain_seconds:.0f} us a call (host {1e6 * event.plain_host_seconds:.0f} us), "
        f"{1e6 * event.recorded_seconds:.0f} us replayed (host {1e6 * event.recorded_host_seconds:.0f} us)"
    )
    measured = took if event.plain_seconds else "not measured"
    if event.reason is not None:
        return f"{event.reason.sentence}{at} ({measured})"
    held = f"{event.bytes / 1e6:.1f} MB held on the device, {event.copied_bytes / 1e6:.3f} MB copied in each call"
    return f"calls are recorded as CUDA graphs{at}: {measured}, {held}"


def speed(row: SubgraphAudit) -> str:
    """What a call takes, where that goes, and how near it is to what the device can do; empty if it was not timed."""
    use = row.timing
    if use is None or use.fastest <= 0:
        return ""
    facts = [f"a call takes {1e3 * use.fastest:.3g} ms"]
    if use.kernels:
        gap = max(0.0, use.fastest - use.kernel_seconds)
        facts.append(f"{plural(use.kernels, 'kernel')} {1e3 * use.kernel_seconds:.3g} ms, gap {1e3 * gap:.3g} ms")
    if use.host_seconds and use.device != "cpu":
        facts.append(f"host {1e3 * use.host_seconds:.3g} ms")
    if use.copy_rate and row.bytes_hint > 0:
        facts.append(f"{percent(row.bytes_hint / use.fastest / use.copy_rate)} of the copy rate")
    if use.product_rate and row.flops_hint > 0:
        rate = percent(row.flops_hint / use.fastest / use.product_rate)
        facts.append(f"{rate} of the rate of {use.product_dtype} products")
    return ", ".join(facts)


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
    lines += [*proof(row), speed(row), *map(recording_line, row.recordings)]
    if row.left_whole is not None:
        lines.append(f"no repeated regions: {row.left_whole.sentence}")
    if not row.flops.lstrip("-").isdigit() and 0 < len(row.flops) <= 80:
        lines.append(f"FLOPs: {row.flops}")
    return [line for line in lines if line]


def proof(row: SubgraphAudit) -> list[str]:
    """What another compiler than torch's made of a row, how far its results were from eager's, and what was shared."""
    lines = repeated(row)
    if row.ran is None or row.ran in _TORCHS_OWN or row.mismatch or not row.evidence:
        return lines
    return [row.evidence, *lines]


def repeated(row: SubgraphAudit) -> list[str]:
    """Regions of a row that are built once."""
    return [f"{where}: built once, called {calls} times" for where, calls in row.repeats.items()]


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
        background(graph.background) if graph.background else "",
        *(calibration(event) for event in graph.calibrations),
        *(f"copies of weights {(copy.bytes + copy.shared) / 2**20:.1f} MiB" for copy in graph.weights),
    ]
    title = f"{graph.id} {graph.function}".rstrip()
    return f"{title}: {', '.join(fact for fact in facts if fact)}"


_BUILDS: Final = {
    "started": "being built in the background",
    "eager": "being built in the background",
    "earlier": "being built in the background",
    "swapped": "built in the background",
    "failed": "not built in the background",
    "foreground": "built in the foreground",
    "improving": "built in the background",
    "improved": "built in the background, and once more for speed",
    "kept": "built in the background",
}


def background(event: Background) -> str:
    """How a graph was built for the option `background`: `built in the background after 12 eager calls in 3.1 s`."""
    text = _BUILDS.get(event.state, event.state)
    calls = f" after {plural(event.calls, 'eager call')} in {duration(event.seconds)}" if event.calls else ""
    return text + calls


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


def cause(reason: Reason) -> str:
    """The same with who says so, and where a match ended."""
    by = f"{reason.by}: " if reason.by and not reason.sentence.lower().startswith(reason.by.lower()) else ""
    ended = f"; the match ended at {reason.node}" if reason.code == "match_ended" and reason.node else ""
    return f"{by}{reason_text(reason)}{ended}"


def step_of(retreat: Retreat) -> str:
    """A retreat in a few words."""
    source, target = retreat.source_lowering, retreat.target_lowering
    if source != target:
        return f"{source} retreated to {target}"
    if retreat.reason.code == "weights_changed":
        return f"{source} reads weights as inputs"
    return f"{source} builds it in pieces only"


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


def rewrite_text(site: Rewrite) -> str:
    """What a place became, and the times of the candidates."""
    times = ", ".join(f"{name} {ms:.4g} ms" for name, ms in sorted(site.timed.items(), key=lambda item: item[1]))
    verdict = VERDICTS.get(site.verdict, site.verdict)
    return "; ".join(filter(None, (site.detail, times and f"timed: {times}", verdict)))


VERDICTS: Final = {
    "proved": "proved",
    "proved_for_sizes": "proved for these sizes",
    "tested": "tested against what it replaced",
    "assumed": "equal if what is assumed holds",
    "refuted": "refuted",
}
"""Verdicts of certificates in words."""


def certificate(event: Certified) -> tuple[str, str, str, str]:
    """A change of a pass: the pass, where, what is known of it, and by what."""
    by = ", ".join(event.methods)
    if event.probability:
        by += f", wrong with a probability of 2^{event.probability:.0f}"
    rests = f"; rests on: {'; '.join(event.assumptions)}" if event.assumptions else ""
    detail = event.sentence or by
    return event.name, event.node, VERDICTS.get(event.verdict, event.verdict), f"{detail}{rests}"


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
    "ran": "ran",
}


def speculation(event: Speculation) -> tuple[str, str, str, str]:
    """What was assumed, what became of it, the variant, and more."""
    inputs = f"reads {', '.join(event.inputs)}" if event.inputs else ""
    saves = f"saves {event.saves}" if event.saves else ""
    why = with_lever(event.reason) if event.reason else ""
    calls = f"in {event.calls} calls or more" if event.calls else ""
    detail = "; ".join(piece for piece in (saves, inputs, calls, why) if piece)
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
