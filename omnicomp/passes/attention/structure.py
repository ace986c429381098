"""Equality of terms, and new terms from old: numbers for structures, constants folded, parts replaced."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from omnicomp import records
from omnicomp._torch.symbols import expression
from omnicomp.passes.attention.terms import Apply, Axis, Index, Number, Position, Read, Term, evaluate


@records.dataclass(frozen=True, kw_only=True)
class IndexSpace:
    """The axes over which the scores of one site run; each index is a mixed-radix number."""

    # Axes of the batch index `b`, most significant first, none of them split; none for a single batch.
    batch: tuple[Axis, ...]
    heads: tuple[Axis, ...]  # axes of the head index `h`
    query: tuple[Axis, ...]  # axes of the query index `q`
    key: tuple[Axis, ...]  # axes of the key index `k`

    @classmethod
    def of(
        cls, *, batch: Sequence[Axis], heads: Sequence[Axis], query: Sequence[Axis], key: Sequence[Axis]
    ) -> "IndexSpace":
        """The space of these axes, split ones replaced by their parts."""
        flat = [tuple(leaf for axis in axes for leaf in axis.flat()) for axes in (batch, heads, query, key)]
        return cls(batch=flat[0], heads=flat[1], query=flat[2], key=flat[3])

    @property
    def roles(self) -> dict[str, tuple[Axis, ...]]:
        """The axes of each index: `b`, `h`, `q` and `k`."""
        return {"b": self.batch, "h": self.heads, "q": self.query, "k": self.key}


class Structure:
    """Numbers terms such that two have the same number exactly if they are built alike from the same tensors.

    Attributes:
        single: which of the indices `b`, `h`, `q`, `k` have one value.
    """

    def __init__(self, space: IndexSpace) -> None:
        self._place = {axis: (role, i) for role, axes in space.roles.items() for i, axis in enumerate(axes)}
        self.single = frozenset(
            role for role, axes in space.roles.items() if all(expression(axis.size) == 1 for axis in axes)
        )
        self._numbers: dict[Hashable, int] = {}
        self._seen: dict[int, tuple[Term, int]] = {}  # holds the term, as ids are used again
        self._facts: dict[int, tuple[frozenset[str], bool]] = {}
        self._values: list[Any] = []

    def number(self, term: Term) -> int:
        """The number of the term's structure."""
        found = self._seen.get(id(term))
        if found is None:
            number = self._numbers.setdefault(self._signature(term), len(self._numbers))
            found = self._seen[id(term)] = (term, number)
        return found[1]

    def signatures(self) -> tuple[Hashable, ...]:
        """The structures met so far, in the order of their numbers; operands are named by number."""
        return tuple(self._numbers)

    def roles(self, term: Term) -> frozenset[str]:
        """The indices on which the term depends: of `b`, `h`, `q`, `k`, and `?` for one of none of the four."""
        return self._known(term)[0]

    def has_data(self, term: Term) -> bool:
        """Whether the term depends on more than indices and numbers."""
        return self._known(term)[1]

    def place(self, axis: Axis) -> tuple[str, int]:
        """Which index the axis belongs to, and which digit of it it is."""
        return self._place.get(axis, ("?", 0))

    def _known(self, term: Term) -> tuple[frozenset[str], bool]:
        number = self.number(term)
        if number not in self._facts:
            roles: frozenset[str] = frozenset()
            data = False
            if isinstance(term, Apply):
                for argument in term.args:
                    more, has = self._known(argument)
                    roles, data = roles | more, data or has
            elif isinstance(term, Index | Read):
                at = (term.position,) if isinstance(term, Index) else term.at
                axes = (axis for position in at for axis in position.flat())
                roles = frozenset(self.place(axis)[0] for axis in axes if expression(axis.size) != 1)
                data = isinstance(term, Read)
            elif not isinstance(term, Number):
                roles, data = frozenset("bhqk"), True
            self._facts[number] = (roles, data)
        return self._facts[number]

    def _signature(self, term: Term) -> Hashable:
        if isinstance(term, Apply):
            return (term.op, term.dtype, *map(self.number, term.args))
        if isinstance(term, Number):
            value = expression(term.value)
            if isinstance(value, bool | int) and term.dtype.is_floating_point:
                value = float(value)
            return ("number", term.dtype, repr(value) if isinstance(value, float) else value)
        if isinstance(term, Index):
            ends = (expression(term.start), expression(term.step))
            return ("index", term.dtype, self._position(term.position), *ends)
        if isinstance(term, Read):
            # `==` of tensors compares elements, and two tensors of equal values are not the same one.
            value: Any = term.value
            if isinstance(value, torch.Tensor):
                self._values.append(value)
                value = ("tensor", id(value))
            return ("read", term.dtype, value, tuple(map(self._position, term.at)))
        return (type(term).__name__, term.dtype)

    def _position(self, position: Position) -> Hashable:
        for axis in position.flat():
            if axis not in self._place:
                self._place[axis] = ("?", sum(role == "?" for role, _ in self._place.values()))
        return (tuple(self._place[axis] for axis in position.flat()), expression(position.start))


