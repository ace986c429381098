"""The class of an attention mask by its values: which keys each query sees, found by reductions on the device.

A mask that is an input says nothing until it is looked at. `statistics` reduces it to a few integers, which one copy
brings to the host for any number of masks; `classified` says which class they are of; `is_of` asks for one class only,
which costs less.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Final

import torch

_FAR: Final = 2**40
# What a mask adds to a score that a query sees is no less: far from what swallows scores, in any dtype.
_STILL_SEEN: Final = -1e3
_MOST_KEPT: Final = 2**24
_STRONG: Final = frozenset(("full", "causal", "band", "prefix"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskClass:
    """What a mask is, for the sizes that it has.

    | kind | a query q sees a key k if |
    |---|---|
    | `full` | always |
    | `causal` | `k <= q` |
    | `band` | `q - left <= k <= q + right`; a side that is None is open |
    | `prefix` | `k <= q + right` or `k < length` |
    | `first` | data says so; each query sees the first key |
    | `rows` | data says so; each query sees a key |
    | `general` | data says so |

    Attributes:
        kind: one of the above.
        left: see above.
        right: see above.
        length: see above.
    """

    kind: str
    left: int | None = None
    right: int | None = None
    length: int | None = None

    def __str__(self) -> str:
        if self.kind == "band":
            left, right = self.left, self.right
            if left is None:
                return f"causal, offset {right}"
            if right == 0:
                return f"sliding window of {left + 1}"
            return f"window of {left} before" + (f" and {right} after" if right is not None else "")
        if self.kind == "prefix":
            return f"prefix of {self.length}"
        return {"first": "the first key is seen", "rows": "no row is empty"}.get(self.kind, self.kind)

    @property
    def is_known(self) -> bool:
        """Whether the class says all of the mask, so that nothing need be read of it."""
        return self.kind in _STRONG

    def among(self, accepted: frozenset[str]) -> "MaskClass":
        """The most that can be said in classes of the accepted kinds."""
        kinds = [self.kind]
        if self.kind in ("full", "causal", "prefix") or (self.kind == "band" and self.left is None):
            kinds.append("first")
        if self.kind != "general":
            kinds.append("rows")
        kind = next((kind for kind in kinds if kind in accepted), "general")
        return self if kind == self.kind else MaskClass(kind=kind)


GENERAL: Final = MaskClass(kind="general")


MaskParts = tuple[torch.Tensor | None, Sequence[torch.Tensor], Sequence[float]]
"""What makes a mask: which keys a query sees, bool, (batch, heads, queries, keys), each maybe 1, or None for all; what
is added to the scores as well, of floating-point dtypes and likewise; and for each of these the number up to which it
hides a key."""


def shown(parts: MaskParts) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The keys that each query sees, and whether the mask does more to scores than hiding them, for `statistics`."""
    visible, added, hides = parts
    other: torch.Tensor | None = None
    for value, limit in zip(added, hides, strict=True):
        seen = value > _STILL_SEEN
        visible = seen if visible is None else visible & seen
        # A CPU is slow at looking for a true bool, and fast at looking for a byte.
        more = ((value != 0) > (value <= limit)).view(torch.uint8).any()
        other = more if other is None else other | more
    assert visible is not None
    return visible, other


def _four(mask: torch.Tensor) -> torch.Tensor:
    """The mask without what is only repeated, bools as numbers of 8 bits."""
    for dim, (size, stride) in enumerate(zip(mask.shape[:-1], mask.stride()[:-1], strict=True)):
        if stride == 0 and size > 1 and dim < mask.dim() - 2:
            mask = mask.narrow(dim, 0, 1)
    return mask.view(torch.uint8) if mask.dtype is torch.bool else mask


