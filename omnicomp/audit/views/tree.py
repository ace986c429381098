"""The report as a tree by module path, for a terminal."""

from collections.abc import Iterator
from typing import Final

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from omnicomp.audit.model import GraphAudit, Report
from omnicomp.audit.views import rows
from omnicomp.audit.views.moduletree import BASES, ModuleNode, Rows, basis_of, module_trees
from omnicomp.audit.views.rows import percent, short_source, summary
from omnicomp.timeline import NodePlacement, Reason
from omnicomp.timeline.text import one_line

__all__ = ["STYLES", "to_tree", "tree_renderables"]

STYLES: Final = {"inductor": "green", "override": "cyan", "eager": "yellow"}
_WIDTH: Final = 120
_MOST_IDS: Final = 2


class _Tree(Tree):
    # Guides of ASCII, as the tables' rules: the same text in a log file and a terminal without Unicode.
    TREE_GUIDES: list[tuple[str, str, str, str]] = [Tree.ASCII_GUIDES] * 3


def to_tree(audit: Report, *, by: str | None = None, width: int = _WIDTH) -> str:
    """Plain text without colours.

    Args:
        audit: the report.
        by: what shares are counted in: `flops`, `seconds`, `nodes` or `bytes`; what is not known gives way to the
            report's own basis.
        width: columns.
    """
    return rows.plain(*tree_renderables(audit, by=by), width=width)


def tree_renderables(audit: Report, *, by: str | None = None) -> Iterator[RenderableType]:
    """The summary, then a tree for each graph, coloured by lowering."""
    basis = basis_of(audit, by)
    yield Text(one_line(summary(audit)), style="bold red" if audit.mismatches else "bold")
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
        fate = "broken off " if miss.reason.code == "graph_break" else "left alone "
        text = Text(fate, style="yellow").append(one_line(f"by {miss.name}: {miss.node}"), style="default")
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
