"""Predicates over the indices of attention scores, in conjunctive normal form.

A predicate is an `and` of clauses, a clause an `or` of literals. A literal compares a linear form of indices with zero
(`<=`, `==` or `!=`), or is opaque: a comparison that involves data, or an element of a boolean tensor. Whatever follows
from the ranges of the indices or from the other clauses is left out.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Final

import torch

from omnicomp import records
from omnicomp._torch.symbols import expression
from omnicomp.passes.attention.linear import EXACT_INTEGERS, IndexReader, Linear, Prover, Quotient
from omnicomp.passes.attention.structure import Structure, boolean, build, substitute
from omnicomp.passes.attention.terms import Apply, Number, Term

MOST_CLAUSES: Final = 32
MOST_LITERALS: Final = 12


class TooComplex(Exception):
    """The normal form would be too large to be of use."""


@records.dataclass(frozen=True, eq=False, kw_only=True)
class Literal:
    """One comparison."""

    term: Term  # the comparison as a term
    relation: str  # `le`, `eq` or `ne`, for `form <= 0`, `form == 0`, `form != 0`; `opaque`
    # What is compared with zero; nothing for an opaque literal.
    form: Linear = dataclasses.field(default_factory=Linear)
    name: Hashable = None  # equal for the same opaque predicate; None otherwise
    positive: bool = True  # False for the negation of the opaque predicate `name`
    roles: frozenset[str] = frozenset()  # the indices on which it depends
    data: bool = False  # whether it depends on data


@records.dataclass(frozen=True, eq=False)
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


_MOST_SPLITS: Final = 64

# What boolean operands make of an operation, `add` of bools being `or`.
_CONNECTIVES: Final[dict[str, str]] = {
    **dict.fromkeys(("and", "mul", "minimum"), "and"),
    **dict.fromkeys(("or", "add", "maximum"), "or"),
    **dict.fromkeys(("xor", "ne"), "xor"),
    "eq": "eq",
}
_COMPARISONS: Final = ("eq", "ne", "lt", "le", "gt", "ge")
_MIRRORED: Final[dict[str, str]] = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_OPPOSITE: Final[dict[str, str]] = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


class NormalForm:
    """Reads the boolean terms of one site."""

    def __init__(self, structure: Structure, reader: IndexReader, prover: Prover) -> None:
        self._structure, self._reader, self._prover = structure, reader, prover
        self._seen: dict[tuple[int, bool], Clauses] = {}
        self._splits = 0

    def read(self, term: Term, positive: bool = True) -> Clauses:
        """The clauses of `term`, or of its negation.

        Raises:
            TooComplex: if the normal form is too large.
        """
        key = (self._structure.number(term), positive)
        if key not in self._seen:
            self._seen[key] = self._read(term, positive)
        return self._seen[key]

    def _read(self, term: Term, positive: bool) -> Clauses:
        if isinstance(term, Number) and isinstance(value := expression(term.value), bool | int | float):
            return TRUE if bool(value) == positive else FALSE
        if not isinstance(term, Apply):
            return self._opaque(term, term, positive)
        args = term.args
        if term.op == "not":
            return self.read(args[0], not positive)
        if term.op == "where":
            branches = (self._either(args[0], False, args[1], positive), self._either(args[0], True, args[2], positive))
            return conjunction(branches, self._prover)
        if term.op == "cast":
            if args[0].dtype is torch.bool:
                return self.read(args[0], positive)
            return self._compare("ne" if positive else "eq", args[0], Number(dtype=args[0].dtype, value=0), term)
        if term.op in _CONNECTIVES and all(argument.dtype is torch.bool for argument in args):
            return self._connect(_CONNECTIVES[term.op], args[0], args[1], positive)
        if term.op in _COMPARISONS:
            op = term.op
            if not positive and (op in ("eq", "ne") or not args[0].dtype.is_floating_point):
                return self._compare(_OPPOSITE[op], args[0], args[1], term)
            return self._compare(op, args[0], args[1], term, positive)
        return self._opaque(term, term, positive)

    def _either(self, one: Term, one_positive: bool, other: Term, other_positive: bool) -> Clauses:
        return disjunction((self.read(one, one_positive), self.read(other, other_positive)), self._prover)

    def _connect(self, connective: str, one: Term, other: Term, positive: bool) -> Clauses:
        if connective in ("xor", "eq"):
            same = (connective == "eq") == positive
            # Of two that must be the same, one or the other is always false, and so is one or the other's negation.
            first = self._either(one, not same, other, True)
            second = self._either(one, same, other, False)
            return conjunction((first, second), self._prover)
        parts = (self.read(one, positive), self.read(other, positive))
        return (conjunction if (connective == "and") == positive else disjunction)(parts, self._prover)

    def _compare(self, op: str, left: Term, right: Term, source: Term, positive: bool = True) -> Clauses:
        """`left op right`, or its negation: floating-point data may be no number, so that `not <` is not `>=`."""
        whole = build(op, torch.bool, left, right)
        if isinstance(whole, Number):
            return TRUE if bool(whole.value) == positive else FALSE
        split = next(self._splittable(whole, set()), None)
        if split is not None:
            self._splits += 1
            if self._splits > _MOST_SPLITS:
                raise TooComplex
            part, condition, then, otherwise = split
            taken, left_over = (substitute(whole, part, value, self._structure) for value in (then, otherwise))
            branches = (
                self._either(condition, False, taken, positive),
                self._either(condition, True, left_over, positive),
            )
            return conjunction(branches, self._prover)
        if not self._structure.has_data(whole):
            found = self._index_comparison(op if positive else _OPPOSITE[op], left, right, whole, positive)
            if found is not None:
                return found
        return self._opaque(whole, source, positive)

    def _index_comparison(self, op: str, left: Term, right: Term, whole: Term, positive: bool) -> Clauses | None:
        one, other = self._reader.read(left), self._reader.read(right)
        if one is None and other is not None:
            one, other, left, right, op = other, one, right, left, _MIRRORED[op]
        if one is None:
            return None
        if other is None:
            return self._beyond(one, op, right, whole, positive)
        difference = one - other
        relation = op if op in ("eq", "ne") else "le"
        form = {"lt": difference + 1, "gt": difference.scaled(-1) + 1, "ge": difference.scaled(-1)}.get(op, difference)
        return self._literal(relation, form, whole, positive)

    def _beyond(self, form: Linear, op: str, limit: Term, whole: Term, positive: bool) -> Clauses | None:
        """An integer compared with a number that is none."""
        value: Any = expression(limit.value) if isinstance(limit, Number) else None
        if not isinstance(value, float) or math.isnan(value):
            return None
        if op in ("eq", "ne"):
            return TRUE if op == "ne" else FALSE
        if math.isinf(value):
            return TRUE if (value > 0) == (op in ("lt", "le")) else FALSE
        # The dtype of the comparison may round the number as written.
        value = torch.tensor(value, dtype=limit.dtype).item()
        if value.is_integer():
            return None
        bound = form - math.floor(value) if op in ("lt", "le") else form.scaled(-1) + math.ceil(value)
        return self._literal("le", bound, whole, positive)

    def _literal(self, relation: str, form: Linear, whole: Term, positive: bool) -> Clauses:
        term = whole if positive else build("not", torch.bool, whole)
        roles = self._structure.roles(whole)
        return index_literal(Literal(term=term, relation=relation, form=form, roles=roles), self._prover)

    def _opaque(self, term: Term, source: Term, positive: bool) -> Clauses:
        """An atom: a boolean element, or a comparison that is not one of indices alone, in one of its spellings."""
        kept, name = positive, self._structure.number(term)
        spelled: Hashable = name
        if isinstance(term, Apply) and term.op in _COMPARISONS:
            spelled, kept = self._spelling(term, positive)
        literal = Literal(
            term=term if positive else build("not", torch.bool, term),
            relation="opaque",
            name=spelled,
            positive=kept,
            roles=self._structure.roles(source),
            data=self._structure.has_data(term),
        )
        return (Clause((literal,)),)

    def _spelling(self, term: Apply, positive: bool) -> tuple[Hashable, bool]:
        """A name for all spellings of one comparison, and whether this one is it or its negation."""
        left, right = term.args
        if term.op in ("eq", "ne"):
            name = frozenset(map(self._structure.number, _unwrapped(left, right)))
            return ("eq", name), positive == (term.op == "eq")
        op, one, other = term.op, self._structure.number(left), self._structure.number(right)
        if op in ("gt", "ge"):
            op, one, other = _MIRRORED[op], other, one
        if op == "lt" and not left.dtype.is_floating_point:
            return ("le", other, one), not positive
        return (op, one, other), positive

    def _splittable(self, term: Term, seen: set[int]) -> Iterator[tuple[Term, Term, Term, Term]]:
        """Parts of a comparison that are one of two values: the part, the condition, and the two."""
        number = self._structure.number(term)
        if number in seen:
            return
        seen.add(number)
        if term.dtype is torch.bool and len(seen) > 1 and not isinstance(term, Number):
            yield term, term, boolean(True), boolean(False)
            return
        if not isinstance(term, Apply):
            return
        if term.op == "where":
            condition, then, otherwise = term.args
            yield term, condition, then, otherwise
        elif term.op in ("maximum", "minimum") and not self._structure.has_data(term):
            one, other = term.args
            yield term, build("ge" if term.op == "maximum" else "le", torch.bool, one, other), one, other
        elif term.op in ("abs", "relu") and not self._structure.has_data(term):
            (inside,) = term.args
            zero = Number(dtype=inside.dtype, value=0)
            below = zero if term.op == "relu" else build("neg", inside.dtype, inside)
            yield term, build("ge", torch.bool, inside, zero), inside, below
        for argument in term.args:
            yield from self._splittable(argument, seen)


def _unwrapped(left: Term, right: Term) -> tuple[Term, Term]:
    """The operands of an equality without arithmetic that cannot change its answer.

    `a - n == 0` is `a == n` for a finite number n, since gradual underflow leaves no difference of unequal numbers at
    zero; and an integer that is compared with a small one does not need its cast to a floating-point dtype.
    """
    if isinstance(left, Number):
        left, right = right, left
    limit = _finite(right)
    while isinstance(left, Apply) and limit is not None:
        if left.op in ("add", "sub") and (found := _shifted(left, limit)) is not None:
            left, limit = found
        elif left.op == "cast" and left.dtype in EXACT_INTEGERS and _is_integral(left.args[0].dtype):
            if abs(limit) > 64 or limit != int(limit):
                break
            left, limit = left.args[0], int(limit)
        else:
            break
    return left, right if limit is None else Number(dtype=left.dtype, value=limit)


def _shifted(term: Apply, limit: Any) -> tuple[Term, Any] | None:
    """`term == limit` for a sum or difference with a number, as (the other operand, what it has to equal)."""
    left, right = term.args
    if (number := _finite(right)) is not None:
        if number == 0:
            return left, limit
        return (left, -number if term.op == "add" else number) if limit == 0 else None
    if (number := _finite(left)) is not None:
        if number == 0 and term.op == "add":
            return right, limit
        return (right, -number if term.op == "add" else number) if limit == 0 else None
    return None


def _finite(term: Term) -> Any:
    """The value of a term that is a finite number, else None."""
    value = expression(term.value) if isinstance(term, Number) else None
    return value if isinstance(value, bool | int | float) and math.isfinite(value) else None


def _is_integral(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool
