"""Which nodes of a graph the device can't run as they are."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.dynamo.autocast import ENTER
from omnicomp.analysis.nodes import op_name
from omnicomp.devices import Device
from omnicomp.passes.attention.nodes import kind
from omnicomp.passes.legal.dtypes import Legal
from omnicomp.passes.legal.fakes import CAST, MARK, leaves
from omnicomp.passes.legal.operators import CASTS, FILLS, moves

__all__ = ["in_transform", "lacking", "lacks_autocast", "missing", "without_missing_autocast"]


def lacks_autocast(device: Device, legal: Legal) -> bool:
    """Whether autocast is on, to a dtype that the device lacks."""
    return torch.is_autocast_enabled(device.type) and not legal.computes(torch.get_autocast_dtype(device.type))


@contextlib.contextmanager
def without_missing_autocast(device: Device, legal: Legal) -> Generator[None]:
    """Autocast to a dtype that the device has, while a graph is traced under autocast to one that it lacks.

    The graph itself switches autocast off, but the operators of its derivative are traced outside of that. It must not
    be off altogether here: AOTAutograd switches off in each call what was on while it traced.
    """
    dtype = torch.get_autocast_dtype(device.type)
    nearest = legal.nearest(dtype)
    if nearest is None or not torch.is_autocast_enabled(device.type):
        yield
        return
    torch.set_autocast_dtype(device.type, nearest)
    try:
        yield
    finally:
        torch.set_autocast_dtype(device.type, dtype)


def lacking(node: Node, legal: Legal) -> bool:
    """Whether a node computes in, or is, something that the device lacks; its casts of other nodes are none."""
    if MARK in node.meta or node.op not in ("call_function", "call_method"):
        return False
    if node.target is CAST or node.target is torch.Tensor.copy_ or node.target == "copy_":
        return not all(legal.stores(leaf.dtype) for leaf in leaves(node)) and "copy_" not in op_name(node)
    if node.target is ENTER and node.args[2]:
        dtype: Any = node.args[1] or torch.get_autocast_dtype(str(node.args[0]))
        return not legal.computes(dtype)
    stored = moves(node) or kind(node) in FILLS or kind(node) in CASTS or kind(node) == "getitem"
    known = legal.stores if stored else legal.computes
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        known = legal.stores
    operands = [leaf for operand in node.all_input_nodes if MARK not in operand.meta for leaf in leaves(operand)]
    return not all(known(leaf.dtype) for leaf in (*leaves(node), *operands))


def missing(node: Node, legal: Legal) -> torch.dtype:
    """A dtype of a node that is `lacking`."""
    used = [leaf.dtype for value in (node, *node.all_input_nodes) for leaf in leaves(value)]
    return next((dtype for dtype in used if not legal.computes(dtype)), torch.get_default_dtype())


def in_transform(module: GraphModule) -> Node | None:
    """The first node of a region that enters a transform of torch.func, whose values are no plain tensors."""
    return next((n for n in module.graph.nodes if op_name(n).endswith("_increment_nesting")), None)
