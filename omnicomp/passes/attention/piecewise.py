"""Terms that take few values: a mask that is added to scores, read as conditions and the values that they choose."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import torch

from omnicomp import records
from omnicomp._torch.symbols import expression
from omnicomp.passes.attention.structure import IndexSpace, Structure, boolean, build, substitute
from omnicomp.passes.attention.terms import Apply, Axis, Number, Term

_MOST_PIECES: Final = 16
_MOST_TERMS: Final = 32
_DIVISIONS: Final = ("div", "reciprocal", "rsqrt", "pow")

# An `or` of `and`s of atoms: the number of an atom's structure + 1, negative for its negation. The empty `and` is true.
_Condition: TypeAlias = frozenset[frozenset[int]]
_TRUE: Final[_Condition] = frozenset([frozenset()])
_Pieces: TypeAlias = list[tuple[_Condition, Any]]


@records.dataclass(frozen=True, eq=False, kw_only=True)
class Piecewise:
    """A term that takes finitely many known values."""

    dtype: torch.dtype  # of the term
    # (condition, value) in order: the first condition that is true gives the value, as `where` upon `where` does; the
    # last condition is the number true. The values are what the program's dtypes make of them.
    pieces: tuple[tuple[Term, float], ...]

    @property
    def values(self) -> tuple[float, ...]:
        """The different values, in the order of their first pieces; zeros of either sign are one value."""
        return tuple(dict.fromkeys(value for _, value in self.pieces))

    @property
    def sentinel(self) -> float | None:
        """The value that is not 0, if the term takes 0 and one other; None otherwise."""
        others = [value for value in self.values if value != 0]
        return others[0] if len(others) == 1 and len(self.values) == 2 else None

    def where(self, accepted: Callable[[float], bool]) -> Term:
        """The boolean term that is true where the value is accepted."""
        total: Term = boolean(accepted(self.pieces[-1][1]))
        for condition, value in reversed(self.pieces[:-1]):
            if accepted(value):
                total = build("or", torch.bool, condition, total)
            else:
                total = build("and", torch.bool, build("not", torch.bool, condition), total)
        return total

    def keep(self) -> Term:
        """The boolean term that is true where the value is 0: a key is attended as it is."""
        return self.where(lambda value: value == 0)


def additive(
    term: Term, *, batch: Sequence[Axis], heads: Sequence[Axis], query: Sequence[Axis], key: Sequence[Axis]
) -> Piecewise | None:
    """Read a term that is added to scores as conditions and values.

    Args:
        term: of a floating-point dtype; of indices, numbers, elements of tensors and pointwise operations alone.
        batch: the axes of the batch index, most significant first; any number.
        heads: of the head index.
        query: of the query index.
        key: of the key index.

    Returns:
        The values that it takes and where, computed in the program's dtypes (so -inf for the smallest float32 in
        bfloat16, and for twice the smallest); None if it takes others than finitely many known ones, or too many.
    """
    space = IndexSpace.of(batch=batch, heads=heads, query=query, key=key)
    reading = _Reading(Structure(space))
    pieces = reading.read(term)
    pieces = None if pieces is None else _simplified([(c, 0.0 if value == 0 else value) for c, value in pieces])
    if pieces is None:
        return None
    return Piecewise(dtype=term.dtype, pieces=tuple((reading.term(c), float(value)) for c, value in pieces))


class _Reading:
    """Terms being read; atoms are boolean terms that are not looked into."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._atoms: dict[int, Term] = {}
        self._seen: dict[int, _Pieces | None] = {}

    def read(self, term: Term) -> _Pieces | None:
        number = self._structure.number(term)
        if number not in self._seen:
            self._seen[number] = self._read(term)
        return self._seen[number]

    def term(self, condition: _Condition) -> Term:
        """The condition as a term."""
        total: Term = boolean(False)
        for atoms in sorted(condition, key=sorted):
            part: Term = boolean(True)
            for atom in sorted(atoms, key=abs):
                found = self._atoms[abs(atom)]
                part = build("and", torch.bool, part, found if atom > 0 else build("not", torch.bool, found))
            total = build("or", torch.bool, total, part)
        return total

    def _read(self, term: Term) -> _Pieces | None:
        if isinstance(term, Number):
            value = expression(term.value)
            return [(_TRUE, _plain(build("cast", term.dtype, term)))] if isinstance(value, bool | int | float) else None
        if term.dtype is torch.bool:
            return self._of_condition(term)
        if not isinstance(term, Apply):
            return None
        if term.op == "where":
            return self._of_where(term)
        args = [self.read(argument) for argument in term.args]
        chains = [chain for chain in args if chain is not None]
        return self._combined(term, chains) if len(chains) == len(args) else None

    def _of_condition(self, term: Term) -> _Pieces:
        """A boolean term: connectives of atoms, as far as that stays small."""
        if isinstance(term, Apply) and term.op in ("and", "or", "not"):
            parts = [self.read(argument) for argument in term.args]
            chains = [part for part in parts if part is not None]
            found = self._combined(term, chains) if len(chains) == len(parts) else None
            if found is not None:
                return found
        atom = self._structure.number(term) + 1
        self._atoms[atom] = term
        return [(frozenset([frozenset([atom])]), True), (_TRUE, False)]

    def _of_where(self, term: Apply) -> _Pieces | None:
        condition, then, otherwise = term.args
        then, otherwise = self._knowing(then, condition, True), self._knowing(otherwise, condition, False)
        chains = [self.read(part) for part in (condition, then, otherwise)]
        if chains[0] is None:
            return None
        found: _Pieces = []
        for test, value in chains[0]:
            branch = chains[1] if value else chains[2]
            if branch is None:
                return None
            found.extend((_both(test, inner), chosen) for inner, chosen in branch)
        return _simplified(found)

    def _combined(self, term: Apply, chains: list[_Pieces]) -> _Pieces | None:
        """Every combination of the operands' pieces, in an order in which the first that applies is the right one."""
        found: list[tuple[_Condition, list[Any]]] = [(_TRUE, [])]
        for chain in chains:
            found = [(_both(one, two), [*values, value]) for one, values in found for two, value in chain]
            if len(found) > _MOST_PIECES**2:
                return None
        results: _Pieces = []
        for condition, values in found:
            args = [Number(dtype=a.dtype, value=value) for a, value in zip(term.args, values, strict=True)]
            result = build(term.op, term.dtype, *args)
            if not isinstance(result, Number):
                return None
            results.append((condition, _plain(result)))
        return _simplified(results)

    def _knowing(self, branch: Term, condition: Term, holds: bool) -> Term:
        """The branch that is taken if the condition is as said, with what that says about its parts put in."""
        branch = substitute(branch, condition, boolean(holds), self._structure)
        while isinstance(condition, Apply) and condition.op == "not":
            condition, holds = condition.args[0], not holds
        if not isinstance(condition, Apply):
            return branch
        args = condition.args
        if _divides(branch):
            return branch
        if condition.op == "cast" and not holds:
            return substitute(branch, args[0], Number(dtype=args[0].dtype, value=0), self._structure)
        if condition.op == ("eq" if holds else "ne"):
            part, value = args if isinstance(args[1], Number) else args[::-1]
            return substitute(branch, part, value, self._structure) if isinstance(value, Number) else branch
        return branch


