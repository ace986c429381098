"""Boundaries between the subgraphs of a cut part: the tensors, bytes, copies and casts that cross them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp.analysis.costs import size_of
from omnicomp.analysis.nodes import fake_value, op_name
from omnicomp.builder.partition import Piece
from omnicomp.lowerings.base import LoweringContext
from omnicomp.timeline import Boundary

_CONVERSIONS: Final = ("aten._to_copy.", "prims.convert_element_type.", "prims.device_put.")
_COPIES: Final = ("aten.clone.", "aten.copy.", "aten.contiguous.")


def boundaries(pieces: Sequence[Piece], context: LoweringContext) -> list[Boundary]:
    """One event for each pair of subgraphs of which one reads results of the other, in program order.

    Args:
        pieces: the subgraphs of a part, in program order; their inputs and outputs are nodes of the part.
        context: where the part belongs.
    """
    made = {node: index for index, piece in enumerate(pieces) for node in piece.outputs}
    crossing: dict[tuple[int, int], list[Node]] = {}
    for index, piece in enumerate(pieces):
        for node in piece.inputs:
            if node in made:
                crossing.setdefault((made[node], index), []).append(node)
    found: list[Boundary] = []
    for (source, target), nodes in sorted(crossing.items(), key=lambda item: item[0]):
        size, hint = size_of([fake_value(node) for node in nodes])
        ends = _ends(nodes, pieces[target])
        found.append(
            Boundary(
                graph=context.graph_id,
                part=context.part,
                source=f"{context.part_id}.{source}",
                target=f"{context.part_id}.{target}",
                tensors=sum(1 for node in nodes if isinstance(fake_value(node), torch.Tensor)),
                bytes=str(size),
                bytes_hint=hint,
                copies=sum(1 for node in ends if _what(node) == "copy"),
                casts=sum(1 for node in ends if _what(node) == "cast"),
            )
        )
    return found


def _ends(nodes: Sequence[Node], target: Piece) -> list[Node]:
    """What makes the values, and what reads them first: the nodes of the subgraph that take its placeholders."""
    placeholders: Mapping[Node, Node] = dict(
        zip(target.inputs, target.module.graph.find_nodes(op="placeholder"), strict=True)
    )
    return [*nodes, *dict.fromkeys(user for node in nodes for user in placeholders[node].users)]


def _what(node: Node) -> str:
    """`copy`, `cast` or nothing."""
    if node.op != "call_function":
        return ""
    name = op_name(node)
    if name.startswith(_COPIES):
        return "copy"
    if not name.startswith(_CONVERSIONS):
        return ""
    return "copy" if _dtype(node.args[0]) == _dtype(node) else "cast"


def _dtype(node: Any) -> torch.dtype | None:
    return getattr(fake_value(node), "dtype", None)
