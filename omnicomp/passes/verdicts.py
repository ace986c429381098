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
from omnicomp.passes.mask_classes import MaskClass, classified, is_of, joined, read_once, reduced
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
    """What was found for the inputs of the last call: valid for the same tensors, while nobody wrote to them.

    A write that torch does not count (through `.data`, by a collective of `torch.distributed`, by a kernel of the
    user's, by the replay of a CUDA graph that the user recorded) is not seen; neither would autograd see it.
    """

    def __init__(self, positions: Sequence[int], constants: Sequence[torch.Tensor] = ()) -> None:
        """Prepare.

        Args:
            positions: of the inputs that matter.
            constants: tensors that matter as well, and are no inputs.
        """
        self._positions, self._constants = tuple(positions), tuple(constants)
        self._last: tuple[list[tuple[Any, ...]], list[tuple[int, Any]], Any] | None = None

    def recall(self, args: Sequence[Any]) -> Any:
        """What was found for these very inputs, or None."""
        last = self._last
        if last is None:
            return None
        tensors, others, found = last
        if self._constants:
            args = (*args, *self._constants)
        # In a program whose layers are compiled one by one, each layer's call comes along here.
        for index, known, version, pointer, storage, shape, strides, _ in tensors:
            value = args[index]
            if (
                known() is not value
                or value._version != version
                or value.data_ptr() != pointer
                # Another storage or shape can be put into the same object.
                or value.untyped_storage()._cdata != storage
                or value.shape != shape
                or value.stride() != strides
            ):
                return None
        for index, known in others:
            if type(args[index]) is not type(known) or args[index] != known:
                return None
        return found

    def keep(self, args: Sequence[Any], found: Any) -> None:
        """Remember something, unless a tensor is on the CPU or has no version counter (inference mode)."""
        args = (*args, *self._constants)
        indices = [*self._positions, *range(len(args) - len(self._constants), len(args))]
        identities = _identities([args[index] for index in indices])
        if identities is None:
            self._last = None
            return
        tensors: list[tuple[Any, ...]] = []
        others: list[tuple[int, Any]] = []
        for index, identity in zip(indices, identities, strict=True):
            if not isinstance(identity, _Identity):
                others.append((index, identity))
                continue
            value = args[index]
            # The address of a storage is not used again while its identity holds a weak reference.
            place = value._version, value.data_ptr(), value.untyped_storage()._cdata
            tensors.append((index, weakref.ref(value), *place, value.shape, value.stride(), identity))
        self._last = tensors, others, found

    def clear(self) -> None:
        """Forget it."""
        self._last = None


class Checker:
    """Runs the checks of some assumptions; of masks it finds the class."""

    def __init__(self, assumptions: Sequence[Assumption]) -> None:
        """Prepare the checks; each has its own inputs.

        Args:
            assumptions: what to check.
        """
        self.items = [(item, item.check.forward) for item in assumptions]
        self.expected: list[Verdict | None] = [None] * len(assumptions)
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
        return self.begin(inputs).verdicts()

    def begin(self, inputs: Sequence[Sequence[Any]]) -> "Look":
        """Recall what is known of the inputs; see `verdicts`."""
        return Look(self, inputs)

    def learn(self, found: dict[int, Verdict]) -> None:
        """Expect what was the same twice. What changed may change again: it is looked at in full, at once."""
        for index, verdict in found.items():
            self.expected[index] = verdict if verdict == self._previous[index] else None
            self._previous[index] = verdict


