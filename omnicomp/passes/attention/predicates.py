"""Predicates over the indices of attention scores, in conjunctive normal form.

A predicate is an `and` of clauses, a clause an `or` of literals. A literal compares a linear form of indices with zero
(`<=`, `==` or `!=`), or is opaque: a comparison that involves data, or an element of a boolean tensor. Whatever follows
from the ranges of the indices or from the other clauses is left out.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import Final

import torch

from omnicomp.passes.attention.linear import Linear, Prover, Quotient
from omnicomp.passes.attention.structure import boolean, build
from omnicomp.passes.attention.terms import Term

__all__ = ["FALSE", "TRUE", "Clause", "Clauses", "Literal", "TooComplex", "conjunction", "disjunction", "index_literal"]

MOST_CLAUSES: Final = 32
MOST_LITERALS: Final = 12


class TooComplex(Exception):
    """The normal form would be too large to be of use."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Literal:
    """One comparison.

    Attributes:
        term: the comparison as a term.
        relation: `le`, `eq` or `ne`, for `form <= 0`, `form == 0`, `form != 0`; `opaque`.
        form: what is compared with zero; nothing for an opaque literal.
        name: equal for the same opaque predicate; None otherwise.
        positive: False for the negation of the opaque predicate `name`.
        roles: the indices on which it depends.
        data: whether it depends on data.
    """

    term: Term
    relation: str
    form: Linear = dataclasses.field(default_factory=Linear)
    name: Hashable = None
    positive: bool = True
    roles: frozenset[str] = frozenset()
    data: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Clause:
    """True where at least one of its literals is; without literals, nowhere."""

    literals: tuple[Literal, ...] = ()

    @property
    def data(self) -> bool:
        """Whether it depends on data."""
        return any(literal.data for literal in self.literals)

    @property
    def roles(self) -> frozenset[str]:
        """The indices on which it depends."""
        return frozenset[str]().union(*(literal.roles for literal in self.literals))

    def term(self) -> Term:
        """The clause as a term."""
        total: Term = boolean(False)
        for literal in self.literals:
            total = build("or", torch.bool, total, literal.term)
        return total


Clauses = tuple[Clause, ...]
TRUE: Final[Clauses] = ()
FALSE: Final[Clauses] = (Clause(),)


def index_literal(literal: Literal, prover: Prover) -> Clauses:
    """The clauses of one comparison of a form with zero, simplified by the ranges of its indices."""
    form, relation = literal.form, literal.relation
    if relation == "le":
        form = _reduced(form)
        if prover.always(form):
            return TRUE
        return FALSE if prover.never(form) else (Clause((dataclasses.replace(literal, form=form),)),)
    above, below = form, form.scaled(-1)
    if prover.never(above) or prover.never(below):
        return FALSE if relation == "eq" else TRUE
    low, high = prover.always(below), prover.always(above)  # form >= 0, form <= 0
    if low and high:
        return TRUE if relation == "eq" else FALSE
    if low or high:
        # At the end of its range, to differ is to be beyond it.
        edge = above if low else below
        edge = edge if relation == "eq" else edge.scaled(-1) + 1
        return index_literal(dataclasses.replace(literal, form=edge, relation="le"), prover)
    return (Clause((literal,)),)


def conjunction(parts: Iterable[Clauses], prover: Prover) -> Clauses:
    """The `and` of predicates.

    Raises:
        TooComplex: if it has too many clauses.
    """
    clauses = [clause for part in parts for clause in part]
    if len(clauses) > 2 * MOST_CLAUSES:
        raise TooComplex
    simplified = _simplify(clauses, prover)
    if len(simplified) > MOST_CLAUSES:
        raise TooComplex
    return simplified


def disjunction(parts: Iterable[Clauses], prover: Prover) -> Clauses:
    """The `or` of predicates: each clause of one with each of the others.

    Raises:
        TooComplex: if it has too many clauses, or clauses too long.
    """
    total = FALSE
    for part in parts:
        merged = [_merge((*one.literals, *two.literals), prover) for one in total for two in part]
        kept = [clause for clause in merged if clause is not None]
        if len(kept) > 2 * MOST_CLAUSES or any(len(clause.literals) > MOST_LITERALS for clause in kept):
            raise TooComplex
        total = _simplify(kept, prover)
    return total


