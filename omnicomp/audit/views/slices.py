"""What was compiled when: properly nested slices, and moments.

Events are recorded when what they tell of is over, so that a slice begins its length before. Attempts of a part are
recorded together after it was built: their lengths are measured, and their places are not; they are laid end to end, in
their order, up to the moment of the record.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from omnicomp.audit.model import GraphAudit, Report, SubgraphAudit
from omnicomp.timeline import Attempt, Stage

_SLACK: Final = 1e-4
"""Seconds by which clocks may disagree before two compilations count as running at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """A slice of time."""

    name: str
    kind: str
    start: float
    end: float
    graph: str
    subgraph: str = ""
    lowering: str = ""
    ok: bool = True
    inferred: bool = False
    detail: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    inside: tuple["Slice", ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment."""

    name: str
    kind: str
    time: float
    pid: int
    rank: int
    graph: str
    subgraph: str = ""
    tone: str = ""
    detail: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lane:
    """Compilations of one process that do not overlap; concurrent ones have lanes of their own."""

    pid: int
    rank: int
    number: int
    slices: tuple[Slice, ...]


def lanes(audit: Report) -> tuple[Lane, ...]:
    """The compilations of each process; a report without times has none."""
    by_process: dict[tuple[int, int], list[Slice]] = {}
    for graph in audit.graphs:
        by_process.setdefault((graph.rank, graph.pid), []).extend(_compilations(graph))
    found: list[Lane] = []
    for (rank, pid), slices in sorted(by_process.items()):
        open_lanes: list[list[Slice]] = []
        for each in sorted(slices, key=lambda s: (s.start, -s.end)):
            lane = next((lane for lane in open_lanes if lane[-1].end <= each.start + _SLACK), None)
            if lane is None:
                open_lanes.append([each])
            else:
                lane.append(_clamped(each, lane[-1].end, each.end))
        found += [
            Lane(pid=pid, rank=rank, number=number, slices=tuple(lane)) for number, lane in enumerate(open_lanes, 1)
        ]
    return tuple(found)


def _compilations(graph: GraphAudit) -> Iterator[Slice]:
    """What was compiled of a graph in one go: all until autograd is through, then parts that are built later."""
    stages = [stage for stage in graph.stages if _drawable(stage.time, stage.seconds)]
    first = min((stage.time for stage in stages if stage.stage == "autograd"), default=0.0)
    passes = [run for run in graph.passes if run.applied and _drawable(run.time, run.seconds)]
    now = [
        Slice(
            name=run.name,
            kind="pass",
            start=run.time - run.seconds,
            end=run.time,
            graph=graph.id,
            detail={"rewrites": run.rewrites, "changed the graph": run.modified},
        )
        for run in passes
    ]
    later: list[Slice] = []
    for each in _stages(graph, stages):
        (now if not first or each.end <= first + _SLACK else later).append(each)
    if now:
        name = f"{graph.id} {graph.function}".rstrip()
        yield _around(name, graph, now)
    for each in later:
        yield _around(f"{graph.id} {each.name}", graph, [each])


def _drawable(time: float, seconds: float = 0.0) -> bool:
    """Whether something has a place on a time line; what was not written by a recorder may have none."""
    return math.isfinite(time) and time > 0 and math.isfinite(seconds) and seconds >= 0


def _around(name: str, graph: GraphAudit, inside: list[Slice]) -> Slice:
    detail = {"compile id": graph.compile_id, "device": graph.device, "operators": graph.nodes}
    start, end = min(s.start for s in inside), max(s.end for s in inside)
    whole = Slice(name=name, kind="compile", start=start, end=end, graph=graph.id, detail=detail)
    return _filled(whole, inside)


def _stages(graph: GraphAudit, stages: Sequence[Stage]) -> Iterator[Slice]:
    """The stages, each with those inside it, whose time its own does not count."""
    waiting: list[Slice] = []
    for stage in sorted(stages, key=lambda stage: stage.time):
        inner = waiting if stage.stage == "autograd" else []
        if stage.stage == "lowering":
            inner = list(_attempts(graph, stage.part))
        counted = sum(s.end - s.start for s in inner) if stage.stage == "autograd" else 0.0
        found = Slice(
            name=f"{stage.stage} {stage.part}".rstrip(),
            kind="stage",
            start=stage.time - stage.seconds - counted,
            end=stage.time,
            graph=graph.id,
        )
        found = _filled(found, inner)
        if stage.stage == "lowering":
            waiting.append(found)
        else:
            if stage.stage == "autograd":
                waiting = []
            yield found
    yield from waiting


def _attempts(graph: GraphAudit, part: str) -> Iterator[Slice]:
    tried: list[tuple[SubgraphAudit | None, Attempt]] = [
        (row, attempt)
        for each in graph.parts
        if each.name == part
        for row in each.subgraphs
        for attempt in row.attempts
    ]
    tried += [(None, attempt) for attempt in graph.attempts if attempt.part == part]
    timed = sorted(
        ((a.time, row, a) for row, a in tried if a.seconds > 0 and _drawable(a.time, a.seconds)),
        key=lambda item: item[0],
    )
    found: list[Slice] = []
    ceiling = float("inf")
    for time, row, attempt in reversed(timed):
        end = min(time, ceiling)
        ceiling = end - attempt.seconds
        why = str(attempt.reason or attempt.skipped or "")
        detail: dict[str, Any] = {"why not": why} if why else {}
        if row is not None:
            detail |= {"operators": row.nodes, "module": row.module or ", ".join(row.modules[:3])}
        found.append(
            Slice(
                name=f"{attempt.lowering} {'builds' if attempt.ok else 'fails on'} {attempt.subgraph}",
                kind="attempt",
                start=ceiling,
                end=end,
                graph=graph.id,
                subgraph=attempt.subgraph,
                lowering=attempt.lowering,
                ok=attempt.ok,
                inferred=True,
                detail=detail,
            )
        )
    yield from reversed(found)


def _filled(outer: Slice, inside: Iterable[Slice]) -> Slice:
    """The slice with others inside it, cut to fit: none reaches beyond it or into the one before."""
    kept: list[Slice] = []
    at = outer.start
    for each in sorted(inside, key=lambda s: (s.start, s.end)):
        cut = _clamped(each, at, outer.end)
        kept.append(cut)
        at = cut.end
    return dataclasses.replace(outer, inside=tuple(kept))


def _clamped(found: Slice, start: float, end: float) -> Slice:
    begins = min(max(found.start, start), end)
    ends = max(min(found.end, end), begins)
    if (begins, ends) == (found.start, found.end):
        return found
    cut = dataclasses.replace(found, start=begins, end=ends)
    return _filled(cut, found.inside)


def moments(audit: Report) -> tuple[Moment, ...]:
    """What happened at one time each, in order: first calls, retreats, verdicts of caches, outcomes of checks."""
    found = [moment for graph in audit.graphs for moment in _moments(graph) if _drawable(moment.time)]
    return tuple(sorted(found, key=lambda moment: (moment.time, moment.graph, moment.name)))


def _moments(graph: GraphAudit) -> Iterator[Moment]:
    def moment(name: str, event: Any, *, subgraph: str = "", tone: str = "", **detail: Any) -> Moment:
        told = {key.replace("_", " "): value for key, value in detail.items() if value}
        return Moment(
            name=name,
            kind=event.type,
            time=event.time,
            pid=graph.pid,
            rank=graph.rank,
            graph=graph.id,
            subgraph=subgraph,
            tone=tone,
            detail=told,
        )

    for retreat in (*graph.retreats, *(retreat for row in graph.subgraphs for retreat in row.retreats)):
        name = f"{retreat.subgraph}: {retreat.source_lowering} retreated to {retreat.target_lowering}"
        yield moment(name, retreat, subgraph=retreat.subgraph, tone="warn", why=str(retreat.reason))
    for row in graph.subgraphs:
        for ran in row.runs:
            tone = "bad" if row.mismatch else ""
            name = f"{row.id} first ran on {ran.lowering}"
            yield moment(name, ran, subgraph=row.id, tone=tone, evidence=ran.evidence)
        for check in row.verifications:
            tone = "bad" if check.state == "wrong" else ""
            name = f"{check.name} is {check.state} ({check.direction})"
            yield moment(name, check, subgraph=row.id, tone=tone, detail=check.detail)
    for check in graph.verifications:
        yield moment(f"{check.name} is {check.state} ({check.direction})", check, detail=check.detail)
    for cache in graph.caches:
        where = cache.subgraph or f"{graph.id} {cache.part}".rstrip()
        changed = "; ".join(cache.changed[:4])
        yield moment(f"{cache.cache} {cache.verdict}: {where}", cache, subgraph=cache.subgraph, changed=changed)
    for guess in graph.speculations:
        yield moment(f"assumption {guess.state}", guess, sentence=guess.sentence)
    for tried in graph.candidates:
        chosen = "chosen" if tried.selected else "not chosen"
        yield moment(f"candidate {tried.candidate} {chosen}", tried, subgraph=tried.subgraph, seconds=tried.seconds)
