"""Assertions about sizes that depend on data, which AOTAutograd of torch 2.11 takes for true.

`m = x.nonzero(); torch._check(m.shape[0] == 2)` makes the size 2 in all that is traced, the assertion included, which
is `_assert_scalar(True)` then: nothing is checked.
"""

import operator
from collections.abc import Iterable
from typing import Final

import torch
from torch.fx import Graph, Node

from omnicomp._torch.repairs.needed import Needed

NEEDED: Final = Needed(first="2.11", fixed="2.13")


def check_sizes(graph: Graph) -> int:
    """Assert the sizes of results that depend on data, where assertions have become constants.

    Returns:
        How many sizes are asserted.
    """
    assertions = graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
    if not any(node.args[0] is True for node in assertions):
        return 0
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
            continue
        for result in list(_tensors(node)):
            for dim, size in enumerate(result.meta["val"].shape):
                known = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
                if known is not None:
                    _assert_size(graph, result, dim, known)
                    count += 1
    return count


def _tensors(node: Node) -> Iterable[Node]:
    if isinstance(node.meta.get("val"), torch.Tensor):
        yield node
    else:
        yield from (user for user in node.users if user.target is operator.getitem)


def _assert_size(graph: Graph, tensor: Node, dim: int, size: int) -> None:
    message = f"Runtime assertion failed for expression Eq({tensor.name}.shape[{dim}], {size})"
    with graph.inserting_after(tensor):
        found = graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))
    with graph.inserting_after(found):
        same = graph.call_function(operator.eq, (found, size))
    with graph.inserting_after(same):
        check = graph.call_function(torch.ops.aten._assert_scalar.default, (same, message))
    found.meta["val"], same.meta["val"], check.meta["val"] = size, True, None
