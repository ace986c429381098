"""The class of an attention mask by its values: which keys each query sees, found by reductions on the device.

A mask that is an input says nothing until it is looked at. `statistics` reduces it to a few integers, which one copy
brings to the host for any number of masks; `classified` says which class they are of; `is_of` asks for one class only,
which costs less. On CUDA a kernel of Triton has all of them from one pass over the mask.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F

from omnicomp._torch.inductor.triton_ops import launch_cached, usable
from omnicomp.errors import first_line
from omnicomp.timeline import Reason

_FAR: Final = 2**30
# What a mask adds to a score that a query sees is more: far from what swallows scores, in any dtype.
STILL_SEEN: Final = -1e3
_MOST_KEPT: Final = 2**24
# How many of the statistics are the least of all rows, and how many are sums.
_LEAST: Final = 10
_SUMS: Final = 3
# A mask has short runs where a kernel that skips blocks of keys, of this size, visits at most such a share of them.
VISITED: Final = 0.5
BLOCK: Final = 128
# Dtypes that the kernel reads as they are, the rows and keys that a program has at a time, and programs at most.
_READ: Final = (torch.float32, torch.bfloat16, torch.float16)
_FEW: Final = 64
_FEW_ROWS: Final = (1, 2048)
_MANY_ROWS: Final = (8, 256)
_PROGRAMS: Final = 512
_unusable: Final[list[Reason]] = []
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
    | `runs` | data says so; it is one of a few keys in a run, such as a document; the first of all if `length` is 1 |
    | `first` | data says so; each query sees the first key |
    | `rows` | data says so; each query sees a key |
    | `general` | data says so |
    """

    kind: str  # one of the above
    left: int | None = None  # see above
    right: int | None = None  # see above
    length: int | None = None  # see above

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
        named = {"first": "the first key is seen", "rows": "no row is empty", "runs": "short runs of keys"}
        return named.get(self.kind, self.kind)

    @property
    def is_known(self) -> bool:
        """Whether the class says all of the mask, so that nothing need be read of it."""
        return self.kind in _STRONG

    def among(self, accepted: frozenset[str]) -> "MaskClass":
        """The most that can be said in classes of the accepted kinds."""
        kinds = [self.kind]
        starts_open = self.kind == "band" and self.left is None
        if self.kind in ("full", "causal", "prefix") or starts_open or (self.kind == "runs" and self.length):
            kinds.append("first")
        if self.kind != "general":
            kinds.append("rows")
        kind = next((kind for kind in kinds if kind in accepted), "general")
        return self if kind == self.kind and self.is_known else MaskClass(kind=kind)


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
        seen = value > STILL_SEEN
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

    Of all rows, the least: number of keys seen; whether the first is seen; whether the keys seen are one run; whether
    the mask only hides; last key seen; distance of it from the query, where it is not the last of all; distance of the
    query from the first key seen, where that is not the first of all. The numbers of keys, queries and rows. The sums
    of the last key seen, of the first, and of the blocks of keys that rows beside each other see something of.

    Args:
        visible: a bool tensor (batch, heads, queries, keys) of the keys that each query sees; a size that does not
            matter may be 1.
        other: a bool of no dimensions: whether the mask does more to scores than hiding them; None if it does not.

    Returns:
        An int64 tensor of one dimension, for `classified`; of two where each column is of some rows.
    """
    mask = _four(visible)
    queries, keys = mask.shape[-2:]
    if mask.numel() == 0:
        return torch.zeros(_LEAST + _SUMS, dtype=torch.int64, device=mask.device)
    only = mask.new_ones(()) if other is None else 1 - other.to(torch.uint8)
    count = mask.sum(-1, dtype=torch.int32)
    if queries == 1:
        none = count.new_zeros(())
        found = [count.min(), mask[..., 0].amin(), none, only, none, none, none, none, none, none]
    else:
        start = mask.argmax(-1)
        changes = mask[..., 1:].bitwise_xor(mask[..., :-1]).sum(-1, dtype=torch.int32)
        # A run of keys is entered and left once, at the edges as well.
        runs = changes + mask[..., 0] + mask[..., -1]
        end, query = start + count - 1, torch.arange(queries, device=mask.device)
        found = [
            count.min(),
            mask[..., 0].amin(),
            (runs == 2).all(),
            only,
            end.min(),
            torch.where(end < keys - 1, end - query, _FAR).min(),
            torch.where(start > 0, query - start, _FAR).min(),
            end.sum(),
            start.sum(),
            _visited(start, end),
        ]
    found[7:7] = [count.new_full((), size) for size in (keys, queries, count.numel())]
    return torch.stack([item.to(torch.int64) for item in found])


def _tile(rows: int) -> tuple[int, int]:
    """How many rows and keys a program of the kernel has at a time."""
    return _FEW_ROWS if rows <= _FEW else _MANY_ROWS


def _visited(start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """How many blocks of keys lie between the first and the last key that the rows of a tile see, in all tiles."""
    size = _tile(start.numel())[0]
    tiles = [F.pad(rows.flatten(), (0, -rows.numel() % size), value=far) for rows, far in ((start, _FAR), (end, -1))]
    first, last = tiles[0].view(-1, size).amin(-1), tiles[1].view(-1, size).amax(-1)
    return (last // BLOCK - first // BLOCK + 1).sum()


def read_once(parts: MaskParts) -> bool:
    """Whether the kernel takes a mask, so that all that `statistics` says takes as long as a part of it."""
    keep, added, _ = parts
    given = [*([] if keep is None else [keep]), *added]
    if _unusable or len(added) > 1 or not all(usable(tensor) and tensor.dim() == 4 for tensor in given):
        return False
    if len({tensor.device for tensor in given}) > 1 or not all(tensor.dtype in _READ for tensor in added):
        return False
    *outer, keys = _broadcast_shape(given)
    return 0 < math.prod(outer) < _FAR and 0 < keys < _FAR


def _broadcast_shape(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The shape that tensors are broadcast to; `torch.broadcast_shapes` is written in Python, and takes 12 to 14 us."""
    return [next((size for size in sizes if size != 1), 1) for sizes in zip(*(t.shape for t in tensors), strict=True)]


