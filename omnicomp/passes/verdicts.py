"""What checks of inputs found, remembered for as long as nobody wrote to these inputs.

A verdict on an accelerator waits for the device, so it is found once for a tensor, whatever number of graphs ask: the
layers of a model that are compiled one by one share the mask, and the memory is one for the process. On the CPU, where
arrays share memory with tensors and nothing waits, a verdict is known by the bits of the inputs, which each call
compares: that takes a fifth of a check.
"""

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from omnicomp.passes.assumptions import Assumption
from omnicomp.passes.mask_classes import MaskClass, classified, is_of, statistics
from omnicomp.safety.forks import new_lock

Verdict = bool | MaskClass

_MOST_KEPT: Final = 256
# Bytes of all copies of inputs, and how many are kept for inputs that differ in nothing but their bits.
_MOST_COPIED: Final = 1 << 26
_MOST_ALIKE: Final = 2
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def capturing() -> bool:
    """Whether a CUDA graph is being captured, in which nothing can be checked."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _remembers(value: torch.Tensor) -> bool:
    """Whether writes to a tensor are counted, and a check of it costs so much that this is worth knowing."""
    return not value.is_cpu and not value.is_inference() and value.layout is torch.strided


class _Identity:
    """A tensor as it is now, held so weakly that its memory is freed; equal only for a view of the same, unwritten.

    The counter of writes belongs to the tensor that others are views of. Neither it nor the storage can be confused
    with a later one at the same address, as weak references to both are held.
    """

    __slots__ = ("key", "root", "storage")

    def __init__(self, value: torch.Tensor) -> None:
        root = value._base if value._base is not None else value
        storage = value.untyped_storage()
        self.key = (
            id(root),
            storage._cdata,
            storage.data_ptr(),
            value._version,
            value.storage_offset(),
            tuple(value.shape),
            value.stride(),
            value.dtype,
        )
        self.root, self.storage = weakref.ref(root), StorageWeakRef(storage)

    @property
    def alive(self) -> bool:
        return self.root() is not None and not self.storage.expired()


def _identities(values: Sequence[Any]) -> list[Any] | None:
    """What the values are known by; None if nothing is remembered of them."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors or not all(map(_remembers, tensors)):
        return None
    return [_Identity(value) if isinstance(value, torch.Tensor) else value for value in values]


def _key(identities: Sequence[Any]) -> Hashable:
    return tuple(item.key if isinstance(item, _Identity) else (type(item), item) for item in identities)


def _alive(identities: Sequence[Any]) -> bool:
    return all(item.alive for item in identities if isinstance(item, _Identity))


class _Memory:
    """Verdicts of the process."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[list[Any], Verdict]] = OrderedDict()
        self._lock = new_lock()

    def recall(self, check: Hashable, identities: list[Any]) -> Verdict | None:
        key = (check, _key(identities))
        with self._lock:
            known = self._known.get(key)
            # While the tensor that asks lives, so does what was remembered of it, or that was another one.
            if known is None or not _alive(known[0]):
                return None
            self._known.move_to_end(key)
            return known[1]

    def keep(self, check: Hashable, identities: list[Any], verdict: Verdict) -> None:
        with self._lock:
            self._known[check, _key(identities)] = identities, verdict
            while len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._known.clear()


_memory: Final = _Memory()


class _Bits:
    """Verdicts of the process by what is in the inputs, for tensors on the CPU: copies of the last few."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Hashable, Hashable], list[tuple[list[torch.Tensor], Verdict]]] = OrderedDict()
        self._lock = new_lock()

    def recall(self, check: Hashable, values: Sequence[Any]) -> Verdict | None:
        with self._lock:
            known = list(self._known.get((check, _shapes(values)), ()))
        if not known:
            return None
        bits = [_bits(value) for value in values if isinstance(value, torch.Tensor)]
        for copies, verdict in known:
            if all(map(torch.equal, copies, bits)):
                return verdict
        return None

    def keep(self, check: Hashable, values: Sequence[Any], verdict: Verdict) -> None:
        bits = [_bits(value) for value in values if isinstance(value, torch.Tensor)]
        if sum(item.nbytes for item in bits) > _MOST_COPIED:
            return
        key = check, _shapes(values)
        copies = [item.clone() for item in bits]
        with self._lock:
            self._known[key] = [(copies, verdict), *self._known.get(key, [])][:_MOST_ALIKE]
            self._known.move_to_end(key)
            held = sum(item.nbytes for found in self._known.values() for copies, _ in found for item in copies)
            while held > _MOST_COPIED and len(self._known) > 1:
                _, found = self._known.popitem(last=False)
                held -= sum(item.nbytes for copies, _ in found for item in copies)

    def clear(self) -> None:
        with self._lock:
            self._known.clear()


