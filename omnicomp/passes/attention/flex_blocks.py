"""Block masks: which blocks of keys a block of queries attends to, found from the predicate of a mask.

Nothing of the size of the mask is kept: the predicate is evaluated for the elements of each block and counted, which
is one reduction to a compiler.

That costs as much as a part of the attention itself. Most masks compare something of the query with something of the
key, and either has its bounds in each block of queries or keys, which are as many values as there are queries and keys.
`Bounds` makes bounds of the whole from them by interval arithmetic (R. E. Moore, Interval Analysis, 1966): a block is
left out only if no pair of it can be kept, and called full only if every pair must be, so that such a block mask is
right wherever it is coarser than the exact one.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from omnicomp import records
from omnicomp._torch.autograd.flex import BLOCK_SIZE
from omnicomp.passes.attention.flex_values import Indices, Values
from omnicomp.passes.attention.terms import Apply, Read, Term, leaves

_ATEN: Final[Any] = torch.ops.aten
_INT: Final = {"dtype": torch.int32}
_Call = Callable[..., Any]


def grid(
    call: _Call,
    sizes: Sequence[Any],
    roles: set[int],
    rows: tuple[Any, Any],
    columns: Any,
    device: torch.device,
    number: Callable[[Any], Any],
) -> tuple[tuple[Any, ...], list[Any]]:
    """The indices of all elements of the blocks, as tensors that broadcast to [B, H, rows, 128, columns, 128].

    Args:
        call: `call(function, *args, **kwargs)` makes a tensor, or a node.
        sizes: of batch, heads, queries and keys; numbers or symbolic ones.
        roles: which of these four the mask depends on.
        rows: the first block of queries, and the one after the last.
        columns: the number of blocks of keys.
        device: where the tensors live.
        number: the value of a symbolic number, as `call` takes it.

    Returns:
        The indices of batch, head, query and key, int64; those past the end repeat the last. And masks of the queries
        and keys that are not past the end, where there may be such.
    """
    made: list[Any] = []
    valid: list[Any] = []
    for role, shape in enumerate(((-1, 1, 1, 1, 1, 1), (1, -1, 1, 1, 1, 1))):
        index = call(torch.arange, number(sizes[role] if role in roles else 1), device=device)
        made.append(call(torch.reshape, index, shape))
    spans = ((rows[0] * BLOCK_SIZE, rows[1] * BLOCK_SIZE), (0, columns * BLOCK_SIZE))
    shapes = ((1, 1, -1, BLOCK_SIZE, 1, 1), (1, 1, 1, 1, -1, BLOCK_SIZE))
    for role, (start, end), shape in zip((2, 3), spans, shapes, strict=True):
        size = sizes[role]
        index = call(torch.reshape, call(torch.arange, number(start), number(end), device=device), shape)
        if role not in roles:
            # The mask is the same for all queries, or for all keys: no block differs from another in that.
            index = call(torch.reshape, call(torch.arange, 1, device=device), (1, 1, 1, 1, 1, 1))
        elif not (isinstance(size, int) and size % BLOCK_SIZE == 0):
            valid.append(call(torch.lt, index, number(size)))
            index = call(torch.clamp_max, index, number(size - 1))
        made.append(index)
    return tuple(made), valid


def find_blocks(call: _Call, keep: Any, valid: Sequence[Any]) -> tuple[Any, Any]:
    """Which blocks have an element that is kept, and which have no other.

    Args:
        call: as for `grid`.
        keep: bool, whether an element is kept; broadcasts to [B, H, rows, 128, columns, 128].
        valid: from `grid`.

    Returns:
        Two bool tensors that broadcast to [B, H, rows, columns]. As in torch's own block masks, a block that reaches
        past the end of the sequences is never full.
    """
    for each in valid:
        keep = call(torch.logical_and, keep, each)
    kept = call(torch.sum, keep, (3, 5), **_INT)
    dropped = call(torch.sum, call(torch.logical_not, keep), (3, 5), **_INT)
    return call(torch.gt, kept, 0), call(torch.eq, dropped, 0)


def ordered(
    call: _Call,
    some: Any,
    full: Any,
    shape: Sequence[Any],
    device: torch.device,
    number: Callable[[Any], Any],
    *,
    training: bool,
) -> tuple[Any, ...]:
    """The eight tensors of a block mask, in the order of `BlockMask`; those of the backward only in training.

    Args:
        call: as for `grid`.
        some: bool, blocks with an element that is kept; broadcasts to `shape`.
        full: bool, blocks without any other.
        shape: batch, heads, number of blocks of queries and of keys; numbers or symbolic ones.
        device: where the tensors live.
        number: the value of a symbolic number, as `call` takes it.
        training: whether there is a backward.

    Returns:
        For partial, then for full blocks: int32 numbers of blocks [B, H, rows], and their indices [B, H, rows,
        columns], ascending, followed by those of all other blocks; then the same for each block of keys.
    """

    def lists(blocks: Any, shape: Sequence[Any]) -> list[Any]:
        count, indices = _lists(call, blocks, number(shape[-1]), device)
        return [_as_contiguous(call, count, shape[:-1], number), _as_contiguous(call, indices, shape, number)]

    some, full = (call(_ATEN.expand.default, blocks, [number(n) for n in shape]) for blocks in (some, full))
    partial = call(torch.logical_and, some, call(torch.logical_not, full))
    found = [*lists(partial, shape), *lists(full, shape)]
    if not training:
        return (*found, None, None, None, None)
    turned = (*shape[:-2], shape[-1], shape[-2])
    return (*found, *(each for b in (partial, full) for each in lists(call(torch.transpose, b, -2, -1), turned)))


def are_contiguous(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether the blocks of each row, partial or full, are neighbours, in all lists of a block mask."""
    for count, indices in zip(tensors[::2], tensors[1::2], strict=True):
        if count is not None and indices is not None:
            listed = torch.arange(indices.shape[-1], device=indices.device) < count.unsqueeze(-1)
            if not (~listed[..., 1:] | (indices.diff(dim=-1) == 1)).all():
                return False
    return True


