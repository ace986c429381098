"""Operators that compute in a missing dtype whatever they are given, in terms of others."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value
from omnicomp.passes.legal.fakes import CAST
from omnicomp.passes.legal.values import Values

__all__ = ["DECOMPOSED"]


def _one_hot(node: Node, values: Values) -> bool:
    """A comparison with all classes; torch's own computes in int64."""
    classes = _argument(node, 1, "num_classes", -1)
    if not isinstance(classes, int) or classes < 0:
        return False
    values.record(node)
    index = values.use(_argument(node, 0, "input", None), node)
    fake = fake_value(index)
    every = values.insert(node, torch.arange, (classes,), {"dtype": fake.dtype, "device": fake.device})
    equal = values.insert(node, torch.eq, (values.insert(node, torch.unsqueeze, (index, -1)), every))
    _put(values.insert(node, CAST, (equal, fake.dtype)), node, values)
    return True


def _scaled_mm(node: Node, values: Values) -> bool:
    """`(a * scale_a) @ (b * scale_b) + bias`, with the scales of a tensor, or of rows of `a` and columns of `b`.

    The scales are floats of no dimension, or `[rows, 1]` and `[1, columns]`; those of blocks are not understood.
    """
    operands: list[Node] = []
    for index, side in enumerate(("self", "mat2")):
        matrix, scale = _argument(node, index, side, None), _argument(node, 2 + index, f"scale_{'ab'[index]}", None)
        if not isinstance(matrix, Node) or not isinstance(scale, Node):
            return False
        shape, sizes = fake_value(scale).shape, fake_value(matrix).shape
        if len(shape) not in (0, 2) and tuple(shape) != (1,):
            return False
        if len(shape) == 2 and (shape[1 - index] != 1 or shape[index] not in (1, sizes[index])):
            return False
        operands.append(values.insert(node, torch.mul, (values.use(matrix, node), values.use(scale, node))))
    if _argument(node, 5, "scale_result", None) is not None:
        return False
    values.record(node)
    result = values.insert(node, torch.matmul, tuple(operands))
    bias = _argument(node, 4, "bias", None)
    if isinstance(bias, Node):
        result = values.insert(node, torch.add, (result, values.use(bias, node)))
    expected = values.expected[node]
    if values.legal.computes(expected) and fake_value(result).dtype is not expected:
        result = values.insert(node, CAST, (result, expected))
    _put(result, node, values)
    return True


def _put(result: Node, node: Node, values: Values) -> None:
    node.replace_all_uses_with(result)
    values.follow(result, node)
    values.graph.erase_node(node)


def _argument(node: Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


DECOMPOSED: Final[dict[str, Callable[[Node, Values], bool]]] = {"one_hot": _one_hot, "_scaled_mm": _scaled_mm}
"""Each replaces a node, or returns False where it does not understand its arguments."""