def _shapes(values: Sequence[Any]) -> Hashable:
    """What else a verdict depends on, of inputs whose bits are equal."""
    return tuple(
        (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else (type(value), value)
        for value in values
    )


def _has_bits(values: Sequence[Any]) -> bool:
    """Whether all tensors are plain ones on the CPU."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    plain = (v.is_cpu and v.layout is torch.strided and v.itemsize in _INTEGERS and not v.is_neg() for v in tensors)
    return bool(tensors) and all(plain)


def _bits(value: torch.Tensor) -> torch.Tensor:
    """A tensor as integers, as long ones as may be, without what is only repeated."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    if value.is_contiguous() and not value.nbytes % 8 and not value.storage_offset() * value.itemsize % 8:
        return value.view(-1).view(torch.int64)
    return value.view(_INTEGERS[value.itemsize])


_bits_known: Final = _Bits()


def forget() -> None:
    """Forget all verdicts."""
    _memory.clear()
    _bits_known.clear()


class Memo:
    """The last verdicts of one graph, valid while the tensors are the same objects and were not written to.

    A write that torch does not count (through `.data`, by a collective of `torch.distributed`, by a kernel of the
    user's, by the replay of a CUDA graph that the user recorded) is not seen; neither would autograd see it.
    """

    def __init__(self) -> None:
        self._last: tuple[list[Any], Any] | None = None

    def recall(self, values: Sequence[Any]) -> Any:
        """The verdicts for these very tensors, or None if they are not known."""
        last = self._last
        if last is None or len(last[0]) != len(values):
            return None
        return last[1] if all(map(_is_same, last[0], values)) else None

    def keep(self, values: Sequence[Any], verdicts: Any) -> None:
        """Remember verdicts, unless a tensor is on the CPU or has no version counter (inference mode)."""
        identities = _identities(values)
        if identities is None:
            self._last = None
            return
        pairs = zip(identities, values, strict=True)
        self._last = (
            [(weakref.ref(v), i, v._version, v.data_ptr()) if isinstance(i, _Identity) else v for i, v in pairs],
            verdicts,
        )


def _is_same(known: Any, value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return type(known) is type(value) and bool(known == value)
    if not isinstance(known, tuple) or known[0]() is not value or known[2:] != (value._version, value.data_ptr()):
        return False
    # Another storage or shape can be put into the same object.
    key = known[1].key
    same = (key[1], key[5], key[6]) == (value.untyped_storage()._cdata, tuple(value.shape), value.stride())
    return same and not known[1].storage.expired()


class Checker:
    """Runs the checks of some assumptions; of masks it finds the class."""

    def __init__(self, assumptions: Sequence[Assumption]) -> None:
        """Prepare the checks; each has its own inputs.

        Args:
            assumptions: what to check.
        """
        self._items = [(item, item.check.forward) for item in assumptions]
        self._expected: list[MaskClass | None] = [None] * len(assumptions)
        self._previous: list[Verdict | None] = [None] * len(assumptions)

    def verdicts(self, inputs: Sequence[Sequence[Any]]) -> list[Verdict]:
        """Whether each assumption holds, or the class of its mask among those that it accepts.

        On an accelerator this waits for the device, once, unless all is remembered; a second time where a mask ceased
        to be of the class that it used to be of.

        Args:
            inputs: those of each check.

        Raises:
            Exception: whatever a check raises.
        """
        found: list[Verdict | None] = []
        read = [[*values, *item.constants] for (item, _), values in zip(self._items, inputs, strict=True)]
        known = [_identities(values) for values in read]
        with torch.no_grad():
            for (item, _), identities, values in zip(self._items, known, read, strict=True):
                if identities is not None:
                    found.append(_memory.recall(item.shared_key, identities))
                else:
                    found.append(_bits_known.recall(item.shared_key, values) if _has_bits(values) else None)
            missing = [index for index, verdict in enumerate(found) if verdict is None]
            made = {index: self._items[index][1](*inputs[index]) for index in missing}
            for index, verdict in self._judged(made).items() if missing else ():
                found[index] = verdict
                key, identities = self._items[index][0].shared_key, known[index]
                if identities is not None:
                    _memory.keep(key, identities, verdict)
                elif _has_bits(read[index]):
                    _bits_known.keep(key, read[index], verdict)
        return [self._accepted(item, verdict) for (item, _), verdict in zip(self._items, found, strict=True)]

    def _accepted(self, item: Assumption, verdict: Verdict | None) -> Verdict:
        return verdict.among(item.accepts) if isinstance(verdict, MaskClass) else bool(verdict)

    def _judged(self, made: dict[int, Any]) -> dict[int, Verdict]:
        found: dict[int, Verdict] = {}
        asked: dict[int, torch.Tensor] = {}
        wanted = list(self._expected)  # another thread may learn something else meanwhile
        for index, value in made.items():
            if not self._items[index][0].accepts:
                asked[index] = value.reshape(1)
                continue
            (visible, other), expected = value, wanted[index]
            asked[index] = (
                statistics(visible, other) if expected is None else is_of(visible, other, expected).reshape(1)
            )
        for index, numbers in _read(asked).items():
            expected = wanted[index]
            if not self._items[index][0].accepts:
                found[index] = bool(numbers[0])
            elif expected is None:
                found[index] = classified(numbers)
            elif numbers[0]:
                found[index] = expected
        again = {index: statistics(*value) for index, value in made.items() if index not in found}
        found |= {index: classified(numbers) for index, numbers in _read(again).items()}
        for index, verdict in found.items():
            # What was the same twice is expected. What changed may change again: it is looked at in full, at once.
            known = verdict if isinstance(verdict, MaskClass) and verdict.is_known else None
            self._expected[index] = known if known == self._previous[index] else None
            self._previous[index] = verdict
        return found


def _read(asked: dict[int, torch.Tensor]) -> dict[int, list[int]]:
    """The numbers of several tensors, with one wait for each device."""
    found: dict[int, list[int]] = {}
    for device in dict.fromkeys(value.device for value in asked.values()):
        own = [(index, value) for index, value in asked.items() if value.device == device]
        if len(own) == 1:
            found[own[0][0]] = own[0][1].tolist()
            continue
        numbers = torch.cat([value.to(torch.int64) for _, value in own]).tolist()
        for index, value in own:
            found[index], numbers = numbers[: value.numel()], numbers[value.numel() :]
    return found
