"""Integers made from indices, as linear forms, and what can be proved of them for every size.

A form is `a·q + b·k + … + c`, where the letters are indices, or rounded quotients and remainders of forms, and the
coefficients are numbers or polynomials of symbolic sizes. A proof is a bound: each index runs over its own range.
`Polynomial` is the little of SymPy that these proofs need, and much faster. `IndexReader` reads the index arithmetic of
a program as a form, only where its dtype provably holds every value.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import sympy
import torch

from omnicomp import records
from omnicomp._torch.symbols import expression, known_range
from omnicomp.passes.attention.structure import IndexSpace, Structure
from omnicomp.passes.attention.terms import Apply, Axis, Index, Number, Position, Term

# A product of generators with their powers, in a fixed order; the empty one is 1.
_Monomial: TypeAlias = tuple[tuple[Any, int], ...]


class Polynomial:
    """A polynomial with integer coefficients that is not a plain number; equal ones are equal as objects.

    Its generators are SymPy expressions: symbols, and whatever is no polynomial of symbols, such as a rounded quotient.
    """

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[_Monomial, int]) -> None:
        self.terms: Final = dict(terms)
        self._hash = hash(frozenset(self.terms.items()))

    def __add__(self, other: "Size") -> "Size":
        total = dict(self.terms)
        for monomial, c in _terms(other).items():
            total[monomial] = total.get(monomial, 0) + c
        return _made(total)

    def __mul__(self, other: "Size") -> "Size":
        total: dict[_Monomial, int] = {}
        others = _terms(other)
        for one, a in self.terms.items():
            for two, b in others.items():
                monomial = _product(one, two)
                total[monomial] = total.get(monomial, 0) + a * b
        return _made(total)

    def __neg__(self) -> "Polynomial":
        return Polynomial({monomial: -c for monomial, c in self.terms.items()})

    def __sub__(self, other: "Size") -> "Size":
        return self + -other

    def __rsub__(self, other: int) -> "Size":
        return -self + other

    __radd__ = __add__
    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Polynomial) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return str(to_sympy(self))

    def generators(self) -> set[Any]:
        """The expressions of which it is a polynomial."""
        return {generator for monomial in self.terms for generator, _ in monomial}

    def shifted(self, shifts: Mapping[Any, int]) -> "Size":
        """The polynomial with `generator + shift` put in for each generator."""
        total: Size = 0
        for monomial, c in self.terms.items():
            part: Size = c
            for generator, power in monomial:
                for _ in range(power):
                    part = part * (Polynomial({((generator, 1),): 1}) + shifts[generator])
            total = total + part
        return total


Size: TypeAlias = Any  # an int, or a `Polynomial`


def polynomial(value: Any) -> Size:
    """A number, or a SymPy expression of an integer, as an int or polynomial."""
    if isinstance(value, int):
        return int(value)
    total: dict[_Monomial, int] = {}
    for term in sympy.Add.make_args(sympy.expand(value)):
        c, rest = term.as_coeff_Mul()
        if not c.is_Integer:
            c, rest = sympy.Integer(1), term
        powers: dict[Any, int] = {}
        for factor in () if rest == 1 else sympy.Mul.make_args(rest):
            base, power = factor.as_base_exp()
            whole = power.is_Integer and power > 0
            powers[base if whole else factor] = int(power) if whole else 1
        monomial = _ordered(powers)
        total[monomial] = total.get(monomial, 0) + int(c)
    return _made(total)


def to_sympy(value: Size) -> Any:
    """The int or polynomial as a number or SymPy expression."""
    if not isinstance(value, Polynomial):
        return value
    return sympy.Add(*(sympy.Mul(c, *(g**power for g, power in m)) for m, c in value.terms.items()))


def divided(value: Size, divisor: Size) -> Size | None:
    """`value / divisor` where that is plainly an integer for all sizes: by a number, a single term, or itself."""
    if isinstance(value, int) and isinstance(divisor, int):
        return value // divisor if value % divisor == 0 else None
    if value == divisor or value == 0:
        return 1 if value == divisor else 0
    denominator = _terms(divisor)
    if len(denominator) != 1:
        return None
    ((below, d),) = denominator.items()
    total: dict[_Monomial, int] = {}
    for monomial, c in _terms(value).items():
        powers = dict(monomial)
        for generator, power in below:
            powers[generator] = powers.get(generator, 0) - power
        if c % d or any(power < 0 for power in powers.values()):
            return None
        total[_ordered(powers)] = c // d
    return _made(total)


def _terms(value: Size) -> dict[_Monomial, int]:
    return value.terms if isinstance(value, Polynomial) else {(): value}


def _made(terms: dict[_Monomial, int]) -> Size:
    kept = {monomial: c for monomial, c in terms.items() if c}
    return kept.get((), 0) if not kept.keys() - {()} else Polynomial(kept)


def _product(one: _Monomial, two: _Monomial) -> _Monomial:
    if not one or not two:
        return one or two
    powers = dict(one)
    for generator, power in two:
        powers[generator] = powers.get(generator, 0) + power
    return _ordered(powers)


def _ordered(powers: dict[Any, int]) -> _Monomial:
    return tuple(sorted(((g, p) for g, p in powers.items() if p), key=lambda pair: str(pair[0])))


@records.dataclass(frozen=True)
class Variable:
    """An index: `b`, `h`, `q` or `k`."""

    name: str


@records.dataclass(frozen=True)
class Quotient:
    """`numerator / divisor`, rounded towards minus infinity."""

    numerator: "Linear"
    divisor: Size


@records.dataclass(frozen=True)
class Remainder:
    """What the rounded quotient leaves: from 0 to `divisor` - 1."""

    numerator: "Linear"
    divisor: Size


Atom: TypeAlias = Variable | Quotient | Remainder


@records.dataclass(frozen=True)
class Linear:
    """The sum of `coefficient * atom` over `terms`, plus `constant`; two equal forms are equal as objects."""

    terms: frozenset[tuple[Atom, Size]] = frozenset()  # pairs of an atom and its coefficient, which is never 0
    constant: Size = 0  # the rest

    @classmethod
    def of(cls, coefficients: Mapping[Atom, Size], constant: Size) -> "Linear":
        """The form with these coefficients; `d * (n // d) + n % d` becomes `n`."""
        kept = {atom: c for atom, c in coefficients.items() if c != 0}
        for atom, c in list(kept.items()):
            if isinstance(atom, Remainder):
                quotient = Quotient(atom.numerator, atom.divisor)
                if kept.get(quotient) == (c * atom.divisor):
                    del kept[atom], kept[quotient]
                    return cls.of(kept, constant) + atom.numerator.scaled(c)
        return cls(frozenset(kept.items()), (constant))

    def __add__(self, other: "Linear | Size") -> "Linear":
        if not isinstance(other, Linear):
            return Linear(self.terms, (self.constant + other))
        total = dict(self.terms)
        for atom, c in other.terms:
            total[atom] = total.get(atom, 0) + c
        return Linear.of(total, self.constant + other.constant)

    def __sub__(self, other: "Linear | Size") -> "Linear":
        return self + (other.scaled(-1) if isinstance(other, Linear) else -other)

    def scaled(self, factor: Size) -> "Linear":
        """The form times a number."""
        return Linear.of({atom: c * factor for atom, c in self.terms}, self.constant * factor)

    def coefficients(self) -> dict[Any, Size]:
        """The coefficients; those of indices under the index' name, the others under the atom."""
        return {atom.name if isinstance(atom, Variable) else atom: c for atom, c in self.terms}


