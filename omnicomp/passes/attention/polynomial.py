"""Integer polynomials of symbolic sizes: the little of SymPy that proofs about masks need, and much faster."""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import sympy

__all__ = ["Polynomial", "Size", "divided", "polynomial", "to_sympy"]

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