def implies(one: Literal, other: Literal, prover: Prover) -> bool:
    """Whether `other` is proved to hold wherever `one` does."""
    if "opaque" in (one.relation, other.relation):
        return one.relation == other.relation and (one.name, one.positive) == (other.name, other.positive)
    if one.relation == other.relation and one.form == other.form:
        return True
    if other.relation == "eq":
        return one.relation == "eq" and one.form == other.form.scaled(-1)
    # Each literal as alternatives of `form <= 0`: all that `one` asserts, any that suffices for `other`.
    targets = [other.form] if other.relation == "le" else [other.form + 1, other.form.scaled(-1) + 1]
    if one.relation == "ne":
        return other.relation == "ne" and one.form == other.form.scaled(-1)
    given = [one.form] if one.relation == "le" else [one.form, one.form.scaled(-1)]
    return any(prover.always(target - source) for target in targets for source in given)


def opposite(literal: Literal) -> Literal:
    """The negation; its term is not meant to be used."""
    if literal.relation == "opaque":
        return dataclasses.replace(literal, positive=not literal.positive)
    if literal.relation == "le":
        return dataclasses.replace(literal, form=literal.form.scaled(-1) + 1)
    return dataclasses.replace(literal, relation="ne" if literal.relation == "eq" else "eq")


def _merge(literals: Iterable[Literal], prover: Prover) -> Clause | None:
    """The clause of these literals without those that imply another one; None if it is always true."""
    kept: list[Literal] = []
    for literal in literals:
        if any(implies(opposite(literal), other, prover) for other in kept):
            return None
        if any(implies(literal, other, prover) for other in kept):
            continue
        kept = [other for other in kept if not implies(other, literal, prover)]
        kept.append(literal)
    return Clause(tuple(kept))


def _simplify(clauses: list[Clause], prover: Prover) -> Clauses:
    """Without clauses that follow from another one, and without literals that a clause of one literal excludes."""
    while True:
        units = [clause.literals[0] for clause in clauses if len(clause.literals) == 1]
        if any(not clause.literals for clause in clauses) or _contradict(units, prover):
            return FALSE
        shortened = [
            clause
            if len(clause.literals) == 1
            else Clause(
                tuple(x for x in clause.literals if not any(implies(unit, opposite(x), prover) for unit in units))
            )
            for clause in clauses
        ]
        if all(len(new.literals) == len(old.literals) for new, old in zip(shortened, clauses, strict=True)):
            return tuple(_without_followers(clauses, prover))
        clauses = shortened


def _contradict(units: list[Literal], prover: Prover) -> bool:
    return any(implies(one, opposite(other), prover) for i, one in enumerate(units) for other in units[:i])


def _without_followers(clauses: list[Clause], prover: Prover) -> Iterator[Clause]:
    kept = list(clauses)
    for clause in clauses:
        others = [other for other in kept if other is not clause]
        if any(_clause_implies(other, clause, prover) for other in others):
            kept = others
    yield from kept


def _clause_implies(one: Clause, other: Clause, prover: Prover) -> bool:
    return all(any(implies(literal, target, prover) for target in other.literals) for literal in one.literals)


def _reduced(form: Linear) -> Linear:
    """`form <= 0` without a rounded quotient, if that is all there is, and without a common divisor."""
    if len(form.terms) == 1:
        ((atom, c),) = form.terms
        if isinstance(atom, Quotient) and c == 1:
            return _reduced(atom.numerator + (atom.divisor * (form.constant - 1) + 1))
        if isinstance(atom, Quotient) and c == -1:
            return _reduced(atom.numerator.scaled(-1) + atom.divisor * form.constant)
    factors = [c for _, c in form.terms]
    if not factors or not all(isinstance(value, int) for value in (*factors, form.constant)):
        return form
    divisor = math.gcd(*factors)
    if divisor == 1:
        return form
    return Linear.of({atom: c // divisor for atom, c in form.terms}, -(-form.constant // divisor))
