"""Judge a report by a fallback budget: a pure function.

What fell back is what the report calls so (`Audit.fallbacks`). An operator that was placed on eager counts as one; a
subgraph, or a whole graph, that moved there later counts with all of its operators. It is a choice, and does not count,
where the options ask no compiler, or where eager was measured to be the fastest.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from omnicomp.audit.diff.compare import difference, paired_graphs
from omnicomp.audit.gate.verdict import STATES, Fallen, Verdict
from omnicomp.audit.model import Fallback, GraphAudit, Report, SubgraphAudit
from omnicomp.options.acknowledged import Acknowledged
from omnicomp.options.fallback_limits import FallbackBudget
from omnicomp.options.placement_rules import selects

# A subgraph names so many of its nodes that were refused; beyond that its operators tell.
_NAMED: Final = 8
_NO_COMPILER: Final = frozenset({"override", "eager"})
_State = tuple[str, str]
_COUNTS: Final[_State] = ("counts", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Item:
    """A fallback with what its verdict depends on: modules, rows and function."""

    fallen: Fallen
    modules: tuple[str, ...]
    rows: tuple[str, ...]
    function: str
    place: str


def judge(
    audit: Report,
    budget: FallbackBudget | None = None,
    *,
    acknowledged: Acknowledged | None = None,
    baseline: Sequence[Report] | None = None,
    name: str = "",
    allow_unfinished: bool = False,
) -> Verdict:
    """Judge a report.

    Args:
        audit: the report.
        budget: the bounds; None for the default ones, by which nothing may fall back.
        acknowledged: what the project acknowledges.
        baseline: earlier reports: what is in one of them does not count. None to count all.
        name: of the report.
        allow_unfinished: whether a report passes of which something has no end.
    """
    budget, acknowledged = budget or FallbackBudget(), acknowledged or Acknowledged()
    items = list(_items(audit))
    known = frozenset(id for report in baseline or () for id in _known(items, audit, report))
    fallen: list[Fallen] = []
    counted: set[str] = set()
    for item in items:
        for state, ops in _split(item, known, budget, acknowledged):
            fallen.append(dataclasses.replace(item.fallen, state=state[0], why=state[1], **ops))
            if state == _COUNTS:
                counted.update(item.rows)
    fallen.sort(key=lambda each: list(STATES).index(each.state))
    # The whole share of a subgraph, as what of it one of its operators has is not known.
    share = sum(row.share or 0.0 for row in audit.subgraphs if row.id in counted or row.parent in counted)
    pairs = [(item, op) for item in items for op in _ops(item)]
    unused = [e for e in acknowledged.entries if not any(_is_for(e.selector, item, op) for item, op in pairs)]
    return Verdict(
        name=name,
        audit=audit,
        budget=budget,
        fallen=tuple(fallen),
        nodes=sum(each.nodes for each in fallen if each.state == "counts"),
        share=min(share, 1.0),
        basis=audit.share_basis,
        notes=(
            *acknowledged.problems,
            *(
                f"the baseline is unfinished, and may lack what falls back: {report.unfinished[0].sentence}"
                for report in baseline or ()
                if report.unfinished
            ),
            *(f"the acknowledgement of {entry.selector} is about nothing in this report" for entry in unused),
        ),
        compared=baseline is not None,
        allow_unfinished=allow_unfinished,
    )


class _Eager:
    """The rows of a part that were planned on eager, by node and by operator."""

    def __init__(self, rows: Sequence[SubgraphAudit]) -> None:
        eager = [row for row in rows if row.planned == "eager"]
        self.given_up = bool(eager) and all(row.superseded for row in eager)
        self._by_node = {node: row.id for row in eager for node in row.refused}
        self._by_op: dict[str, list[str]] = {}
        for row in eager:
            if not 0 < len(row.refused) < _NAMED:
                for op in row.ops:
                    self._by_op.setdefault(op, []).append(row.id)

    def holding(self, fallback: Fallback) -> tuple[str, ...]:
        """The rows that may hold a node; one, where the report names it."""
        own = self._by_node.get(fallback.node)
        return (own,) if own is not None else tuple(self._by_op.get(fallback.op, ()))


def _items(audit: Report) -> Iterator[_Item]:
    """The fallbacks of a report, each once: what was placed on eager, and what moved there later."""
    graphs = {graph.id: graph for graph in audit.graphs}
    eager = {(graph.id, part.name): _Eager(part.subgraphs) for graph in audit.graphs for part in graph.parts}
    rows = {row.id: row for row in audit.subgraphs}
    fallbacks = audit.fallbacks
    placed = {(fallback.graph, fallback.part) for fallback in fallbacks if not fallback.subgraph}
    fallen = {fallback.subgraph for fallback in fallbacks if fallback.subgraph}
    for fallback in fallbacks:
        graph, part = graphs[fallback.graph], (fallback.graph, fallback.part)
        if not fallback.subgraph:
            # Where its graph retreated as a whole, that counts. A function that Dynamo compiles no more has no part.
            own = eager.get(part, _Eager(()))
            if not own.given_up:
                yield _of_node(fallback, graph, own.holding(fallback))
            continue
        row = rows[fallback.subgraph]
        planned = row.planned == "eager" and not row.retreats and not row.mismatch
        # Where nodes were refused, these count; an override call counts with the subgraph that it is in.
        if not (planned and part in placed) and row.parent not in fallen:
            yield _of_row(fallback, row, graph)


def _of_node(fallback: Fallback, graph: GraphAudit, rows: tuple[str, ...]) -> _Item:
    return _Item(
        fallen=Fallen(
            state="counts",
            graph=graph.id,
            part=fallback.part,
            node=fallback.node,
            subgraph=rows[0] if len(rows) == 1 else "",
            ops={fallback.op: 1} if fallback.op else {},
            source=_source(fallback),
            module=fallback.module,
            reasons=fallback.reasons,
        ),
        modules=(fallback.module,) if fallback.module else (),
        rows=rows,
        function=graph.function.partition(" ")[0],
        place=fallback.module,
    )


def _of_row(fallback: Fallback, row: SubgraphAudit, graph: GraphAudit) -> _Item:
    module = row.module or fallback.module or (graph.module if row.id == graph.id else "")
    # Of more modules than are named, the path that they share is what is certain.
    modules = row.modules if 0 < len(row.modules) < _NAMED else (module,) if module and not row.modules else ()
    return _Item(
        fallen=Fallen(
            state="chosen" if _is_chosen(row, graph) else "counts",
            graph=graph.id,
            part=fallback.part,
            subgraph=row.id,
            ops=dict(row.ops),
            nodes=max(row.nodes, 1),
            source=_source(fallback),
            module=module,
            reasons=row.reasons,
        ),
        modules=modules or ((row.module,) if row.module else ()),
        rows=(row.id,),
        function=graph.function.partition(" ")[0],
        place=module,
    )


def _source(fallback: Fallback) -> str:
    return fallback.source or next((reason.source for reason in fallback.reasons if reason.source), "")


def _is_chosen(row: SubgraphAudit, graph: GraphAudit) -> bool:
    """Whether a row is on eager because the options ask no compiler, or measuring chose eager."""
    if row.planned != "eager" or row.reasons or row.mismatch:
        return False
    measured = any(each.selected and each.lowerings[:1] == ("eager",) for each in graph.candidates)
    return measured or set(graph.lowerings) <= _NO_COMPILER


def _split(
    item: _Item, known: frozenset[int], budget: FallbackBudget, acknowledged: Acknowledged
) -> Iterator[tuple[_State, dict[str, object]]]:
    """The states of an item; a subgraph of which some operators are allowed has two, each with its operators."""
    fallen = item.fallen
    if fallen.state == "chosen":
        yield ("chosen", ""), {}
        return
    if id(item) in known:
        yield ("known", ""), {}
        return

    def state(op: str) -> _State:
        for selector in budget.allow:
            if _is_for(selector, item, op):
                return "allowed", selector
        for entry in acknowledged.entries:
            if _is_for(entry.selector, item, op):
                return "acknowledged", f"{entry.reason} (until {entry.expires})"
        return _COUNTS

    found: dict[_State, dict[str, int]] = {}
    for op, count in fallen.ops.items():
        found.setdefault(state(op), {})[op] = count
    if len(found) < 2:
        yield next(iter(found), None) or state(""), {}
        return
    for each, ops in found.items():
        yield each, {"ops": ops, "nodes": sum(ops.values())}


def _ops(item: _Item) -> tuple[str, ...]:
    return tuple(item.fallen.ops) or ("",)


def _is_for(selector: str, item: _Item, op: str) -> bool:
    fallen = item.fallen
    ids = (fallen.graph, f"{fallen.graph}.{fallen.part}", fallen.subgraph)
    return selects(selector, op, node=fallen.node, modules=item.modules, ids=ids, function=item.function)


def _known(items: Sequence[_Item], audit: Report, baseline: Report) -> frozenset[int]:
    """Ids of the items that a baseline has, too: in the graph of the same identity, or else of the same place."""
    olds: dict[str, list[_Item]] = {}
    for item in _items(baseline):
        olds.setdefault(item.fallen.graph, []).append(item)
    own: dict[str, list[_Item]] = {}
    for item in items:
        own.setdefault(item.fallen.graph, []).append(item)
    pairs, _, alone = paired_graphs(baseline.graphs, audit.graphs)
    found: set[int] = set()
    for one, other in pairs:
        mine = own.get(other.id, [])
        _, new = difference(olds.get(one.id, []), _key, mine, _key)
        fresh = set(map(id, new))
        found.update(id(item) for item in mine if id(item) not in fresh)
    # The same program, compiled once more, for other sizes.
    places: dict[str, set[object]] = {}
    for graph in baseline.graphs:
        places.setdefault(_place(graph), set()).update(map(_key, olds.get(graph.id, ())))
    for graph in alone:
        keys = places.get(_place(graph), set())
        found.update(id(item) for item in own.get(graph.id, []) if _key(item) in keys)
    return frozenset(found)


def _place(graph: GraphAudit) -> str:
    return graph.identity.rpartition("/")[0]


def _key(item: _Item) -> object:
    fallen = item.fallen
    return fallen.part, item.place, tuple(sorted(fallen.ops.items())), bool(fallen.node)
