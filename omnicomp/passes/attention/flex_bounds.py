"""Block masks from bounds: what a block of the mask may hold, from the least and the greatest value of its parts.

To evaluate a predicate for every pair of a query and a key costs as much as a part of the attention itself. Most masks
compare something of the query with something of the key, and either has its bounds in each block of queries or keys,
which are as many values as there are queries and keys. Interval arithmetic (R. E. Moore, Interval Analysis, 1966) makes
bounds of the whole from them: a block is left out only if no pair of it can be kept, and called full only if every
pair must be, so a block mask from bounds is right wherever it is coarser than the exact one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from omnicomp.passes.attention.flex_blocks import find_blocks
from omnicomp.passes.attention.flex_values import Indices, Values
from omnicomp.passes.attention.terms import Apply, Read, Term, leaves

__all__ = ["Bounds", "Unbounded"]

_WITHIN_BLOCKS: Final = (3, 5)  # dimensions of [B, H, rows, 128, columns, 128]
_COMPARISONS: Final = ("eq", "ne", "lt", "le", "gt", "ge")
_Pair = tuple[Any, Any]


class Unbounded(Exception):
    """Part of the predicate mixes queries and keys in a way that has no bounds here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of terms over the blocks of an attention, each a tensor that broadcasts to [B, H, rows, columns].

    Attributes:
        call: `call(function, *args, **kwargs)` makes a tensor, or a node.
        indices: where the axes of the terms lie.
        values: makes the values of terms, which broadcast to [B, H, rows, 128, columns, 128].
        number: the value of a symbolic number, as `call` takes it.
        device: where the tensors live.
    """

    call: Callable[..., Any]
    indices: Indices
    values: Values
    number: Callable[[Any], Any]
    device: torch.device

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
