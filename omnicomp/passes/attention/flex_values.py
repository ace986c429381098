"""Values of terms: what a term becomes in a graph that FlexAttention calls, in the graph of a site, or as a tensor."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import Node

from omnicomp import records
from omnicomp._torch.autograd.flex import on_real_tensors
from omnicomp.passes.attention.terms import Apply, Axis, Index, Number, Position, Read, Scores, Term, leaves

_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "pow", "neg", "xor")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(torch, name) for name in ("maximum", "minimum", "where", "abs", "exp", "log", "tanh", "sigmoid")},
    **{name: getattr(torch, name) for name in ("sqrt", "rsqrt", "relu", "sin", "cos", "erf", "floor", "reciprocal")},
    **{"div": operator.truediv, "and": operator.and_, "or": operator.or_, "not": operator.invert},
    **{"log1p": torch.log1p, "softplus": F.softplus, "nan_to_num": torch.nan_to_num},
}
# With a number for one operand.
_BOUNDS: Final[dict[str, Callable[..., Any]]] = {"maximum": torch.clamp_min, "minimum": torch.clamp_max}
# What gives a symbolic integer for symbolic integers.
_INTEGER: Final = ("add", "sub", "mul", "floordiv", "mod", "neg")
_NUMBERS: Final = (bool, int, float, torch.SymInt)
# The indices in a kernel have 32 bits: numbers up to this can be added to them.
_SMALL: Final = 1 << 30
_CAST: Final[Any] = torch.ops.aten.to.dtype


class Indices:
    """Where axes lie in an attention's batch (0), head (1), query (2) and key index (3)."""

    def __init__(self, *axes: tuple[Axis, ...]) -> None:
        """Args: the axes that each of the four indices is made of, most significant first."""
        self._digits = [_digits(each) for each in axes]
        self._place = {axis: (role, n) for role, digits in enumerate(self._digits) for n, axis in enumerate(digits)}

    def runs(self, position: Position) -> list[tuple[int, Any, Any, Any]]:
        """A position, less its start, as a sum over runs of neighbouring digits of one index.

        Returns:
            For each run the index, stride, size and weight: the run adds `index // stride % size * weight`; the size is
            None where no digit of the index is above the run.

        Raises:
            ValueError: an axis is in none of the four.
        """
        found: list[tuple[int, Any, Any, Any]] = []
        rest = list(_digits(position.axes))
        weight: Any = 1
        while rest:
            axis = rest.pop()
            if axis not in self._place:
                raise ValueError(f"the axis {axis} is neither of the batch, the heads, the queries nor the keys")
            role, last = self._place[axis]
            digits, first = self._digits[role], last
            while rest and first and rest[-1] is digits[first - 1]:
                rest.pop()
                first -= 1
            size = math.prod(digit.size for digit in digits[first : last + 1])
            stride = math.prod(digit.size for digit in digits[last + 1 :])
            found.append((role, stride, size if first else None, weight))
            weight = weight * size
        return found

    def roles(self, term: Term) -> set[int]:
        """Which of the four indices a term depends on."""
        return {role for leaf in leaves(term) for at in positions_of(leaf) for role, *_ in self.runs(at)}

    def name(self, term: Term, leaf: Callable[[Any], Node], names: dict[Any, int]) -> int:
        """A number that equal terms have in common, also those of other attentions.

        Args:
            term: any term.
            leaf: the node of a `Read`.
            names: the numbers so far; extended.
        """
        own: tuple[Any, ...] = tuple((str(at.start), str(self.runs(at))) for at in positions_of(term))
        match term:
            case Apply():
                own = (term.op, *(self.name(argument, leaf, names) for argument in term.args))
            case Read():
                own += (leaf(term.value),)
            case Index():
                own += (str(term.start), str(term.step))
            case Number():
                own += (str(term.value),)
            case _:
                pass
        return names.setdefault((type(term), term.dtype, own), len(names))


@records.dataclass(frozen=True, kw_only=True)
class Backend:
    """What makes values: the nodes of a graph, or tensors."""

    call: Callable[..., Any]  # `call(function, *args, **kwargs)`
    index: tuple[Any, ...]  # batch, head, query and key index
    # The element of a `Read`; it gets a function that makes the value of a position.
    read: Callable[[Read, Callable[[Position], Any]], Any]
    number: Callable[[Any], Any]  # the value of a symbolic number; others as they are
    score: Any = None  # the score in float32, or None
    tanh: Callable[..., Any] = torch.tanh  # the hyperbolic tangent of what depends on the score


