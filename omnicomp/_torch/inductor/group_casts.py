"""Casts of many tensors by one kernel each some, where Inductor would launch a kernel for each tensor.

A training step in low precision casts every weight once, and every weight's gradient back. These casts stand alone: a
library's product reads what was cast, or wrote what is to be cast, so that there is nothing to fuse them with. Where a
step is short, launching them takes longer than they do. Here they become `_foreach_copy`, of which Inductor makes one
kernel on a GPU, as it does of an optimizer's step.
"""

import math
import operator
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from omnicomp._torch.autograd.mutations import is_view, write_targets

_aten: Final[Any] = torch.ops.aten
_CAST: Final[Any] = torch.ops.prims.convert_element_type.default
_HALF: Final = (torch.bfloat16, torch.float16)
_LIBRARY: Final = frozenset(
    (
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
        *(_aten.convolution.default, _aten.convolution_backward.default),
    )
)
# What is cast waits in both dtypes for the last of its group.
_BYTES: Final = 64 * 2**20
_MANY: Final = 64


def cast_together(graph: Graph, device: str = "cuda") -> int:
    """Let casts of inputs that products read, and of products that are outputs, be made in groups.

    A group of inputs is cast where the first of them was, and one of outputs where the last was. It has 64 MiB in
    float32 at most, and tensors of fixed size alone.

    Args:
        graph: a forward or backward graph, after autograd; changed in place.
        device: type of the devices that launch one kernel for a group.

    Returns:
        How many kernels fewer there are to launch.
    """
    written = {target for node in graph.nodes for target in write_targets(node)}
    output = graph.output_node()
    order = {node: index for index, node in enumerate(graph.nodes)}
    inputs: list[Node] = []
    outputs: list[Node] = []
    for node in graph.nodes:
        if node.target is not _CAST or not _is_fixed(node, device):
            continue
        source, dtype = node.args[0], node.args[1]
        before = source.meta["val"].dtype
        if source.op == "placeholder" and before is torch.float32 and dtype in _HALF:
            if source not in written and all(user.target in _LIBRARY or user is output for user in _readers(node)):
                inputs.append(node)
        elif before in _HALF and dtype is torch.float32 and list(node.users) == [output] and _of_library(source):
            outputs.append(node)
    fewer = 0
    for group in _groups(inputs):
        fewer += _cast(graph, group, before=min(group, key=order.__getitem__))
    for group in _groups(outputs):
        fewer += _cast(graph, group, before=max(group, key=order.__getitem__))
    return fewer


def _is_fixed(node: Node, device: str) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.device.type != device or not isinstance(node.args[0], Node):
        return False
    return all(type(size) is int for size in value.shape) and value.numel() > 0


def _readers(node: Node) -> Iterable[Node]:
    """What reads a value, also through views."""
    for user in node.users:
        if user.op == "call_function" and is_view(user):
            yield from _readers(user)
        else:
            yield user


def _of_library(node: Node) -> bool:
    """Whether a value is a product's result, or a view of one."""
    while node.op == "call_function" and (node.target is operator.getitem or is_view(node)):
        node = node.all_input_nodes[0]
    return node.target in _LIBRARY


def _groups(casts: Iterable[Node]) -> Iterable[list[Node]]:
    """Casts to one dtype on one device, in the order of the graph."""
    group: list[Node] = []
    size = 0
    for node in casts:
        value = node.meta["val"]
        mine = 4 * math.prod(value.shape)
        other = group and (value.dtype, value.device) != (group[0].meta["val"].dtype, group[0].meta["val"].device)
        if group and (other or size + mine > _BYTES or len(group) == _MANY):
            yield group
            group, size = [], 0
        group.append(node)
        size += mine
    if group:
        yield group


def _cast(graph: Graph, group: list[Node], before: Node) -> int:
    """Make one call of a group's casts; how many kernels fewer that are."""
    if len(group) < 2:
        return 0
    values = [node.meta["val"] for node in group]
    with graph.inserting_before(before):
        targets: dict[tuple[int, ...], Node] = {}
        for value in values:
            shape = tuple(value.shape)
            if shape not in targets:  # of which only shape and dtype are taken
                settings = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
                targets[shape] = graph.call_function(_aten.full.default, (list(shape), 0), settings)
                targets[shape].meta["val"] = value
        wanted = [targets[tuple(value.shape)] for value in values]
        call = graph.call_function(_aten._foreach_copy.default, (wanted, [node.args[0] for node in group]))
        call.meta["val"] = values
        results = [graph.call_function(operator.getitem, (call, index)) for index in range(len(group))]
    for node, result in zip(group, results, strict=True):
        result.meta.update(node.meta)
        node.replace_all_uses_with(result)
    for node in group:
        graph.erase_node(node)
    graph.lint()
    return len(group) - 1