@functools.cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    """A number as a comparison with a tensor of a dtype would round it."""
    return float(torch.tensor(number, dtype=dtype, device="cpu"))


def reduced(parts: MaskParts) -> torch.Tensor:
    """`statistics` of a mask; those of the kernel where it takes the mask, one column for each program."""
    if read_once(parts):
        try:
            return _launched(*parts)
        except Exception as error:  # noqa: BLE001 - becomes a reason in the timeline; torch's operators take its place
            found = Reason(
                code="check_failed",
                by="speculation",
                sentence=f"the kernel that reads masks failed; torch's operators take its place: {first_line(error)}",
                observed=type(error).__name__,
                lever="install the version of Triton that belongs to this torch, or report the error",
            )
            _unusable.append(found)
    return statistics(*shown(parts))


def unusable() -> Reason | None:
    """Why masks are not read by the kernel in this process, if it failed."""
    return _unusable[0] if _unusable else None


def joined(found: torch.Tensor) -> list[int]:
    """What `classified` takes, of `statistics` on the host."""
    if found.dim() == 1:
        return found.tolist()
    return [*found[:_LEAST].amin(1).tolist(), *found[_LEAST:].sum(1).tolist()]


def _launched(keep: torch.Tensor | None, added: Sequence[torch.Tensor], hides: Sequence[float]) -> torch.Tensor:
    from omnicomp.passes.kernels import masks  # needs Triton

    kernel: Any = masks.statistics
    number = added[0] if added else None
    given = [tensor for tensor in (keep, number) if tensor is not None]
    *outer, queries, keys = _broadcast_shape(given)
    strides = [
        [step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
        for tensor in (keep if keep is not None else given[0], given[-1])
    ]
    # What is only repeated is read once.
    batch, heads = (size if any(own[dim] for own in strides) else 1 for dim, size in enumerate(outer))
    rows = batch * heads * queries
    tile = _tile(rows)
    programs = min(-(-rows // tile[0]), _PROGRAMS)
    found = given[0].new_empty((_LEAST + _SUMS, programs), dtype=torch.int64)
    arguments = (
        keep if keep is None else keep.view(torch.uint8),
        number,
        found,
        heads,
        queries,
        keys,
        rows,
        _rounded(hides[0], number.dtype) if number is not None else 0.0,
        *strides[0],
        *strides[1],
        keep is not None,
        number is not None,
        STILL_SEEN,
        _FAR,
        BLOCK,
        *tile,
    )
    with torch.cuda.device_of(found):
        launch_cached(kernel, programs, arguments)
    return found


def classified(numbers: Sequence[int]) -> MaskClass:
    """The class of a mask, from its `statistics`."""
    fewest, sees_first, one_run, only_hides, shortest, right, left, keys, queries, rows, ends, starts, seen = numbers
    if fewest <= 0:
        return GENERAL
    weak = MaskClass(kind="first" if sees_first else "rows")
    if not only_hides:
        return weak
    if fewest == keys:
        return MaskClass(kind="full")
    if not one_run or queries == 1:
        return weak
    if seen <= VISITED * -(-rows // _tile(rows)[0]) * -(-keys // BLOCK):
        weak = MaskClass(kind="runs", length=1 if sees_first else None)
    # No row ends before its distance from the query says, and none starts behind: the sums tell whether each is there.
    has_right, has_left = right != _FAR, left != _FAR
    times = rows // queries
    if not has_left or starts == times * _total(queries, -left, 0, keys):
        if not has_right or ends == times * _total(queries, right, right, keys - 1):
            if not has_left and right == 0:
                return MaskClass(kind="causal")
            return MaskClass(kind="band", left=left if has_left else None, right=right if has_right else None)
    rises = shortest < min(queries - 1 + right, keys - 2)
    if has_left or not rises or ends != times * _total(queries, right, shortest, keys - 1):
        return weak
    return MaskClass(kind="prefix", right=right, length=shortest + 1)


def _total(queries: int, offset: int, least: int, most: int) -> int:
    """The sum of `query + offset` over all queries, each no less than `least` and no more than `most`."""
    low = min(max(least - offset, 0), queries)
    high = min(max(most - offset, low), queries)
    return low * least + (high - low) * (2 * offset + low + high - 1) // 2 + (queries - high) * most


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
