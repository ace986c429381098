"""What a mask demands, one condition at a time: what kind it is, and how it reads as a SymPy predicate."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import sympy

from omnicomp._torch.symbols import expression
from omnicomp.passes.attention.linear import Linear, Quotient, Variable
from omnicomp.passes.attention.polynomial import Size, to_sympy
from omnicomp.passes.attention.predicates import Clause, Literal
from omnicomp.passes.attention.structure import Structure
from omnicomp.passes.attention.terms import Apply, Index, Number, Position, Read, Term, leaves

__all__ = ["Conjunct", "classify"]

_ARITHMETIC: Final[dict[str, Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "eq": sympy.Eq,
    "ne": sympy.Ne,
    "lt": sympy.Lt,
    "le": sympy.Le,
    "gt": sympy.Gt,
    "ge": sympy.Ge,
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
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

    Attributes:
        kind: one of the above.
        clause: the condition.
        parameters: ints, or SymPy expressions of symbolic sizes.
        position: reads the position of an element as a number made from indices.
    """

    kind: str
    clause: Clause
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    position: Callable[[Position], Linear | None] = dataclasses.field(repr=False)

    @functools.cached_property
    def term(self) -> Term:
        """The condition as a boolean term."""
        return self.clause.term()

    @functools.cached_property
    def predicate(self) -> Any:
        """The condition in SymPy, in integer symbols `b`, `h`, `q`, `k` and those of symbolic sizes.

        An element of a tensor is a function `t0`, `t1`, … of its position, other pointwise functions have their own
        names; a boolean one is true where it is not zero.
        """
        writer = _Writer(self.position)
        return sympy.Or(*map(writer.literal, self.clause.literals))

    @property
    def data(self) -> bool:
        """Whether it depends on data."""
        return self.clause.data


def classify(clause: Clause, structure: Structure, position: Callable[[Position], Linear | None]) -> Conjunct:
    """The kind and the parameters of a condition; `position` reads positions as numbers made from indices."""
    kind, parameters = (_of_data(clause, structure), {}) if clause.data else _of_indices(clause, structure.single)
    readable = {name: to_sympy(value) for name, value in parameters.items()}
    return Conjunct(kind=kind, clause=clause, parameters=readable, position=position)


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


class _Writer:
    """Writes terms as SymPy expressions, equal tensors under one name."""

    def __init__(self, position: Callable[[Position], Linear | None]) -> None:
        self._position = position
        self._names: dict[int, str] = {}

    def literal(self, literal: Literal) -> Any:
        if literal.relation == "opaque":
            found = self._term(literal.term)
            return _truth(found)
        sides = [sympy.Integer(0), sympy.Integer(0)]
        for atom, c in literal.form.terms:
            factor = sympy.sympify(to_sympy(c))
            negative = factor.could_extract_minus_sign()
            sides[negative] += (-factor if negative else factor) * _atom(atom)
        comparison = {"le": sympy.Le, "eq": sympy.Eq, "ne": sympy.Ne}[literal.relation]
        return comparison(sides[0], sides[1] - to_sympy(literal.form.constant))

    def _term(self, term: Term) -> Any:
        if isinstance(term, Number):
            return sympy.sympify(expression(term.value))
        if isinstance(term, Index):
            return expression(term.start) + expression(term.step) * self._at(term.position)
        if isinstance(term, Read):
            name = self._names.setdefault(id(term.value), f"t{len(self._names)}")
            return sympy.Function(name)(*map(self._at, term.at))
        if not isinstance(term, Apply):
            return sympy.Symbol(type(term).__name__.lower())
        args = list(map(self._term, term.args))
        if term.op == "not":
            return sympy.Not(_truth(args[0]))
        numbers = [sympy.Piecewise((1, a), (0, True)) if _is_truth(a) else a for a in args]
        if term.op in _ARITHMETIC:
            return _ARITHMETIC[term.op](*numbers)
        name = f"cast_{term.dtype}".replace("torch.", "") if term.op == "cast" else term.op
        return sympy.Function(name)(*numbers)

    def _at(self, position: Position) -> Any:
        form = self._position(position)
        return sympy.Symbol("elsewhere") if form is None else _linear(form)


def _is_truth(value: Any) -> bool:
    return bool(value.is_Boolean or value.is_Relational)


def _truth(value: Any) -> Any:
    return value if _is_truth(value) else sympy.Ne(value, 0)


def _linear(form: Linear) -> Any:
    return sum((to_sympy(c) * _atom(atom) for atom, c in form.terms), sympy.sympify(to_sympy(form.constant)))


def _atom(atom: Any) -> Any:
    if isinstance(atom, Variable):
        return sympy.Symbol(atom.name, integer=True, nonnegative=True)
    inside = _linear(atom.numerator)
    divisor = to_sympy(atom.divisor)
    return sympy.floor(inside / divisor) if isinstance(atom, Quotient) else sympy.Mod(inside, divisor)
