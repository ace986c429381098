"""Queries, keys and values behind their views: the tensor that the graph holds, and the steps on the way."""

import math
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp._torch.autograd.attention import known_equal
from omnicomp.analysis.nodes import fake_value
from omnicomp.passes.attention.reader import At, Reader
from omnicomp.passes.attention.site import MatchEnded, Operand, Scale
from omnicomp.passes.attention.terms import Apply, Number, Read, Term
from omnicomp.passes.attention.trace import Trace, Value

_COPIES: Final = ("clone", "contiguous", "expand", "repeat")


def peel(
    value: Value, at: At, dtype: torch.dtype, trace: Trace, reader: Reader, where: Node, *, scaled: bool
) -> tuple[Operand, float, list[Scale]]:
    """Go behind copies, repeated heads, casts and factors, to a tensor that the graph holds.

    Args:
        value: the operand of the product.
        at: the positions in it.
        dtype: the dtype of the attention.
        trace: the trace of the graph.
        reader: reads the trace.
        where: the node before which the operand must be held.
        scaled: whether factors may be taken out of the operand.

    Returns:
        The operand; the product of the constant factors taken out; other factors.

    Raises:
        MatchEnded: no tensor on the way is held by the graph.
    """
    scale, factors, worth = 1.0, list[Scale](), 0
    best: tuple[tuple[int, int], Operand, float, list[Scale]] | None = None
    stopped = False
    while True:
        node = trace.holder(value, where)
        if node is not None and stopped and fake_value(node).requires_grad:
            break  # gradients would flow to what the program detached
        stopped = stopped or (node is not None and not fake_value(node).requires_grad)
        if node is not None:
            # What was taken out pays; views that are left over cost nothing much, but each is one more node.
            rank = (worth, -_disorder(at))
            if best is None or rank > best[0]:
                best = (rank, Operand(value, node, at), scale, list(factors))
        term = reader.define(Read(dtype=value.fake.dtype, value=value, at=at))
        if term is None:
            break
        made = value.op.name if value.op is not None else ""
        if isinstance(term, Read) and term.dtype == value.fake.dtype:
            worth += made in _COPIES and len(_axes(term.at)) <= len(_axes(at))
            value, at = term.value, term.at
            continue
        term, step = _without_factor(term) if scaled else (term, None)
        inner = _behind_casts(term, value.fake.dtype, dtype)
        if inner is None:
            break
        if step is not None:
            number = step.term.value if isinstance(step.term, Number) else None
            if isinstance(number, int | float) and math.isfinite(number) and number != 0:
                scale = scale / number if step.divide else scale * number
            else:
                break
        worth += 1
        value, at = inner.value, inner.at
    if best is None:
        raise MatchEnded(
            where,
            "an operand of the attention is made inside another operation, or was changed in place since",
            observed=repr(value),
            needed="queries, keys and values that the graph holds where the attention's output is made",
        )
    return best[1], best[2], best[3]


def _without_factor(term: Term) -> tuple[Term, Scale | None]:
    if isinstance(term, Apply) and term.op in ("mul", "div"):
        first, second = term.args
        if isinstance(second, Number):
            return first, Scale(second, term.op == "div")
        if isinstance(first, Number) and term.op == "mul":
            return second, Scale(first)
    return term, None


def _behind_casts(term: Term, outer: torch.dtype, attention: torch.dtype) -> Read | None:
    """What was cast, if casting it to the attention's dtype instead is not less precise."""
    while isinstance(term, Apply) and term.op == "cast":
        before = term.args[0].dtype
        if not before.is_floating_point or min(before.itemsize, term.dtype.itemsize) < 2:
            return None  # numbers of 8 bits were rounded on purpose
        widened = torch.promote_types(before, term.dtype) == term.dtype
        # A wider one that was narrowed to what the product took: the attention must not be narrower than that.
        if not widened and torch.promote_types(attention, term.dtype) != attention:
            return None
        # A narrower one that was widened: it must not be narrowed where it is now.
        if widened and torch.promote_types(attention, before) != attention:
            return None
        term = term.args[0]
    return term if isinstance(term, Read) else None


def _axes(at: At) -> list[Any]:
    return [axis for position in at for axis in position.flat()]


def _disorder(at: At) -> int:
    """How many views it takes to bring the axes into the order and form in which an attention takes them."""
    constants = sum(not position.axes and not known_equal(position.start, 0) for position in at)
    return constants + (len(at) > 4) + sum(len(position.flat()) > 1 for position in at)


def visible(term: Term, trace: Trace, reader: Reader, where: Node) -> Term | None:
    """`term` over tensors that the graph holds before `where`, or None if it can't be made of such."""
    memo: dict[int, Term | None] = {}

    def visit(item: Term) -> Term | None:
        if id(item) not in memo:
            memo[id(item)] = look(item)
        return memo[id(item)]

    def look(item: Term) -> Term | None:
        if isinstance(item, Read):
            if trace.holder(item.value, where) is not None:
                return item
            inner = reader.define(item)
            return None if inner is None else visit(inner)
        if isinstance(item, Apply):
            args = [visit(argument) for argument in item.args]
            if any(argument is None for argument in args):
                return None
            return Apply(dtype=item.dtype, op=item.op, args=tuple(a for a in args if a is not None))
        return item

    return visit(term)
