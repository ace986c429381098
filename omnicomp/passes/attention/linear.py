"""Integers made from indices, as linear forms, and what can be proved of them for every size.

A form is `a·q + b·k + … + c`, where the letters are indices, or rounded quotients and remainders of forms, and the
coefficients are numbers or polynomials of symbolic sizes. A proof is a bound: each index runs over its own range.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from omnicomp.passes.attention.polynomial import Polynomial, Size, divided

__all__ = ["Linear", "Prover", "Quotient", "Remainder", "Variable"]


@dataclasses.dataclass(frozen=True)
class Variable:
    """An index: `b`, `h`, `q` or `k`."""

    name: str


@dataclasses.dataclass(frozen=True)
class Quotient:
    """`numerator / divisor`, rounded towards minus infinity."""

    numerator: "Linear"
    divisor: Size


@dataclasses.dataclass(frozen=True)
class Remainder:
    """What the rounded quotient leaves: from 0 to `divisor` - 1."""

    numerator: "Linear"
    divisor: Size


Atom: TypeAlias = Variable | Quotient | Remainder


@dataclasses.dataclass(frozen=True)
class Linear:
    """The sum of `coefficient * atom` over `terms`, plus `constant`; two equal forms are equal as objects.

    Attributes:
        terms: pairs of an atom and its coefficient, which is never 0.
        constant: the rest.
    """

    terms: frozenset[tuple[Atom, Size]] = frozenset()
    constant: Size = 0

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