def _both(one: _Condition, two: _Condition) -> _Condition:
    return _absorbed(a | b for a in one for b in two if not any(-atom in b for atom in a))


def _absorbed(parts: Iterable[frozenset[int]]) -> _Condition:
    """The `or` of these without what another one covers."""
    distinct = set(parts)
    return frozenset(part for part in distinct if not any(other < part for other in distinct))


def _simplified(pieces: _Pieces) -> _Pieces | None:
    """Without pieces that are never reached, and with neighbours of one value made one; None if too large."""
    false: set[frozenset[int]] = set()  # what no later piece can meet
    found: _Pieces = []
    for condition, value in pieces:
        known = {-atom for part in false if len(part) == 1 for atom in part}
        reached = _absorbed(part - known for part in condition if not any(part >= other for other in false))
        if not reached:
            continue
        if found and _same(found[-1][1], value):
            reached = _absorbed((*found.pop()[0], *reached))
        found.append((reached, value))
        false |= reached
        if frozenset() in reached:
            break
    fits = len(found) <= _MOST_PIECES and all(len(condition) <= _MOST_TERMS for condition, _ in found)
    return found if fits else None


def _same(one: Any, two: Any) -> bool:
    """Whether two values are one, zeros of different signs being two, as long as something may divide by them."""
    return (one == two and math.copysign(1, one) == math.copysign(1, two)) or (one != one and two != two)


def _plain(number: Term) -> Any:
    """The value of a number of the program."""
    assert isinstance(number, Number)
    return expression(number.value)


def _divides(term: Term) -> bool:
    """Whether some operation in the term tells the two zeros apart."""
    return isinstance(term, Apply) and (term.op in _DIVISIONS or any(map(_divides, term.args)))
