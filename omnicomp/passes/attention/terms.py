"""The meaning of attention scores: expressions over the indices of batch, head, query and key.

A *term* is the value of one element of a tensor, as a function of *axes* (indices). The element of a tensor that was
made elsewhere is a `Read`; what was computed on the way is an `Apply`; the arithmetic of indices starts at an `Index`.
Views of tensors leave no trace in a term: they only say which axes address which dimension.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from omnicomp import records
from omnicomp._torch.symbols import expression


class Axis:
    """An index that runs from 0 to `size` - 1; two axes are the same one only if they are the same object.

    A reshape may show that an axis is made of several: then it has `parts`, most significant first, and whoever holds
    the axis sees it split.

    Attributes:
        name: for people: `b`, `h`, `q`, `k` or `d` and a number.
        size: a number, or a symbolic one.
        parts: the axes that it was split into, or nothing.
    """

    __slots__ = ("name", "parts", "size")

    def __init__(self, name: str, size: Any) -> None:
        self.name, self.size = name, size
        self.parts: tuple[Axis, ...] = ()

    def flat(self) -> "tuple[Axis, ...]":
        """The axis itself, or what it was split into, most significant first."""
        return tuple(leaf for part in self.parts for leaf in part.flat()) if self.parts else (self,)

    def __repr__(self) -> str:
        return f"{self.name}<{self.size}>" if not self.parts else "(" + " ".join(map(repr, self.flat())) + ")"


@records.dataclass(frozen=True)
class Position:
    """Which element along one dimension of a tensor: `start` + the mixed-radix number of the axes."""

    # The digits, most significant first; none is the constant `start` (a broadcast dimension, a `select`).
    axes: tuple[Axis, ...] = ()
    start: Any = 0  # first element, a number or a symbolic one (a slice)

    def flat(self) -> tuple[Axis, ...]:
        """The digits with every split axis resolved."""
        return tuple(leaf for axis in self.axes for leaf in axis.flat())


@records.dataclass(frozen=True, eq=False, kw_only=True)
class Term:
    """One element of a tensor, as a function of axes."""

    dtype: torch.dtype  # dtype in which the program holds it


@records.dataclass(frozen=True, eq=False, kw_only=True)
class Scores(Term):
    """The product of a query and a key: the sum over the features, before any scale."""


@records.dataclass(frozen=True, eq=False, kw_only=True)
class Number(Term):
    """A number that no index changes."""

    value: Any  # a Python number or bool, or a symbolic number of the graph (`torch.SymInt`, `torch.SymFloat`)


@records.dataclass(frozen=True, eq=False, kw_only=True)
class Index(Term):
    """A number made from an index, as `arange` gives: `start + step * position`."""

    position: Position  # the index
    start: Any = 0  # value at position 0, a number or a symbolic one
    step: Any = 1  # difference of neighbours


@records.dataclass(frozen=True, eq=False, kw_only=True)
class Read(Term):
    """One element of a tensor that the graph holds."""

    value: Any  # the tensor; which one is known to whoever made the term. Equal objects are the same tensor.
    at: tuple[Position, ...]  # the position along each of its dimensions


@records.dataclass(frozen=True, eq=False, kw_only=True)
class Apply(Term):
    """A pointwise operation."""

    op: str  # one of `OPERATIONS`
    args: tuple[Term, ...]  # its operands, already in the dtype in which the operation computes


# Names and numbers of operands. `cast` rounds to its own dtype; `where` takes (condition, then, otherwise); `and`,
# `or`, `xor` and `not` are logical for bools (bitwise for integers); `floordiv` and `mod` round towards minus infinity.
OPERATIONS: Final[dict[str, int]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "floordiv", "mod", "pow", "maximum", "minimum"), 2),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor"), 2),
    **dict.fromkeys(("neg", "abs", "exp", "log", "tanh", "sigmoid", "sqrt", "rsqrt", "relu", "not", "cast"), 1),
    **dict.fromkeys(("sin", "cos", "erf", "floor", "reciprocal", "log1p", "softplus", "nan_to_num"), 1),
    "where": 3,
}


def flat(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The axes with every split one resolved, and without those of one element."""
    found = (leaf for axis in axes for leaf in axis.flat())
    return tuple(axis for axis in found if not (isinstance(axis.size, int) and axis.size == 1))


