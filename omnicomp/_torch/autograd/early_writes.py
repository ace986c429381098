"""Writes to inputs before an error of the same call, which eager keeps and AOTAutograd loses.

After autograd, what a graph writes to its inputs is written at its end, or behind it where autograd follows the write.
If an operator in the middle raises, nothing has been written. Here a write is moved in front of such an operator if its
value is there by then, and nothing reads the old one any more.
"""

from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch.fx import Graph, Node

from omnicomp import records
from omnicomp._torch.autograd.mutations import is_view, write_targets

# What functionalisation makes of a write to a view, at the next read of the tensor or at the end of the graph.
_SCATTERED: Final = frozenset(
    {
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.slice_scatter.default,
        torch.ops.aten.diagonal_scatter.default,
        torch.ops.aten.as_strided_scatter.default,
    }
)


@records.dataclass(frozen=True)
class _Write:
    """What is written to an input at the end of a graph, or behind it, if there is no node."""

    target: Node
    value: Node
    node: Node | None


def write_early(graph: Graph, may_raise: Callable[[Node], bool]) -> int:
    """Move writes to inputs in front of the operators that may raise, as in the program.

    A value that is written to the same input again behind such an operator is not to be had: it is lost as before.

    Returns:
        How many inputs are written to earlier.
    """
    before = {node: index for index, node in enumerate(graph.nodes)}
    order: dict[Node, float] = {**before}
    raising = [node for node in order if node.op == "call_function" and not _assembles(node) and may_raise(node)]
    writes = list(_writes(graph)) if raising else []
    own = {write.node for write in writes}
    places: list[tuple[float, Node, _Write, list[Node]]] = []
    for write in writes:
        late = _late(write.value)
        sources = [source for node in late for source in node.all_input_nodes] or [write.value]
        known = {*sources, *_readers(write.target)} - {write.node, *late}
        ready = max(order[node] for node in known)
        place = next((node for node in raising if order[node] > ready and node not in own), None)
        if place is not None and (write.node is None or order[place] < order[write.node]):
            moved = sorted((node for node in late if order[node] > order[place]), key=before.__getitem__)
            places.append((order[place], place, write, moved))
            # The next write may have to come behind these.
            order.update(dict.fromkeys([*moved, *([] if write.node is None else [write.node])], order[place] - 0.5))
    for _, place, write, moved in sorted(places, key=lambda entry: -entry[0]):
        for node in (*moved, *([write.node] if write.node is not None else [])):
            place.prepend(node)
        if write.node is None:
            with graph.inserting_before(place):
                copy = graph.call_function(torch.ops.aten.copy_.default, (write.target, write.value))
            copy.meta["val"] = write.target.meta["val"]
    return len(places)


def _writes(graph: Graph) -> Iterable[_Write]:
    """The writes at the end of a graph, and those that are left to what calls it."""
    targets = [(node, target) for node in graph.nodes for target in write_targets(node)]
    counts = [target for _, target in targets]
    for node, target in targets:
        if node.target is torch.ops.aten.copy_.default and node.args[0] is target and counts.count(target) == 1:
            yield _Write(target, node.args[1], node)
    described = {node.meta["desc"]: node for node in graph.find_nodes(op="placeholder") if "desc" in node.meta}
    output = graph.output_node()
    for value, description in zip(output.args[0], output.meta.get("desc", ()), strict=False):  # type: ignore[arg-type]
        target = described.get(getattr(description, "mutated_input", None))
        if isinstance(value, Node) and target is not None and target not in counts and _alike(value, target):
            yield _Write(target, value, None)


def _alike(value: Node, target: Node) -> bool:
    """Whether the new value of an input has its layout, as it has unless the program changed that, too."""
    made, there = value.meta.get("val"), target.meta.get("val")
    if not isinstance(made, torch.Tensor) or not isinstance(there, torch.Tensor):
        return False
    return (str(made.shape), str(made.stride()), made.dtype) == (str(there.shape), str(there.stride()), there.dtype)


def _late(value: Node) -> set[Node]:
    """The nodes of a value that only put together what was computed before, and may be computed as early as that."""
    found: set[Node] = set()
    pending = [value]
    while pending:
        node = pending.pop()
        if node not in found and _assembles(node):
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _assembles(node: Node) -> bool:
    return node.op == "call_function" and (is_view(node) or node.target in _SCATTERED)


def _readers(target: Node) -> Iterable[Node]:
    """What reads the elements of an input, also through views of it."""
    for user in target.users:
        if user.op == "call_function" and is_view(user):
            yield from _readers(user)
        elif user.op != "output":
            yield user
