"""Tensors whose elements are residues: a tensor subclass that computes ATen operators over finite fields.

A `Residue` claims a shape and a dtype like any tensor, so that graphs before and after autograd run on it as they are.
What it holds are residues (`fields`), for booleans a truth value for each prime. Views are views of the payload, and
writes in place are seen through aliases. An operator without a definition here is uninterpreted: its result is a hash
of what it was given, the same for the same operands.

Minus infinity is no number of a field. It, and fills that count as it, are kept beside the residues (`big`), and have
weight zero in an exponential. A logarithm is kept as the number that it was taken of (`logs`) until an exponential
undoes it.
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from omnicomp.analysis.certify import fields

_aten: Final[Any] = torch.ops.aten
_Function = Callable[..., Any]
_CPU: Final = torch.device("cpu")


class Unsupported(Exception):
    """The algebra can't follow a program, as when its sizes depend on data."""


SWALLOWS: Final = -1e8
"""A fill at or below it leaves nothing of a score that it is added to, in the dtypes of programs."""

UNIFORM: Final = -1.0
"""In place of a probability: a draw of numbers."""

_INTO_CONSTANT: Final = "data is written into a constant of the program"


def into_constant(error: Unsupported) -> bool:
    """Whether a run failed at a write into a constant, which succeeds where constants are residues."""
    return str(error) == _INTO_CONSTANT


@dataclasses.dataclass
class State:
    """What one run of a graph keeps."""

    threshold: float = -math.inf  # fills at or below it count as minus infinity
    empty_rows: bool = True  # whether rows may be filled as a whole: then the fill hides none of it
    # The random draws so far, as their kind, number of elements and probability.
    draws: list[tuple[str, int, float]] = dataclasses.field(default_factory=list)
    seeds: int = 0  # how many seeds were drawn so far
    opaque: set[str] = dataclasses.field(default_factory=set)  # names of the operators that were not interpreted
    degree: int = 1  # the largest degree of a numerator or denominator so far
    compared: bool = False  # whether the order of two numbers was asked for
    lift: bool = False  # whether constants become residues when they are made, so that data can be written to them
    device: torch.device = _CPU  # where constants are made
    watch: Callable[[Any, Any, Any, Any], None] | None = None  # called with each node, its arguments and its result


_state: Final[contextvars.ContextVar[State]] = contextvars.ContextVar("state")


def state() -> State:
    """The state of the run."""
    return _state.get()


@contextlib.contextmanager
def running(kept: State) -> Generator[State]:
    """Inside, operators report to a state."""
    token = _state.set(kept)
    try:
        yield kept
    finally:
        _state.reset(token)


@dataclasses.dataclass(slots=True)
class Number:
    """Residues without the coat of a tensor."""

    payload: torch.Tensor  # [COUNT, *shape], int64, or bool
    # [COUNT, *shape], float64, or None: minus infinity or a fill that is to be added to an element.
    big: torch.Tensor | None = None
    logs: torch.Tensor | None = None  # [COUNT, *shape], int64, or None: numbers whose logarithms are to be added
    low: int = 0  # how many of the lowest levels are meaningless
    degree: tuple[int, int] = (1, 0)  # bounds of the degrees of numerator and denominator
    known: torch.Tensor | None = None  # the value as float64, for constants of the program
    logs_low: int = 0  # the same of `logs`


class Residue(torch.Tensor):
    """A tensor of residues; see the module."""

    number: Number

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls: "type[Residue]", number: Number, dtype: torch.dtype) -> "Residue":
        """A tensor that claims `dtype`."""
        payload = number.payload
        self: Any = torch.Tensor._make_wrapper_subclass(
            cls, payload.shape[1:], strides=payload.stride()[1:], dtype=dtype, device=torch.device("cpu")
        )
        self.number = number
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Residue({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # pyright: ignore[reportMissingParameterType]
        return _dispatch(func, args, kwargs or {})


# ---- numbers


def number_of(value: Any) -> Number:
    """A tensor or a scalar of a program as residues; scalars have no dimensions."""
    if isinstance(value, Residue):
        return value.number
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, (bool, int, float)):
        return _of_tensor(torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64))
    raise Unsupported(f"a {type(value).__name__} is no number")


def _of_tensor(value: torch.Tensor) -> Number:
    if value.is_complex():
        raise Unsupported("complex numbers")
    if value.dtype == torch.bool:
        return Number(value.expand(fields.COUNT, *value.shape), degree=(0, 0))
    known = value.to(torch.float64)
    if not value.is_floating_point():
        wide = value.to(torch.int64).expand(fields.COUNT, *value.shape)
        return Number(fields.mod(wide), degree=(0, 0), known=known)
    unique, inverse = known.unique(return_inverse=True)
    if unique.numel() > 5000:
        raise Unsupported(f"{unique.numel()} different constants")
    limit = _state.get().threshold
    residues: list[torch.Tensor] = []
    big: list[float] = []
    for each in unique.tolist():
        if math.isnan(each) or each == math.inf:
            raise Unsupported(f"the constant {each}")
        hides = each <= limit
        big.append(each if hides else 0.0)
        residues.append(fields.constant(0.0 if hides else each))
    if not residues:
        return Number(torch.zeros(fields.COUNT, *value.shape, dtype=torch.int64), degree=(0, 0), known=known)
    payload = torch.stack(residues, 1)[:, inverse.reshape(-1)].view(fields.COUNT, *value.shape)
    fills = None
    if any(big):
        fills = torch.tensor(big, dtype=torch.float64)[inverse].expand(fields.COUNT, *value.shape).clone()
    return Number(payload, fills, degree=(0, 0), known=known)


def _as_int(number: Number) -> Number:
    """Truth values as the numbers 0 and 1."""
    if number.payload.dtype != torch.bool:
        return number
    return Number(number.payload.to(torch.int64), degree=number.degree)


def _plain(number: Number) -> Number:
    """The number without logarithms, which become hashes of what they are of, and without finite fills."""
    number = _as_int(number)
    if number.logs is not None:
        _state.get().opaque.add("log")
        canonical = fields.mod(fields.exponential(number.payload) * number.logs)
        number = Number(fields.hashed(canonical, 101), number.big, degree=(1, 0))
    if number.big is not None:
        if bool(number.big.isinf().any()):
            raise Unsupported("minus infinity outside of a sum that goes into an exponential")
        fill = _of_tensor_exact(number.big)
        number = Number(fields.mod(number.payload + fill), low=number.low, degree=number.degree)
    return number


def _of_tensor_exact(value: torch.Tensor) -> torch.Tensor:
    unique, inverse = value[0].unique(return_inverse=True)
    table = torch.stack([fields.constant(each) for each in unique.tolist()], 1)
    return table[:, inverse.reshape(-1)].view(value.shape)


def _wide(value: torch.Tensor | None, ndim: int) -> torch.Tensor | None:
    if value is None or value.ndim == ndim + 1:
        return value
    return value.view(fields.COUNT, *[1] * (ndim + 1 - value.ndim), *value.shape[1:])


