"""Masks and index maps: whether those of two graphs are equal at every position, for all sizes.

A tensor that is made of positions and sizes alone has a formula for its elements: linear in the place of the element
and in the sizes, with floor divisions by numbers, or comparisons of such. Two formulas are equal if neither "the first
and not the second" nor the reverse has a solution in whole numbers. Both are taken apart into cases, and each case, a
conjunction of linear inequalities, is refuted by Fourier's and Motzkin's elimination: variables go one by one, each
pair of a lower and an upper bound becoming one inequality; coefficients are divided by their common divisor, and the
constant is rounded to a whole number (Pugh, The Omega test, 1991). What follows from inequalities holds, so a case that
ends in a false one has no solution, whatever the sizes are. A case that does not end so is undecided: nothing is said.
A floor division q = x // n is the one whole number with n * q <= x < n * q + n.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import sympy
import torch
from torch.fx import GraphModule, Node

from omnicomp import records
from omnicomp._torch.fx import fake_value
from omnicomp.analysis.certify import sizes, structure
from omnicomp.analysis.certify.certificate import ONES

_MOST_CASES: Final = 64
_MOST_BOUNDS: Final = 200

Linear = Mapping[Any, int]
"""Coefficients of variables; that of 1 is the constant, and `("at", n)` the place in a dimension, from the last one."""

Formula = tuple[Any, ...]
"""`("le", linear)` where a linear form is at most zero; `("and" | "or", formulas)`; `("not", formula)`."""

_ALWAYS: Final[Formula] = ("and", ())


class UndecidedError(Exception):
    """Whether formulas are equal is not known."""


def compared(
    before: GraphModule, after: GraphModule, masks: Mapping[str, str] | None = None
) -> tuple[bool | None, str]:
    """Whether the masks and index maps of two graphs are the same ones for all sizes.

    Args:
        before: a graph.
        after: another one.
        masks: the classes of masks that are inputs, by their names.

    Returns:
        True where each of one graph is proved to be one of the other graph, or its negation; None where there are none;
        False where that is not known. And what was found.
    """
    following = _Following()
    try:
        sides = [following.read_by_data(module, masks or {}) for module in (before, after)]
        if not any(sides):
            return None, ""
        for some, others in (sides, sides[::-1]):
            for each in some:
                if not each.constant() and not any(following.same(each, other) for other in others):
                    raise UndecidedError(f"a predicate or index of {each.name} has no equal that is proved")
    except Exception as error:  # noqa: BLE001 - whatever can't be followed; becomes what the method says
        return False, f"at the sizes that were tried: {error}"
    return True, f"{max(map(len, sides))} predicates and index maps are equal for all sizes"


@records.dataclass(frozen=True)
class _Tensor:
    """A formula for the elements of a tensor, or the numbers that are in it."""

    name: str
    shape: tuple[Linear, ...]
    number: Linear | None = None
    formula: Formula | None = None

    def constant(self) -> bool:
        """Whether it is one number or truth value."""
        return self.formula in (_ALWAYS, ("not", _ALWAYS)) or (self.number is not None and set(self.number) <= {1})


def _sum(a: Linear, b: Linear, times: int = 1) -> Linear:
    found = dict(a)
    for key, value in b.items():
        found[key] = found.get(key, 0) + times * value
    return {key: value for key, value in found.items() if value}


def _le(a: Linear, b: Linear, less: int = 0) -> Formula:
    """A + less <= b."""
    return ("le", _sum(_sum(a, b, -1), {1: less}))


def _both(*formulas: Formula) -> Formula:
    return ("and", formulas)


_COMPARE: Final[dict[str, Callable[[Linear, Linear], Formula]]] = {
    "le": _le,
    "lt": lambda a, b: _le(a, b, 1),
    "ge": lambda a, b: _le(b, a),
    "gt": lambda a, b: _le(b, a, 1),
    "eq": lambda a, b: _both(_le(a, b), _le(b, a)),
    "ne": lambda a, b: ("not", _both(_le(a, b), _le(b, a))),
}
_JOIN: Final[dict[str, Callable[[Formula, Formula], Formula]]] = {
    "and": _both,
    "or": lambda a, b: ("or", (a, b)),
    "xor": lambda a, b: ("or", (_both(a, ("not", b)), _both(("not", a), b))),
}
_SPELLINGS: Final = {"&": "and", "|": "or", "and_": "and", "or_": "or", "invert": "not", "mod": "remainder"}
_FACTORIES: Final = ("ones", "zeros", "full", "new_ones", "new_zeros", "new_full", "ones_like", "zeros_like")
_KEPT: Final = ("expand", "contiguous", "clone", "to", "bool", "long", "int", "expand_as", "detach", "alias", "type_as")
_MOVED: Final = ("getitem", "gather", "index_select", "take_along_dim", "repeat", "tile", "roll", "flip")


class _Following:
    """What is known of the tensors of graphs; floor divisions are variables that both graphs share."""

    def __init__(self) -> None:
        self.quotients: dict[Any, tuple[Linear, int]] = {}
        self.lowest: dict[Any, int] = {}

    # ---- formulas of a graph

    def read_by_data(self, module: GraphModule, masks: Mapping[str, str]) -> list[_Tensor]:
        """The masks and index maps that operators on data read.

        Raises:
            UndecidedError: an operator makes others of them in a way that has no formula.
        """
        known: dict[Node, _Tensor] = {}
        found: dict[str, _Tensor] = {}
        for node in module.graph.nodes:
            value = fake_value(node)
            name = sizes.base_name(node).strip("_") if node.op.startswith("call_") else ""
            read = [known[each] for each in node.all_input_nodes if each in known and known[each].shape]
            if name == "scaled_dot_product_attention" and _argument(node, 5, "is_causal") is True:
                query, key = (fake_value(each).shape[-2] for each in node.args[:2])  # type: ignore[union-attr]
                shape = tuple(map(self.size, (query, key)))
                found[node.name] = _Tensor(node.name, shape, formula=_le({("at", 0): 1}, {("at", 1): 1}))
            if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
                known[node] = _Tensor(node.name, (), self.size(value))
                continue
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise UndecidedError(f"{name} calls a graph")
            if node.name in masks and isinstance(value, torch.Tensor):
                shape = tuple(map(self.size, value.shape))
                formula = _of_class(masks[node.name], shape)
                known.update({} if formula is None else {node: _Tensor(node.name, shape, formula=formula)})
            if node.op == "placeholder" or not (name == "setitem" or isinstance(value, torch.Tensor)):
                continue
            data = any(
                each not in known and isinstance(fake_value(each), torch.Tensor) for each in node.all_input_nodes
            )
            if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
                if name in ("tril", "triu") and not read:
                    found[node.name] = self._triangle(node, name, value, known)
                data = True
            elif read and structure.is_in_order(node) and node.args[0] in known:
                raise UndecidedError(f"{name} writes to positions")
            made = None if data or not isinstance(value, torch.Tensor) else self._followed(node, name, value, known)
            if made is not None:
                known[node] = made
            elif data:
                found.update((each.name, each) for each in read)
            elif read or name in ("arange", "iota", "tril_indices", "triu_indices"):
                raise UndecidedError(f"{name} of positions")
        for node in module.graph.find_nodes(op="output")[0].all_input_nodes:
            if node in known and known[node].shape:
                found[node.name] = known[node]
        return list(found.values())

    def size(self, value: Any) -> Linear:
        """A size as a linear form; what is none of its symbols is a variable by its text."""
        if not isinstance(value, torch.SymInt):
            return {1: int(value)} if value else {}
        found: dict[Any, int] = {}
        for term, times in sympy.expand(value.node.expr).as_coefficients_dict().items():
            if times != int(times):
                raise UndecidedError(f"the size {value}")
            if term == 1:
                found[1] = int(times)
                continue
            found[str(term)] = int(times)
            if term.is_nonnegative:
                self.lowest[str(term)] = 0
        return found

    def _triangle(self, node: Node, name: str, value: torch.Tensor, known: Mapping[Node, _Tensor]) -> _Tensor:
        diagonal = _argument(node, 1, "diagonal", 0)
        number = known[diagonal].number if diagonal in known else self.size(diagonal)
        if number is None:
            raise UndecidedError("a diagonal that is no number")
        moved = _sum({("at", 0): 1, ("at", 1): -1}, number, -1)
        formula: Formula = ("le", moved) if name == "tril" else ("le", {key: -times for key, times in moved.items()})
        return _Tensor(node.name, tuple(map(self.size, value.shape)), formula=formula)

    def _followed(self, node: Node, name: str, value: torch.Tensor, known: Mapping[Node, _Tensor]) -> _Tensor | None:
        """The formula of what a node makes; None if it has none."""
        name = name.removeprefix("logical_").removeprefix("bitwise_")
        name = _SPELLINGS.get(name, name)
        if value.dtype not in (torch.bool, torch.int32, torch.int64):
            return None  # small ones wrap
        shape = tuple(map(self.size, value.shape))
        operands = [known.get(each) if isinstance(each, Node) else self._number(each) for each in node.args]
        first = operands[0] if operands else None

        def of(number: Linear | None = None, formula: Formula | None = None) -> _Tensor:
            # A dimension of one element may be broadcast: its only place is zero.
            single = {("at", dim) for dim, size in enumerate(reversed(shape)) if size == {1: 1}}
            if single & set(_variables((number, formula))):
                kept = {dim: {("at", dim): 1} for dim in range(len(shape)) if ("at", dim) not in single}
                number, formula = _moved((number, formula), kept)
            return _Tensor(node.name, shape, number, formula)

        if name == "arange":
            if None in operands or not {"start", "end", "step"}.isdisjoint(node.kwargs):
                return None
            start, _, step = ([None, *operands, None] if len(operands) == 1 else [*operands, None, None])[:3]
            begin, by = (start.number if start else {}), (step.number if step else {1: 1})
            if begin is None or by is None or set(by) - {1}:
                return None
            return of(_sum(begin, {("at", 0): by.get(1, 0)}))
        if name in _FACTORIES:
            fill = (
                _argument(node, 1 + name.startswith("new"), "fill_value", None)
                if "full" in name
                else int("ones" in name)
            )
            if value.dtype == torch.bool and fill in (0, 1):
                return of(formula=_ALWAYS if fill else ("not", _ALWAYS))
            return of(self.size(fill)) if type(fill) is int else None
        if first is None:
            return None
        if name in ("tril", "triu") and first.formula is not None:
            return of(formula=_both(first.formula, self._triangle(node, name, value, known).formula))  # type: ignore[arg-type]
        second = operands[1] if len(operands) > 1 else None
        if name == "not" and first.formula is not None:
            return of(formula=("not", first.formula))
        if name in ("add", "sub", "rsub", "mul", *_COMPARE, *_JOIN, "floordiv", "floor_divide", "remainder"):
            return None if second is None or node.kwargs else self._binary(name, first, second, of)
        if name == "neg" and first.number is not None:
            return of(_sum({}, first.number, -1))
        if value.dtype == torch.bool and first.formula is None:
            return None
        if name in _KEPT:
            return of(first.number, first.formula)
        if name in _MOVED and not any(key != 1 for key in _variables((first.number, first.formula))):
            return of(first.number, first.formula)  # one value everywhere
        places = self._places(node, name, value, first)
        if places is None:
            return None
        return of(*(None if each is None else _moved(each, places) for each in (first.number, first.formula)))

    def _number(self, value: Any) -> _Tensor | None:
        if type(value) is bool:
            return _Tensor("", (), formula=_ALWAYS if value else ("not", _ALWAYS))
        return _Tensor("", (), self.size(value)) if type(value) is int else None

    def _binary(self, name: str, a: _Tensor, b: _Tensor, of: Callable[..., _Tensor]) -> _Tensor | None:
        if a.formula is not None and b.formula is not None:
            return of(formula=_JOIN[name](a.formula, b.formula)) if name in _JOIN else None
        if a.number is None or b.number is None:
            return None
        x, y = a.number, b.number
        if name in _COMPARE:
            return of(formula=_COMPARE[name](x, y))
        if name in ("add", "sub", "rsub"):
            return of(_sum(x, y, -1) if name == "sub" else _sum(y, x, 1 if name == "add" else -1))
        x, y = (y, x) if name == "mul" and set(x) <= {1} else (x, y)
        number = y.get(1, 0)
        if set(y) - {1} or (name != "mul" and number <= 0) or name in _JOIN:
            return None
        if name == "mul":
            return of({key: value * number for key, value in x.items() if number})
        key = ("//", tuple(sorted(x.items(), key=repr)), number)
        self.quotients[key] = x, number
        return of(_sum(x, {key: number}, -1) if name == "remainder" else {key: 1})

    def _places(self, node: Node, name: str, value: torch.Tensor, first: _Tensor) -> dict[int, Linear | None] | None:
        """Where in an operand an element comes from: for its dimensions from the last, a linear form of places."""
        like = fake_value(node.args[0])
        rank, made = like.dim(), value.dim()
        if name in ("unsqueeze", "getitem", "view", "reshape"):
            kept, starts = _lasting(node, name, *(tuple(map(self.size, each.shape)) for each in (like, value)))
            if kept is None:
                return None
            return {
                rank - 1 - old: _sum({("at", made - 1 - new): 1}, {1: start})
                for old, (new, start) in enumerate(zip(kept, starts, strict=True))
            }
        if name in ("transpose", "permute", "t"):
            order = list(range(rank))
            if name == "permute":
                dims: Any = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
                order = [int(each) % rank for each in dims]
            else:
                told: Any = node.args[1:3]
                one, other = (int(each) % rank for each in told) if name == "transpose" else (0, rank - 1)
                order[one], order[other] = order[other], order[one]
            return {rank - 1 - old: {("at", made - 1 - new): 1} for new, old in enumerate(order)}
        return None

    # ---- equality

    def same(self, a: _Tensor, b: _Tensor) -> bool:
        """Whether two are equal at every place, or one is the negation of the other."""
        if (a.formula is None) != (b.formula is None):
            return False
        within = [bound for each in (a, b) for bound in self._within(each)]
        if a.formula is None or b.formula is None:
            assert a.number is not None
            assert b.number is not None
            return self._impossible(within, ("not", _COMPARE["eq"](a.number, b.number)))
        for other in (b.formula, ("not", b.formula)):
            if self._impossible(within, _JOIN["xor"](a.formula, other)):
                return True
        return False

    def _within(self, tensor: _Tensor) -> Iterator[Linear]:
        """Places are in their dimensions; dimensions that are broadcast have no place that counts."""
        for dim, size in enumerate(reversed(tensor.shape)):
            if size != {1: 1}:
                yield {("at", dim): -1}
                yield _sum(_sum({("at", dim): 1}, size, -1), {1: 1})

    def _impossible(self, within: Sequence[Linear], formula: Formula) -> bool:
        cases = list(itertools.islice(_cases(formula, True), _MOST_CASES + 1))
        return len(cases) <= _MOST_CASES and all(
            _contradict([*within, *self._known([*within, *each]), *each]) for each in cases
        )

    def _known(self, bounds: Sequence[Linear]) -> Iterator[Linear]:
        """What holds for the variables of bounds: symbols are sizes, and quotients what they are defined as."""
        todo = [key for bound in bounds for key in bound]
        seen: set[Any] = set()
        while todo:
            key = todo.pop()
            if key in seen:
                continue
            seen.add(key)
            if key in self.quotients:
                form, number = self.quotients[key]
                yield _sum({key: number}, form, -1)
                yield _sum(_sum(form, {key: number}, -1), {1: 1 - number})
                todo.extend(form)
            elif key in self.lowest:
                yield {key: -1, 1: self.lowest[key]}


def _of_class(detail: str, shape: Sequence[Linear]) -> Formula | None:
    """The formula of a mask of a class; None if it has none."""
    kind, *bounds = detail.removesuffix(f" {ONES}").split()
    key, query = {("at", 0): 1}, {("at", 1): 1}
    first, second = ([None if each == "-" else {1: int(each)} for each in bounds] + [None, None])[:2]
    if kind in ("full", "hidden"):
        return _ALWAYS if kind == "full" else ("not", _ALWAYS)
    if kind == "causal":
        return _le(key, query)
    if kind == "causal_bottom_right" and len(shape) > 1:
        return _le(key, _sum(query, _sum(shape[-1], shape[-2], -1)))
    if kind not in ("band", "prefix"):
        return None
    left, right = (first, second) if kind == "band" else (None, first)
    seen = _ALWAYS if right is None else _le(key, _sum(query, right))
    seen = seen if left is None else _both(seen, _le(_sum(query, left, -1), key))
    return seen if kind == "band" or second is None else ("or", (seen, _le(key, second, 1)))


def _argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _variables(value: Any) -> Iterator[Any]:
    """The variables of a formula or number."""
    if isinstance(value, (tuple, Mapping)):
        yield from value if isinstance(value, Mapping) else itertools.chain(*map(_variables, value))


def _moved(value: Any, places: Mapping[int, Linear | None]) -> Any:
    """A formula or number with other places."""
    if isinstance(value, tuple):
        return tuple(_moved(each, places) for each in value)
    if not isinstance(value, Mapping):
        return value
    found: Linear = {}
    for key, times in value.items():
        if isinstance(key, tuple) and key[0] == "//":
            raise UndecidedError("a view of a floor division")
        found = _sum(found, places.get(key[1]) or {} if isinstance(key, tuple) else {key: 1}, times)
    return found


def _lasting(node: Node, name: str, old: Sequence[Linear], new: Sequence[Linear]) -> tuple[list[int] | None, list[int]]:
    """For each dimension the one that it is in a view that adds or drops dimensions of size one, and its start."""
    starts = [0] * len(old)
    if name == "unsqueeze":
        dim = int(node.args[1]) % len(new)  # type: ignore[arg-type]
        return [place + (place >= dim) for place in range(len(old))], starts
    if name == "getitem":
        kept: list[int] = []
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        for at, each in enumerate(index):
            if isinstance(each, slice):
                if type(each.start) not in (int, type(None)) or (each.start or 0) < 0 or each.step not in (None, 1):
                    return None, starts
                starts[len(kept)] = each.start or 0
                kept.append(at)
            elif each is not None:
                return None, starts
        kept += range(len(index), len(index) + len(old) - len(kept))
        return kept, starts
    mine, wide = ([place for place, size in enumerate(shape) if size != {1: 1}] for shape in (old, new))
    if [old[place] for place in mine] != [new[place] for place in wide]:
        return None, starts
    places = dict(zip(mine, wide, strict=True))
    return [places.get(place, 0) for place in range(len(old))], starts


def _cases(formula: Formula, holds: bool) -> Iterator[list[Linear]]:
    """Conjunctions of linear forms that are at most zero, of which one holds where the formula does (or does not)."""
    kind, rest = formula
    if kind == "not":
        yield from _cases(rest, not holds)
    elif kind == "le":
        yield [rest] if holds else [_sum({1: 1}, rest, -1)]
    elif (kind == "and") == holds:
        for parts in itertools.product(
            *(list(itertools.islice(_cases(each, holds), _MOST_CASES + 1)) for each in rest)
        ):
            yield [bound for part in parts for bound in part]
    else:
        for each in rest:
            yield from _cases(each, holds)


def _contradict(bounds: Sequence[Linear]) -> bool:
    """Whether no whole numbers make all linear forms at most zero; False also if that is not known."""
    left = {_tight(each) for each in bounds}
    while True:
        if any(set(dict(each)) <= {1} and dict(each).get(1, 0) > 0 for each in left):
            return True
        variables = {key for each in left for key, _ in each if key != 1}
        if not variables or len(left) > _MOST_BOUNDS:
            return False

        def cost(key: Any, left: set[Any] = left) -> int:
            signs = [dict(each).get(key, 0) for each in left]
            return sum(sign > 0 for sign in signs) * sum(sign < 0 for sign in signs)

        gone = min(variables, key=lambda key: (cost(key), repr(key)))
        over = [dict(each) for each in left if dict(each).get(gone, 0) > 0]
        under = [dict(each) for each in left if dict(each).get(gone, 0) < 0]
        left = {each for each in left if gone not in dict(each)}
        for a, b in itertools.product(over, under):
            left.add(_tight(_sum({key: value * -b[gone] for key, value in a.items()}, b, a[gone])))


def _tight(bound: Linear) -> frozenset[tuple[Any, int]]:
    """A linear form at most zero, divided by what its coefficients share, with a constant that is rounded up."""
    shared = math.gcd(*(value for key, value in bound.items() if key != 1))
    if shared > 1:
        bound = {key: -(-value // shared) if key == 1 else value // shared for key, value in bound.items()}
    return frozenset((key, value) for key, value in bound.items() if value)
