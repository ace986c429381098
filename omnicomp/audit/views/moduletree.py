"""The report as a tree of modules: shares are summed from the leaves, and equal layers are merged."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from omnicomp.audit.identity import natural
from omnicomp.audit.model import GraphAudit, Report, SubgraphAudit
from omnicomp.timeline import NearMiss, NodePlacement

__all__ = ["BASES", "ModuleNode", "Rows", "basis_of", "module_trees"]

BASES: Final = {"flops": "FLOPs", "seconds": "time", "nodes": "operators", "bytes": "bytes"}
_MOST_RUNS: Final = 4


@dataclasses.dataclass(frozen=True)
class Rows:
    """Subgraphs of one module that are alike: the same part, operators and fate."""

    rows: tuple[SubgraphAudit, ...]

    @property
    def first(self) -> SubgraphAudit:
        """The one that stands for them."""
        return self.rows[0]

    def share(self, basis: str) -> float:
        """Their part of the whole audit's work."""
        return sum(getattr(row.shares, basis) or 0.0 for row in self.rows)


@dataclasses.dataclass(frozen=True)
class ModuleNode:
    """A module, or several equal ones beside each other.

    Attributes:
        names: last pieces of the paths; several if equal modules were merged.
        path: whole path of the first; of a graph's root the path that all modules of the graph begin with.
        graph: id of the graph.
        rows: subgraphs that lie in this module and in none of its children, those of merged modules included.
        declined: nodes of this very module that an earlier lowering refused, with the name of the part.
        near_misses: candidates of this very module that a pass left alone.
        children: the modules inside.
    """

    names: tuple[str, ...]
    path: str
    graph: str
    rows: tuple[Rows, ...] = ()
    declined: tuple[tuple[str, NodePlacement], ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    children: tuple["ModuleNode", ...] = ()

    @property
    def label(self) -> str:
        """`mlp`, or `0-4, 6-11` for merged ones."""
        if len(self.names) == 1:
            return self.names[0]
        if not all(name.isdecimal() for name in self.names):
            return f"{self.names[0]} … {self.names[-1]}"
        runs: list[list[int]] = []
        for number in sorted(map(int, self.names)):
            if runs and number == runs[-1][-1] + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        pieces = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
        return ", ".join(pieces[:_MOST_RUNS]) + (", …" if len(pieces) > _MOST_RUNS else "")

    def shares(self, basis: str) -> dict[str, float]:
        """Share of the whole audit's work by lowering, all modules inside counted."""
        total: dict[str, float] = {}
        for rows in self.every_row():
            share = rows.share(basis)
            total[rows.first.lowering] = total.get(rows.first.lowering, 0.0) + share
        return total

    def every_row(self) -> Iterator[Rows]:
        """The rows of this module and of all inside it."""
        yield from self.rows
        for child in self.children:
            yield from child.every_row()


def basis_of(audit: Report, wanted: str | None = None) -> str:
    """The basis of shares: the one asked for if it is known, else the report's own."""
    known = audit.shares_by
    if wanted is not None and known.get(wanted):
        return wanted
    return audit.share_basis if known.get(audit.share_basis) else "nodes"


class _Module:
    def __init__(self, path: str) -> None:
        self.path = path
        self.rows: list[SubgraphAudit] = []
        self.declined: list[tuple[str, NodePlacement]] = []
        self.near_misses: list[NearMiss] = []
        self.children: dict[str, _Module] = {}

    def at(self, pieces: Iterable[str]) -> "_Module":
        node = self
        for piece in pieces:
            path = f"{node.path}.{piece}" if node.path else piece
            node = node.children.setdefault(piece, _Module(path))
        return node


def module_trees(audit: Report, *, merge: bool = True) -> tuple[ModuleNode, ...]:
    """A tree for each graph; its root stands for the whole graph.

    A subgraph lies where all of its module paths meet: its work can't be told apart by module.

    Args:
        audit: the report.
        merge: whether equal neighbours with numbers in their names become one node, and equal subgraphs of a module.
    """
    return tuple(_tree(graph, merge) for graph in audit.graphs)


def _tree(graph: GraphAudit, merge: bool) -> ModuleNode:
    root = _Module("")
    for part in graph.parts:
        for row in part.subgraphs:
            root.at(_pieces(_place(row, graph))).rows.append(row)
        for node in part.declined:
            root.at(_pieces(node.module)).declined.append((part.name, node))
    for miss in graph.near_misses:
        root.at(_pieces(miss.module)).near_misses.append(miss)
    return _frozen(root, (graph.id,), graph.id, merge)


def _place(row: SubgraphAudit, graph: GraphAudit) -> str:
    if row.module or "/" not in row.id:
        return row.module or graph.module
    return row.modules[0] if len(row.modules) == 1 else row.module or graph.module


def _pieces(path: str) -> list[str]:
    return [piece for piece in path.split(".") if piece]


def _frozen(module: _Module, names: tuple[str, ...], graph: str, merge: bool) -> ModuleNode:
    children = [_frozen(module.children[name], (name,), graph, merge) for name in sorted(module.children, key=natural)]
    return ModuleNode(
        names=names,
        path=module.path,
        graph=graph,
        rows=_alike(module.rows) if merge else tuple(Rows((row,)) for row in module.rows),
        declined=tuple(module.declined),
        near_misses=tuple(module.near_misses),
        children=_merged(children) if merge else tuple(children),
    )


def _alike(rows: Sequence[SubgraphAudit]) -> tuple[Rows, ...]:
    found: dict[object, list[SubgraphAudit]] = {}
    for row in rows:
        found.setdefault(_fate(row), []).append(row)
    return tuple(Rows(tuple(same)) for same in found.values())


def _fate(row: SubgraphAudit) -> object:
    state = (row.part, row.planned, row.expected, row.ran, row.mismatch, row.superseded, bool(row.retreats))
    codes = tuple((reason.by, reason.code, reason.observed) for reason in row.reasons)
    name = _unnumbered(row.id.rpartition("/")[2]) if row.parent else ""
    return bool(row.parent), name, state, codes, tuple(sorted(row.ops.items()))


def _merged(children: Sequence[ModuleNode]) -> tuple[ModuleNode, ...]:
    """Siblings that differ in a number of their names alone, as one where the first of them is."""
    found: dict[object, list[ModuleNode]] = {}
    for child in children:
        found.setdefault(_shape(child), []).append(child)
    return tuple(same[0] if len(same) == 1 else _one(same) for same in found.values())


def _one(nodes: Sequence[ModuleNode]) -> ModuleNode:
    """Nodes of one shape as one: their rows and children go together pair by pair."""
    return ModuleNode(
        names=tuple(name for node in nodes for name in node.names),
        path=nodes[0].path,
        graph=nodes[0].graph,
        rows=tuple(
            Rows(tuple(row for rows in same for row in rows.rows))
            for same in zip(*(node.rows for node in nodes), strict=True)
        ),
        declined=tuple(entry for node in nodes for entry in node.declined),
        near_misses=tuple(miss for node in nodes for miss in node.near_misses),
        children=tuple(_renamed(same) for same in zip(*(node.children for node in nodes), strict=True)),
    )


def _renamed(nodes: Sequence[ModuleNode]) -> ModuleNode:
    """Children that stand for one another in merged parents keep the name of the first."""
    return dataclasses.replace(_one(nodes), names=nodes[0].names)


def _shape(node: ModuleNode) -> object:
    """What two modules share that are told apart by a number alone."""
    if len(node.names) == 1 and not any(char.isdigit() for char in node.names[0]):
        return (node.path,)
    return _inside(node)


def _inside(node: ModuleNode) -> object:
    return (
        _unnumbered(node.names[0]),
        len(node.names),
        tuple((_fate(rows.first), len(rows.rows)) for rows in node.rows),
        tuple((part, n.op, n.lowering, tuple(reason.code for reason in n.chain)) for part, n in node.declined),
        tuple((miss.name, miss.reason.code) for miss in node.near_misses),
        tuple(_inside(child) for child in node.children),
    )


def _unnumbered(name: str) -> str:
    return re.sub(r"\d+", "#", name)
