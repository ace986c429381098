"""Pairing the graphs and subgraphs of two reports by identity."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, TypeVar

from omnicomp.audit.identity import operators_of
from omnicomp.audit.model import GraphAudit, SubgraphAudit

__all__ = ["Pairs", "difference", "operators", "paired_graphs", "paired_rows"]

Item = TypeVar("Item")
Pairs = tuple[list[tuple[Item, Item]], list[Item], list[Item]]
"""The pairs, and what is in the first or the second alone."""

# Of two graphs of one name that are otherwise unlike, fewer operators than this part of all make one out of the other.
_ALIKE: Final = 0.3
_COMPARED: Final = 32


def paired_graphs(left: Sequence[GraphAudit], right: Sequence[GraphAudit]) -> Pairs[GraphAudit]:
    """The graphs of two reports: those of equal identity, of equal operators, and those that were edited."""
    pairs, rest, others = _paired(left, right, (lambda g: g.identity, lambda g: operators_of(g.identity)))
    by_place: dict[str, list[GraphAudit]] = {}
    for graph in others:
        by_place.setdefault(_place(graph), []).append(graph)
    lost: list[GraphAudit] = []
    for graph in rest:
        waiting = by_place.get(_place(graph), [])
        best = max(waiting[:_COMPARED], key=lambda other: _likeness(graph, other), default=None)
        if best is None or _likeness(graph, best) < _ALIKE:
            lost.append(graph)
        else:
            pairs.append((graph, best))
            waiting.remove(best)
    taken = {graph.id for _, graph in pairs}
    return pairs, lost, [graph for graph in others if graph.id not in taken]


def _place(graph: GraphAudit) -> str:
    return graph.identity.rpartition("/")[0]


def paired_rows(left: Sequence[SubgraphAudit], right: Sequence[SubgraphAudit]) -> Pairs[SubgraphAudit]:
    """The rows of two graphs that are one: of equal identity, of equal operators, or of the same place."""
    return _paired(
        left,
        right,
        (
            lambda row: row.identity,
            lambda row: operators_of(row.identity),
            # A part that is cut otherwise has several at one place: what stayed on its lowering did not move.
            lambda row: (row.identity.rpartition("/")[0], bool(row.parent), row.lowering),
            lambda row: (row.identity.rpartition("/")[0], bool(row.parent)),
        ),
    )


def operators(graph: GraphAudit) -> Counter[str]:
    """How many of each operator a graph has, after autograd, with the part."""
    found: Counter[str] = Counter()
    for row in graph.subgraphs:
        if not row.parent:
            found.update({f"{row.part} {op}": count for op, count in row.ops.items()})
    return found


def _likeness(left: GraphAudit, right: GraphAudit) -> float:
    """The part of all their operators that two graphs share, from 0 to 1; graphs that were never placed are alike."""
    one, other = operators(left), operators(right)
    total = (one | other).total()
    return (one & other).total() / total if total else 1.0


def _paired(left: Sequence[Item], right: Sequence[Item], keys: Sequence[Callable[[Item], Hashable]]) -> Pairs[Item]:
    """Pair items of equal keys, in order, trying one key after the other."""
    pairs: list[tuple[Item, Item]] = []
    rest, others = list(left), list(right)
    for key in keys:
        waiting: dict[Hashable, list[Item]] = {}
        for item in reversed(others):
            waiting.setdefault(key(item), []).append(item)
        unpaired: list[Item] = []
        for item in rest:
            found = waiting.get(key(item))
            if found:
                pairs.append((item, found.pop()))
            else:
                unpaired.append(item)
        taken = {id(other) for _, other in pairs}
        rest, others = unpaired, [item for item in others if id(item) not in taken]
    return pairs, rest, others


def difference(
    left: Iterable[Item], left_key: Callable[[Item], Hashable], right: Iterable[Item], key: Callable[[Item], Hashable]
) -> tuple[list[Item], list[Item]]:
    """The multiset differences by key: first without second, second without first."""
    waiting: dict[Hashable, list[Item]] = {}
    for item in left:
        waiting.setdefault(left_key(item), []).append(item)
    new: list[Item] = []
    for item in right:
        same = waiting.get(key(item))
        if same:
            same.pop(0)
        else:
            new.append(item)
    return [item for items in waiting.values() for item in items], new
