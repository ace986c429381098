"""The report as a tree of modules: shares are summed from the leaves, and equal layers are merged."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from omnicomp.audit.identity import natural
from omnicomp.audit.model import GraphAudit, Report, SubgraphAudit
from omnicomp.audit.views import rows
from omnicomp.audit.views.layout import plain
from omnicomp.audit.views.rows import percent, short_source, summary
from omnicomp.safety.escapes import one_line
from omnicomp.timeline import NearMiss, NodePlacement, Reason
from omnicomp.timeline.reasons import RECOMPILE_LIMIT

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
    """A module, or several equal ones beside each other."""

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
        for same in self.every_row():
            total[same.first.lowering] = total.get(same.first.lowering, 0.0) + same.share(basis)
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


STYLES: Final = {"inductor": "green", "override": "cyan", "eager": "yellow"}
_MOST_IDS: Final = 2


class _Tree(Tree):
    # Guides of ASCII, as the tables' rules: the same text in a log file and a terminal without Unicode.
    TREE_GUIDES: list[tuple[str, str, str, str]] = [Tree.ASCII_GUIDES] * 3


def to_tree(audit: Report, *, by: str | None = None, width: int = 120) -> str:
    """Plain text without colours.

    Args:
        audit: the report.
        by: what shares are counted in: `flops`, `seconds`, `nodes` or `bytes`; what is not known gives way to the
            report's own basis.
        width: columns.
    """
    return plain(*tree_renderables(audit, by=by), width=width)


def tree_renderables(audit: Report, *, by: str | None = None) -> Iterator[RenderableType]:
    """The summary, then a tree for each graph, coloured by lowering."""
    basis = basis_of(audit, by)
    yield Text(one_line(summary(audit)), style="bold red" if audit.mismatches or audit.unfinished else "bold")
    yield from (Text(one_line(line), style="yellow") for line in rows.missing(audit))
    if by is not None and basis != by:
        yield Text(f"Shares count {BASES[basis]}: of {BASES.get(by, by)} nothing is known.", style="dim")
    for graph, root in zip(audit.graphs, module_trees(audit), strict=True):
        yield _graph(graph, root, basis)


def _graph(graph: GraphAudit, root: ModuleNode, basis: str) -> Tree:
    label = Text(one_line(rows.graph_line(graph)), style="bold")
    tree = _Tree(label.append("  ").append_text(_shares(root, basis)))
    _fill(tree, root, basis, set())
    return tree


def _fill(tree: Tree, node: ModuleNode, basis: str, said: set[str]) -> None:
    for same in node.rows:
        branch = tree.add(_row(same, basis))
        for reason in same.first.reasons or _of_refused(node, same):
            branch.add(_reason(reason, said))
    for text, chain in _declined(node):
        branch = tree.add(text)
        for reason in chain:
            branch.add(_reason(reason, said))
    for miss in node.near_misses[:1]:
        broken = miss.reason.code in ("graph_break", RECOMPILE_LIMIT)
        fate = miss.kind.replace("_", " ") if broken else "near miss"
        which = miss.node if broken else f"{miss.node} of {miss.name}"
        text = Text(fate, style="yellow").append(one_line(f": {which}"), style="default")
        more = f" and {len(node.near_misses) - 1} more" if len(node.near_misses) > 1 else ""
        branch = tree.add(text.append(f" {short_source(one_line(miss.source))}{more}", style="dim"))
        branch.add(_reason(miss.reason, said))
    for child in node.children:
        names, last = [child.label], child
        # A module with one module inside and nothing else is one line with it.
        while len(last.children) == 1 and not (last.rows or last.declined or last.near_misses):
            last = last.children[0]
            names.append(last.label)
        label = Text(one_line(".".join(names)), style="bold")
        count = len(child.names)
        label.append(f" ({count} equal)" if count > 1 else "", style="dim").append("  ")
        _fill(tree.add(label.append_text(_shares(child, basis))), last, basis, said)


def _of_refused(node: ModuleNode, same: Rows) -> tuple[Reason, ...]:
    """Why the first refused operator of a row is where it is, where the row itself has no reasons."""
    return next((placed.chain for _, placed in node.declined if placed.node in same.first.refused), ())


def _shares(node: ModuleNode, basis: str) -> Text:
    """`inductor 98.7 %, eager 1.3 % of FLOPs`."""
    found = {name: share for name, share in node.shares(basis).items() if share > 0}
    text = Text()
    for index, name in enumerate(sorted(found, key=lambda name: (name == "eager", -found[name], name))):
        text.append(", " if index else "", style="dim")
        text.append(f"{one_line(name) or 'unplanned'} {percent(found[name])}", style=STYLES.get(name, "magenta"))
    return text.append(f" of {BASES[basis]}", style="dim") if found else text


def _row(same: Rows, basis: str) -> Text:
    row = same.first
    state = rows.status(row)
    text = Text(one_line(row.lowering) or "unplanned", style=STYLES.get(row.lowering, "magenta"))
    if row.ran is None:
        text.append(" (planned)" if row.planned else "", style="dim")
    text.append(f" {state}" if state else "", style="bold red" if row.mismatch else "dim")
    ids = [each.id.rpartition("/")[2] if each.parent else each.id for each in same.rows]
    shown = ", ".join(ids[:_MOST_IDS]) + (f" and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else "")
    text.append(f"  {one_line(shown)}", style="default")
    share = percent(same.share(basis)) if row.share is not None else ""
    text.append(f"  {share}" if share else "", style="bold")
    return text.append(f"  {one_line(rows.counts(row.ops, limit=3))}", style="dim")


def _declined(node: ModuleNode) -> Iterator[tuple[Text, tuple[Reason, ...]]]:
    """Refused operators whose subgraph has rows elsewhere, equal ones once; those of a row here say it themselves."""
    said = {name for same in node.rows for row in same.rows for name in row.refused}
    grouped: dict[tuple[str, str, str], list[NodePlacement]] = {}
    for part, placed in node.declined:
        if placed.node not in said:
            grouped.setdefault((part, placed.op, placed.lowering), []).append(placed)
    for (part, op, lowering), nodes in grouped.items():
        times = f" x{len(nodes)}" if len(nodes) > 1 else ""
        text = Text(one_line(lowering), style=STYLES.get(lowering, "magenta"))
        text.append(one_line(f"  {op}{times} in {part}"), style="default")
        place = short_source(one_line(nodes[0].source))
        yield text.append(f" {place}" if place else "", style="dim"), nodes[0].chain


def _reason(reason: Reason, said: set[str]) -> Text:
    """The reason with its lever, or its code alone where the tree has said the rest above."""
    by = f"{reason.by}: " if reason.by else ""
    sentence = one_line(f"{by}{rows.reason_text(reason)}")
    if sentence in said:
        return Text(one_line(f"{by}as above [{reason.code}]"), style="dim")
    said.add(sentence)
    text = Text(sentence, style="default").append(one_line(f" [{reason.code}]"), style="dim")
    return text.append(one_line(f"; {reason.lever}") if reason.lever else "", style="italic dim")
