"""Weights that were built into an executable, and checks that they have not changed since.

Each call of such an executable asks, and a weight that changed is never passed by:

- a parameter is the same object, at the same address, with the version that torch counts up at every in-place
  operation; nothing has touched it that is not counted (`omnicomp.weights.observer`); it alone holds its memory, so
  that nothing can be written from elsewhere; and it was never given to NumPy, as an array may have been written to
  and be gone;
- a buffer, whose `.data` is not seen, is compared by value, so that only small ones are built in.

Where `.data` was merely read the contents decide, by a hash.
"""

import ctypes
import hashlib
import weakref
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

from omnicomp._torch import parameters
from omnicomp._torch.parameters import owners, owns_alone, weak_storage
from omnicomp.weights import observer

# A comparison of so many elements takes about 20 microseconds; running statistics are far smaller.
_COMPARED: Final = 65536


def fixable(tensor: Tensor) -> bool:
    """Whether a change of a tensor would be seen, so that it may be built into an executable."""
    if tensor.is_inference() or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False
    if type(tensor) is Parameter:
        followed = observer.find(tensor)
        allowed = owns_alone if followed is None else followed.allowed
        return parameters.is_private(tensor) and owners(weak_storage(tensor).cdata) <= allowed
    return type(tensor) is Tensor and tensor.numel() <= _COMPARED


def hash_of(tensor: Tensor) -> str:
    """Hash of the elements of a tensor, as the CPU stores them in order; about a millisecond a MiB."""
    plain = tensor.detach().cpu().contiguous()
    size = plain.numel() * plain.element_size()
    content = (ctypes.c_char * size).from_address(plain.data_ptr()) if size else b""  # NumPy may not be installed
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class Constants:
    """The weights of one executable, as they were when it was built."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Remember weights; to be called before they are read, so that a write meanwhile is seen.

        Args:
            tensors: all of them `fixable`.
        """
        self._mark = observer.mark()
        self._parameters = [index for index, value in enumerate(tensors) if type(value) is Parameter]
        self._buffers = [(index, value.clone()) for index, value in enumerate(tensors) if type(value) is not Parameter]
        self._pick = parameters.picker(self._parameters)
        picked = self._pick(tuple(tensors))
        self._followed = list(map(observer.follow, picked))
        self._touches = [followed.touches for followed in self._followed]
        self._ids = list(map(id, picked))
        self._refs = [weakref.ref(value) for value in picked]
        self._versions = [value._version for value in picked]
        self._pointers = [value.data_ptr() for value in picked]
        self._storages = [weak_storage(value) for value in picked]
        self._cdata = [storage.cdata for storage in self._storages]
        self._owners = list(map(owners, self._cdata))
        self._hashes: list[str | None] = [None] * len(picked)

    def built(self) -> None:
        """To be called once the executable is built: it may hold the memory of the weights itself."""
        now = list(map(owners, self._cdata))
        for followed, before, after in zip(self._followed, self._owners, now, strict=True):
            if after > before:
                followed.holders[self] = after - before
        self._owners = now

    def hashes(self, tensors: Sequence[Tensor]) -> list[str]:
        """Hashes of the contents, in order; `tensors` are those it was made of."""
        found = [hash_of(value) for value in tensors]
        self._hashes = [found[index] for index in self._parameters]
        return found

    @property
    def alive(self) -> bool:
        """Whether its parameters still exist."""
        return all(ref() is not None for ref in self._refs)

    def hold(self, wanted: tuple[Tensor, ...]) -> bool:
        """Whether these tensors, in the original order, equal the constants that were built in."""
        picked = self._pick(wanted)
        if (
            list(map(id, picked)) != self._ids
            or [value._version for value in picked] != self._versions
            or (list(map(owners, self._cdata)) != self._owners and not self._held_by_executables())
            or [value.data_ptr() for value in picked] != self._pointers
            # What was given to NumPy once is no longer resizable, whether the array is gone again or not.
            or not all([value.untyped_storage().resizable() for value in picked])
            or (self._mark is not observer.mark() and not self._look(picked))
        ):
            return False
        # A parameter that died has freed its memory, which then nobody holds: its id may be given away.
        return not self._buffers or self._same_buffers(wanted)

    def merely_shared(self, wanted: tuple[Tensor, ...]) -> bool:
        """Whether nothing was written as far as is known, and only someone else holds the memory of a weight, too."""
        picked = self._pick(wanted)
        return (
            list(map(id, picked)) == self._ids
            and [value._version for value in picked] == self._versions
            and [value.data_ptr() for value in picked] == self._pointers
            and self._mark is observer.mark()
        )

    def same_objects(self, wanted: tuple[Tensor, ...]) -> bool:
        """Whether these are the same parameters, whatever they hold."""
        return self.alive and list(map(id, self._pick(wanted))) == self._ids

    def _held_by_executables(self) -> bool:
        """Whether nothing but executables hold the memory beside the parameters."""
        now = list(map(owners, self._cdata))
        if any(not 0 < count <= followed.allowed for count, followed in zip(now, self._followed, strict=True)):
            return False
        self._owners = now
        return True

    def _same_buffers(self, wanted: tuple[Tensor, ...]) -> bool:
        with torch.no_grad():
            return all(
                wanted[index].shape == kept.shape
                and wanted[index].dtype == kept.dtype
                and bool(torch.equal(wanted[index], kept))
                for index, kept in self._buffers
            )

    def _look(self, picked: Sequence[Tensor]) -> bool:
        """Whether those that were touched have the contents that were built in."""
        mark = observer.mark()
        for index, (value, followed, known) in enumerate(zip(picked, self._followed, self._touches, strict=True)):
            now = followed.touches
            if now == known:
                continue
            expected = self._hashes[index]
            observer.follow(value)  # again, if that was stopped
            if expected is None or hash_of(value) != expected:
                return False
            self._touches[index] = now
        self._mark = mark
        return True