def one_block(device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a mask that drops nothing: one block as large as the sequences."""
    count = torch.ones((1, 1, 1), dtype=torch.int32, device=device)
    first = torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=device)
    return count, first, None, None, count, first, None, None


def _lists(call: _Call, blocks: Any, columns: Any, device: torch.device) -> tuple[Any, Any]:
    """For each row the number of blocks, and a permutation of all that begins with them.

    A block's place is the number of those before it, and the list at a place is the block that has it: two sums,
    which a compiler fuses, where a sort would be a call.
    """
    index = call(torch.arange, columns, device=device, **_INT)
    column = call(torch.unsqueeze, index, -1)
    count = call(torch.sum, blocks, -1, **_INT)
    before = call(torch.logical_and, call(torch.unsqueeze, blocks, -2), call(torch.lt, index, column))
    rank = call(torch.sum, before, -1, **_INT)
    behind = call(torch.sub, call(torch.add, call(torch.unsqueeze, count, -1), index), rank)
    place = call(torch.where, blocks, rank, behind)
    there = call(torch.eq, call(torch.unsqueeze, place, -2), column)
    return count, call(torch.sum, call(torch.mul, there, index), -1, **_INT)


def _as_contiguous(call: _Call, tensor: Any, shape: Sequence[Any], number: Callable[[Any], Any]) -> Any:
    """A tensor with the strides of a contiguous one, also in dimensions of size 1.

    The kernels multiply the place in the batch by the stride of the heads, and a compiler is free to give a dimension
    of size 1 any stride. It keeps to those that `as_strided` says.
    """
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    plain = call(_ATEN.contiguous.default, tensor)
    return call(_ATEN.as_strided.default, plain, [number(n) for n in shape], [number(n) for n in strides])


_WITHIN_BLOCKS: Final = (3, 5)  # dimensions of [B, H, rows, 128, columns, 128]
_COMPARISONS: Final = ("eq", "ne", "lt", "le", "gt", "ge")
_Pair = tuple[Any, Any]


class Unbounded(Exception):
    """Part of the predicate mixes queries and keys in a way that has no bounds here."""


@records.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of terms over the blocks of an attention, each a tensor that broadcasts to [B, H, rows, columns]."""

    call: Callable[..., Any]  # `call(function, *args, **kwargs)` makes a tensor, or a node
    indices: Indices  # where the axes of the terms lie
    values: Values  # makes the values of terms, which broadcast to [B, H, rows, 128, columns, 128]
    number: Callable[[Any], Any]  # the value of a symbolic number, as `call` takes it
    device: torch.device  # where the tensors live

    def blocks(self, keep: Term, valid: Sequence[Any]) -> _Pair:
        """Which blocks may have an element that is kept, and which can have no other.

        Args:
            keep: bool.
            valid: masks of the queries and keys that are not past the end.

        Returns:
            Two bools for each block. As in torch's own block masks, one that reaches past the end is never full.

        Raises:
            Unbounded: the predicate has to be evaluated for each pair.
        """
        some, full = self._truth(keep)
        for each in valid:
            full = self.call(torch.logical_and, full, find_blocks(self.call, each, ())[1])
        return some, full

    def _truth(self, term: Term) -> _Pair:
        """Whether a bool may be true in a block, and whether it must be."""
        if term.dtype != torch.bool:
            raise Unbounded
        if not self._mixes(term):
            return find_blocks(self.call, self._value(term), ())
        if not isinstance(term, Apply):
            raise Unbounded
        if term.op in _COMPARISONS:
            return self._comparison(term)
        if term.op == "not":
            return self._not(self._truth(term.args[0]))
        if term.op in ("and", "or"):
            function = torch.logical_and if term.op == "and" else torch.logical_or
            (some, full), (other_some, other_full) = map(self._truth, term.args)
            return self.call(function, some, other_some), self.call(function, full, other_full)
        raise Unbounded

    def _comparison(self, term: Apply) -> _Pair:
        left, right = map(self._range, term.args)
        if term.op in ("gt", "ge"):
            left, right = right, left
        (low, high), (other_low, other_high) = left, right
        if term.op in ("lt", "gt"):
            return self.call(torch.lt, low, other_high), self.call(torch.lt, high, other_low)
        if term.op in ("le", "ge"):
            return self.call(torch.le, low, other_high), self.call(torch.le, high, other_low)

        def both(function: Callable[..., Any]) -> Any:
            one, other = self.call(function, low, other_high), self.call(function, other_low, high)
            return self.call(torch.logical_and, one, other)

        # Two ranges share a value if neither lies above the other. They are one value, the same, if neither begins
        # below the other's end.
        equal = both(torch.le), both(torch.ge)
        return equal if term.op == "eq" else self._not(equal)

    def _range(self, term: Term) -> _Pair:
        """The least and the greatest value of an integer in a block."""
        # No float: one that is not a number has no place among the others.
        if term.dtype.is_floating_point or term.dtype.is_complex or term.dtype == torch.bool:
            raise Unbounded
        if not self._mixes(term):
            value = self._value(term)
            return self.call(torch.amin, value, _WITHIN_BLOCKS), self.call(torch.amax, value, _WITHIN_BLOCKS)
        # What is read may be as large as its dtype allows, and its sums may overflow in some pairs; indices are small.
        if not isinstance(term, Apply) or any(isinstance(leaf, Read) for leaf in leaves(term)):
            raise Unbounded
        if term.op == "abs":
            low, high = self._range(term.args[0])
            least = self.call(torch.clamp_min, self.call(torch.maximum, low, self.call(torch.neg, high)), 0)
            return least, self.call(torch.maximum, high, self.call(torch.neg, low))
        if term.op not in ("add", "sub"):
            raise Unbounded
        (low, high), (other_low, other_high) = map(self._range, term.args)
        if term.op == "add":
            return self.call(torch.add, low, other_low), self.call(torch.add, high, other_high)
        return self.call(torch.sub, low, other_high), self.call(torch.sub, high, other_low)

    def _mixes(self, term: Term) -> bool:
        return self.indices.roles(term) >= {2, 3}

    def _value(self, term: Term) -> Any:
        """The values of a term; of a number, too, a tensor."""
        value = self.values(term)
        if isinstance(value, int | float | torch.SymInt):
            return self.call(torch.full, (1,) * 6, self.number(value), dtype=term.dtype, device=self.device)
        return value

    def _not(self, pair: _Pair) -> _Pair:
        some, full = pair
        return self.call(torch.logical_not, full), self.call(torch.logical_not, some)
