"""Tensors read as terms: one element of a traced value, as a function of the axes that address it."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from omnicomp._torch.autograd.attention import known_equal
from omnicomp._torch.autograd.flex import on_real_tensors
from omnicomp.passes.attention.terms import Apply, Axis, Index, Number, Position, Read, Term
from omnicomp.passes.attention.trace import Op, Value
from omnicomp.passes.attention.views import VIEWS, NotAView, broadcast, source

_MOST_ELEMENTS: Final = 1 << 20
_MOST_OPERATORS: Final = 100


def uniform(value: Value) -> int | bool | None:
    """The number that every element of a tensor of integers or bools is, in every call; None if that is not known."""
    if value.fake.dtype.is_floating_point or value.fake.is_complex():
        return None
    order = _operators(value)
    if order is None:
        return None
    results: dict[int, Any] = {}
    with on_real_tensors(), contextlib.suppress(_UnknownError):
        for item in order:
            results[id(item)] = _compute(item, results)
        found = results[id(value)].unique()
        return found.item() if found.numel() == 1 else None
    return None


class _UnknownError(Exception):
    pass


def _operators(value: Value) -> list[Value] | None:
    """The values that `value` is made of, operands first; None if one is an input, random, large or symbolic."""
    order: list[Value] = []
    seen: set[int] = set()

    def visit(item: Value) -> bool:
        if id(item) in seen:
            return True
        seen.add(id(item))
        op = item.op
        if op is None or op.target is None or len(seen) > _MOST_OPERATORS:
            return False
        if torch.Tag.nondeterministic_seeded in op.target.tags:
            return False
        leaves = tree_leaves((op.args, dict(op.kwargs), list(item.fake.shape)))
        if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
            return False
        if item.fake.numel() > _MOST_ELEMENTS or not all(visit(v) for v in op.inputs):
            return False
        order.append(item)
        return True

    return order if visit(value) else None


def _compute(item: Value, results: dict[int, Any]) -> Any:
    op = item.op
    assert op is not None
    get = lambda leaf: results[id(leaf)] if isinstance(leaf, Value) else leaf  # noqa: E731
    kwargs = {name: tree_map(get, given) for name, given in op.kwargs.items()}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    result = op.target(*tree_map(get, tuple(op.args)), **kwargs)
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if item.index >= len(tensors):
        raise _UnknownError
    return tensors[item.index]


At = tuple[Position, ...]

_BINARY: Final = {
    **{name: name for name in ("add", "sub", "mul", "div", "pow", "maximum", "minimum")},
    **{name: name for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{"logical_and": "and", "bitwise_and": "and", "__and__": "and", "logical_or": "or", "bitwise_or": "or"},
    **{"__or__": "or", "logical_xor": "xor", "bitwise_xor": "xor", "__xor__": "xor"},
    **{"floor_divide": "floordiv", "remainder": "mod", "fmod": ""},
}
_COMPARISONS: Final = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_UNARY: Final = frozenset(
    "neg abs exp log tanh sigmoid sqrt rsqrt relu sin cos erf floor reciprocal log1p softplus".split()
)
_CASTS: Final = ("_to_copy", "to", "type_as", "_autocast_to_reduced_precision", "_autocast_to_full_precision")
_FILLED: Final = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero": 0, "ones": 1, "ones_like": 1, "new_ones": 1}


def axes_of(value: Value, name: str = "x") -> At:
    """A new axis for each dimension of a tensor; none for dimensions of one element."""
    return tuple(
        Position() if known_equal(size, 1) else Position((Axis(f"{name}{n}", size),))
        for n, size in enumerate(value.fake.shape)
    )


def cast(term: Term, dtype: torch.dtype) -> Term:
    """`term` in another dtype; numbers take it without a trace."""
    if term.dtype == dtype:
        return term
    if isinstance(term, Number) and not isinstance(term.value, bool):
        return Number(dtype=dtype, value=term.value)
    return Apply(dtype=dtype, op="cast", args=(term,))


def number_of(value: Value) -> float | int | bool | None:
    """The number that a tensor without dimensions is in every call of the graph, or None."""
    constant = getattr(value.fake, "constant", None)
    if value.fake.dim() or constant is None:
        return None
    return constant.item()


class Reader:
    """Reads values as terms; the same value at the same positions gives the same term."""

    def __init__(self) -> None:
        self._defined: dict[tuple[int, tuple[Any, ...]], Term | None] = {}
        self._keep: list[Value] = []
        self._uniform: dict[Value, int | bool | None] = {}

    def read(self, value: Value, at: At) -> Term:
        """The element of `value` at `at`, not yet looked into, except that a known number is a number."""
        number = number_of(value)
        if number is not None:
            return Number(dtype=value.fake.dtype, value=number)
        return Read(dtype=value.fake.dtype, value=value, at=at)

    def define(self, read: Read) -> Term | None:
        """What the element was computed from, one operator deep; None if that is no view, index or arithmetic."""
        # A symbolic number has no hash; within one graph, equal texts are equal numbers.
        starts = (p.start if isinstance(p.start, int) else str(p.start) for p in read.at)
        key = (id(read.value), tuple(zip((p.axes for p in read.at), starts, strict=True)))
        if key not in self._defined:
            self._keep.append(read.value)  # an id stays unique as long as the object lives
            try:
                made = self._define(read.value, read.at)
            except NotAView:
                made = None
            if made is None and read.value.op is not None:
                made = self._number(read.value)
            self._defined[key] = made
        return self._defined[key]

    def _number(self, value: Value) -> Term | None:
        """What no operator here defines, if it is one number everywhere."""
        if value not in self._uniform:
            self._uniform[value] = uniform(value)
        number = self._uniform[value]
        return None if number is None else Number(dtype=value.fake.dtype, value=number)

    def expand(self, term: Term, wanted: Callable[[Read], bool] = lambda read: True) -> Term:
        """`term` with every `wanted` read replaced by its definition, again and again."""
        memo: dict[int, Term] = {}
        alive: list[Term] = []

        def visit(item: Term) -> Term:
            if id(item) in memo:
                return memo[id(item)]
            alive.append(item)
            result = item
            if isinstance(item, Read) and wanted(item) and (inner := self.define(item)) is not None:
                result = visit(inner)
            elif isinstance(item, Apply):
                args = tuple(visit(argument) for argument in item.args)
                if any(new is not old for new, old in zip(args, item.args, strict=True)):
                    result = Apply(dtype=item.dtype, op=item.op, args=args)
            memo[id(item)] = result
            return result

        return visit(term)

    def _define(self, value: Value, at: At) -> Term | None:
        op = value.op
        if op is None:
            return None
        if op.name in VIEWS:
            inner, inner_at = source(op, value.index, at)
            return self.read(inner, inner_at)
        if op.name in ("cat", "concat"):
            return self._cat(op, at)
        if op.name == "index":
            return self._index(op, at)
        if op.name in _CREATED:
            return _CREATED[op.name](op, value, at)
        term = self._arithmetic(op, at)
        return None if term is None else cast(term, value.fake.dtype)

    def _operand(self, operand: Any, at: At, dtype: torch.dtype) -> Term:
        if isinstance(operand, Value):
            return cast(self.read(operand, broadcast(operand, at)), dtype)
        return Number(dtype=dtype, value=operand)

    def _arithmetic(self, op: Op, at: At) -> Term | None:
        name = op.name
        if name in _CASTS or name == "copy":
            return self._operand(op.args[1 if name == "copy" else 0], at, op.outputs[0].fake.dtype)
        if name in _BINARY and len(op.args) == 2:
            return self._binary(op, _BINARY[name], at)
        if name == "rsub":
            first, second = op.args[:2]
            return self._apply("sub", (second, first), at)
        if name in _UNARY and len(op.args) == 1:
            return self._apply(name, op.args, at, at_least=op.outputs[0].fake.dtype)
        if name == "nan_to_num" and not op.argument("nan") and all(bound is None for bound in op.args[2:]):
            return self._apply(name, op.args[:1], at)
        if name in ("logical_not", "bitwise_not") and op.args[0].fake.dtype == torch.bool:
            return Apply(dtype=torch.bool, op="not", args=(self._operand(op.args[0], at, torch.bool),))
        if name in ("where", "masked_fill"):
            return self._where(op, at)
        if name == "index_put":
            return self._filled_where(op, at)
        if name == "lerp":
            return self._chosen(op, at)
        if name in ("clamp", "clamp_min", "clamp_max"):
            return self._clamp(op, at)
        if name == "square":
            return self._apply("mul", (op.args[0], op.args[0]), at)
        if name == "scaled_add":
            bias, product = op.args
            right = self._apply("mul", (product, op.argument("alpha", 1)), at)
            if op.argument("beta", 1) == 0:
                return right  # the bias is not read, whatever it holds
            left = self._apply("mul", (bias, op.argument("beta", 1)), at)
            return Apply(dtype=product.fake.dtype, op="add", args=(left, right))
        if name in ("tril", "triu"):
            return self._triangle(op, at)
        return None

    def _apply(self, name: str, operands: Sequence[Any], at: At, *, at_least: torch.dtype | None = None) -> Apply:
        dtype = _promoted(operands)
        if at_least is not None:
            dtype = torch.promote_types(dtype, at_least)
        return Apply(dtype=dtype, op=name, args=tuple(self._operand(o, at, dtype) for o in operands))

    def _binary(self, op: Op, name: str, at: At) -> Term | None:
        left, right = op.args
        if name in ("and", "or", "xor"):
            dtypes = {o.fake.dtype for o in op.args if isinstance(o, Value)}
            if dtypes != {torch.bool}:
                return None
        if not name:
            return None
        rounding = op.argument("rounding_mode")
        if rounding is not None:
            if rounding != "floor":
                return None
            name = "floordiv"
        alpha = op.argument("alpha", 1)
        if name in ("add", "sub") and alpha != 1:
            dtype = op.outputs[0].fake.dtype
            scaled = Apply(
                dtype=dtype, op="mul", args=(self._operand(right, at, dtype), Number(dtype=dtype, value=alpha))
            )
            return Apply(dtype=dtype, op=name, args=(self._operand(left, at, dtype), scaled))
        result = op.outputs[0].fake.dtype if name in ("div", "pow") else None
        made = self._apply(name, (left, right), at, at_least=result)
        return Apply(dtype=torch.bool, op=name, args=made.args) if name in _COMPARISONS else made

    def _where(self, op: Op, at: At) -> Term | None:
        if len(op.args) != 3:
            return None
        if op.name == "where":
            condition, then, otherwise = op.args
        else:
            otherwise, condition, then = op.args
        if not isinstance(condition, Value) or condition.fake.dtype != torch.bool:
            return None
        dtype = op.outputs[0].fake.dtype
        args = (self._operand(condition, at, torch.bool), self._operand(then, at, dtype))
        return Apply(dtype=dtype, op="where", args=(*args, self._operand(otherwise, at, dtype)))

    def _filled_where(self, op: Op, at: At) -> Term | None:
        """`scores[mask] = number` with a bool mask of the leading dimensions."""
        base, indices, values = op.args[:3]
        if len(indices) != 1 or not isinstance(indices[0], Value) or op.argument("accumulate", False):
            return None
        condition, number = indices[0], number_of(values)
        if condition.fake.dtype != torch.bool or number is None:
            return None
        dtype = op.outputs[0].fake.dtype
        kept = self._operand(base, at, dtype)
        args = (self.read(condition, at[: condition.fake.dim()]), Number(dtype=dtype, value=number), kept)
        return Apply(dtype=dtype, op="where", args=args)

    def _chosen(self, op: Op, at: At) -> Term | None:
        """`torch.lerp(scores, number, mask)` with a mask of ones and zeros that a cast makes of a condition."""
        dtype = op.outputs[0].fake.dtype
        start, end, weight = (self._operand(each, at, dtype) for each in op.args[:3])
        end, weight = self.expand(end), self.expand(weight)
        while isinstance(weight, Apply) and weight.op == "cast":
            weight = weight.args[0]
        finite = isinstance(end, Number) and abs(end.value) <= torch.finfo(dtype).max  # zero times infinity is NaN
        return (
            Apply(dtype=dtype, op="where", args=(weight, end, start)) if finite and weight.dtype == torch.bool else None
        )

    def _clamp(self, op: Op, at: At) -> Term:
        dtype = op.outputs[0].fake.dtype
        term = self._operand(op.args[0], at, dtype)
        for bound, name in (("min", "maximum"), ("max", "minimum")):
            limit = op.argument(bound)
            if limit is not None:
                term = Apply(dtype=dtype, op=name, args=(term, self._operand(limit, at, dtype)))
        return term

    def _triangle(self, op: Op, at: At) -> Term:
        diagonal = op.argument("diagonal", 0)
        row, column = (Index(dtype=torch.int64, position=position) for position in at[-2:])
        shifted = Apply(dtype=torch.int64, op="add", args=(row, Number(dtype=torch.int64, value=diagonal)))
        name = "le" if op.name == "tril" else "ge"
        inside = Apply(dtype=torch.bool, op=name, args=(column, shifted))
        dtype = op.outputs[0].fake.dtype
        kept = self._operand(op.args[0], at, dtype)
        if dtype == torch.bool:
            return Apply(dtype=dtype, op="and", args=(inside, kept))
        return Apply(dtype=dtype, op="where", args=(inside, kept, Number(dtype=dtype, value=0)))

    def _cat(self, op: Op, at: At) -> Term | None:
        """The piece that the position lies in as a whole, if there is one."""
        dim = int(op.argument("dim", 0)) % len(at)
        position = at[dim]
        start: Any = 0
        for piece in op.args[0]:
            if piece.fake.dim() != len(at):
                continue  # an empty tensor without dimensions joins anything, as caches start
            size = piece.fake.shape[dim]
            count: Any = 1
            for axis in position.flat():
                count = count * axis.size
            if known_equal(position.start, start) and known_equal(count, size):
                inner = Position(position.axes) if not known_equal(size, 1) else Position()
                return cast(self.read(piece, (*at[:dim], inner, *at[dim + 1 :])), op.outputs[0].fake.dtype)
            start = start + size
        return None

    def _index(self, op: Op, at: At) -> Term | None:
        """Advanced indexing by index arithmetic: `padding[batch_index, key_index]`."""
        base, indices = op.args[0], list(op.args[1])
        indices += [None] * (base.fake.dim() - len(indices))
        if any(isinstance(i, Value) and i.fake.dtype == torch.bool for i in indices):
            return None
        tensors = [i for i in indices if isinstance(i, Value)]
        places = [n for n, i in enumerate(indices) if isinstance(i, Value)]
        rank = max(t.fake.dim() for t in tensors)
        # With a slice between tensors the indexed dimensions come first.
        first = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
        window = at[first : first + rank]
        rest = iter((*at[:first], *at[first + rank :]))
        found: list[Position] = []
        for item in indices:
            if item is None:
                found.append(next(rest))
                continue
            term = _moved(self.expand(self.read(item, broadcast(item, window))))
            if isinstance(term, Number) and isinstance(term.value, int) and term.value >= 0:
                found.append(Position((), term.value))
            elif isinstance(term, Index) and known_equal(term.step, 1):
                start = term.position.start + term.start
                if isinstance(start, int) and start < 0:
                    return None  # the first elements are the last ones of the tensor
                found.append(Position(term.position.axes, start))
            else:
                return None
        return self.read(base, tuple(found))


def _moved(term: Term) -> Term:
    """An index with a number added to it as an index that starts elsewhere."""
    if isinstance(term, Apply) and term.op in ("add", "sub"):
        left, right = map(_moved, term.args)
        if term.op == "add" and isinstance(left, Number):
            left, right = right, left
        if isinstance(left, Index) and isinstance(right, Number) and isinstance(right.value, int):
            by = right.value if term.op == "add" else -right.value
            return dataclasses.replace(left, dtype=term.dtype, start=left.start + by)
    return term


def _promoted(operands: Sequence[Any]) -> torch.dtype:
    fakes = [o.fake if isinstance(o, Value) else o for o in operands]
    # A symbolic number promotes like the Python number that it stands for.
    fakes = [1 if isinstance(f, torch.SymInt) else 1.0 if isinstance(f, torch.SymFloat) else f for f in fakes]
    if len(fakes) == 1:
        return fakes[0].dtype
    return torch.result_type(*fakes)


def _filled(op: Op, value: Value, at: At) -> Term | None:
    number = op.argument("fill_value") if "full" in op.name else _FILLED.get(op.name)
    if op.name in ("fill", "scalar_tensor"):
        number = op.argument("value", op.argument("s"))
    if isinstance(number, Value):
        number = number_of(number)
    if number is None:
        return None
    dtype = value.fake.dtype
    return Number(dtype=dtype, value=bool(number) if dtype == torch.bool else number)


def _arange(op: Op, value: Value, at: At) -> Term | None:
    start, step = op.argument("start", 0), op.argument("step", 1)
    return Index(dtype=value.fake.dtype, position=at[0], start=start, step=step)


_CREATED: Final[dict[str, Callable[[Op, Value, At], Term | None]]] = {
    **dict.fromkeys((*_FILLED, "full", "full_like", "new_full", "fill", "scalar_tensor"), _filled),
    "arange": _arange,
}
