"""Attention masks by meaning: which keys a query attends, read from index arithmetic, named, and proved.

A mask is read as an `and` of conditions, each an `or` of integer comparisons `a·q + b·k + … + c <= 0` (or `==`, `!=`)
and of atoms that depend on data. What is said of a mask holds for every value of the symbolic sizes that the graph's
guards admit, and of the data. What cannot be proved is not said: such a mask is `unknown`, and stays what it is.
"""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from omnicomp import records
from omnicomp.passes.attention.conjuncts import Conjunct, classify
from omnicomp.passes.attention.linear import IndexReader, Linear, Size, Variable, polynomial, prover_of, to_sympy
from omnicomp.passes.attention.predicates import Clause, Clauses, Literal, NormalForm, TooComplex, conjunction
from omnicomp.passes.attention.structure import IndexSpace, Structure, boolean, build
from omnicomp.passes.attention.tables import MOST_PAIRS, Band, Table
from omnicomp.passes.attention.terms import Apply, Axis, Index, Number, Position, Term, leaves
from omnicomp.passes.mask_classes import MaskClass

__all__ = ["Conjunct", "Mask", "read_mask", "sees_first_key", "under"]

# Pairs of a query and a key up to which a mask that algebra has read, and has named, is evaluated as well.
_MOST_IF_EXACT = 2**22
_MOST_IF_NAMED = 2**18
_NAMED = {"index": "index predicate", "data": "unknown"}


@records.dataclass(frozen=True, eq=False, kw_only=True)
class Mask:
    """What is known of a mask."""

    # For people: `none`, `causal`, `causal, offset 3`, `sliding window of 128`, `causal and padding`, `unknown`, ….
    name: str
    # The conditions, all of which a key has to meet; none if every key is attended.
    conjuncts: tuple[Conjunct, ...] = ()
    is_full: bool = False  # every query attends every key
    is_causal: bool = False  # the mask is `k <= q`, and nothing else: aligned at the top left, whatever the sizes
    # The conditions on indices alone are `k <= q + offset`, together with `window` where that is set; None if they are
    # anything else. An int, or a SymPy expression of the graph's symbols.
    offset: Any = None
    # The conditions on indices alone are `q - left <= k <= q + right`, as (left, right); right is None where only the
    # left is bounded. None if they are anything else, or if the left is not bounded.
    window: tuple[Any, Any] | None = None
    bottom_right: bool = False  # `offset` is the number of keys less the number of queries
    rows_nonempty: bool = False  # every query attends a key, whatever the data
    keys_nonempty: bool = False  # every key is attended by the query of its own index, whatever the data
    depends_on_data: bool = False  # some condition does
    proof: str = ""  # how the conditions on indices were decided: `algebra`, `evaluation`, or nothing if they were not

    @functools.cached_property
    def term(self) -> Term:
        """The mask as a boolean term, without what follows from the rest."""
        total: Term = boolean(True)
        for conjunct in self.conjuncts:
            total = build("and", torch.bool, total, conjunct.term)
        return total


def read_mask(
    keep: Term, *, batch: Sequence[Axis], heads: Sequence[Axis], query: Sequence[Axis], key: Sequence[Axis]
) -> Mask:
    """Read a mask.

    Args:
        keep: of dtype bool, true where the query attends the key; of indices, numbers, elements of tensors and
            pointwise operations alone.
        batch: the axes of the batch index, most significant first; any number. Sizes may be symbolic, no guard is
            added.
        heads: of the head index.
        query: of the query index.
        key: of the key index.

    Returns:
        What is proved of it. Every index is taken to have at least one value.

    Raises:
        ValueError: if `keep` is not of dtype bool.
        MaskDisagreement: if algebra and evaluation differ, which is a defect here.
    """
    if keep.dtype is not torch.bool:
        raise ValueError(f"a mask is read from a boolean term, not from one of {keep.dtype}")
    space = IndexSpace.of(batch=batch, heads=heads, query=query, key=key)
    return _Reading(space).read(keep)


