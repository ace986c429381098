"""Views read backward: which element of the input is the element at given positions of the output.

Reshapes regroup axes like the digits of a mixed-radix number; where a boundary falls inside an axis, that axis is
split, and everything that was read through it before sees the parts.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from omnicomp._torch.autograd.attention import known_equal
from omnicomp.passes.attention.terms import Axis, Position
from omnicomp.passes.attention.trace import Op, Value

At = tuple[Position, ...]


class NotAView(Exception):
    """The elements of the output are not addressed by axes of the input."""


def source(op: Op, index: int, at: At) -> tuple[Value, At]:
    """The tensor that a view reads, and the positions in it.

    Args:
        op: a view operator, one of `VIEWS`.
        index: which of its results.
        at: a position along each dimension of that result.

    Raises:
        NotAView: the positions can't be expressed.
    """
    value = next(op.inputs)
    return value, VIEWS[op.name](op, value, index, at)


def followed(value: Value, at: At, made_by: Op) -> tuple[list[Value], At]:
    """Follow a value back to the operator that it comes from through views, casts, arithmetic with numbers and sums.

    Args:
        value: where to begin.
        at: a position along each of its dimensions.
        made_by: the operator; the value is known to come from it.

    Returns:
        The values on the way, both ends included, and the positions in the last of them.

    Raises:
        NotAView: the positions can't be expressed.
    """
    passed = [value]
    while (op := value.op) is not made_by:
        assert op is not None
        if op.name in VIEWS:
            value, at = source(op, value.index, at)
        else:
            value = next(each for each in op.inputs if _comes_from(each, made_by))
            at = broadcast(value, at)
        passed.append(value)
    return passed, at


def _comes_from(value: Value, made_by: Op) -> bool:
    """Whether a value comes from an operator by others of one operand."""
    op = value.op
    while op is not None and op is not made_by:
        inputs = list(op.inputs)
        op = inputs[0].op if len(inputs) == 1 else None
    return op is made_by


def broadcast(value: Value, at: At) -> At:
    """Positions in a tensor that is broadcast to a shape, from positions in that shape."""
    shape = value.fake.shape
    own = at[len(at) - len(shape) :]
    return tuple(Position() if known_equal(size, 1) else position for size, position in zip(shape, own, strict=True))


def full(position: Position, size: Any) -> bool:
    """Whether the position runs over a whole dimension of that size, once."""
    if not known_equal(position.start, 0):
        return False
    return known_equal(_product([axis.size for axis in position.flat()]), size)


def split(axes: Sequence[Axis], size: Any) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Split digits so that the last ones number `size` elements; an axis across the boundary is split.

    Raises:
        NotAView: the sizes do not divide.
    """
    digits = [leaf for axis in axes for leaf in axis.flat()]
    taken: list[Axis] = []
    left = size
    while not known_equal(left, 1):
        if not digits:
            raise NotAView("a reshape mixes dimensions")
        axis = digits.pop()
        if known_equal(axis.size, 1):
            continue
        rest = _quotient(left, axis.size)
        if rest is not None:
            taken.insert(0, axis)
            left = rest
            continue
        high = _quotient(axis.size, left)
        if high is None:
            raise NotAView("a reshape cuts across a dimension")
        axis.parts = (Axis(axis.name, high), Axis(axis.name, left))
        digits.append(axis.parts[0])
        taken.insert(0, axis.parts[1])
        left = 1
    return tuple(digits), tuple(taken)


def _reshape(op: Op, value: Value, index: int, at: At) -> At:
    inner, outer = list(value.fake.shape), list(op.outputs[index].fake.shape)
    positions: list[Position] = []
    i, o = len(inner), len(outer)
    while i or o:
        left, right = max(i - 1, 0), max(o - 1, 0)
        # The smallest group of dimensions, from the right, with equally many elements on both sides.
        while not known_equal(inside := _product(inner[left:i]), outside := _product(outer[right:o])):
            if not left and not right:
                raise NotAView("a reshape of unknown sizes")
            # The side with fewer elements takes one more dimension; both do if nobody knows which side that is.
            below, above = _quotient(outside, inside) is not None, _quotient(inside, outside) is not None
            grow_inner, grow_outer = below or not (above and right), above or not (below and left)
            left, right = max(left - grow_inner, 0), max(right - grow_outer, 0)
        positions = [*_regroup(inner[left:i], outer[right:o], at[right:o]), *positions]
        i, o = left, right
    return tuple(positions)


