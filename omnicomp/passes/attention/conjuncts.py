"""The conditions of a mask, one at a time: of what kind each is, and its parameters."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from omnicomp import records
from omnicomp.passes.attention.linear import Linear, Quotient, Size, Variable, to_sympy
from omnicomp.passes.attention.predicates import Clause, Literal
from omnicomp.passes.attention.structure import Structure
from omnicomp.passes.attention.terms import Apply, Read, Term, leaves


@records.dataclass(frozen=True, eq=False, kw_only=True)
class Conjunct:
    """One condition for a key to be attended.

    | kind | condition | parameters |
    |---|---|---|
    | `causal` | `k <= q + offset` | `offset` |
    | `window` | `q - k <= left` | `left` |
    | `diagonal` | `k == q + offset` | `offset` |
    | `prefix` | `k <= q + offset` or `k < length` | `offset`, `length` |
    | `keys` | `k < length` | `length` |
    | `chunk` | `(q + query) // size == (k + key) // size` | `size`, `query`, `key` |
    | `block causal` | `(k + key) // size <= (q + query) // size` | `size`, `query`, `key` |
    | `empty` | false | |
    | `index` | any other of indices alone | |
    | `padding` | data at the batch and the key, or at the key alone | |
    | `query padding` | data at the batch and the query, or at the query alone | |
    | `document` | data at the query equals the same data at the key | |
    | `data` | any other that depends on data | |
    """

    kind: str  # one of the above
    clause: Clause  # the condition
    # Ints, or SymPy expressions of symbolic sizes.
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @functools.cached_property
    def term(self) -> Term:
        """The condition as a boolean term."""
        return self.clause.term()

    @property
    def data(self) -> bool:
        """Whether it depends on data."""
        return self.clause.data


def classify(clause: Clause, structure: Structure) -> Conjunct:
    """The kind and the parameters of a condition."""
    kind, parameters = (_of_data(clause, structure), {}) if clause.data else _of_indices(clause, structure.single)
    readable = {name: to_sympy(value) for name, value in parameters.items()}
    return Conjunct(kind=kind, clause=clause, parameters=readable)


def _of_data(clause: Clause, structure: Structure) -> str:
    if clause.roles <= {"b", "k"} and "k" in clause.roles:
        return "padding"
    if clause.roles <= {"b", "q"} and "q" in clause.roles:
        return "query padding"
    if len(clause.literals) == 1 and _is_document(clause.literals[0].term, structure):
        return "document"
    return "data"


def _is_document(term: Term, structure: Structure) -> bool:
    wanted = "eq"
    while isinstance(term, Apply) and term.op == "not":
        term, wanted = term.args[0], "ne"
    if not isinstance(term, Apply) or term.op != wanted:
        return False
    sides = sorted(term.args, key=lambda side: "k" in structure.roles(side))
    roles = [structure.roles(side) for side in sides]
    if not (roles[0] <= {"b", "q"} and roles[1] <= {"b", "k"} and "q" in roles[0] and "k" in roles[1]):
        return False
    reads = [[leaf.value for leaf in leaves(side) if isinstance(leaf, Read)] for side in sides]
    return len(reads[0]) == len(reads[1]) > 0 and all(a is b for a, b in zip(*reads, strict=True))


def _of_indices(clause: Clause, single: frozenset[str]) -> tuple[str, dict[str, Size]]:
    if not clause.literals:
        return "empty", {}
    if len(clause.literals) == 1:
        return _of_one(clause.literals[0], single)
    if len(clause.literals) == 2:
        found = dict(_of_one(literal, single) for literal in clause.literals)
        if found.keys() == {"causal", "keys"}:
            return "prefix", found["causal"] | found["keys"]
    return "index", {}


def _of_one(literal: Literal, single: frozenset[str]) -> tuple[str, dict[str, Size]]:
    form, c = literal.form.coefficients(), literal.form.constant
    if literal.relation == "le":
        # An index of one value is 0 and has left the form: a single query's last key is a band's end all the same.
        if _is_difference(form, "k", "q", single):
            return "causal", {"offset": -c}
        if _is_difference(form, "q", "k", single):
            return "window", {"left": -c}
        if form == {"k": 1}:
            return "keys", {"length": 1 - c}
    if literal.relation == "eq" and form in ({"k": 1, "q": -1}, {"q": 1, "k": -1}):
        return "diagonal", {"offset": -c * form["k"]}
    if literal.relation in ("le", "eq") and c == 0 and (blocks := _blocks(literal.form)) is not None:
        sign, parameters = blocks
        if literal.relation == "eq":
            return "chunk", parameters
        if sign == 1:
            return "block causal", parameters
    return "index", {}


def _is_difference(form: dict[Any, Size], plus: str, minus: str, single: frozenset[str]) -> bool:
    return form == {name: c for name, c in ((plus, 1), (minus, -1)) if name not in single}


def _blocks(form: Linear) -> tuple[int, dict[str, Size]] | None:
    """Sign and parameters of `(k + key) // size - (q + query) // size`."""
    parts: dict[str, tuple[Size, Quotient]] = {}
    for atom, c in form.terms:
        if isinstance(atom, Quotient) and len(atom.numerator.terms) == 1:
            ((inner, factor),) = atom.numerator.terms
            if isinstance(inner, Variable) and factor == 1:
                parts[inner.name] = (c, atom)
    if len(form.terms) != 2 or parts.keys() != {"q", "k"}:
        return None
    (a, query), (b, key) = parts["q"], parts["k"]
    if query.divisor != key.divisor or (a, b) not in ((1, -1), (-1, 1)):
        return None
    shifts = {"query": query.numerator.constant, "key": key.numerator.constant}
    return b, {"size": query.divisor, **shifts}
