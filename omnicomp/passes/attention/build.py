"""Terms made into tensors: once on stand-ins, to see what torch would do with them, and once as nodes of the graph."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp._torch.autograd.attention import known_equal
from omnicomp.analysis.nodes import fake_value
from omnicomp.passes.attention.terms import Apply, Axis, Index, Number, Position, Read, Term, flat

Call = Callable[..., Any]
Group = tuple[Axis, ...]

_BINARY: Final[dict[str, Call]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "pow", "eq", "ne", "lt", "le", "gt", "ge")},
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.logical_xor,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
}
_UNARY: Final[dict[str, Call]] = {
    **{n: getattr(torch, n) for n in "neg abs exp log tanh sigmoid sqrt rsqrt relu sin cos erf floor".split()},
    **{n: getattr(torch, n) for n in ("reciprocal", "log1p", "nan_to_num")},
    "softplus": torch.nn.functional.softplus,
    "not": torch.logical_not,
}


class UnknownSize(ValueError):
    """A symbolic size that no tensor has from which the graph could take it."""


def value_of(item: Any) -> Any:
    """The fake value of a node, or a stand-in itself."""
    return fake_value(item) if isinstance(item, Node) else item


class Builder:
    """Makes tensors whose dimensions are groups of axes.

    Args:
        get: gives what stands for a traced tensor: a node, or a stand-in of its size.
        call: runs or inserts one call: `call(function, args, kwargs)`.
        symbol: gives the node of a symbolic number; raises ValueError if nothing that is held is that number.
    """

    def __init__(self, get: Callable[[Any], Any], call: Call, symbol: Callable[[Any], Any] | None = None) -> None:
        self.get, self.call, self.symbol = get, call, symbol
        self._sizes: dict[Axis, tuple[Any, int, int]] = {}

    def learn(self, item: Any, at: Sequence[Position]) -> None:
        """Remember where symbolic sizes of axes can be taken from."""
        for dim, position in enumerate(at):
            symbolic = [axis for axis in position.flat() if not isinstance(axis.size, int)]
            others = math.prod(axis.size for axis in position.flat() if isinstance(axis.size, int))
            if len(symbolic) == 1 and (others == 1 or symbolic[0] not in self._sizes):
                self._sizes[symbolic[0]] = (item, dim, others)

    def size(self, group: Group) -> Any:
        """The number of elements along a group of axes: a number, or a node of one.

        Raises:
            UnknownSize: it is symbolic, and nothing that is held has it.
        """
        number: Any = 1
        for axis in flat(group):
            size = axis.size
            if not isinstance(size, int):
                if axis not in self._sizes:
                    raise UnknownSize(f"no tensor at hand has the symbolic size {size}")
                item, dim, others = self._sizes[axis]
                size = self.call(torch.Tensor.size, (item, dim))
                size = size if others == 1 else self.call(operator.floordiv, (size, others))
            if isinstance(number, int) and number == 1:
                number = size
            elif isinstance(size, int) and isinstance(number, int):
                number *= size
            else:
                number = self.call(operator.mul, (number, size))
        return number

    def place(self, item: Any, at: Sequence[Position], groups: Sequence[Group], *, wide: Sequence[int] = ()) -> Any:
        """Rearrange a tensor whose dimensions are addressed by `at`, so that its dimensions are `groups`.

        Args:
            item: a node or a stand-in.
            at: the position along each of its dimensions.
            groups: the axes of each wanted dimension; a dimension has size 1 if the tensor has none of its axes.
            wide: dimensions that get their full size even so.
        """
        wanted_groups = [flat(group) for group in groups]
        shape = value_of(item).shape
        item = self._narrow(item, at)
        dims = [[a for a in position.flat() if not known_equal(a.size, 1)] for position in at]
        if any(len(axes) > 1 for axes in dims):
            item = self.call(
                torch.Tensor.reshape, (item, tuple(self.size((a,)) for axes in dims for a in axes or (_ONE,)))
            )
        digits: list[Axis | None] = [a for axes in dims for a in (axes or [None])]
        wanted = [axis for group in wanted_groups for axis in group]
        unknown = [a for a in digits if a is not None and a not in wanted]
        if unknown or len(set(digits) - {None}) != len([d for d in digits if d is not None]):
            raise ValueError(f"a tensor of shape {list(shape)} has an axis that its place does not have")
        present = [digits.index(axis) for axis in wanted if axis in digits]
        order = _keeping_ones(digits, present, [[a in digits for a in group] for group in wanted_groups])
        if order != list(range(len(digits))):
            item = self.call(torch.permute, (item, tuple(order)))
        return self._merge(item, wanted_groups, digits, wide)

    def _narrow(self, item: Any, at: Sequence[Position]) -> Any:
        for dim, position in enumerate(at):
            size = value_of(item).shape[dim]
            count: Any = 1
            for axis in position.flat():
                count = count * axis.size
            if known_equal(count, size) or not isinstance(value_of(item), torch.Tensor):
                continue
            if not isinstance(item, Node) and not isinstance(count, int):
                continue  # a stand-in with the whole symbolic dimension
            start = position.start
            length = self.size(position.flat())
            if not isinstance(start, int):
                raise ValueError("a slice starts at a symbolic place")
            item = self.call(torch.narrow, (item, dim, start, length))
        return item

    def _merge(self, item: Any, groups: Sequence[Group], digits: Sequence[Any], wide: Sequence[int]) -> Any:
        partly = [n for n, g in enumerate(groups) if any(a in digits for a in g) and any(a not in digits for a in g)]
        missing = [n for n in wide if not any(a in digits for a in groups[n])]
        if partly:
            one = [[self.size((a,)) if a in digits else 1 for a in group] or [1] for group in groups]
            item = self._shaped(item, [size for sizes in one for size in sizes])
            full = [[self.size((a,)) if n in partly else -1 for a in group] or [-1] for n, group in enumerate(groups)]
            item = self.call(torch.Tensor.expand, (item, *[size for sizes in full for size in sizes]))
        sizes = [self.size(g) if any(a in digits for a in g) else 1 for g in groups]
        item = self._shaped(item, sizes)
        if missing:
            item = self.call(
                torch.Tensor.expand, (item, *[self.size(g) if n in missing else -1 for n, g in enumerate(groups)])
            )
        return item

    def _shaped(self, item: Any, sizes: Sequence[Any]) -> Any:
        shape, new = value_of(item).shape, [value_of(size) for size in sizes]
        if len(shape) == len(new) and all(map(known_equal, shape, new)):
            return item
        return self.call(torch.Tensor.reshape, (item, tuple(sizes)))

    def term(self, term: Term, groups: Sequence[Group], device: torch.device) -> Any:
        """The tensor of a term: an element for each index of `groups`, or one for all where no axis matters.

        Raises:
            ValueError: an operation or an index can't be made.
        """
        if isinstance(term, Read):
            return self.place(self.get(term.value), term.at, groups)
        if isinstance(term, Number):
            value = self._number(term)
            return self.call(torch.full, ((), value), {"dtype": term.dtype, "device": device})
        if isinstance(term, Index):
            return self._index(term, groups, device)
        if isinstance(term, Apply):
            return self._apply(term, groups, device)
        raise ValueError(f"{type(term).__name__} can't be made into a tensor")

    def factor(self, term: Term, groups: Sequence[Group], device: torch.device) -> Any:
        """`term`, but a number stays one: a symbolic number in a tensor would be made a constant of the graph."""
        return self._number(term) if isinstance(term, Number) else self.term(term, groups, device)

    def _number(self, term: Number) -> Any:
        if isinstance(term.value, int | float):
            return term.value
        if self.symbol is None:
            raise ValueError("a symbolic number takes part in the scores")
        return self.symbol(term.value)

    def _index(self, term: Index, groups: Sequence[Group], device: torch.device) -> Any:
        numbers = (term.start, term.step, term.position.start)
        if not all(isinstance(n, int | float) for n in numbers):
            raise ValueError("a symbolic number takes part in an index")
        axes = term.position.flat()
        made = self.call(torch.arange, (self.size(axes),), {"device": device, "dtype": torch.int64})
        made = self.place(made, (Position(axes),), groups)
        start = term.start + term.step * term.position.start
        made = self.call(torch.mul, (made, term.step)) if term.step != 1 else made
        made = self.call(torch.add, (made, start)) if start != 0 else made
        return made if term.dtype == torch.int64 else self.call(torch.Tensor.to, (made, term.dtype))

    def _apply(self, term: Apply, groups: Sequence[Group], device: torch.device) -> Any:
        args = term.args
        if term.op == "cast":
            return self.call(torch.Tensor.to, (self.term(args[0], groups, device), term.dtype))
        if term.op in ("maximum", "minimum") and isinstance(args[1], Number):
            made, bound = self.term(args[0], groups, device), "min" if term.op == "maximum" else "max"
            return self.call(torch.clamp, (made,), {bound: args[1].value})
        if term.op in ("maximum", "minimum"):
            return self.call(getattr(torch, term.op), tuple(self.term(a, groups, device) for a in args))
        if term.op == "where":
            return self.call(torch.where, tuple(self.term(a, groups, device) for a in args))
        if term.op in _UNARY:
            return self.call(_UNARY[term.op], (self.term(args[0], groups, device),))
        made = [self.factor(a, groups, device) if n else self.term(a, groups, device) for n, a in enumerate(args)]
        return self.call(_BINARY[term.op], tuple(made))


_ONE: Final = Axis("one", 1)


def _keeping_ones(digits: Sequence[Any], present: list[int], groups: Sequence[Sequence[bool]]) -> list[int]:
    """An order of dimensions with the present ones as wanted, and those of one element where a group has none."""
    ones = [n for n, digit in enumerate(digits) if digit is None]
    order: list[int] = []
    taken = iter(present)
    for group in groups:
        order.extend(next(taken) for here in group if here)
        if not any(group) and ones:
            order.append(ones.pop(0))
    return [*order, *ones]
