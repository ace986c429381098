"""What operator tables of several engines ask of a node before they take it: functions for `check=`.

Each takes the node and returns one sentence on why it is not taken; empty if it is.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value


def argument(node: Node, name: str) -> Any:
    """An argument by the name that the operator's schema gives it; its default where it is not given."""
    schema: Any = getattr(node.target, "_schema", None)
    for index, each in enumerate(schema.arguments):
        if each.name == name:
            if index < len(node.args):
                return node.args[index]
            return node.kwargs.get(name, each.default_value if each.has_default_value() else None)
    return None


def all_of(*checks: Callable[[Node], str]) -> Callable[[Node], str]:
    """The first sentence that one of several checks has."""
    return lambda node: next((sentence for each in checks if (sentence := each(node))), "")


def first_alone(node: Node) -> str:
    """Of several results the first alone may be read."""
    first = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    return "" if first else "it makes the first result alone"


def floating(node: Node) -> str:
    """The first operand has to be of floating-point numbers."""
    value = fake_value(node.args[0])
    return "" if value.dtype.is_floating_point else "it takes floating-point numbers alone"


def numeric(node: Node) -> str:
    """The first result may be no boolean."""
    value = fake_value(node)
    first = value[0] if isinstance(value, (tuple, list)) else value
    return "it makes no booleans" if first.dtype is torch.bool else ""


def of_several(node: Node) -> str:
    """The first operand may be no single number."""
    return "" if fake_value(node.args[0]).shape else "it takes no tensor without dimensions"


def filled(node: Node) -> str:
    """No operand may be known to have no elements."""
    values = [fake_value(each) for each in node.all_input_nodes]
    empty = any(
        type(size) is int and size == 0 for value in values if isinstance(value, torch.Tensor) for size in value.shape
    )
    return "it takes no tensors without elements" if empty else ""


def dense(node: Node) -> str:
    """The first operand's memory has to be known, and to be row-major, as its elements are counted in it."""
    value = fake_value(node.args[0])
    known = all(type(each) is int for each in (*value.shape, *value.stride()))
    return "" if known and value.is_contiguous() else "the strides of its operand are not known or not row-major"


def no_dropout(node: Node) -> str:
    """No random numbers may be drawn."""
    return "it draws no random numbers" if argument(node, "dropout_p") else ""


def same_heads(node: Node) -> str:
    """Of attention: there have to be as many heads of keys and values as of queries."""
    query, key = (fake_value(argument(node, name)) for name in ("query", "key"))
    return "" if str(query.shape[1]) == str(key.shape[1]) else "it has as many heads of keys as of queries"


def no_masks(node: Node) -> str:
    """Indices may be no masks, and there has to be one."""
    given: Any = argument(node, "indices")
    values = [fake_value(each) for each in given if isinstance(each, Node)]
    if any(value.dtype in (torch.bool, torch.uint8) for value in values):
        return "the size of what a mask picks is only known when it runs"
    return "" if values else "it is indexed by nothing"


def pads(node: Node) -> str:
    """A padding may not cut anything off."""
    value: Any = node.args[1]
    negative = not all(type(each) is int and each >= 0 for each in value)
    return "it pads, and cuts nothing off" if negative else ""


def whole_divisor(node: Node) -> str:
    """Integers are divided by known numbers alone: division by zero, for which torch raises, would end the process."""
    if fake_value(node).dtype.is_floating_point:
        return ""
    divisor = node.args[1]
    return "" if isinstance(divisor, (int, float)) and divisor else "it divides integers by known numbers alone"
