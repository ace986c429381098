"""Boolean terms read as predicates in conjunctive normal form."""

import math
from collections.abc import Hashable, Iterator
from typing import Any, Final

import torch

from omnicomp._torch.symbols import expression
from omnicomp.passes.attention.arithmetic import EXACT_INTEGERS, Reader
from omnicomp.passes.attention.linear import Linear, Prover
from omnicomp.passes.attention.predicates import (
    FALSE,
    TRUE,
    Clause,
    Clauses,
    Literal,
    TooComplex,
    conjunction,
    disjunction,
    index_literal,
)
from omnicomp.passes.attention.structure import Structure, boolean, build, substitute
from omnicomp.passes.attention.terms import Apply, Number, Term

__all__ = ["NormalForm"]

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

    def __init__(self, structure: Structure, reader: Reader, prover: Prover) -> None:
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
