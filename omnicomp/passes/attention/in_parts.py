"""Scores, weights and masks that are written to in parts: `scores[..., 1:, 1:] += bias`, `mask[..., n:] = -inf`.

A bias that is added to a part is one for all of it with zeros around, and a number in a part is a fill. It is written
so before the graph is traced, and as it was again if nothing of it was fused.
"""

import dataclasses
import math
import operator
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from omnicomp._torch.autograd.attention import known_at_least, known_shape, without_guards
from omnicomp.analysis.nodes import insert_call
from omnicomp.passes.attention.nodes import changes_grad_mode, is_shape_only, kind, mutates
from omnicomp.passes.attention.trial import Old, Trial, between

# Operators that return memory of their own, which nothing else shares.
_FRESH: Final = frozenset(
    "matmul bmm baddbmm einsum mul div truediv add sub masked_fill softmax clone zeros ones full "
    "zeros_like ones_like full_like new_zeros new_ones new_full".split()
)
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.int32, torch.int64)
_VIEWS: Final = ("view", "reshape")
_SUMS: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(("add", "add_", "iadd"), torch.add),
    **dict.fromkeys(("sub", "sub_", "isub"), torch.sub),
}
_LONGEST: Final = 8


@dataclasses.dataclass(frozen=True)
class _Span:
    """A part's beginning and end in one dimension, and the size of that; None are a symbolic size, and an end at it."""

    start: int
    stop: int | None
    size: int | None

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.stop == self.size


def gather_parts(graph: Graph) -> list[Trial]:
    """Write each change of a part of scores, weights or masks as one of all of them.

    A graph that switches gradients off or on is left alone: a part without gradients would take all of them along.
    """
    if any(map(changes_grad_mode, graph.nodes)):
        return []
    writes = [node for node in graph.nodes if node.target is operator.setitem]
    return [made for node in writes if (made := _gathered(node)) is not None]


def _gathered(write: Node) -> Trial | None:
    whole, index, value = write.args
    if not isinstance(whole, Node) or not _is_tensor(whole):
        return None
    fake: torch.Tensor = whole.meta["example_value"]
    plain = hasattr(fake, "fake_mode") and fake.layout is torch.strided and fake.dtype in _DTYPES
    if not plain or not (fake.is_floating_point() or isinstance(value, int)):
        return None
    if kind(whole) not in _FRESH or mutates(whole) or write.users or write.graph is not whole.graph:
        return None
    if kind(whole) == "einsum" and len(whole.all_input_nodes) < 2:
        return None  # of one operand, it is a view
    if isinstance(value, int | float) and fake.is_floating_point() and math.isfinite(value):
        most = torch.finfo(fake.dtype).max
        if most < abs(value) < 2 * most:
            return None  # it may be rounded to a finite number
        if abs(value) > most:
            value = math.copysign(math.inf, value)
    spans = _spans(index, fake)
    if spans is None:
        return None
    steps = None if isinstance(value, int | float) else _sum(value, whole, index)
    if steps is not None and not all(map(_reaches, fake.shape, spans)):
        return None
    old = [write] if steps is None else [*steps, write]
    read = () if steps is None else (steps[0],)
    later = [user for user in whole.users if user > write]
    if any(user not in (*later, write, *read) and not is_shape_only(user) for user in whole.users):
        return None  # it may be seen through a view
    if isinstance(value, Node) and (steps is None or not _keeps_index(index) or not _same(steps[0], value)):
        return None
    if steps is not None and any(mutates(node) and node not in steps for node in between(steps[0], write)):
        return None  # what is added may be written to since
    new: list[Node] = []
    fake_mode: Any = getattr(fake, "fake_mode", None)

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        with fake_mode:  # also where no operand is fake
            new.append(insert_call(write, target, args, kwargs))
        return new[-1]

    trained = any(each.meta["example_value"].requires_grad for each in (whole, value) if isinstance(each, Node))
    kept = tuple(map(Old.of, old))
    with torch.set_grad_enabled(trained), torch.autocast(fake.device.type, enabled=False), without_guards(fake):
        if steps is None:
            result = call(torch.masked_fill, whole, _inside(spans, whole, call), value)
        else:
            sizes: list[Any] = [
                call(torch.Tensor.size, whole, dim) if span.size is None else span.size
                for dim, span in enumerate(spans)
            ]
            ends = [size if span.stop is None else span.stop for span, size in zip(spans, sizes, strict=True)]
            lengths = [_less(end, span.start, call) for span, end in zip(spans, ends, strict=True)]
            zeros = call(torch.zeros, lengths, dtype=fake.dtype, device=fake.device)
            around = [(span.start, _less(size, end, call)) for span, size, end in zip(spans, sizes, ends, strict=True)]
            padding = [number for pair in reversed(around) for number in pair]
            padded = call(torch.ops.aten.constant_pad_nd.default, _bias(steps, zeros, call), padding)
            result = call(torch.add, whole, padded)
    for user in later:
        user.replace_input_with(whole, result)
    for node in reversed(old):
        node.graph.erase_node(node)
    return Trial(products=(result,), new=tuple(new), old=kept, stands_for=whole)


def _spans(index: Any, fake: torch.Tensor) -> list[_Span] | None:
    """The part in each dimension, or None if it is not known."""
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        place = items.index(Ellipsis)
        items[place : place + 1] = [slice(None)] * (fake.dim() - len(items) + 1)
    items += [slice(None)] * (fake.dim() - len(items))
    spans = [_span(item, size) for item, size in zip(items, fake.shape, strict=False)]
    known = [span for span in spans if span is not None]
    partly = not all(span.whole for span in known)
    return known if len(known) == len(spans) == fake.dim() == len(items) and partly else None


def _span(item: Any, size: Any) -> _Span | None:
    if type(item) is int:
        item = slice(item, item + 1 or None)
    if not isinstance(item, slice) or any(type(n) not in (int, type(None)) for n in (item.start, item.stop, item.step)):
        return None
    if isinstance(size, int):
        span = range(size)[item]
        return _Span(span.start, span.stop, size) if len(span) and span.step == 1 else None
    if item.step not in (None, 1):
        return None
    start, stop = item.start or 0, item.stop
    if start < 0 or (stop is not None and stop <= start):
        return None  # it is counted from the end, or empty
    return _Span(start, None if stop is None or stop == sys.maxsize else stop, None)


def _reaches(size: Any, span: _Span) -> bool:
    """Whether a dimension is known to have all of the part; in a shorter one, the part would be cut off."""
    return span.size is not None or known_at_least(size, span.start if span.stop is None else span.stop)


def _less(one: Any, other: Any, call: Callable[..., Node]) -> Any:
    """A difference of sizes, each a number or a node."""
    if one is other or other == 0:
        return 0 if one is other else one
    return one - other if isinstance(one, int) and isinstance(other, int) else call(operator.sub, one, other)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _keeps_index(index: Any) -> bool:
    return all(isinstance(item, slice) or item is Ellipsis for item in (index if isinstance(index, tuple) else [index]))


def _same(one: Node, other: Node) -> bool:
    first, second = one.meta["example_value"], other.meta["example_value"]
    return known_shape(first, second) and first.dtype == second.dtype


def _sum(value: Any, whole: Node, index: Any) -> list[Node] | None:
    """The part as it is read, and the sums and views that lead from it to what is written; None for others."""
    node, found = value, list[Node]()
    while isinstance(node, Node) and len(node.users) == 1 and len(found) < _LONGEST:
        found.insert(0, node)
        if kind(node) == "getitem":
            return found if node.args == (whole, index) else None
        if node.kwargs or not (kind(node) in _VIEWS or (kind(node) in _SUMS and len(node.args) == 2)):
            return None
        node = node.args[0]
    return None


def _bias(steps: list[Node], zeros: Node, call: Callable[..., Node]) -> Node:
    """What is added to the part: the same sums, from zeros on."""
    result = zeros
    for step in steps[1:]:
        given: Any = step.args[1:]
        if kind(step) in _SUMS:
            result = call(_SUMS[kind(step)], result, *given)
        else:
            result = call(torch.reshape, result, list(given[0] if isinstance(given[0], list | tuple) else given))
    return result


def _inside(spans: list[_Span], whole: Node, call: Callable[..., Node]) -> Node:
    """Whether an element is in the part, from comparisons of indices."""
    device = whole.meta["example_value"].device
    conditions: list[Node] = []
    for dim, span in enumerate(spans):
        if span.whole:
            continue
        size = call(torch.Tensor.size, whole, dim) if span.size is None else span.size
        places = call(torch.reshape, call(torch.arange, size, device=device), [-1] + [1] * (len(spans) - dim - 1))
        if span.start:
            conditions.append(call(torch.ge, places, span.start))
        if span.stop != span.size:
            conditions.append(call(torch.lt, places, span.stop))
    result = conditions[0]
    for condition in conditions[1:]:
        result = call(torch.logical_and, result, condition)
    return result