class Look:
    """What is known of the inputs of a call, what is to be expected of the rest, and what the device says of it."""

    def __init__(self, checker: Checker, inputs: Sequence[Sequence[Any]]) -> None:
        """Recall what is known; the device is asked for the rest when the verdicts are wanted."""
        self._checker, self._inputs = checker, inputs
        items = checker.items
        self._read = [[*values, *item.constants] for (item, _), values in zip(items, inputs, strict=True)]
        self._identities = [_identities(values) for values in self._read]
        self._found = [
            _memory.recall(item.shared_key, identities)
            if identities is not None
            else (_bits_known.recall(item.shared_key, values) if _has_bits(values) else None)
            for (item, _), identities, values in zip(items, self._identities, self._read, strict=True)
        ]
        self._missing = [index for index, verdict in enumerate(self._found) if verdict is None]
        self._wanted = list(checker.expected)  # another thread may learn something else meanwhile
        self._whole: set[int] = set()  # what costs no more to be looked at in full
        self._made: dict[int, Any] = {}
        asked = (value for index in self._missing for value in self._read[index] if isinstance(value, torch.Tensor))
        self._is_waited_for = any(map(_waits, asked))
        self._sent: _Sent | None = None

    @property
    def guess(self) -> list[Verdict] | None:
        """What the verdicts will be if nothing changed; None if that is not known, or nothing is waited for."""
        if not self._is_waited_for:
            return None
        likely = [self._wanted[i] if found is None else found for i, found in enumerate(self._found)]
        known = [verdict for verdict in likely if verdict is not None]
        return self._accepted(known) if len(known) == len(likely) else None

    def ask(self) -> None:
        """Have the device look at the inputs as they are now, without waiting for it.

        Raises:
            Exception: whatever a check raises.
        """
        with torch.no_grad():
            items = self._checker.items
            self._made = {index: items[index][1](*self._inputs[index]) for index in self._missing}
            self._sent = _sent({index: self._asked(index, value) for index, value in self._made.items()})

    def verdicts(self) -> list[Verdict]:
        """Those of `Checker.verdicts`; waits for the device, which is asked now unless it was before."""
        if self._missing:
            if self._sent is None:
                self.ask()
            assert self._sent is not None
            with torch.no_grad():
                self._judge(self._sent)
            self._missing, self._made, self._sent = [], {}, None
        return self._accepted([verdict for verdict in self._found if verdict is not None])

    def _asked(self, index: int, made: Any) -> torch.Tensor:
        if not self._checker.items[index][0].accepts:
            return made.reshape(1)
        if read_once(made):
            self._whole.add(index)
        expected = self._told(index)
        return reduced(made) if expected is None else is_of(made, expected).reshape(1)

    def _judge(self, sent: "_Sent") -> None:
        found: dict[int, Verdict] = {}
        for index, numbers in _read(sent).items():
            expected = self._told(index)
            if not self._checker.items[index][0].accepts:
                found[index] = bool(numbers[0])
            elif expected is None:
                found[index] = classified(numbers)
            elif numbers[0]:
                found[index] = expected
        again = {index: reduced(value) for index, value in self._made.items() if index not in found}
        found |= {index: classified(numbers) for index, numbers in _read(_sent(again)).items()}
        for index, verdict in found.items():
            self._found[index] = verdict
            key, identities = self._checker.items[index][0].shared_key, self._identities[index]
            if identities is not None:
                _memory.keep(key, identities, verdict)
            elif _has_bits(self._read[index]):
                _bits_known.keep(key, self._read[index], verdict)
        self._checker.learn(found)

    def _told(self, index: int) -> MaskClass | None:
        """The class that is expected and asked for alone, if it says all of the mask."""
        expected = self._wanted[index]
        if not isinstance(expected, MaskClass) or not expected.is_known or index in self._whole:
            return None
        return expected

    def _accepted(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        pairs = zip(self._checker.items, verdicts, strict=True)
        return [v.among(item.accepts) if isinstance(v, MaskClass) else v for (item, _), v in pairs]


def _waits(value: torch.Tensor) -> bool:
    """Whether the host waits for a device to know what is in a tensor."""
    return value.is_cuda


_Sent = list[tuple[list[tuple[int, torch.Size]], torch.Tensor, Any]]


def _sent(asked: dict[int, torch.Tensor]) -> _Sent:
    """Have the numbers of several tensors copied to the host, with one copy for each device.

    Returns:
        For each device the indices and the shapes of their numbers, the copy, and what to wait for, if anything.
    """
    found: _Sent = []
    for device in dict.fromkeys(value.device for value in asked.values()):
        own = {index: value for index, value in asked.items() if value.device == device}
        values = list(own.values())
        together = values[0] if len(own) == 1 else torch.cat([value.to(torch.int64).view(-1) for value in values])
        copy, event = _copied(together)
        found.append(([(index, value.shape) for index, value in own.items()], copy, event))
    return found


def _copied(value: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy on the host, and the event that it is there; where the host can't go on meanwhile, the tensor itself."""
    if not value.is_cuda:
        return value, None
    copy, event = value.to("cpu", non_blocking=True), torch.cuda.Event()  # the copy is in pinned memory
    event.record(torch.cuda.current_stream(value.device))
    return copy, event


def _read(sent: _Sent) -> dict[int, list[int]]:
    """The numbers, once they are there."""
    found: dict[int, list[int]] = {}
    for shapes, copy, event in sent:
        if event is not None:
            event.synchronize()
        parts = copy.view(-1).split([shape.numel() for _, shape in shapes])
        found |= {index: joined(part.view(shape)) for (index, shape), part in zip(shapes, parts, strict=True)}
    return found