def _aligned(*numbers: Number) -> list[Number]:
    """Operands with as many dimensions as the largest has."""
    ndim = max(each.payload.ndim for each in numbers) - 1
    if all(each.payload.ndim == ndim + 1 for each in numbers):
        return list(numbers)
    return [
        each
        if each.payload.ndim == ndim + 1
        else dataclasses.replace(
            each,
            payload=_wide(each.payload, ndim),
            big=_wide(each.big, ndim),
            logs=_wide(each.logs, ndim),
            known=None if each.known is None else each.known.view(*[1] * (ndim - each.known.ndim), *each.known.shape),
        )
        for each in numbers
    ]


def _degree(degree: tuple[int, int]) -> tuple[int, int]:
    found = _state.get()
    found.degree = max(found.degree, *degree)
    return degree


def _sum_degree(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return _degree((max(a[0] + b[1], b[0] + a[1]), a[1] + b[1])) if a[1] or b[1] else _degree((max(a[0], b[0]), 0))


def add(a: Number, b: Number, alpha: Any = 1) -> Number:
    """A + alpha * b."""
    a, b = _aligned(_as_int(a), _as_int(b))
    if alpha == -1:
        b = negate(b)
    elif alpha != 1:
        (b,) = _aligned(multiply(b, number_of(alpha)))
    big = a.big if b.big is None else b.big if a.big is None else a.big + b.big
    logs = a.logs if b.logs is None else b.logs if a.logs is None else fields.mod(a.logs * b.logs)
    payload = fields.mod(a.payload + b.payload)
    shape = payload.shape
    return Number(
        payload,
        None if big is None else big.expand(shape),
        None if logs is None else logs.expand(shape),
        max(a.low, b.low),
        _sum_degree(a.degree, b.degree),
        logs_low=max(a.logs_low, b.logs_low),
    )


def negate(a: Number) -> Number:
    """-a."""
    a = _as_int(a)
    logs = None if a.logs is None else fields.inverse(a.logs)
    big = None if a.big is None else -a.big
    return Number(fields.mod(-a.payload), big, logs, a.low, a.degree, logs_low=a.logs_low)


def multiply(a: Number, b: Number) -> Number:
    """A * b; minus infinity times a number of the program that is positive stays what it is."""
    a, b = _aligned(_as_int(a), _as_int(b))
    if b.big is not None:
        a, b = b, a
    big = None
    if a.big is not None and b.known is not None and b.big is None:
        big = a.big * b.known
        if bool(big.isnan().any()) or bool((big == math.inf).any()):
            raise Unsupported("infinity")
        a = dataclasses.replace(a, big=None)
    a, b = _plain(a), _plain(b)
    payload = fields.mod(a.payload * b.payload)
    degree = _degree((a.degree[0] + b.degree[0], a.degree[1] + b.degree[1]))
    return Number(payload, None if big is None else big.expand(payload.shape), None, max(a.low, b.low), degree)


def reciprocal(a: Number) -> Number:
    """1 / a."""
    known = None if a.known is None else 1 / a.known
    if a.known is not None and a.known.numel() == 1 and math.isfinite(float(known)):  # type: ignore[arg-type]
        return number_of(known)
    a = _plain(a)
    return Number(fields.inverse(a.payload), low=a.low, degree=_degree((a.degree[1], a.degree[0])), known=known)


def exponential(a: Number) -> Number:
    """E to the power of a."""
    a = _as_int(a)
    big, hidden = a.big, None
    if big is not None:
        limit = max(_state.get().threshold, -1e300)
        hidden = big <= limit
        rest = big.masked_fill(hidden, 0.0)
        if bool((rest != 0).any()):
            a = dataclasses.replace(a, payload=fields.mod(a.payload + _of_tensor_exact(rest)))
    if a.low >= fields.LEVELS - 1:
        _state.get().opaque.add("exp")
        payload, low = fields.hashed(a.payload, 103), 0
    else:
        payload, low = fields.exponential(a.payload), a.low + 1
    if a.logs is not None:
        payload, low = fields.mod(payload * a.logs), max(low, a.logs_low)
    if hidden is not None:
        payload = payload.masked_fill(hidden, 0)
    return Number(payload, low=low, degree=_degree((1 + sum(a.degree), 0)))


def logarithm(a: Number) -> Number:
    """The natural logarithm."""
    a = _plain(a)
    hidden = a.payload == 0
    big = torch.where(hidden, -math.inf, 0.0).to(torch.float64) if bool(hidden.any()) else None
    logs = a.payload.masked_fill(hidden, 1)
    return Number(torch.zeros_like(a.payload), big, logs, 0, a.degree, logs_low=a.low)


def root(a: Number) -> Number:
    """The square root."""
    a = _plain(a)
    return Number(fields.root(a.payload), low=a.low, degree=_degree((2 * a.degree[0], 2 * a.degree[1])))


def positive(a: Number) -> torch.Tensor:
    """Whether a is greater than zero."""
    _state.get().compared = True
    a = _as_int(a)
    big, a = a.big, dataclasses.replace(a, big=None)
    found = fields.positive(_plain(a).payload)
    return found if big is None else torch.where(big < 0, False, torch.where(big > 0, True, found))


def choose(condition: torch.Tensor, a: Number, b: Number) -> Number:
    """Elements of a where the condition holds, elsewhere of b; the condition has truth values for each prime."""
    if a.payload.dtype != b.payload.dtype:
        a, b = _as_int(a), _as_int(b)
    mask, a, b = _aligned(Number(condition), a, b)
    condition = mask.payload
    shape = torch.broadcast_shapes(condition.shape, a.payload.shape, b.payload.shape)

    def pick(x: torch.Tensor | None, y: torch.Tensor | None, missing: Any) -> torch.Tensor | None:
        if x is None and y is None:
            return None
        return torch.where(condition, missing if x is None else x, missing if y is None else y).expand(shape)

    zero = torch.zeros((), dtype=torch.float64)
    low, degree = max(a.low, b.low), (max(a.degree[0], b.degree[0]), max(a.degree[1], b.degree[1]))
    payload: Any = pick(a.payload, b.payload, 0)
    logs_low = max(a.logs_low, b.logs_low)
    return Number(payload, pick(a.big, b.big, zero), pick(a.logs, b.logs, 1), low, degree, logs_low=logs_low)


def product(a: Number, b: Number) -> Number:
    """The matrix product of [..., n, k] and [..., k, m]."""
    a, b = _plain(a), _plain(b)
    x, y = a.payload, b.payload
    high = fields.mod((x >> 16) @ y)
    payload = fields.mod(high * 65536 + (x & 65535) @ y)
    terms, numerator, denominator = x.shape[-1], a.degree[0] + b.degree[0], a.degree[1] + b.degree[1]
    degree = _degree((numerator + denominator * max(terms - 1, 0), denominator * max(terms, 1)))
    return Number(payload, low=max(a.low, b.low), degree=degree)


def total(a: Number, dims: Sequence[int], keepdim: bool) -> Number:
    """Sums over dimensions, which are counted from the front; logarithms become one of the product."""
    a = _as_int(a)
    over = [dim + 1 for dim in dims]
    terms = math.prod(a.payload.shape[dim] for dim in over)
    if not over:
        return a
    big = None if a.big is None else a.big.sum(over, keepdim)
    logs = a.logs
    for dim in sorted(over, reverse=True) if logs is not None else ():
        logs = _multiplied(logs, dim, keepdim)
    degree = _degree((a.degree[0] + a.degree[1] * max(terms - 1, 0), a.degree[1] * max(terms, 1)))
    return Number(fields.mod(a.payload.sum(over, keepdim)), big, logs, a.low, degree, logs_low=a.logs_low)


def _multiplied(value: Any, dim: int, keepdim: bool) -> torch.Tensor:
    result = torch.ones_like(value.select(dim, 0)) if value.shape[dim] else value.new_ones(()).expand(0)
    for index in range(value.shape[dim]):
        result = fields.mod(result * value.select(dim, index))
    return result.unsqueeze(dim) if keepdim else result


def _filled_rows(a: Number, dim: int) -> tuple[Number, torch.Tensor | None]:
    """The number with zero for the largest fill of rows that are filled as a whole, and these fills; None without such.

    What such a fill is added to is lost in it, if it is as large as `SWALLOWS`.
    """
    if a.big is None or not _state.get().empty_rows:
        return a, None
    most = a.big.amax(dim + 1, keepdim=True)
    filled = (most <= max(_state.get().threshold, -1e300)) & most.isfinite()
    if not bool(filled.any()):
        return a, None
    payload = a.payload.masked_fill(filled & (most <= SWALLOWS), 0)
    most = most.where(filled, 0.0)
    return dataclasses.replace(a, payload=payload, big=a.big - most), most


def largest(a: Number, dim: int, keepdim: bool) -> Number:
    """The maximum over a dimension: an unknown function of the differences, plus the first element that is not hidden.

    So it moves with its operands; nothing else is known of it.
    """
    _state.get().opaque.add("max")
    a, fill = _filled_rows(_as_int(a), dim)
    shape = a.payload.shape
    hidden = torch.zeros(shape, dtype=torch.bool) if a.big is None else a.big <= max(_state.get().threshold, -1e300)
    a = _plain(dataclasses.replace(a, big=None if a.big is None else a.big.masked_fill(hidden, 0.0)))
    first = hidden.to(torch.int8).argmin(dim + 1, keepdim=True)
    start = a.payload.gather(dim + 1, first)
    differences = fields.mod(a.payload - start)
    hashes = fields.mix(fields.top(differences)).masked_fill(fields.top(hidden), 0).sum(dim + 1, keepdim=True)
    payload = fields.mod(start + fields.spread(fields.mix(hashes)))
    empty = hidden.all(dim + 1, keepdim=True)
    big = torch.where(empty, -math.inf, 0.0).to(torch.float64) if bool(empty.any()) else None
    big = fill if big is None else big if fill is None else big + fill
    payload = payload.masked_fill(empty, 0)
    if not keepdim:
        payload, big = payload.squeeze(dim + 1), None if big is None else big.squeeze(dim + 1)
    return Number(payload, big, low=a.low, degree=a.degree)


def softmax(a: Number, dim: int) -> Number:
    """Exponentials over their sum; rows of which everything is hidden by minus infinity are zero."""
    a, _ = _filled_rows(a, dim)
    if a.low >= fields.LEVELS - 1:
        top = largest(a, dim, True)
        a = add(a, dataclasses.replace(top, big=None), -1)
    e = exponential(a)
    s = total(e, [dim], True)
    one = _degree((e.degree[0], e.degree[0]))
    return dataclasses.replace(multiply(e, reciprocal(s)), degree=one)


def log_sum_exp(a: Number, dims: Sequence[int], keepdim: bool) -> Number:
    """The logarithm of the sum of exponentials."""
    return logarithm(total(exponential(a), dims, keepdim))


def equal(a: Number, b: Number) -> torch.Tensor:
    """For each element and tower, whether two values are the same: [COUNT, *shape]."""
    if a.payload.dtype == torch.bool and b.payload.dtype == torch.bool:
        return a.payload == b.payload
    a, b = _as_int(a), _as_int(b)
    low = max(a.low, b.low)
    x, y = a.payload, b.payload
    if a.logs is not None or b.logs is not None:
        low = max(low + 1, a.logs_low, b.logs_low)
        x, y = (
            fields.exponential(v.payload) if v.logs is None else fields.mod(fields.exponential(v.payload) * v.logs)
            for v in (a, b)
        )
    same = x == y
    levels = torch.arange(fields.COUNT) % fields.LEVELS < min(low, fields.LEVELS - 1)
    same |= levels.view(-1, *[1] * (same.ndim - 1))
    if a.big is not None or b.big is not None:
        limit = max(_state.get().threshold, -1e300)
        fill_a, fill_b = (torch.zeros(x.shape, dtype=torch.float64) if v.big is None else v.big for v in (a, b))
        hidden = (fill_a <= limit) & (fill_b <= limit)
        same = torch.where(hidden, True, same & (fill_a == fill_b))
    return same


# ---- operators


def _scalar_stand(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _STANDS[value.dtype, value.ndim > 0]


class _Stands(dict[Any, torch.Tensor]):
    def __missing__(self, key: Any) -> torch.Tensor:
        self[key] = value = torch.empty((1,) if key[1] else (), dtype=key[0])
        return value


_STANDS: Final = _Stands()


def _joint(a: Any, b: Any) -> torch.dtype:
    return torch.result_type(_scalar_stand(a), _scalar_stand(b))


def _floating(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _dims(value: Any, dims: Any) -> list[int]:
    ndim = value.ndim
    if dims is None or dims == []:
        return list(range(ndim))
    return sorted({dim % ndim if ndim else 0 for dim in ([dims] if isinstance(dims, int) else dims)}) if ndim else []


def _at(dim: int, ndim: int) -> int:
    """A dimension of a tensor, in its payload."""
    return dim % max(ndim, 1) + 1


def _each(number: Number, move: _Function) -> Number:
    return Number(
        move(number.payload),
        None if number.big is None else move(number.big),
        None if number.logs is None else move(number.logs),
        number.low,
        number.degree,
        logs_low=number.logs_low,
    )


def _moved(x: Residue, move: _Function) -> Residue:
    return Residue(_each(x.number, move), x.dtype)


def _size(value: torch.Tensor, size: Sequence[int]) -> list[int]:
    return [fields.COUNT, *size]


def _expand(x: Any, size: Any, **_: Any) -> Any:
    def move(p: torch.Tensor) -> torch.Tensor:
        lead = len(size) - (p.ndim - 1)
        p = p.view(fields.COUNT, *[1] * lead, *p.shape[1:]) if lead else p
        return p.expand(fields.COUNT, *size)

    return _moved(x, move)


def _squeeze(x: Any, dims: Any = None) -> Any:
    over = [dim + 1 for dim in _dims(x, dims) if x.shape[dim] == 1]
    return _moved(x, lambda p: p.squeeze(over) if over else p.view(p.shape))


_MOVES: Final[dict[Any, _Function]] = {
    _aten.view.default: lambda x, size: _moved(x, lambda p: p.view(_size(p, size))),
    _aten._unsafe_view.default: lambda x, size: _moved(x, lambda p: p.reshape(_size(p, size))),
    _aten.reshape.default: lambda x, size: _moved(x, lambda p: p.reshape(_size(p, size))),
    _aten.permute.default: lambda x, dims: _moved(x, lambda p: p.permute(0, *[_at(d, x.ndim) for d in dims])),
    _aten.transpose.int: lambda x, a, b: _moved(x, lambda p: p.transpose(_at(a, x.ndim), _at(b, x.ndim))),
    _aten.t.default: lambda x: _moved(x, lambda p: p.transpose(1, 2) if x.ndim == 2 else p.view(p.shape)),
    _aten.expand.default: _expand,
    _aten.unsqueeze.default: lambda x, d: _moved(x, lambda p: p.unsqueeze(_at(d, x.ndim + 1))),
    _aten.squeeze.default: _squeeze,
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.dims: _squeeze,
    _aten.select.int: lambda x, d, i: _moved(x, lambda p: p.select(_at(d, x.ndim), i)),
    _aten.slice.Tensor: lambda x, d=0, start=None, end=None, step=1: _moved(
        x,
        lambda p: _aten.slice.Tensor(p, _at(d, x.ndim), start, end, step),
    ),
    _aten.clone.default: lambda x, memory_format=None: _moved(x, lambda p: _cloned(p, memory_format)),
    _aten.alias.default: lambda x: _moved(x, lambda p: p.view(p.shape) if p.is_contiguous() else p[:]),
    _aten.detach.default: lambda x: _moved(x, lambda p: p[:]),
    _aten.lift_fresh.default: lambda x: x,
    _aten.lift_fresh_copy.default: lambda x: _moved(x, torch.clone),
}


def _unbind(x: Any, dim: int = 0) -> Any:
    return [_moved(x, lambda p: p.select(_at(dim, x.ndim), index)) for index in range(x.shape[dim])]  # noqa: B023


def _split(x: Any, size: Any, dim: int = 0) -> Any:
    if isinstance(size, int):
        size = [min(size, x.shape[dim] - start) for start in range(0, x.shape[dim], size)]
    at, start, parts = _at(dim, x.ndim), 0, []
    for length in size:
        parts.append(_moved(x, lambda p: p.narrow(at, start, length)))  # noqa: B023
        start += length
    return parts


_MOVES.update({_aten.unbind.int: _unbind, _aten.split.Tensor: _split, _aten.split_with_sizes.default: _split})


def _cloned(value: torch.Tensor, memory_format: Any) -> torch.Tensor:
    contiguous = memory_format in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    return value.clone(memory_format=torch.contiguous_format if contiguous else torch.preserve_format)


_DEFINED: Final[dict[Any, _Function]] = {}


def _define(*operators: Any) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        for operator in operators:
            for overload in operator.overloads():
                _DEFINED[getattr(operator, overload)] = function
        return function

    return register


@_define(_aten.add)
def _add(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return Residue(add(number_of(a), number_of(b), alpha), _joint(a, b))


@_define(_aten.sub)
def _sub(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return Residue(add(number_of(a), number_of(b), -alpha), _joint(a, b))


@_define(_aten.rsub)
def _rsub(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return _sub(b, a, alpha=alpha)


@_define(_aten.mul)
def _mul(a: Any, b: Any) -> Any:
    return Residue(multiply(number_of(a), number_of(b)), _joint(a, b))


@_define(_aten.div)
def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        return _uninterpreted(_aten.div.Tensor_mode, (a, b), {"rounding_mode": rounding_mode})
    return Residue(multiply(number_of(a), reciprocal(number_of(b))), _floating(_joint(a, b)))


@_define(_aten.reciprocal)
def _reciprocal(a: Any) -> Any:
    return Residue(reciprocal(number_of(a)), a.dtype)


@_define(_aten.neg)
def _neg(a: Any) -> Any:
    return Residue(negate(number_of(a)), a.dtype)


@_define(_aten.exp)
def _exp(a: Any) -> Any:
    return Residue(exponential(number_of(a)), a.dtype)


@_define(_aten.exp2)
def _exp2(a: Any) -> Any:
    return Residue(exponential(multiply(number_of(a), number_of(math.log(2)))), a.dtype)


@_define(_aten.expm1)
def _expm1(a: Any) -> Any:
    return Residue(add(exponential(number_of(a)), number_of(1), -1), a.dtype)


@_define(_aten.log)
def _log(a: Any) -> Any:
    return Residue(logarithm(number_of(a)), a.dtype)


@_define(_aten.log1p)
def _log1p(a: Any) -> Any:
    return Residue(logarithm(add(number_of(a), number_of(1))), a.dtype)


@_define(_aten.log2)
def _log2(a: Any) -> Any:
    return Residue(multiply(logarithm(number_of(a)), number_of(1 / math.log(2))), a.dtype)


def _sigmoid_of(a: Number) -> Number:
    return reciprocal(add(number_of(1), exponential(negate(a))))


def _tanh_of(a: Number) -> Number:
    # 1 - 2 / (exp(2a) + 1)
    twice = exponential(add(a, a))
    return add(number_of(1), multiply(number_of(2), reciprocal(add(twice, number_of(1)))), -1)


@_define(_aten.sigmoid)
def _sigmoid(a: Any) -> Any:
    return Residue(_sigmoid_of(number_of(a)), a.dtype)


@_define(_aten.silu)
def _silu(a: Any) -> Any:
    return Residue(multiply(number_of(a), _sigmoid_of(number_of(a))), a.dtype)


@_define(_aten.tanh)
def _tanh(a: Any) -> Any:
    return Residue(_tanh_of(number_of(a)), a.dtype)


@_define(_aten.gelu)
def _gelu(a: Any, *, approximate: str = "none") -> Any:
    x = number_of(a)
    if approximate == "tanh":
        cube = multiply(multiply(x, x), x)
        inner = multiply(number_of(math.sqrt(2 / math.pi)), add(x, multiply(number_of(0.044715), cube)))
        inside = _tanh_of(inner)
    else:
        inside = _pointwise_hash("erf", [multiply(x, number_of(math.sqrt(0.5)))])
    return Residue(multiply(multiply(number_of(0.5), x), add(number_of(1), inside)), a.dtype)


@_define(_aten.sqrt)
def _sqrt(a: Any) -> Any:
    return Residue(root(number_of(a)), a.dtype)


@_define(_aten.rsqrt)
def _rsqrt(a: Any) -> Any:
    return Residue(reciprocal(root(number_of(a))), a.dtype)


@_define(_aten.square)
def _square(a: Any) -> Any:
    return _mul(a, a)


@_define(_aten.pow)
def _pow(a: Any, exponent: Any) -> Any:
    if isinstance(exponent, torch.Tensor) and not isinstance(exponent, Residue) and exponent.numel() == 1:
        exponent = exponent.item()
    if isinstance(exponent, torch.Tensor):
        if a == 2 if not isinstance(a, torch.Tensor) else False:
            return _exp2(exponent)
        return _uninterpreted(_aten.pow.Tensor_Tensor, (a, exponent), {})
    twice = exponent * 2
    if twice != int(twice) or abs(exponent) > 64:
        return _uninterpreted(_aten.pow.Tensor_Scalar, (a, exponent), {})
    base, times = number_of(a), abs(int(twice))
    if times % 2:
        base = root(base)
    else:
        times //= 2
    result = number_of(1)
    while times:
        if times & 1:
            result = multiply(result, base)
        base, times = (multiply(base, base), times >> 1) if times > 1 else (base, 0)
    result = reciprocal(result) if exponent < 0 else result
    (result, _) = _aligned(result, number_of(a))
    return Residue(_each(result, lambda p: p.expand(number_of(a).payload.shape)), _joint(a, exponent))


@_define(_aten.abs)
def _abs(a: Any) -> Any:
    x = number_of(a)
    return Residue(choose(positive(x), x, negate(x)), a.dtype)


@_define(_aten.relu)
def _relu(a: Any) -> Any:
    x = number_of(a)
    return Residue(choose(positive(x), x, number_of(0)), a.dtype)


@_define(_aten.leaky_relu)
def _leaky_relu(a: Any, negative_slope: float = 0.01) -> Any:
    x = number_of(a)
    return Residue(choose(positive(x), x, multiply(x, number_of(negative_slope))), a.dtype)


@_define(_aten.sign, _aten.sgn)
def _sign(a: Any) -> Any:
    x = number_of(a)
    found = choose(positive(x), number_of(1), choose(positive(negate(x)), number_of(-1), number_of(0)))
    return Residue(found, a.dtype)


def _greater(a: Number, b: Number) -> torch.Tensor:
    return positive(add(a, b, -1))


@_define(_aten.maximum)
def _maximum(a: Any, b: Any) -> Any:
    x, y = number_of(a), number_of(b)
    return Residue(choose(_greater(x, y), x, y), _joint(a, b))


@_define(_aten.minimum)
def _minimum(a: Any, b: Any) -> Any:
    x, y = number_of(a), number_of(b)
    return Residue(choose(_greater(x, y), y, x), _joint(a, b))


@_define(_aten.clamp, _aten.clip, _aten.hardtanh)
def _clamp(a: Any, min: Any = None, max: Any = None) -> Any:
    result = a
    if min is not None and min != -math.inf:
        result = _maximum(result, min)
    if max is not None and max != math.inf:
        result = _minimum(result, max)
    return Residue(number_of(result), a.dtype)


@_define(_aten.clamp_min)
def _clamp_min(a: Any, min: Any) -> Any:
    return _clamp(a, min)


@_define(_aten.clamp_max)
def _clamp_max(a: Any, max: Any) -> Any:
    return _clamp(a, None, max)


def _truth(payload: torch.Tensor) -> Any:
    return Residue(Number(payload, degree=(0, 0)), torch.bool)


@_define(_aten.gt)
def _gt(a: Any, b: Any) -> Any:
    return _truth(_greater(number_of(a), number_of(b)))


@_define(_aten.lt)
def _lt(a: Any, b: Any) -> Any:
    return _truth(_greater(number_of(b), number_of(a)))


@_define(_aten.ge)
def _ge(a: Any, b: Any) -> Any:
    return _truth(~_greater(number_of(b), number_of(a)))


@_define(_aten.le)
def _le(a: Any, b: Any) -> Any:
    return _truth(~_greater(number_of(a), number_of(b)))


def _same(a: Any, b: Any) -> torch.Tensor:
    if isinstance(b, float) and math.isinf(b):  # no number of a field, but one may be kept beside it
        x = number_of(a)
        return torch.zeros_like(x.payload, dtype=torch.bool) if x.big is None else x.big == b
    x, y = _aligned(number_of(a), number_of(b))
    if x.payload.dtype == torch.bool and y.payload.dtype == torch.bool:
        return x.payload == y.payload
    shape = torch.broadcast_shapes(x.payload.shape, y.payload.shape)
    x, y = (_each(_as_int(v), lambda p: p.expand(shape)) for v in (x, y))
    return fields.tops(equal(x, y))


@_define(_aten.eq)
def _eq(a: Any, b: Any) -> Any:
    return _truth(_same(a, b))


@_define(_aten.ne)
def _ne(a: Any, b: Any) -> Any:
    return _truth(~_same(a, b))


@_define(_aten.isinf)
def _isinf(a: Any) -> Any:
    big = number_of(a).big
    return _truth(torch.zeros_like(number_of(a).payload, dtype=torch.bool) if big is None else big.isinf())


@_define(_aten.isneginf)
def _isneginf(a: Any) -> Any:
    big = number_of(a).big
    return _truth(torch.zeros_like(number_of(a).payload, dtype=torch.bool) if big is None else big == -math.inf)


@_define(_aten.isnan)
def _isnan(a: Any) -> Any:
    return _truth(torch.zeros_like(number_of(a).payload, dtype=torch.bool))


@_define(_aten.nan_to_num)
def _nan_to_num(a: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    if number_of(a).big is not None:
        raise Unsupported("nan_to_num of minus infinity")
    return _moved(a, torch.clone)


def _booleans(value: Any) -> torch.Tensor:
    payload = number_of(value).payload
    return payload if payload.dtype == torch.bool else fields.tops(payload != 0)


def _logical(function: _Function) -> _Function:
    def run(a: Any, b: Any) -> Any:
        x, y = _aligned(Number(_booleans(a)), Number(_booleans(b)))
        return _truth(function(x.payload, y.payload))

    return run


_define(_aten.logical_and)(_logical(torch.logical_and))
_define(_aten.logical_or)(_logical(torch.logical_or))
_define(_aten.logical_xor)(_logical(torch.logical_xor))


@_define(_aten.bitwise_and)
def _bitwise_and(a: Any, b: Any) -> Any:
    return _of_bits(torch.logical_and, a, b)


@_define(_aten.bitwise_or)
def _bitwise_or(a: Any, b: Any) -> Any:
    return _of_bits(torch.logical_or, a, b)


def _of_bits(function: _Function, a: Any, b: Any) -> Any:
    if any(isinstance(v, torch.Tensor) and v.dtype != torch.bool for v in (a, b)):
        raise Unsupported("bits of integers that depend on data")
    return _logical(function)(a, b)


@_define(_aten.logical_not, _aten.bitwise_not)
def _logical_not(a: Any) -> Any:
    return _truth(~_booleans(a))


@_define(_aten.any)
def _any(a: Any, dim: Any = None, keepdim: bool = False) -> Any:
    dims = [d + 1 for d in _dims(a, dim)]
    return _truth(_booleans(a).any(dims, keepdim=keepdim) if dims else _booleans(a))


@_define(_aten.all)
def _all(a: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _truth(~_any(_truth(~_booleans(a)), dim, keepdim).number.payload)


@_define(_aten.where)
def _where(condition: Any, a: Any, b: Any) -> Any:
    dtype = a.dtype if not isinstance(b, torch.Tensor) and isinstance(a, torch.Tensor) else _joint(a, b)
    return Residue(choose(_booleans(condition), number_of(a), number_of(b)), dtype)


@_define(_aten.masked_fill)
def _masked_fill(a: Any, mask: Any, value: Any) -> Any:
    chosen = _booleans(mask)
    if not bool(chosen.any()):  # such as NaN for rows that hide everything, where there are none
        value = 0
    return Residue(choose(chosen, number_of(value), number_of(a)), a.dtype)


@_define(_aten._to_copy, _aten.to)
def _to_copy(a: Any, dtype: Any = None, **_: Any) -> Any:
    wanted = dtype or a.dtype
    if wanted == torch.bool and a.dtype != torch.bool:
        return _truth(_booleans(a))
    if a.dtype.is_floating_point and not wanted.is_floating_point:
        return Residue(_pointwise_hash("trunc", [number_of(a)]), wanted)
    return Residue(_each(_as_int(a.number) if wanted != torch.bool else a.number, torch.clone), wanted)


@_define(torch.ops.prims.convert_element_type)
def _convert(a: Any, dtype: Any) -> Any:
    return _to_copy(a, dtype)


@_define(_aten.sum)
def _sum(a: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    kind = dtype or (a.dtype if a.dtype.is_floating_point else torch.int64)
    return Residue(total(number_of(a), _dims(a, dim), keepdim), kind)


@_define(_aten.mean)
def _mean(a: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return Residue(_mean_of(number_of(a), _dims(a, dim), keepdim), dtype or a.dtype)


def _mean_of(a: Number, dims: list[int], keepdim: bool) -> Number:
    count = math.prod(a.payload.shape[dim + 1] for dim in dims)
    return multiply(total(a, dims, keepdim), reciprocal(number_of(count)))


def _variance_of(a: Number, dims: list[int], keepdim: bool, correction: Any) -> tuple[Number, Number]:
    mean = _mean_of(a, dims, True)
    centred = add(a, mean, -1)
    count = math.prod(a.payload.shape[dim + 1] for dim in dims)
    found = multiply(total(multiply(centred, centred), dims, keepdim), reciprocal(number_of(count - correction)))
    return found, mean if keepdim else _mean_of(a, dims, False)


def _correction(unbiased: Any, correction: Any) -> Any:
    return correction if correction is not None else 0 if unbiased is False else 1


@_define(_aten.var)
def _var(a: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None) -> Any:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    found, _ = _variance_of(number_of(a), _dims(a, dim), keepdim, _correction(unbiased, correction))
    return Residue(found, a.dtype)


@_define(_aten.var_mean)
def _var_mean(a: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None) -> Any:
    found = _variance_of(number_of(a), _dims(a, dim), keepdim, _correction(unbiased, correction))
    return tuple(Residue(each, a.dtype) for each in found)


@_define(_aten.std)
def _std(a: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None) -> Any:
    return _sqrt(_var(a, dim, unbiased, keepdim, correction=correction))


@_define(_aten.amax)
def _amax(a: Any, dim: Any = (), keepdim: bool = False) -> Any:
    result = number_of(a)
    for each in sorted(_dims(a, list(dim) if not isinstance(dim, int) else dim), reverse=True):
        result = largest(result, each, keepdim)
    return Residue(result, a.dtype)


@_define(_aten.amin)
def _amin(a: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return _neg(_amax(_neg(a), dim, keepdim))


@_define(_aten.max)
def _max(a: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if isinstance(dim, torch.Tensor):
        return _maximum(a, dim)
    if dim is None:
        return _amax(a)
    values = _amax(a, [dim], keepdim)
    return values, _uninterpreted_integers(values)


def _uninterpreted_integers(like: Any) -> Any:
    return Residue(_pointwise_hash("argmax", [like.number]), torch.int64)


@_define(_aten.cumsum)
def _cumsum(a: Any, dim: int, *, dtype: Any = None) -> Any:
    x = _plain(number_of(a))
    found = Number(fields.mod(x.payload.cumsum(_at(dim, a.ndim))), low=x.low, degree=x.degree)
    return Residue(found, dtype or (a.dtype if a.dtype.is_floating_point else torch.int64))


@_define(_aten._softmax, _aten._safe_softmax, _aten.softmax)
def _softmax(a: Any, dim: int, half_to_float: Any = False, dtype: Any = None) -> Any:
    if isinstance(half_to_float, torch.dtype):
        dtype, half_to_float = half_to_float, False
    return Residue(softmax(number_of(a), dim % max(a.ndim, 1)), torch.float32 if half_to_float else dtype or a.dtype)


@_define(_aten._log_softmax, _aten.log_softmax)
def _log_softmax(a: Any, dim: int, half_to_float: Any = False, dtype: Any = None) -> Any:
    if isinstance(half_to_float, torch.dtype):
        dtype, half_to_float = half_to_float, False
    x = number_of(a)
    found = add(x, log_sum_exp(x, [dim % max(a.ndim, 1)], True), -1)
    return Residue(found, torch.float32 if half_to_float else dtype or a.dtype)


@_define(_aten.logsumexp)
def _logsumexp(a: Any, dim: Any, keepdim: bool = False) -> Any:
    return Residue(log_sum_exp(number_of(a), _dims(a, dim), keepdim), a.dtype)


@_define(_aten._softmax_backward_data)
def _softmax_backward(grad: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    g, y = number_of(grad), number_of(output)
    weighted = multiply(g, y)
    inner = total(weighted, [dim % grad.ndim], True)
    return Residue(add(weighted, multiply(y, inner), -1), dtype)


@_define(_aten.mm, _aten.bmm)
def _mm(a: Any, b: Any, *_: Any) -> Any:
    return Residue(product(number_of(a), number_of(b)), a.dtype)


@_define(_aten.addmm, _aten.baddbmm)
def _addmm(c: Any, a: Any, b: Any, *_: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    found = product(number_of(a), number_of(b))
    found = found if alpha == 1 else multiply(found, number_of(alpha))
    return Residue(found if beta == 0 else add(found, number_of(c), beta), a.dtype)


@_define(_aten.mv)
def _mv(a: Any, b: Any) -> Any:
    column = _each(number_of(b), lambda p: p.unsqueeze(-1))
    return Residue(_each(product(number_of(a), column), lambda p: p.squeeze(-1)), a.dtype)


@_define(_aten.dot)
def _dot(a: Any, b: Any) -> Any:
    return _sum(_mul(a, b))


@_define(_aten.linalg_vector_norm)
def _vector_norm(a: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if ord == 1:
        return _sum(_abs(a), dim, keepdim)
    if ord != 2:
        return _uninterpreted(_aten.linalg_vector_norm.default, (a, ord, dim, keepdim), {})
    return _sqrt(_sum(_mul(a, a), dim, keepdim))


@_define(_aten.addcmul)
def _addcmul(a: Any, b: Any, c: Any, *, value: Any = 1) -> Any:
    return _add(a, _mul(b, c), alpha=value)


@_define(_aten.addcdiv)
def _addcdiv(a: Any, b: Any, c: Any, *, value: Any = 1) -> Any:
    return _add(a, _div(b, c), alpha=value)


@_define(_aten.lerp)
def _lerp(a: Any, b: Any, weight: Any) -> Any:
    return _add(a, _mul(weight, _sub(b, a)))


@_define(_aten.native_layer_norm)
def _layer_norm(a: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    dims = list(range(a.ndim - len(shape), a.ndim))
    x = number_of(a)
    variance, mean = _variance_of(x, dims, True, 0)
    scale = reciprocal(root(add(variance, number_of(eps))))
    found = multiply(add(x, mean, -1), scale)
    found = found if weight is None else multiply(found, number_of(weight))
    found = found if bias is None else add(found, number_of(bias))
    return Residue(found, a.dtype), Residue(mean, a.dtype), Residue(scale, a.dtype)


@_define(_aten._fused_rms_norm)
def _rms_norm(a: Any, shape: Any, weight: Any, eps: Any = None) -> Any:
    dims = list(range(a.ndim - len(shape), a.ndim))
    x = number_of(a)
    eps = torch.finfo(a.dtype).eps if eps is None else eps
    scale = reciprocal(root(add(_mean_of(multiply(x, x), dims, True), number_of(eps))))
    found = multiply(x, scale)
    found = found if weight is None else multiply(found, number_of(weight))
    return Residue(found, a.dtype), Residue(scale, a.dtype)


@_define(_aten.nll_loss_forward)
def _nll_loss(a: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    if weight is not None or isinstance(target, Residue) or a.ndim != 2:
        return _uninterpreted(_aten.nll_loss_forward.default, (a, target, weight, reduction, ignore_index), {})
    used = target != ignore_index
    picked = _aten.gather.default(a, 1, target.clamp(0, a.shape[1] - 1).unsqueeze(1))
    losses = _where(used, _neg(_aten.squeeze.dim(picked, 1)), 0.0)
    count = used.sum()
    if reduction == 0:
        return losses, count.to(a.dtype)
    found = _sum(losses)
    return (_div(found, count) if reduction == 1 else found), count.to(a.dtype)


def dropped(x: Any, p: float, kind: str = "dropout") -> tuple[Any, Any]:
    """Dropout: the numbers that stay, scaled, and which do; a hash of how many draws were before decides."""
    keep = kept(tuple(x.shape), p, kind)
    scaled = _mul(x, 1 / (1 - p)) if p < 1 else x
    return _masked_fill(scaled, ~keep, 0.0), keep


def kept(shape: tuple[int, ...], p: float, kind: str) -> torch.Tensor:
    """Which elements a draw keeps; recorded in the state."""
    draws = _state.get().draws
    seed()  # it moves the generator on, as numbers that are drawn by their seeds do
    generator = torch.Generator().manual_seed(sum(each[0] == kind for each in draws) * 7919 + 13)
    draws.append((kind, math.prod(shape), p))
    if _state.get().device.type == "meta":
        return torch.ones(shape, dtype=torch.bool, device="meta")
    return torch.rand(shape, generator=generator) >= min(max(p, 0.3), 0.6)


def seed() -> int:
    """The next seed of a program."""
    state = _state.get()
    state.seeds += 1
    return state.seeds - 1


def drew(kind: str, elements: int) -> None:
    """An operator without a definition drew numbers from torch's generator."""
    _state.get().draws.append((f"{kind} {seed()}", elements, UNIFORM))


def drawn(kind: str, shape: tuple[int, ...], seed: int, low: int = 0, high: int = 0) -> torch.Tensor:
    """Random numbers of a seed; recorded in the state."""
    _state.get().draws.append((f"{kind} {seed}", math.prod(shape), UNIFORM))
    if _state.get().device.type == "meta":
        return torch.empty(shape, dtype=torch.int64 if high else torch.float32, device="meta")
    generator = torch.Generator().manual_seed(seed * 7919 + 29)
    if high:
        return torch.randint(low, high, shape, generator=generator)
    return (torch.randn if kind == "randn" else torch.rand)(shape, generator=generator)


@_define(_aten.native_dropout)
def _native_dropout(a: Any, p: float, train: Any) -> Any:
    if train is False or p == 0:
        return _moved(a, torch.clone), torch.ones(a.shape, dtype=torch.bool)
    return dropped(a, p)


@_define(_aten.dropout)
def _dropout(a: Any, p: float, train: bool) -> Any:
    return dropped(a, p)[0] if train and p > 0 else a


# ---- what has no definition


def _salt(*words: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=7).digest(), "little")


def _hashes_of(number: Number) -> torch.Tensor:
    """[TOWERS, *shape] hashes of elements, fills included."""
    number = _as_int(number)
    big, number = number.big, dataclasses.replace(number, big=None)
    hashes = fields.mix(fields.top(_plain(number).payload))
    return hashes if big is None else fields.mix(hashes ^ fields.top(big).contiguous().view(torch.int64))


def _pointwise_hash(name: str, operands: Sequence[Number], *rest: Any) -> Number:
    _state.get().opaque.add(name)
    result: Any = _salt(name, *rest)
    for each in _aligned(*operands):
        result = fields.mix(_hashes_of(each) ^ result)
    return Number(fields.spread(result))


def _uninterpreted(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an unknown function: a hash of its name and of all that it was given."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise Unsupported(f"random numbers of {func}")
    if func._schema.is_mutable or func.is_view:
        raise Unsupported(f"{func} has no definition over finite fields")
    name = str(func.overloadpacket)
    meta_args, meta_kwargs = tree_map(_meta, (args, kwargs))
    try:
        result = func(*meta_args, **meta_kwargs)
    except (RuntimeError, NotImplementedError) as error:
        raise Unsupported(f"{func}: {error}") from error
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    # Integer and boolean constants count with the values that they have.
    rest = tree_map(lambda v: "tensor" if isinstance(v, torch.Tensor) else str(v), (args, kwargs))
    rest[1].pop("device", None)
    rest[1].pop("layout", None)
    rest[1].pop("pin_memory", None)
    shaped = isinstance(result, torch.Tensor) and result.is_floating_point()
    if torch.Tag.pointwise in func.tags and shaped:
        return Residue(_pointwise_hash(name, [number_of(v) for v in operands], rest), result.dtype)
    _state.get().opaque.add(name)
    seed: Any = torch.full((fields.TOWERS,), _salt(name, rest))
    for each in operands:
        hashes = _hashes_of(number_of(each)).reshape(fields.TOWERS, -1)
        place = fields.mix(torch.arange(hashes.shape[1]))
        seed = fields.mix(seed ^ fields.mix(hashes + place).sum(1))

    def made(value: Any, index: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            if value.dtype != torch.bool:
                return Residue(_filled(seed, value, index), value.dtype)
            return _truth(fields.tops(_filled(seed, value, index).payload & 1 == 1))
        return Residue(_filled(seed, value, index), value.dtype)

    if isinstance(result, torch.Tensor):
        return made(result, 0)
    return type(result)(made(value, index) for index, value in enumerate(result))


def _filled(seed: torch.Tensor, like: torch.Tensor, index: int) -> Number:
    places = fields.mix(torch.arange(like.numel()) + (index << 40)).view(1, *like.shape)
    hashes = fields.mix(seed.view(-1, *[1] * like.ndim) ^ places)
    return Number(fields.spread(hashes))


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


_GATHERING: Final = {
    getattr(packet, overload)
    for packet in (
        _aten.cat,
        _aten.stack,
        _aten.gather,
        _aten.index,
        _aten.index_select,
        _aten.index_put,
        _aten.scatter,
        _aten.slice_scatter,
        _aten.select_scatter,
        _aten.embedding,
        _aten.flip,
        _aten.roll,
        _aten.repeat,
        _aten.constant_pad_nd,
        _aten.tril,
        _aten.triu,
        _aten.diagonal,
        _aten.unfold,
        _aten.as_strided,
        _aten.masked_select,
        _aten.movedim,
        _aten.narrow,
        _aten.unflatten,
        _aten.flatten,
        _aten.swapaxes,
        _aten._reshape_alias,
        _aten.view_as,
        _aten.expand_as,
        _aten.repeat_interleave,
        _aten.copy,
        _aten.diag_embed,
        _aten.pixel_shuffle,
    )
    for overload in packet.overloads()
}


def _gathered(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator that only moves elements: run on their positions, of which 0 is that of a zero."""
    leaves = tree_leaves((args, kwargs))
    moved = [v for v in leaves if isinstance(v, Residue) or (isinstance(v, torch.Tensor) and v.is_floating_point())]
    if func.overloadpacket in (_aten.index, _aten.gather, _aten.index_select, _aten.embedding) and len(moved) > 1:
        raise Unsupported("indices that depend on data")
    if func.overloadpacket is _aten.index_put and (kwargs.get("accumulate") or args[3:] == (True,)):
        raise Unsupported("index_put that accumulates")
    if func.overloadpacket is _aten.constant_pad_nd and (args[2:] or (0,))[0] != 0:
        return _padded(*args)
    numbers = [number_of(each) for each in moved]
    if any(each.payload.dtype != torch.bool for each in numbers):
        numbers = [_as_int(each) for each in numbers]
    starts = [1]
    for each in moved:
        starts.append(starts[-1] + each.numel())
    positions = {
        id(value): torch.arange(start, start + value.numel()).view(value.shape)
        for value, start in zip(moved, starts, strict=False)
    }
    placed_args, placed_kwargs = tree_map(lambda leaf: positions.get(id(leaf), leaf), (args, kwargs))
    found = func(*placed_args, **placed_kwargs)
    kind = next((each.dtype for each in moved if isinstance(each, Residue)), torch.float32)

    def collected(name: str, missing: float) -> torch.Tensor | None:
        parts = [getattr(each, name) for each in numbers]
        if all(each is None for each in parts):
            return None
        like = next(each for each in parts if each is not None)
        flat = [like.new_full((fields.COUNT, 1), missing)]
        for number, each in zip(numbers, parts, strict=True):
            whole = like.new_full(number.payload.shape, missing) if each is None else each
            flat.append(whole.reshape(fields.COUNT, -1))
        return torch.cat(flat, 1)

    payload, big, logs = collected("payload", 0), collected("big", 0.0), collected("logs", 1)
    low, logs_low = (max(getattr(each, name) for each in numbers) for name in ("low", "logs_low"))
    degree = (max(each.degree[0] for each in numbers), max(each.degree[1] for each in numbers))

    def picked(position: torch.Tensor) -> Any:
        def pick(values: torch.Tensor | None) -> Any:
            return None if values is None else values[:, position.reshape(-1)].view(fields.COUNT, *position.shape)

        return Residue(Number(pick(payload), pick(big), pick(logs), low, degree, logs_low=logs_low), kind)

    return picked(found) if isinstance(found, torch.Tensor) else [picked(each) for each in found]


def _padded(x: Any, pad: Sequence[int], value: float) -> Any:
    inside = torch.ones(x.shape, dtype=torch.bool)
    inside = _aten.constant_pad_nd.default(inside, pad, False)
    return _where(inside, _aten.constant_pad_nd.default(x, pad), torch.tensor(value, dtype=torch.float64).to(x.dtype))


def _write(x: Any, result: Any) -> Any:
    if not isinstance(x, Residue):
        raise Unsupported(_INTO_CONSTANT)
    value = number_of(result)
    target = x.number
    if target.payload.dtype != torch.bool:
        value = _as_int(value)
    elif value.payload.dtype != torch.bool:
        value = Number(_booleans(result))
    for name, missing in (("big", 0.0), ("logs", 1)):
        new, old = getattr(value, name), getattr(target, name)
        if new is None and old is None:
            continue
        if target.payload._base is not None and target.payload._base.shape != target.payload.shape:
            raise Unsupported("minus infinity written through a view")
        shape = target.payload.shape
        dtype = torch.float64 if name == "big" else torch.int64
        setattr(target, name, (torch.full(shape, missing, dtype=dtype) if new is None else new.expand(shape).clone()))
    wide = _wide(value.payload, x.ndim)
    target.payload.copy_(wide)  # type: ignore[arg-type]
    target.low = max(target.low, value.low)
    target.logs_low = max(target.logs_low, value.logs_low)
    target.degree = _degree((max(target.degree[0], value.degree[0]), max(target.degree[1], value.degree[1])))
    target.known = None
    return x


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name.split("::")[1]
    if name == "copy_":
        return _write(args[0], args[1])
    if name == "fill_":
        return _write(args[0], args[1])
    if name == "zero_":
        return _write(args[0], 0)
    if name in ("bernoulli_", "uniform_", "normal_", "set_", "resize_"):
        raise Unsupported(name)
    if not name.endswith("_") or name.startswith("_"):
        raise Unsupported(f"{func} writes to its operands")
    functional = getattr(getattr(_aten, name[:-1]), func._overloadname, None)
    if functional is None:
        raise Unsupported(f"{func} writes to its operands")
    return _write(args[0], functional(*args, **kwargs))


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    move = _MOVES.get(func)
    if move is not None:
        return move(*args, **kwargs)
    defined = _DEFINED.get(func)
    if defined is not None and not func._schema.is_mutable:
        return defined(*args, **kwargs)
    if func in _GATHERING:
        return _gathered(func, args, kwargs)
    if func._schema.is_mutable:
        return _in_place(func, args, kwargs)
    packet = func.overloadpacket
    if packet in (
        _aten.ones_like,
        _aten.zeros_like,
        _aten.full_like,
        _aten.empty_like,
        _aten.new_zeros,
        _aten.new_ones,
        _aten.new_full,
        _aten.new_empty,
    ):
        return _factory(func, args, kwargs)
    if packet in (_aten._local_scalar_dense, _aten.nonzero):
        raise Unsupported("the program branches on data")
    return _uninterpreted(func, args, kwargs)


def _factory(func: Any, args: Any, kwargs: Any) -> Any:
    first = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype)
    made = func(first, *args[1:], **{**kwargs, **({"device": "cpu"} if "device" in kwargs else {})})
    if func.overloadpacket in (_aten.empty_like, _aten.new_empty):
        made.zero_()
    return Residue(_materialised(number_of(made)), made.dtype) if made.is_floating_point() else made


def _materialised(number: Number) -> Number:
    """A number with memory of its own, which can be written to."""
    return _each(number, torch.clone)


def copied(value: Residue) -> Residue:
    """A tensor of residues that may be written to, with strides as it has."""
    payload = value.number.payload
    payload = torch.empty_strided(payload.shape, payload.stride(), dtype=payload.dtype).copy_(payload)
    return Residue(dataclasses.replace(value.number, payload=payload), value.dtype)


def lifted(value: torch.Tensor) -> Any:
    """A tensor of the program as residues with memory of their own."""
    return Residue(_materialised(number_of(value)), value.dtype)


def draw(shape: Iterable[int], stride: Sequence[int], dtype: torch.dtype, seed: int) -> Any:
    """A tensor of random residues."""
    shape = tuple(shape)
    generator = torch.Generator().manual_seed(seed)
    numel = math.prod(shape)
    order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
    flat = torch.randint(1, fields.SMALLEST, (fields.COUNT, numel), generator=generator)
    payload = flat.view(fields.COUNT, *[shape[dim] for dim in order])
    back = [0] * len(shape)
    for position, dim in enumerate(order):
        back[dim] = position + 1
    return Residue(Number(payload.permute(0, *back), degree=(1, 0)), dtype)