def under(
    mask: Mask | None,
    known: MaskClass,
    *,
    batch: Sequence[Axis],
    heads: Sequence[Axis],
    query: Sequence[Axis],
    key: Sequence[Axis],
) -> Mask:
    """What a mask is where all its conditions on data together are a mask of a known class.

    Args:
        mask: the mask; None if it has no conditions.
        known: a class that says all of a mask.
        batch: the axes that the mask was read with.
        heads: likewise.
        query: likewise.
        key: likewise.
    """
    total: Term = boolean(True)
    for conjunct in mask.conjuncts if mask is not None else ():
        if not conjunct.data:
            total = build("and", torch.bool, total, conjunct.term)
    q, k = (Index(dtype=torch.int64, position=Position(axes=tuple(axes))) for axes in (query, key))
    right = 0 if known.kind == "causal" else known.right
    if right is not None:
        seen = build("le", torch.bool, k, _plus(q, right))
        if known.length is not None:
            seen = build("or", torch.bool, seen, build("lt", torch.bool, k, _integer(known.length)))
        total = build("and", torch.bool, total, seen)
    if known.left is not None:
        total = build("and", torch.bool, total, build("le", torch.bool, q, _plus(k, known.left)))
    return read_mask(total, batch=batch, heads=heads, query=query, key=key)


def sees_first_key(mask: Mask, **axes: Sequence[Axis]) -> bool:
    """Whether each query sees the first key as far as the conditions on indices go."""
    first: Term = Index(dtype=torch.int64, position=Position(axes=tuple(axes["key"])))
    total: Term = build("lt", torch.bool, first, _integer(1))
    for conjunct in mask.conjuncts:
        if not conjunct.data:
            total = build("and", torch.bool, total, conjunct.term)
    return read_mask(total, **axes).rows_nonempty