def term_key(
    term: Term, *, batch: Sequence[Axis], heads: Sequence[Axis], query: Sequence[Axis], key: Sequence[Axis]
) -> Hashable:
    """A key that is equal for two terms of one graph exactly if they say the same of sites of the same sizes.

    Axes count by their role, position and size, not by identity, so that the layers of a model share one key for one
    mask. The key is as large as the term is with shared parts counted once.
    """
    space = IndexSpace.of(batch=batch, heads=heads, query=query, key=key)
    structure = Structure(space)
    structure.number(term)
    sizes = tuple((role, tuple(expression(a.size) for a in axes)) for role, axes in space.roles.items())
    return (sizes, structure.signatures())


def boolean(value: bool) -> Number:
    """The term that is always true, or always false."""
    return Number(dtype=torch.bool, value=value)


def build(op: str, dtype: torch.dtype, *args: Term) -> Term:
    """`Apply` with constants folded in the program's dtypes; what is simplified has the same value bit by bit."""
    if op == "cast" and args[0].dtype is dtype:
        return args[0]
    term = Apply(dtype=dtype, op=op, args=args)
    constants = [_constant(argument) for argument in args]
    if all(value is not None for value in constants) and not (op in ("floordiv", "mod") and constants[1] == 0):
        return Number(dtype=dtype, value=evaluate(term, {}).item())
    if op == "where":
        return _where(term, constants[0])
    if op == "not" and isinstance(args[0], Apply) and args[0].op == "not":
        return args[0].args[0]
    if len(args) == 2:
        for value, other in ((constants[0], args[1]), (constants[1], args[0])):
            if value is None:
                continue
            if dtype is torch.bool and op in ("and", "or"):
                return other if value == (op == "and") else boolean(op == "or")
            if op == "mul" and dtype is not torch.bool:
                if value == 1:
                    return other
                if value == 0 and not dtype.is_floating_point:
                    return Number(dtype=dtype, value=0)
            if op == "add" and value == 0 and not dtype.is_floating_point and dtype is not torch.bool:
                return other
        if op == "sub" and constants[1] == 0 and not dtype.is_floating_point:
            return args[0]
    return term


def folded(term: Term) -> Term:
    """`term` with its constants folded."""
    return build(term.op, term.dtype, *map(folded, term.args)) if isinstance(term, Apply) else term


def substitute(term: Term, old: Term, new: Term, structure: Structure) -> Term:
    """`term` with every part of the same structure as `old` replaced by `new`, and constants folded."""
    wanted = structure.number(old)
    done: dict[int, Term] = {}

    def visit(part: Term) -> Term:
        number = structure.number(part)
        if number == wanted:
            return new
        if not isinstance(part, Apply):
            return part
        if number not in done:
            args = tuple(map(visit, part.args))
            same = all(one is other for one, other in zip(args, part.args, strict=True))
            done[number] = part if same else build(part.op, part.dtype, *args)
        return done[number]

    return visit(term)


def _where(term: Apply, condition: Any) -> Term:
    test, then, otherwise = term.args
    if condition is not None:
        return then if condition else otherwise
    if then is otherwise:
        return then
    if term.dtype is torch.bool:
        pair = (_constant(then), _constant(otherwise))
        if pair == (True, False):
            return test
        if pair == (False, True):
            return build("not", torch.bool, test)
    return term


def _constant(term: Term) -> Any:
    """The value of a number that can be computed with in its dtype, else None."""
    if not isinstance(term, Number):
        return None
    value = expression(term.value)
    if not isinstance(value, bool | int | float):
        return None
    if term.dtype is torch.bool or term.dtype.is_floating_point:
        return value
    fits = torch.iinfo(term.dtype) if not term.dtype.is_complex else None
    return value if fits is not None and fits.min <= value <= fits.max else None
