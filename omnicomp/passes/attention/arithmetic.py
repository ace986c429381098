"""Index arithmetic of a program read as exact linear forms: only where its dtype provably holds every value."""

import math
from typing import Any, Final

import sympy
import torch

from omnicomp._torch.symbols import expression, known_range
from omnicomp.passes.attention.linear import Linear, Prover, Variable
from omnicomp.passes.attention.polynomial import Size, polynomial, to_sympy
from omnicomp.passes.attention.structure import IndexSpace, Structure
from omnicomp.passes.attention.terms import Apply, Axis, Index, Number, Position, Term

__all__ = ["EXACT_INTEGERS", "Reader", "prover_of"]

# Largest integer below which a floating-point dtype holds every integer.
EXACT_INTEGERS: Final[dict[torch.dtype, int]] = {
    torch.float64: 2**53,
    torch.float32: 2**24,
    torch.float16: 2**11,
    torch.bfloat16: 2**8,
}


def prover_of(space: IndexSpace) -> Prover:
    """A prover for the sizes of these axes, with what the shape environment knows of their symbols."""
    sizes = {role: math.prod(_size(axis) for axis in axes) for role, axes in space.roles.items()}
    symbolic = [a.size for axes in space.roles.values() for a in axes if isinstance(a.size, torch.SymInt)]

    def known(expr: Any) -> tuple[int | None, int | None]:
        return known_range(symbolic[0], sympy.sympify(to_sympy(expr))) if symbolic else (None, None)

    return Prover(sizes, known)


class Reader:
    """Reads terms as linear forms.

    An index that is symbolic is taken to fit a 32-bit or 64-bit integer, and the sum or difference of two of them;
    everything else has to be proved to fit.
    """

    def __init__(self, space: IndexSpace, structure: Structure, prover: Prover) -> None:
        self._space, self._structure, self._prover = space, structure, prover
        self._seen: dict[int, Linear | None] = {}

    def read(self, term: Term) -> Linear | None:
        """The form of an integer-valued term, or None if it is none, or not provably computed without error."""
        number = self._structure.number(term)
        if number not in self._seen:
            form = self._read(term)
            self._seen[number] = form if form is not None and self._fits(form, term.dtype) else None
        return self._seen[number]

    def _read(self, term: Term) -> Linear | None:
        if isinstance(term, Number):
            value = expression(term.value)
            if isinstance(value, float):
                return Linear(constant=int(value)) if value.is_integer() else None
            if isinstance(value, bool | int) or getattr(value, "is_integer", False):
                return Linear(constant=polynomial(value))
            return None
        if isinstance(term, Index):
            ends = (expression(term.start), expression(term.step))
            at = self.position(term.position)
            if at is None or any(isinstance(end, float) and not end.is_integer() for end in ends):
                return None
            start, step = (int(end) if isinstance(end, float) else polynomial(end) for end in ends)
            return at.scaled(step) + start
        if isinstance(term, Apply):
            return self._apply(term)
        return None

    def _apply(self, term: Apply) -> Linear | None:
        if term.op == "cast" or term.op == "floor":
            inside = self.read(term.args[0])
            if inside is not None:
                return inside
            return self._rounded_quotient(term)
        args = [self.read(argument) for argument in term.args]
        if term.op == "neg" and args[0] is not None:
            return args[0].scaled(-1)
        if len(args) != 2 or args[0] is None or args[1] is None:
            return None
        left, right = args[0], args[1]
        if term.op in ("add", "sub"):
            return left + right if term.op == "add" else left - right
        if term.op == "mul":
            if not left.terms:
                left, right = right, left
            return None if right.terms else left.scaled(right.constant)
        if term.op in ("floordiv", "mod") and not right.terms and self._prover.nonnegative(right.constant - 1):
            return self._prover.divide(left, right.constant)[term.op == "mod"]
        return None

    def _rounded_quotient(self, term: Apply) -> Linear | None:
        """`floor(a / b)`, and its cast to an integer where that rounds the same way.

        The correctly rounded quotient of two integers of at most half the exact range cannot reach the next integer.
        """
        inside = term.args[0]
        if term.op == "cast" and (term.dtype.is_floating_point or term.dtype is torch.bool):
            return None
        if not (isinstance(inside, Apply) and inside.op == "div" and inside.dtype in EXACT_INTEGERS):
            return None
        left, right = map(self.read, inside.args)
        if left is None or right is None or right.terms or not self._prover.nonnegative(right.constant - 1):
            return None
        if not self._within(left, EXACT_INTEGERS[inside.dtype] // 2) or not self._within(
            right, EXACT_INTEGERS[inside.dtype] // 2
        ):
            return None
        if term.op == "cast" and not self._prover.always(left.scaled(-1)):
            return None
        return self._prover.divide(left, right.constant)[0]

    def position(self, position: Position) -> Linear | None:
        """Which element, as a number made from the four indices; None if it is made from anything else."""
        total, weight = Linear(constant=polynomial(expression(position.start))), 1
        run: list[Axis] = []  # neighbouring digits of one index, least significant first
        for axis in (*reversed(position.flat()), None):
            if run and (axis is None or not self._continues(axis, run[-1])):
                digits = self._digits(run[::-1])
                if digits is None:
                    return None
                total = total + digits.scaled(weight)
                for digit in run:
                    weight = weight * _size(digit)
                run = []
            if axis is not None:
                run.append(axis)
        return total

    def _continues(self, axis: Axis, after: Axis) -> bool:
        (role, place), (next_role, next_place) = self._structure.place(axis), self._structure.place(after)
        return role == next_role and role != "?" and place + 1 == next_place

    def _digits(self, run: list[Axis]) -> Linear | None:
        """The number made of neighbouring digits of one index: `index // (what is below) % (what they can hold)`."""
        role, place = self._structure.place(run[0])
        if role == "?":
            return None
        axes = self._space.roles[role]
        form = Linear.of({Variable(role): 1}, 0) if self._prover.sizes[role] != 1 else Linear()
        below = math.prod(_size(axis) for axis in axes[place + len(run) :])
        holds = math.prod(_size(axis) for axis in run)
        if below != 1:
            form = self._prover.divide(form, below)[0]
        return self._prover.divide(form, holds)[1] if place > 0 else form

    def _fits(self, form: Linear, dtype: torch.dtype) -> bool:
        if dtype in EXACT_INTEGERS:
            return self._within(form, EXACT_INTEGERS[dtype])
        if dtype.is_floating_point or dtype.is_complex:
            return False
        low, high = self._prover.magnitude(form)
        if dtype is torch.bool:
            return low == high and low in (0, 1)
        ends = torch.iinfo(dtype)
        if (low is None or high is None) and dtype in (torch.int32, torch.int64):
            small = 1 if dtype is torch.int32 else 2**20
            return all(not isinstance(c, int) or abs(c) <= small for _, c in form.terms)
        return low is not None and high is not None and ends.min <= low and high <= ends.max

    def _within(self, form: Linear, limit: int) -> bool:
        low, high = self._prover.magnitude(form)
        return low is not None and high is not None and -limit <= low and high <= limit


def _size(axis: Axis) -> Size:
    return polynomial(expression(axis.size))