class _Reading:
    """One mask being read."""

    def __init__(self, space: IndexSpace) -> None:
        self._space = space
        self._structure = Structure(space)
        self._prover = prover_of(space)
        self._reader = IndexReader(space, self._structure, self._prover)
        self._missing: Size = self._prover.sizes["k"] - self._prover.sizes["q"]
        self._table = Table.of(space, self._structure)

    def read(self, keep: Term) -> Mask:
        try:
            clauses = NormalForm(self._structure, self._reader, self._prover).read(keep)
        except TooComplex:
            clauses = (Clause((self._opaque(keep),)),)
        conjuncts = self._classified(clauses)
        indices = [c for c in conjuncts if not c.data]
        exact = not any(literal.relation == "opaque" for c in indices for literal in c.clause.literals)
        proof = "algebra" if exact and (indices or not conjuncts) else ""
        if self._table is not None:
            whole = None if self._structure.has_data(keep) else keep
            self._table.check(whole, [c.clause for c in indices], _name(conjuncts, self._missing))
            if (found := self._evaluated(indices, exact=exact)) is not None:
                conjuncts, proof = self._classified((*found, *(c.clause for c in conjuncts if c.data))), "evaluation"
        return self._mask(conjuncts, proof)

    def _opaque(self, term: Term) -> Literal:
        return Literal(
            term=term,
            relation="opaque",
            name=self._structure.number(term),
            roles=self._structure.roles(term),
            data=self._structure.has_data(term),
        )

    def _classified(self, clauses: Clauses) -> tuple[Conjunct, ...]:
        return tuple(classify(clause, self._structure) for clause in clauses)

    def _evaluated(self, indices: list[Conjunct], *, exact: bool) -> Clauses | None:
        """The band that the conditions on indices are for these sizes, if they are one and it was not seen before.

        What was read exactly, let alone named, is a band only by chance, so that little time is spent on asking.
        """
        if not indices or _band(indices)[2] or self._table is None:
            return None
        named = all(c.kind != "index" for c in indices)
        total: Term = boolean(True)
        for conjunct in indices:
            total = build("and", torch.bool, total, conjunct.term)
        if not self._table.affords([total], _MOST_IF_NAMED if named else _MOST_IF_EXACT if exact else MOST_PAIRS):
            return None
        band = self._table.band(total)
        return None if band is None else self._of_band(band)

    def _of_band(self, band: Band) -> Clauses:
        q, k = (Index(dtype=torch.int64, position=Position(axes=axes)) for axes in (self._space.query, self._space.key))
        parts: list[Term] = []
        if band.right is not None:
            parts.append(build("le", torch.bool, k, _plus(q, band.right)))
        if band.left is not None:
            parts.append(build("le", torch.bool, q, _plus(k, band.left)))
        normal = NormalForm(self._structure, self._reader, self._prover)
        return conjunction(map(normal.read, parts), self._prover)

    def _mask(self, conjuncts: tuple[Conjunct, ...], proof: str) -> Mask:
        left, right, is_band = _band([c for c in conjuncts if not c.data])
        return Mask(
            name=_name(conjuncts, self._missing),
            conjuncts=conjuncts,
            is_full=not conjuncts,
            is_causal=len(conjuncts) == 1 and is_band and left is None and right == 0,
            offset=to_sympy(right) if is_band else None,
            window=(to_sympy(left), to_sympy(right)) if is_band and left is not None else None,
            bottom_right=is_band and right is not None and right == self._missing,
            rows_nonempty=self._rows_nonempty(conjuncts),
            keys_nonempty=self._keys_nonempty(conjuncts),
            depends_on_data=any(c.data for c in conjuncts),
            proof=proof,
        )

    def _rows_nonempty(self, conjuncts: tuple[Conjunct, ...]) -> bool:
        if not conjuncts:
            return True
        # A query has the document of the key at its own index; only what is not a number differs from itself.
        documents = [c for c in conjuncts if c.kind == "document" and self._compares_with_itself(c.term)]
        if documents:
            others = [c.clause.literals for c in conjuncts if c not in documents]
            literals = [[literal for literal in row if not literal.data] for row in others]
            return self._attends(self._own_index(), literals)
        clauses = [c.clause for c in conjuncts]
        literals = [[literal for literal in clause.literals if not literal.data] for clause in clauses]
        if not all(literals):
            return False
        prover = self._prover
        left, right, is_band = _band(conjuncts)
        if is_band and (right is None or prover.nonnegative(right)):
            # The last query reaches the last key or one before it, and the band is at least one key wide.
            seen = left is None or prover.nonnegative(left - prover.sizes["q"] + prover.sizes["k"])
            if seen and (left is None or right is None or prover.nonnegative(left + right)):
                return True
        if any(self._attends(witness, literals) for witness in self._witnesses(literals)):
            return True
        terms = [literal.term for row in literals for literal in row]
        return self._table is not None and self._table.affords(terms, MOST_PAIRS) and self._table.every_row(clauses)

    def _witnesses(self, literals: list[list[Literal]]) -> list[Linear]:
        """Keys that a query may attend, as functions of the query."""
        one = self._own_index()
        ends = [literal.form.constant for row in literals for literal in row if literal.relation in ("le", "eq")]
        shifts = [-end for end in ends] + ends
        return [one, Linear(), Linear(constant=self._prover.sizes["k"] - 1), *(one + by for by in shifts)]

    def _keys_nonempty(self, conjuncts: tuple[Conjunct, ...]) -> bool:
        if not self._prover.nonnegative(self._prover.sizes["q"] - self._prover.sizes["k"]):
            return False
        literals = [[literal for literal in c.clause.literals if not literal.data] for c in conjuncts]
        return self._attends(self._own_index(), literals)

    def _compares_with_itself(self, term: Term) -> bool:
        """Whether the two sides of an equation are one function, of the query here and of the key there."""
        while isinstance(term, Apply) and term.op == "not":
            term = term.args[0]
        if not isinstance(term, Apply) or any(leaf.dtype.is_floating_point for leaf in leaves(term)):
            return False
        space = self._space
        if len(space.query) > 1 or len(space.key) > 1:
            return False  # digits of an index may have other sizes here and there
        found: list[Hashable] = []
        for side in term.args:
            own = space.key if "k" in self._structure.roles(side) else space.query
            structure = Structure(IndexSpace(batch=space.batch, heads=space.heads, query=own, key=()))
            structure.number(side)
            found.append(structure.signatures())
        return found[0] == found[1]

    def _own_index(self) -> Linear:
        return Linear.of({Variable("q"): 1}, 0) if self._prover.sizes["q"] != 1 else Linear()

    def _attends(self, witness: Linear, literals: list[list[Literal]]) -> bool:
        prover = self._prover
        if not (prover.always(witness.scaled(-1)) and prover.always(witness - (prover.sizes["k"] - 1))):
            return False
        return all(any(self._holds(literal, witness) for literal in row) for row in literals)

    def _holds(self, literal: Literal, witness: Linear) -> bool:
        if literal.relation == "opaque":
            return False
        form, prover = self._prover.substitute(literal.form, "k", witness), self._prover
        if literal.relation == "ne":
            return prover.never(form) or prover.never(form.scaled(-1))
        return prover.always(form) and (literal.relation == "le" or prover.always(form.scaled(-1)))


