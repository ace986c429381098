"""Checks at run time that integers fit a narrower dtype, computed in floats that the device has."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value, insert_call, op_name, source_line
from omnicomp.passes.attention.nodes import kind
from omnicomp.passes.legal.dtypes import Legal, largest, short

__all__ = ["insert", "insert_arithmetic"]

_CAST: Final = torch.ops.aten.to.dtype
_ARITHMETIC: Final[dict[str, Any]] = {
    "add": torch.add,
    "iadd": torch.add,
    "add_": torch.add,
    "sub": torch.sub,
    "isub": torch.sub,
    "sub_": torch.sub,
    "mul": torch.mul,
    "imul": torch.mul,
    "mul_": torch.mul,
}


def insert(value: Node, target: torch.dtype, user: Node, legal: Legal) -> bool:
    """Check before `user` that the integers of `value` fit `target`.

    The values are converted to the widest float that the device has. Rounding is monotonic, and `2**31` is a float of
    any precision: what rounds to less is less. A few integers below the limit round to it, and are refused.

    Returns:
        False if the device has no float to check in.
    """
    wide = _widest(legal)
    if wide is None:
        return False
    number = insert_call(user, _CAST, (value, wide))
    _assert(number, value, target, user)
    return True


def insert_arithmetic(node: Node, target: torch.dtype, legal: Legal, operand: Callable[[Node, Node], Node]) -> bool:
    """Check before `node`, a sum, difference or product of integers, that its result will fit `target`.

    The result is computed in floats. Of operands that fit, the error is at most three roundings of numbers up to the
    limit, which is lowered by more.

    Args:
        node: the operator.
        target: the dtype that takes the place of its result's.
        legal: what the device has.
        operand: gives an operand as it will be read by a node.

    Returns:
        False if there is no such check.
    """
    wide = _widest(legal)
    function = _ARITHMETIC.get(kind(node))
    if wide is None or function is None or len(node.args) != 2 or node.kwargs:
        return False
    args: list[Any] = []
    for value in node.args:
        if isinstance(value, Node) and isinstance(fake_value(value), torch.Tensor):
            args.append(insert_call(node, _CAST, (operand(value, node), wide)))
        else:
            args.append(value)
    if not any(isinstance(value, Node) for value in args):
        return False
    _assert(insert_call(node, function, tuple(args)), node, target, node, slack=4 * torch.finfo(wide).eps)
    return True


def _assert(number: Node, value: Node, target: torch.dtype, user: Node, *, slack: float = 0.0) -> None:
    # A power of two, and exact in every float.
    limit = float(int(largest(target)) + 1) * (1 - slack)
    small = insert_call(
        user, torch.ops.aten.lt.Scalar, (insert_call(user, torch.ops.aten.abs.default, (number,)), limit)
    )
    every = insert_call(user, torch.ops.aten.all.default, (small,))
    source = source_line(value)
    place = f"{value.name} ({op_name(value)}){f' at {source}' if source else ''}"
    text = f"an integer of {place} does not fit {short(target)}, which the device has instead of int64"
    insert_call(user, torch.ops.aten._assert_async.msg, (every, text))


def _widest(legal: Legal) -> torch.dtype | None:
    return next((d for d in (torch.float64, torch.float32, torch.bfloat16) if d in legal.compute), None)
