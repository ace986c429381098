"""Masks of known sizes by evaluation: every pair of a query and a key is computed, a block of queries at a time."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from omnicomp import records
from omnicomp._torch.symbols import expression
from omnicomp.passes.attention.linear import Linear, Quotient, Variable
from omnicomp.passes.attention.predicates import Clause, Literal
from omnicomp.passes.attention.structure import IndexSpace, Structure
from omnicomp.passes.attention.terms import Axis, Term, can_evaluate, evaluate

# Pairs of a query and a key: the most that are evaluated to decide a mask, to check one that is decided, for one query,
# and at once. What is done at once stays in a core's cache, and below the size from which torch wakes its threads.
MOST_PAIRS: Final = 2**26
MOST_CHECKED: Final = 2**15
_MOST_A_ROW: Final = 2**22
_BLOCK: Final = 2**15


class MaskDisagreement(AssertionError):
    """Algebra and evaluation give two meanings to one mask: a defect of the analysis, never of the program."""


@records.dataclass(frozen=True, kw_only=True)
class Band:
    """`q - left <= k <= q + right`; None is no bound. `right` of nothing and `left` of nothing is every key."""

    left: int | None = None  # how many keys before its own position a query sees
    right: int | None = None  # how many keys after it


class Table:
    """Evaluates predicates of indices over all queries and keys of a site.

    Args:
        space: the axes of the site, whose sizes are known.
        structure: tells which indices a term depends on.
    """

    def __init__(self, space: IndexSpace, structure: Structure) -> None:
        self._space, self._structure = space, structure
        self._sizes = {role: math.prod(expression(axis.size) for axis in axes) for role, axes in space.roles.items()}

    @staticmethod
    def of(space: IndexSpace, structure: Structure) -> "Table | None":
        """A table, if all sizes are known numbers."""
        sizes = [expression(axis.size) for axes in space.roles.values() for axis in axes]
        return Table(space, structure) if all(isinstance(size, int) for size in sizes) else None

    def affords(self, terms: Sequence[Term], most: int) -> bool:
        """Whether these terms can be evaluated for all queries and keys, if those are at most so many pairs."""
        used = self._used(terms)
        if "?" in used or not all(map(can_evaluate, terms)):
            return False
        row = math.prod(self._sizes[role] for role in used - {"q"})
        return row <= _MOST_A_ROW and row * self._sizes["q"] <= most

    def band(self, term: Term) -> Band | None:
        """The band that `term` is, on every query and in every batch and head, or None if it is none that was found.

        A sample of queries, which is all of them where they are few, says which band it may be; then all are compared.
        """
        found = [self._row_ends(at, evaluate(term, block)) for at, block in self._blocks([term], sample=True)]
        ends = [some for some in found if some is not None]
        if len(ends) < len(found):
            return None
        queries, first, last = (torch.cat(parts) for parts in zip(*ends, strict=True))
        band = self._fitted(queries, first, last)
        if band is None:
            return None
        keys = torch.arange(self._sizes["k"])
        for at, block in self._blocks([term]):
            wanted = torch.ones((), dtype=torch.bool)
            if band.right is not None:
                wanted = wanted & (keys <= (at.queries + band.right).unsqueeze(-1))
            if band.left is not None:
                wanted = wanted & (keys >= (at.queries - band.left).unsqueeze(-1))
            if not bool((evaluate(term, block) == wanted).all()):
                return None
        return band

    def _row_ends(self, at: "_At", found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Queries with their first and last keys, if those of each query are neighbours, in all batches and heads."""
        keys = self._sizes["k"]
        found = found.expand(at.batches, at.heads, at.queries.numel(), keys)
        if not bool((found == found[:1, :1]).all()):
            return None
        rows = found[0, 0]
        count = rows.sum(-1)
        # Of equal values argmax gives the first; a row of none has first > last.
        first = torch.where(count > 0, rows.to(torch.uint8).argmax(-1), keys)
        last = torch.where(count > 0, keys - 1 - rows.flip(-1).to(torch.uint8).argmax(-1), -1)
        return (at.queries, first, last) if bool(((last - first + 1 == count) | (count == 0)).all()) else None

    def every_row(self, clauses: Sequence[Clause]) -> bool:
        """Whether each query has a key for which the clauses hold, whatever the data in them."""
        known = [[literal.term for literal in clause.literals if not literal.data] for clause in clauses]
        terms = [term for row in known for term in row]
        for at, block in self._blocks(terms):
            holds = torch.ones((), dtype=torch.bool)
            for row in known:
                some = torch.zeros((), dtype=torch.bool)
                for term in row:
                    some = some | evaluate(term, block)
                holds = holds & some
            if not bool(holds.expand(at.batches, at.heads, at.queries.numel(), self._sizes["k"]).any(-1).all()):
                return False
        return True

    def check(self, whole: Term | None, clauses: Sequence[Clause], name: str) -> None:
        """Compare what was read with the terms that it was read from, on a sample of queries.

        Args:
            whole: the whole mask, if it depends on no data; its clauses have to give the same.
            clauses: those of the mask that depend on no data.
            name: of the mask, for the error.

        Raises:
            MaskDisagreement: if they differ.
        """
        terms = [literal.term for clause in clauses for literal in clause.literals]
        if whole is not None:
            terms.append(whole)
        if "?" in self._used(terms) or not all(map(can_evaluate, terms)):
            return
        for _, block in self._blocks(terms, sample=True):
            values = {role: _number(axes, block) for role, axes in self._space.roles.items()}
            holds = torch.ones((), dtype=torch.bool)
            for clause in clauses:
                some = torch.zeros((), dtype=torch.bool)
                for literal in clause.literals:
                    read, computed = _holds(literal, values, block), evaluate(literal.term, block)
                    if not bool((read == computed).all()):
                        raise MaskDisagreement(f"mask '{name}': {literal.relation} {literal.form} is not its term")
                    some = some | read
                holds = holds & some
            if whole is not None and not bool((evaluate(whole, block) == holds).all()):
                raise MaskDisagreement(f"mask '{name}': its clauses are not what the program computes")

    def _fitted(self, queries: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> Band | None:
        """The band with these first and last keys a query, if there is one; the simplest of those that are equal."""
        keys = self._sizes["k"]
        inside = first <= last
        if not bool(inside.any()):
            return Band(right=-self._sizes["q"])
        ends, starts = inside & (last < keys - 1), inside & (first > 0)
        right = int((last - queries)[ends][0]) if bool(ends.any()) else None
        left = int((queries - first)[starts][0]) if bool(starts.any()) else None
        candidates = [Band(left=left, right=right)]
        # Rows without a key say where the band ends, too: the last such row before the others, or the first after.
        rows = inside.nonzero().flatten()
        before, after = int(queries[rows[0]]), int(queries[rows[-1]])
        if right is None and before > 0:
            candidates.append(Band(left=left, right=-before))
        if left is None and after < self._sizes["q"] - 1:
            candidates.append(Band(left=after - keys + 1, right=candidates[-1].right))
        for band in candidates:
            start = queries - band.left if band.left is not None else torch.zeros_like(queries)
            end = queries + band.right if band.right is not None else torch.full_like(queries, keys - 1)
            start, end = start.clamp(min=0), end.clamp(max=keys - 1)
            full = start <= end
            if bool((full == inside).all()) and bool(((start == first) & (end == last))[inside].all()):
                return band
        return None

    def _used(self, terms: Sequence[Term]) -> frozenset[str]:
        return frozenset("qk").union(*map(self._structure.roles, terms))

    def _blocks(self, terms: Sequence[Term], *, sample: bool = False) -> "Iterator[tuple[_At, dict[Axis, Any]]]":
        """Values of all axes, block by block of queries; batches and heads only if the terms depend on them."""
        used = self._used(terms)
        ranges = {role: torch.arange(self._sizes[role] if role in used else 1) for role in "bh"}
        keys, queries = torch.arange(self._sizes["k"]), torch.arange(self._sizes["q"])
        row = max(1, keys.numel() * ranges["b"].numel() * ranges["h"].numel())
        if sample and queries.numel() * row > MOST_CHECKED:
            picked = torch.linspace(0, queries.numel() - 1, max(2, MOST_CHECKED // row))
            queries = picked.to(torch.int64).unique()
        for some in queries.split(max(1, _BLOCK // row)):
            digits: dict[Axis, Any] = {}
            for i, (role, values) in enumerate({**ranges, "q": some, "k": keys}.items()):
                shaped = values.view(*(-1 if i == j else 1 for j in range(4)))
                for axis in reversed(self._space.roles[role]):
                    digits[axis] = shaped % expression(axis.size)
                    shaped = shaped // expression(axis.size)
            yield _At(batches=ranges["b"].numel(), heads=ranges["h"].numel(), queries=some), digits


@records.dataclass(frozen=True, kw_only=True)
class _At:
    batches: int
    heads: int
    queries: torch.Tensor


def _number(axes: tuple[Axis, ...], digits: dict[Axis, Any]) -> Any:
    value: Any = torch.zeros((), dtype=torch.int64)
    for axis in axes:
        value = value * expression(axis.size) + digits[axis]
    return value


def _holds(literal: Literal, values: dict[str, Any], digits: dict[Axis, Any]) -> torch.Tensor:
    if literal.relation == "opaque":
        return evaluate(literal.term, digits)
    compare: Callable[..., torch.Tensor] = {"le": torch.le, "eq": torch.eq, "ne": torch.ne}[literal.relation]
    return compare(torch.as_tensor(_form(literal.form, values)), 0)


def _form(form: Linear, values: dict[str, Any]) -> Any:
    total: Any = form.constant
    for atom, c in form.terms:
        if isinstance(atom, Variable):
            total = total + c * values[atom.name]
        else:
            inside = torch.as_tensor(_form(atom.numerator, values))
            rounded = inside // atom.divisor if isinstance(atom, Quotient) else inside % atom.divisor
            total = total + c * rounded
    return total