def _band(indices: Sequence[Conjunct]) -> tuple[Any, Any, bool]:
    """Left and right of the band that the conditions make, None for no bound, and whether they make one."""
    found: dict[str, Size] = {}
    for conjunct in indices:
        given = {name: polynomial(value) for name, value in conjunct.parameters.items()}
        if conjunct.kind == "causal":
            ends = {"right": given["offset"]}
        elif conjunct.kind == "window":
            ends = {"left": given["left"]}
        elif conjunct.kind == "diagonal":
            ends = {"right": given["offset"], "left": -given["offset"]}
        else:
            return None, None, False
        if ends.keys() & found.keys():
            return None, None, False
        found |= ends
    return found.get("left"), found.get("right"), bool(found)


def _name(conjuncts: Sequence[Conjunct], missing: Size) -> str:
    if not conjuncts:
        return "none"
    parts: list[str] = []
    bands = [conjunct for conjunct in conjuncts if conjunct.kind in ("causal", "window", "diagonal")]
    left, right, is_band = _band(bands)
    if is_band:
        parts.append(_band_name(left, right, missing))
    else:
        parts.extend(_band_name(*_band([conjunct])[:2], missing) for conjunct in bands)
    parts.extend(_condition_name(conjunct) for conjunct in conjuncts if conjunct not in bands)
    return " and ".join(dict.fromkeys(parts))


def _band_name(left: Any, right: Any, missing: Size) -> str:
    """The name of a band; `missing` is how many more keys than queries there are."""
    if left is None:
        return "causal" if right == 0 else f"causal, offset {right}"
    if right is None:
        return f"window of {left} before"
    if right == 0:
        return f"sliding window of {left + 1}"
    if right == missing:
        return f"sliding window of {left + right + 1}, offset {right}"
    if left == right:
        return f"window of {left} on both sides"
    return f"diagonal, offset {right}" if left + right == 0 else f"window of {left} before and {right} after"


def _condition_name(conjunct: Conjunct) -> str:
    size, shift = conjunct.parameters.get("size"), conjunct.parameters.get("query")
    if conjunct.kind == "chunk":
        return f"chunked by {size}" + (f", shifted by {shift}" if shift else "")
    if conjunct.kind == "block causal":
        return f"block causal by {size}" + (f", shifted by {shift}" if shift else "")
    if conjunct.kind == "prefix":
        return f"prefix of {conjunct.parameters['length']}"
    if conjunct.kind == "keys":
        return f"first {conjunct.parameters['length']} keys"
    if conjunct.kind == "index" and any(literal.relation == "opaque" for literal in conjunct.clause.literals):
        return "unknown"
    return _NAMED.get(conjunct.kind, conjunct.kind)


def _plus(term: Term, number: int) -> Term:
    return build("add", torch.int64, term, _integer(number))


def _integer(value: int) -> Number:
    return Number(dtype=torch.int64, value=value)