def _regroup(inner: Sequence[Any], outer: Sequence[Any], at: Sequence[Position]) -> list[Position]:
    kept = [(size, position) for size, position in zip(outer, at, strict=True) if not known_equal(size, 1)]
    wide = [n for n, size in enumerate(inner) if not known_equal(size, 1)]
    found = [Position() for _ in inner]
    if len(kept) == 1 and len(wide) == 1:
        found[wide[0]] = kept[0][1]  # one dimension stays as it is, whatever addresses it
        return found
    if any(not full(position, size) for size, position in kept):
        if all(not p.axes and known_equal(p.start, 0) for _, p in kept):
            return found
        raise NotAView("a slice or a single element is reshaped")
    digits = tuple(axis for _, position in kept for axis in position.flat())
    for n in reversed(wide):
        digits, own = split(digits, inner[n])
        found[n] = Position(own)
    return found


def _quotient(left: Any, right: Any) -> Any:
    """`left / right` if that is known to be a whole number, else None."""
    if known_equal(right, 0):
        return None
    if isinstance(left, int) and isinstance(right, int):
        return left // right if left % right == 0 else None
    quotient = left // right
    return quotient if known_equal(quotient * right, left) else None


def _product(sizes: Sequence[Any]) -> Any:
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def _permute(op: Op, value: Value, index: int, at: At) -> At:
    rank = len(at)
    if op.name == "permute":
        order = [int(d) % rank for d in op.argument("dims")]
    elif op.name == "t":
        order = list(reversed(range(rank)))
    else:
        first, second = int(op.argument("dim0")) % rank, int(op.argument("dim1")) % rank
        order = list(range(rank))
        order[first], order[second] = order[second], order[first]
    found = [Position()] * rank
    for position, dim in zip(at, order, strict=True):
        found[dim] = position
    return tuple(found)


def _same(op: Op, value: Value, index: int, at: At) -> At:
    return at


def _expand(op: Op, value: Value, index: int, at: At) -> At:
    return broadcast(value, at)


def _unsqueeze(op: Op, value: Value, index: int, at: At) -> At:
    dim = int(op.argument("dim")) % len(at)
    return (*at[:dim], *at[dim + 1 :])


def _squeeze(op: Op, value: Value, index: int, at: At) -> At:
    dims: Any = op.argument("dim")
    shape = value.fake.shape
    chosen = (
        range(len(shape)) if dims is None else [d % len(shape) for d in ([dims] if isinstance(dims, int) else dims)]
    )
    left = iter(at)
    return tuple(Position() if n in chosen and known_equal(s, 1) else next(left) for n, s in enumerate(shape))


def _shift(at: At, dim: int, start: Any) -> At:
    old = at[dim]
    return (*at[:dim], Position(old.axes, old.start + start), *at[dim + 1 :])


def _slice(op: Op, value: Value, index: int, at: At) -> At:
    dim = int(op.argument("dim", 0)) % len(at)
    start, step = op.argument("start", None) or 0, op.argument("step", 1)
    if step != 1:
        raise NotAView("a slice with a step")
    size = value.fake.shape[dim]
    if known_equal(op.outputs[index].fake.shape[dim], size):
        return at
    if not isinstance(start, int):
        return _shift(at, dim, start)
    if start < 0:
        start = start + size
    return _shift(at, dim, start)


def _select(op: Op, value: Value, index: int, at: At) -> At:
    dim = int(op.argument("dim")) % (len(at) + 1)
    chosen = op.argument("index")
    if isinstance(chosen, Value):
        raise NotAView("an index that is a tensor")
    if isinstance(chosen, int) and chosen < 0:
        chosen = chosen + value.fake.shape[dim]
    return (*at[:dim], Position((), chosen), *at[dim:])


def _unbind(op: Op, value: Value, index: int, at: At) -> At:
    dim = int(op.argument("dim", 0)) % (len(at) + 1)
    return (*at[:dim], Position((), index), *at[dim:])


def _split(op: Op, value: Value, index: int, at: At) -> At:
    dim = int(op.argument("dim", 0)) % len(at)
    start: Any = 0
    for output in op.outputs[:index]:
        start = start + output.fake.shape[dim]
    return _shift(at, dim, start)


def _repeat(op: Op, value: Value, index: int, at: At) -> At:
    shape = value.fake.shape
    own = at[len(at) - len(shape) :]
    found: list[Position] = []
    for size, position, wide in zip(shape, own, op.outputs[index].fake.shape[len(at) - len(shape) :], strict=True):
        if known_equal(size, 1):
            found.append(Position())
        elif known_equal(size, wide):
            found.append(position)
        elif full(position, wide):
            found.append(Position(split(position.flat(), size)[1]))
        else:
            raise NotAView("a slice of a repeated tensor")
    return tuple(found)


_Read = Callable[[Op, Value, int, At], At]
VIEWS: Final[dict[str, _Read]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten"), _reshape),
    **dict.fromkeys(("permute", "transpose", "t", "swapaxes"), _permute),
    **dict.fromkeys(("clone", "alias", "detach", "contiguous", "lift_fresh", "lift_fresh_copy", "lift"), _same),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk"), _split),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    "repeat": _repeat,
}