def leaves(term: Term) -> Iterator[Term]:
    """The terms without operands in `term`, left to right."""
    if isinstance(term, Apply):
        for argument in term.args:
            yield from leaves(argument)
    else:
        yield term


def rewrite(term: Term, change: Callable[[Term], Term | None]) -> Term:
    """`term` with every part replaced for which `change` gives another one, outermost first."""
    changed = change(term)
    if changed is not None:
        return changed
    if not isinstance(term, Apply):
        return term
    args = tuple(rewrite(argument, change) for argument in term.args)
    same = all(new is old for new, old in zip(args, term.args, strict=True))
    return term if same else dataclasses.replace(term, args=args)


_LOGICAL: Final[dict[str, tuple[Any, Any]]] = {
    "and": (torch.logical_and, torch.bitwise_and),
    "or": (torch.logical_or, torch.bitwise_or),
    "xor": (torch.logical_xor, torch.bitwise_xor),
    "not": (torch.logical_not, torch.bitwise_not),
}
_FUNCTIONS: Final[dict[str, Any]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "where")},
    **{name: getattr(torch, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "exp", "log", "tanh")},
    **{name: getattr(torch, name) for name in ("sigmoid", "sqrt", "rsqrt", "relu", "sin", "cos", "erf", "floor")},
    **{name: getattr(torch, name) for name in ("reciprocal", "log1p", "nan_to_num")},
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "softplus": torch.nn.functional.softplus,
}


def can_evaluate(term: Term) -> bool:
    """Whether `term` holds only indices of known sizes, known numbers and operations: no data, nothing symbolic."""
    seen: set[int] = set()
    stack: list[Term] = [term]
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Apply):
            if part.op not in _FUNCTIONS and part.op not in _LOGICAL and part.op != "cast":
                return False
            stack.extend(part.args)
        elif isinstance(part, Index):
            sizes = [axis.size for axis in part.position.flat()]
            if not all(_is_plain(value) for value in (part.start, part.step, part.position.start, *sizes)):
                return False
        elif not (isinstance(part, Number) and _is_plain(part.value)):
            return False
    return True


def evaluate(term: Term, digits: Mapping[Axis, torch.Tensor]) -> torch.Tensor:
    """The value of `term` at the given values of its axes.

    Args:
        term: one that `can_evaluate` accepts.
        digits: for each axis of the term, int64 values of it; all broadcast together.

    Returns:
        A tensor of the term's dtype, as large as the axes in the term make it, on the CPU.
    """
    known: dict[int, torch.Tensor] = {}

    def visit(part: Term) -> torch.Tensor:
        if id(part) not in known:
            known[id(part)] = compute(part)
        return known[id(part)]

    def compute(part: Term) -> torch.Tensor:
        if isinstance(part, Number):
            return torch.tensor(expression(part.value), dtype=part.dtype)
        if isinstance(part, Index):
            at = _position(part.position, digits)
            return (at * expression(part.step) + expression(part.start)).to(part.dtype)
        if not isinstance(part, Apply):
            raise TypeError(f"a {type(part).__name__} has no value that is known at compile time")
        args = [visit(argument) for argument in part.args]
        if part.op == "cast":
            return args[0].to(part.dtype)
        if part.op in _LOGICAL:
            return _LOGICAL[part.op][0 if part.dtype is torch.bool else 1](*args)
        return _FUNCTIONS[part.op](*args).to(part.dtype)

    return visit(term)


def _position(position: Position, digits: Mapping[Axis, torch.Tensor]) -> torch.Tensor:
    value = torch.zeros((), dtype=torch.int64)
    for axis in position.flat():
        value = value * expression(axis.size) + digits[axis]
    return value + expression(position.start)


def _is_plain(value: Any) -> bool:
    return isinstance(expression(value), bool | int | float)