def statistics(visible: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """Numbers that tell the class of a mask.

    Args:
        visible: a bool tensor (batch, heads, queries, keys) of the keys that each query sees; a size that does not
            matter may be 1.
        other: a bool of no dimensions: whether the mask does more to scores than hiding them; None if it does not.

    Returns:
        An int64 tensor of one dimension, for `classified`.
    """
    mask = _four(visible)
    queries, keys = mask.shape[-2:]
    if mask.numel() == 0:
        return torch.zeros(4, dtype=torch.int64, device=mask.device)
    other = mask.new_zeros(()) if other is None else other
    count = mask.sum(-1, dtype=torch.int32)
    if queries == 1:
        return torch.stack(
            [n.to(torch.int64) for n in (count.min(), mask[..., 0].amin(), other, count.new_full((), keys))]
        )
    first = mask.argmax(-1)
    changes = mask[..., 1:].bitwise_xor(mask[..., :-1]).sum(-1, dtype=torch.int32)
    # A run of keys is entered and left once, at the edges as well.
    runs = changes + mask[..., 0] + mask[..., -1]
    count, first, runs = (item.reshape(-1, queries) for item in (count, first, runs))
    last = first + count - 1
    same = (first == first[:1]) & (last == last[:1]) & (runs == 2)
    start, end, query = first[0], last[0], torch.arange(queries, device=mask.device)
    inner, cut = end < keys - 1, start > 0
    shortest = end.min()
    above = inner & (end > shortest)
    least = (
        count.min(),
        mask[..., 0].amin(),
        same.all(),
        torch.where(inner, end - query, _FAR).min(),
        torch.where(inner, end - query, -_FAR).max(),
        torch.where(inner, _FAR, query).min(),
        torch.where(cut, query - start, _FAR).min(),
        torch.where(cut, query - start, -_FAR).max(),
        torch.where(cut, -_FAR, query).max(),
        shortest,
        torch.where(above, end - query, _FAR).min(),
        torch.where(above, end - query, -_FAR).max(),
        torch.where(end == shortest, query, -_FAR).max(),
        other,
    )
    sizes = torch.full((1,), keys, dtype=torch.int64, device=mask.device)
    return torch.cat([torch.stack([item.to(torch.int64) for item in least]), sizes])


def classified(numbers: Sequence[int]) -> MaskClass:
    """The class of a mask, from its `statistics`."""
    fewest, sees_first, *bands, other, keys = numbers
    if fewest <= 0:
        return GENERAL
    weak = MaskClass(kind="first" if sees_first else "rows")
    if other:
        return weak
    if fewest == keys:
        return MaskClass(kind="full")
    if not bands or not bands[0]:
        return weak
    right, most_right, end, left, most_left, start, shortest, offset, most_offset, plateau = bands[1:]
    has_right, has_left = right != _FAR, left != _FAR
    bounded = not has_left or (left == most_left and start <= left)
    if bounded and (not has_right or (right == most_right and end + right >= keys - 1)):
        if not has_left and right == 0:
            return MaskClass(kind="causal")
        return MaskClass(kind="band", left=left if has_left else None, right=right if has_right else None)
    if has_left or offset != most_offset or plateau + offset > shortest or end + offset < keys - 1:
        return weak
    return MaskClass(kind="prefix", right=offset, length=shortest + 1)


def is_of(parts: MaskParts, wanted: MaskClass) -> torch.Tensor:
    """Whether a mask is of a class that says all of it, as a number of no dimensions."""
    keep, added, hides = parts
    alone = keep is None and len(added) == 1  # what most programs have: looked at as it is, in fewer steps
    visible, other = (added[0], None) if alone else shown(parts)
    mask = _four(visible)
    queries, keys = mask.shape[-2:]
    device = mask.device
    if mask.numel() == 0:
        return torch.zeros((), dtype=torch.uint8, device=device)
    expected: torch.Tensor | None = None
    if wanted.kind != "full":
        # The pattern costs more than the comparison on a CPU, whose memory is large.
        make = _kept_pattern if device.type == "cpu" and queries * keys <= _MOST_KEPT else _pattern
        expected = make(queries, keys, wanted, device)
    if alone:
        holds = mask == 0
        if expected is not None:
            holds = torch.where(expected.view(torch.bool), holds, mask <= hides[0])
    else:
        holds = mask == (1 if expected is None else expected)
    found = holds.view(torch.uint8).amin()
    return found if other is None else found & ~other.to(torch.bool)


def _pattern(queries: int, keys: int, wanted: MaskClass, device: torch.device) -> torch.Tensor:
    made = torch.ones(queries, keys, dtype=torch.uint8, device=device)
    if wanted.kind != "band" or wanted.right is not None:
        made = made.tril(wanted.right or 0)
    if wanted.left is not None:
        made = made.triu(-wanted.left)
    if wanted.length is not None:
        made[:, : wanted.length] = 1
    return made


_kept_pattern = functools.lru_cache(maxsize=4)(_pattern)


def usual_name(visible: torch.Tensor) -> str:
    """A name for people of a mask that only data tells: `right padding`, `causal and padding`, `documents`."""
    mask = _four(visible)
    queries, keys = mask.shape[-2:]
    if mask.numel() == 0:
        return ""
    count = mask.sum(-1, dtype=torch.int32)
    runs = mask[..., 1:].bitwise_xor(mask[..., :-1]).sum(-1, dtype=torch.int32) + mask[..., 0] + mask[..., -1]
    first, count, runs = (item.reshape(-1, queries) for item in (mask.argmax(-1), count, runs))
    seen, last = count > 0, first + count - 1
    if not bool(((runs == 2) | ~seen).all()) or not bool(seen.any()):
        return ""
    q = torch.arange(queries, device=mask.device).expand_as(first)
    start, end = (torch.where(seen, item, far) for item, far in ((first, keys), (last, -1)))
    low, high = start.amin(-1, keepdim=True), end.amax(-1, keepdim=True)
    # What is cut at the left and the right of a query's own index, beside what is cut for all queries of a sequence.
    cut, stopped = seen & (start > low), seen & (end < high)
    left = int((q - start)[cut].max()) if bool(cut.any()) else None
    right = int((end - q)[stopped].max()) if bool(stopped.any()) else None
    begins = low.expand_as(q) if left is None else torch.maximum(q - left, low)
    ends = high.expand_as(q) if right is None else torch.minimum(q + right, high)
    if bool(torch.where(begins <= ends, seen & (start == begins) & (end == ends), ~seen).all()):
        sides = [side for side, cuts in (("left", low > 0), ("right", high < keys - 1)) if bool(cuts.any())]
        padding = [f"{sides[0]} padding" if len(sides) == 1 else "padding"] if sides else []
        kind = "causal" if left is None and right == 0 else "band"
        band = [] if left is None and right is None else [str(MaskClass(kind=kind, left=left, right=right))]
        return " and ".join([*band, *padding])
    if queries != keys:
        return ""
    same = first.gather(1, first) == first
    for name, wanted in (("documents", last.gather(1, first)), ("causal documents", q)):
        if bool((same & (last == wanted) | ~seen).all()):
            return name if bool(seen.all()) else f"{name} and padding"
    return ""