class Prover:
    """Bounds of linear forms, and inequalities between sizes that hold whatever the symbolic sizes are.

    Every index is taken to have at least one value: what is said of an empty tensor's elements is true of none.

    Args:
        sizes: the size of each index.
        known: what is known of a generator of polynomials, or of a polynomial: its smallest and largest value or None.
    """

    def __init__(self, sizes: Mapping[str, Size], known: Callable[[Any], tuple[int | None, int | None]]) -> None:
        self.sizes, self._known = dict(sizes), known
        self._nonnegative: dict[Any, bool] = {}
        self._known_bounds: dict[Any, tuple[int | None, int | None]] = {}
        symbolic: list[Size] = [size for size in sizes.values() if isinstance(size, Polynomial)]
        self._counts = {next(iter(s.generators())) for s in symbolic if list(s.terms.values()) == [1] and _is_one(s)}
        self._facts: list[Size] = []
        self._facts = [size - 1 for size in dict.fromkeys(symbolic) if not self._is_sum_of_nonnegative(size - 1)]

    def nonnegative(self, value: Size) -> bool:
        """Whether `value >= 0` is proved."""
        if isinstance(value, int):
            return value >= 0
        if value not in self._nonnegative:
            self._nonnegative[value] = self._prove(value)
        return self._nonnegative[value]

    def range(self, form: Linear) -> tuple[Size | None, Size | None]:
        """Bounds of the form; None where there is none, or none is known. Exact if all its atoms are indices."""
        low: Size | None = form.constant
        high: Size | None = form.constant
        for atom, c in form.terms:
            ends = self._atom_range(atom)
            if self.nonnegative(c):
                first, last = ends
            elif self.nonnegative(-c):
                last, first = ends
            else:
                return None, None
            low = None if low is None or first is None else low + c * first
            high = None if high is None or last is None else high + c * last
        return (None if low is None else (low)), (None if high is None else (high))

    def always(self, form: Linear) -> bool:
        """Whether `form <= 0` is proved for every value of the indices."""
        high = self.range(form)[1]
        return high is not None and self.nonnegative(-high)

    def never(self, form: Linear) -> bool:
        """Whether `form > 0` is proved for every value of the indices."""
        low = self.range(form)[0]
        return low is not None and self.nonnegative(low - 1)

    def magnitude(self, form: Linear) -> tuple[int | None, int | None]:
        """Bounds of the form that are plain numbers; None where none is known."""
        low, high = self.range(form)
        if low is not None and not isinstance(low, int):
            low = self._bounds(low)[0]
        if high is not None and not isinstance(high, int):
            high = self._bounds(high)[1]
        return low, high

    def divide(self, form: Linear, divisor: Size) -> tuple[Linear, Linear]:
        """Quotient and remainder of the form by a number that is proved positive, both in simplest form."""
        whole: dict[Atom, Size] = {}
        rest: dict[Atom, Size] = {}
        for atom, c in form.terms:
            exact = divided(c, divisor)
            (rest if exact is None else whole)[atom] = c if exact is None else exact
        constant, left = 0, form.constant
        if isinstance(left, int) and isinstance(divisor, int):
            constant, left = divmod(left, divisor)
        elif (exact := divided(left, divisor)) is not None:
            constant, left = exact, 0
        quotient, remaining = Linear.of(whole, constant), Linear.of(rest, left)
        if self.always(remaining.scaled(-1)) and self.always(remaining - (divisor - 1)):
            return quotient, remaining
        quotient = quotient + Linear.of({Quotient(remaining, divisor): 1}, 0)
        return quotient, Linear.of({Remainder(remaining, divisor): 1}, 0)

    def substitute(self, form: Linear, name: str, value: Linear) -> Linear:
        """The form with an index replaced by another form."""
        total = Linear(frozenset(), form.constant)
        for atom, c in form.terms:
            if isinstance(atom, Variable):
                part = value if atom.name == name else Linear.of({atom: 1}, 0)
            else:
                inner = self.substitute(atom.numerator, name, value)
                part = self.divide(inner, atom.divisor)[isinstance(atom, Remainder)]
            total = total + part.scaled(c)
        return total

    def _atom_range(self, atom: Atom) -> tuple[Size | None, Size | None]:
        if isinstance(atom, Variable):
            return 0, (self.sizes[atom.name] - 1)
        if isinstance(atom, Remainder):
            return 0, (atom.divisor - 1)
        low, high = self.range(atom.numerator)
        return self._floor(low, atom.divisor, upper=False), self._floor(high, atom.divisor, upper=True)

    def _floor(self, value: Size | None, divisor: Size, *, upper: bool) -> Size | None:
        """A bound of `value // divisor`: exact where that is simple, else on the side asked for."""
        if value is None:
            return None
        if isinstance(value, int) and isinstance(divisor, int):
            return value // divisor
        if (exact := divided(value, divisor)) is not None:
            return exact
        if (exact := divided(value + 1, divisor)) is not None:
            return exact - 1  # m·d - 1
        if self.nonnegative(value):
            if self.nonnegative(divisor - 1 - value):
                return 0
            return value if upper else 0
        if self.nonnegative(-value):
            return 0 if upper else value
        return None

    def _prove(self, value: Polynomial) -> bool:
        if any(self._is_sum_of_nonnegative(part) for part in (value, *(value - fact for fact in self._facts))):
            return True
        if all(self._bounds(generator)[1] is None for generator in value.generators()):
            return False
        low = self._bounds(value)[0]
        return low is not None and low >= 0

    def _is_sum_of_nonnegative(self, value: Size) -> bool:
        """Whether the polynomial has no negative coefficient once each generator is its minimum + a rest."""
        if isinstance(value, int):
            return value >= 0
        lows = {generator: self._bounds(generator)[0] for generator in value.generators()}
        shifts = {generator: low for generator, low in lows.items() if low is not None}
        if len(shifts) < len(lows):
            return False
        rest = value.shifted(shifts)
        return rest >= 0 if isinstance(rest, int) else all(c >= 0 for c in rest.terms.values())

    def _bounds(self, value: Any) -> tuple[int | None, int | None]:
        if value not in self._known_bounds:
            low, high = self._known(value)
            # A size that is a symbol of its own; one that is made of several is a fact.
            if (low is None or low < 1) and value in self._counts:
                low = 1
            self._known_bounds[value] = (low, high)
        return self._known_bounds[value]


def _is_one(size: Polynomial) -> bool:
    """Whether the polynomial is one generator."""
    return [[power for _, power in monomial] for monomial in size.terms] == [[1]]


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


class IndexReader:
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