class Values:
    """Values of the terms of one attention; each is made once."""

    def __init__(self, indices: Indices, backend: Backend) -> None:
        self._indices, self._backend, self._call = indices, backend, backend.call
        self._made: dict[int, tuple[Term, Any, bool]] = {}

    def __call__(self, term: Term) -> Any:
        """The value of a term: a number if it is one, symbolic or not, else what the backend makes.

        Raises:
            ValueError: an axis is unknown, or the scores were read where there are none.
            NotImplementedError: a function of symbolic numbers is no integer.
        """
        return self._get(term)[0]

    def _get(self, term: Term) -> tuple[Any, bool]:
        """The value, and whether it depends on the scores."""
        if id(term) not in self._made:
            # The term is kept, too: else another one might get its id.
            self._made[id(term)] = (term, *self._make(term))
        return self._made[id(term)][1:]

    def _make(self, term: Term) -> tuple[Any, bool]:
        match term:
            case Number():
                return term.value, False
            case Scores():
                if self._backend.score is None:
                    raise ValueError("which keys a query attends to can't depend on the scores")
                return self._backend.score, True
            case Index():
                value = self._add(self._scale(self._position(term.position), term.step), term.start)
                return self._cast(value, term.dtype) if term.dtype.is_floating_point else value, False
            case Read():
                return self._backend.read(term, self._position), False
            case Apply():
                args = [self._get(argument) for argument in term.args]
                scored = any(depends for _, depends in args)
                return self._apply(term, [value for value, _ in args], scored), scored
            case _:
                raise NotImplementedError(f"{type(term).__name__} in the scores of an attention")

    def _apply(self, term: Apply, args: list[Any], scored: bool) -> Any:
        if all(isinstance(value, _NUMBERS) for value in args):
            return _fold(term.op, term.dtype, args, [argument.dtype for argument in term.args])
        if term.op == "cast":
            return args[0] if scored and term.dtype.is_floating_point else self._cast(args[0], term.dtype)
        if term.op == "where" and isinstance(args[0], bool):
            return args[1] if args[0] else args[2]
        if any(argument.dtype == torch.int64 for argument in term.args) and _may_be_large(term.op, args):
            args = [value if isinstance(value, _NUMBERS) else self._cast(value, torch.int64) for value in args]
        args = [self._backend.number(value) for value in args]
        number = next((value for value in args if isinstance(value, int | float)), None)
        if number is not None and term.op in _BOUNDS:
            return self._call(_BOUNDS[term.op], *(value for value in args if value is not number), number)
        if scored and number and term.op == "div" and args[1] is number:
            return self._call(operator.mul, args[0], 1 / number)
        return self._call(self._backend.tanh if scored and term.op == "tanh" else _FUNCTIONS[term.op], *args)

    def _position(self, position: Position) -> Any:
        total: Any = 0
        for role, stride, size, weight in self._indices.runs(position):
            digit = self._backend.index[role]
            if not _is(stride, 1):
                digit = self._call(operator.floordiv, digit, self._backend.number(stride))
            if size is not None:
                digit = self._call(operator.mod, digit, self._backend.number(size))
            total = self._add(self._scale(digit, weight), total)
        return self._add(total, position.start)

    def _scale(self, value: Any, factor: Any) -> Any:
        if _is(factor, 1):
            return value
        if isinstance(value, _NUMBERS):
            return value * factor
        return self._call(operator.mul, value, self._backend.number(factor))

    def _add(self, value: Any, other: Any) -> Any:
        if _is(other, 0) or _is(value, 0):
            return value if _is(other, 0) else other
        if isinstance(value, _NUMBERS) and isinstance(other, _NUMBERS):
            return value + other
        return self._call(operator.add, self._backend.number(value), self._backend.number(other))

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, _NUMBERS):
            return _fold("cast", dtype, [value], [dtype])
        return self._call(_CAST, value, dtype)


def positions_of(leaf: Term) -> tuple[Position, ...]:
    """The positions that a term without operands has."""
    return leaf.at if isinstance(leaf, Read) else (leaf.position,) if isinstance(leaf, Index) else ()


def is_constant(term: Term) -> bool:
    """Whether a term depends on indices alone: on no tensor, no score and no symbolic number."""
    for leaf in leaves(term):
        numbers = (leaf.value,) if isinstance(leaf, Number) else ()
        numbers += (leaf.start, leaf.step) if isinstance(leaf, Index) else ()
        numbers += tuple(at.start for at in positions_of(leaf))
        numbers += tuple(axis.size for at in positions_of(leaf) for axis in at.flat())
        if isinstance(leaf, Read | Scores) or not all(isinstance(number, int | float) for number in numbers):
            return False
    return True


def _digits(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The digits of an index; one of a single value adds nothing."""
    return tuple(digit for axis in axes for digit in axis.flat() if not _is(digit.size, 1))


def _is(value: Any, number: int) -> bool:
    """Whether a value is that number, without a guard on a symbolic one."""
    return isinstance(value, int | float) and value == number


def _may_be_large(op: str, args: list[Any]) -> bool:
    """Whether an operation on indices could leave 32 bits."""
    numbers = [value for value in args if isinstance(value, int | float)]
    return op in ("mul", "pow") or any(abs(value) >= _SMALL for value in numbers)


def _fold(op: str, dtype: torch.dtype, values: list[Any], dtypes: list[torch.dtype]) -> Any:
    """An operation on numbers alone, computed now."""
    if any(isinstance(value, torch.SymInt) for value in values):
        if op == "cast" and not dtype.is_floating_point and dtype != torch.bool:
            return values[0]
        if op not in _INTEGER:
            raise NotImplementedError(f"{op} of a symbolic size")
        return functools.reduce(_FUNCTIONS[op], values) if len(values) > 1 else -values[0]
    with on_real_tensors():
        tensors = [torch.tensor(value, dtype=made) for value, made in zip(values, dtypes, strict=True)]
        result = tensors[0] if op == "cast" else _FUNCTIONS[op](*tensors)
        return result.to(dtype).item()
