"""What differs between two reports: a pure function of both."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final

from omnicomp.audit.diff.changes import KINDS, AuditDiff, Change
from omnicomp.audit.diff.differences import difference, environments, options, passes
from omnicomp.audit.diff.measuring import measures, over_threshold
from omnicomp.audit.diff.pairing import operators, paired_graphs, paired_rows
from omnicomp.audit.facts import Fallback
from omnicomp.audit.identity import operators_of, without_number
from omnicomp.audit.model import Audit, GraphAudit, PartAudit, SubgraphAudit
from omnicomp.audit.views.rows import step_of
from omnicomp.timeline import Retreat

__all__ = ["compare"]

_SHOWN: Final = 8


def compare(
    before: Audit, after: Audit, *, time_threshold: float | None = None, memory_threshold: float | None = None
) -> AuditDiff:
    """Find what differs.

    Args:
        before: the first report.
        after: the second one.
        time_threshold: growth of a time, as a part of what it was, beyond which it is a change; None for none.
        memory_threshold: likewise of memory.
    """
    measured = measures(before, after)
    found = [*_between(before, after), *over_threshold(measured, time_threshold, memory_threshold)]
    order = list(KINDS)
    return AuditDiff(
        before=before.summary(),
        after=after.summary(),
        changes=tuple(sorted(_grouped(found), key=lambda change: order.index(change.kind))),
        measures=measured,
        time_threshold=time_threshold,
        memory_threshold=memory_threshold,
    )


def _between(before: Audit, after: Audit) -> Iterator[Change]:
    pairs, gone, new = paired_graphs(before.graphs, after.graphs)
    fallen = _by_graph(before.fallbacks), _by_graph(after.fallbacks)
    for one, other in pairs:
        yield from _graphs(one, other, fallen[0].get(one.id, []), fallen[1].get(other.id, []))
    for graph in gone:
        yield Change(
            kind="disappeared",
            what="graph",
            before=_graph_name(graph),
            graph=graph.identity,
            places=(graph.function,),
            sentence=f"the graph {_graph_name(graph)} is not there any more",
        )
    for graph in new:
        yield Change(
            kind="appeared",
            what="graph",
            after=_graph_name(graph),
            graph=graph.identity,
            places=(graph.function,),
            sentence=f"the graph {_graph_name(graph)} is there now",
        )
        yield from _fallbacks([], fallen[1].get(graph.id, []), GraphAudit(id=""), graph)
    yield from environments(before, after)


def _graphs(one: GraphAudit, other: GraphAudit, was: list[Fallback], now: list[Fallback]) -> Iterator[Change]:
    yield from _content(one, other)
    yield from _fallbacks(was, now, one, other)
    parts = {part.name: part for part in one.parts}
    others = {part.name: part for part in other.parts}
    fallen = {fallback.subgraph for fallback in (*was, *now) if fallback.subgraph}
    for name in dict.fromkeys((*parts, *others)):
        yield from _parts(name, parts.get(name), others.get(name), other, fallen)
    yield from _retreats(one, other)
    yield from passes(one, other)
    yield from options(one, other)


def _content(one: GraphAudit, other: GraphAudit) -> Iterator[Change]:
    old, new = without_number(one.identity), without_number(other.identity)
    if old == new:
        return
    if operators_of(old) == operators_of(new):
        sentence = f"{_graph_name(other)} was compiled for sizes of another class"
        yield Change(kind="sizes", what="graph", sentence=sentence, graph=other.identity, before=old, after=new)
        return
    had, has = operators(one), operators(other)
    more = [f"+{count} {op}" for op, count in sorted((has - had).items())]
    less = [f"-{count} {op}" for op, count in sorted((had - has).items())]
    shown = ", ".join((*less, *more)[:_SHOWN]) or "arguments or dtypes before autograd"
    left = len(less) + len(more) - _SHOWN
    yield Change(
        kind="edited",
        what="graph",
        graph=other.identity,
        before=old,
        after=new,
        sentence=f"{_graph_name(other)} was edited: {shown}{f', and {left} more' if left > 0 else ''}",
    )


def _fallbacks(was: list[Fallback], now: list[Fallback], one: GraphAudit, other: GraphAudit) -> Iterator[Change]:
    def key(graph: GraphAudit) -> Callable[[Fallback], Hashable]:
        identities = {row.id: operators_of(row.identity) for row in graph.subgraphs}
        return lambda f: (f.part, f.module, f.op, identities.get(f.subgraph, ""))

    gone, new = difference(was, key(one), now, key(other))
    for fallback in new:
        yield _moved(fallback, other, "fell_back", "", "eager", "runs eager now")
    for fallback in gone:
        yield _moved(fallback, other, "recovered", "eager", "", "does not fall back to eager any more")


def _moved(fallback: Fallback, graph: GraphAudit, kind: str, before: str, after: str, what: str) -> Change:
    name = fallback.op or fallback.subgraph
    return Change(
        kind=kind,
        what=name if len(name) <= 80 else f"{name[:79]}…",
        sentence=f"{name.split(', ')[0] if fallback.subgraph else name} {what}",
        graph=graph.identity,
        part=fallback.part,
        before=before,
        after=after,
        places=tuple(filter(None, (fallback.module or fallback.source,))),
        reasons=fallback.reasons if kind == "fell_back" else (),
    )


def _parts(
    name: str, one: PartAudit | None, other: PartAudit | None, graph: GraphAudit, fallen: set[str]
) -> Iterator[Change]:
    if one is None or other is None:
        kind, text = ("appeared", "there now") if one is None else ("disappeared", "not there any more")
        what = f"{name} part" if name else "whole graph on eager"
        yield Change(
            kind=kind,
            what=what,
            graph=graph.identity,
            part=name,
            sentence=f"the {what} of {_graph_name(graph)} is {text}",
        )
        return
    rows, others = _live(one), _live(other)
    pairs, gone, new = paired_rows(rows, others)
    for old, row in pairs:
        yield from _rows(old, row, graph, fallen)
    whole = [row for row in rows if not row.parent], [row for row in others if not row.parent]
    if len(whole[0]) != len(whole[1]):
        before, after = (_lowerings(part) for part in whole)
        sentence = f"{name} of {_graph_name(graph)} is {_pieces(whole[1])}, and was {_pieces(whole[0])}"
        yield Change(
            kind="cut",
            what=f"{name} part",
            graph=graph.identity,
            part=name,
            before=before,
            after=after,
            sentence=sentence,
        )
        gone, new = [row for row in gone if row.parent], [row for row in new if row.parent]
    for row in gone:
        yield _alone(row, graph, "disappeared", "not there any more")
    for row in new:
        yield _alone(row, graph, "appeared", "there now")


def _alone(row: SubgraphAudit, graph: GraphAudit, kind: str, text: str) -> Change:
    name = f"the override call {row.id.rsplit('/', 1)[-1]}" if row.parent else f"a subgraph on {row.lowering}"
    gone = kind == "disappeared"
    return Change(
        kind=kind,
        what=name.removeprefix("the ").removeprefix("a "),
        sentence=f"{name} is {text}",
        graph=graph.identity,
        part=row.part,
        places=(row.identity,),
        before=row.lowering if gone else "",
        after="" if gone else row.lowering,
    )


def _rows(old: SubgraphAudit, row: SubgraphAudit, graph: GraphAudit, fallen: set[str]) -> Iterator[Change]:
    common: dict[str, Any] = {"graph": graph.identity, "part": row.part, "places": (row.identity,)}
    reasons = row.reasons
    if row.mismatch and not old.mismatch:
        yield Change(
            kind="mismatch",
            what="subgraph",
            sentence=f"a subgraph was {row.difference}",
            before=old.lowering,
            after=row.lowering,
            reasons=reasons,
            **common,
        )
    elif row.lowering != old.lowering and not {old.id, row.id} & fallen:
        yield Change(
            kind="moved",
            what="subgraph",
            sentence=f"a subgraph is on {row.lowering}, and was on {old.lowering}",
            before=old.lowering,
            after=row.lowering,
            reasons=reasons,
            **common,
        )
    if (old.ran is None) != (row.ran is None):
        called = ["was not called" if r.ran is None else "was called" for r in (old, row)]
        yield Change(
            kind="not_called",
            what="subgraph",
            before=called[0],
            after=called[1],
            sentence=f"a subgraph {called[1]}, and {called[0]} before",
            **common,
        )
    wrong = {v.name: v.detail for v in row.verifications if v.state == "wrong"}
    for name in sorted(set(wrong) - {v.name for v in old.verifications if v.state == "wrong"}):
        yield Change(
            kind="wrong",
            what=name,
            after=wrong[name],
            sentence=f"the override {name} was found to compute something else than its reference",
            **common,
        )


def _retreats(one: GraphAudit, other: GraphAudit) -> Iterator[Change]:
    def key(retreat: Retreat) -> Hashable:
        return (retreat.part, retreat.source_lowering, retreat.target_lowering, retreat.reason.code)

    _, new = difference(one.retreats, key, other.retreats, key)
    for retreat in new:
        source, target = retreat.source_lowering, retreat.target_lowering
        step = step_of(retreat)
        yield Change(
            kind="retreat",
            what=f"{retreat.part} part" if retreat.part else "graph",
            graph=other.identity,
            part=retreat.part,
            before=source,
            after=target,
            reasons=(retreat.reason,),
            sentence=f"{step} in {_graph_name(other)}",
        )


def _grouped(changes: Iterable[Change]) -> list[Change]:
    """Equal changes of several places as one."""
    found: dict[Hashable, Change] = {}
    for change in changes:
        codes = tuple((reason.code, reason.by) for reason in change.reasons)
        named = change.kind in ("appeared", "disappeared", "edited", "sizes", "cut")
        key = (change.kind, change.what, change.sentence, change.part, codes, change.graph if named else "")
        same = found.get(key)
        if same is None:
            found[key] = change
        else:
            places = tuple(dict.fromkeys((*same.places, *change.places)))[:_SHOWN]
            graph = same.graph if same.graph == change.graph else ""
            found[key] = dataclasses.replace(same, places=places, count=same.count + 1, graph=graph)
    return list(found.values())


def _by_graph(fallbacks: Iterable[Fallback]) -> dict[str, list[Fallback]]:
    found: dict[str, list[Fallback]] = {}
    for fallback in fallbacks:
        found.setdefault(fallback.graph, []).append(fallback)
    return found


def _live(part: PartAudit) -> list[SubgraphAudit]:
    return [row for row in part.subgraphs if not row.superseded]


def _lowerings(rows: Sequence[SubgraphAudit]) -> str:
    shown = [row.lowering or "unplanned" for row in rows[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else "")


def _pieces(rows: Sequence[SubgraphAudit]) -> str:
    return "one subgraph" if len(rows) == 1 else f"{len(rows)} subgraphs" if rows else "without a subgraph"


def _graph_name(graph: GraphAudit) -> str:
    """Name of a graph for a person: its function or module."""
    function = graph.function.partition(" ")[0]
    name = f"{graph.module}.{function}" if graph.module and function else graph.module or function or "graph"
    return f"{name}:{graph.variant}" if graph.variant else name
