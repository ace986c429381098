"""Low-precision copies of parameters: each made once, shared by all graphs, and renewed when its parameter changes.

A copy belongs to a parameter and a form (`omnicomp.weights.forms`): its dtype, or the numbers or the scales of float8.
It lives as long as the parameter does and a compiled graph reads it, and it is renewed in place, so that its address
stays. Each call of a graph looks whether its copies still hold:

- the parameter's version, which every in-place operation of torch counts up, is the one that was copied;
- nothing has touched it meanwhile that is not counted (`omnicomp.weights.observer`);
- its memory is the same, and the parameter alone holds it. As long as something else does (a tensor of `.data`, an
  array, a flat buffer), writes from there can't be told, and the copy is renewed in each call, and once more after.

What passes this by is listed in docs/dtypes.md; `DtypePolicy(weights="call")` casts in each call instead.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from omnicomp._torch import parameters
from omnicomp._torch.parameters import owners, owns_alone, stream_of, weak_storage
from omnicomp.forks import new_lock
from omnicomp.weights import observer
from omnicomp.weights.forms import Form

__all__ = ["Copies", "changed", "clear", "copies"]


class _Watched:
    """A parameter that has copies; it is forgotten with the last of them."""

    def __init__(self, parameter: Tensor) -> None:
        self.copies: weakref.WeakValueDictionary[Form, _Copy] = weakref.WeakValueDictionary()
        mine = weakref.ref(self)

        def died(_: Any) -> None:
            # May run anywhere, as the garbage collector does: takes no lock.
            watched = mine()
            for copy in [] if watched is None else list(watched.copies.values()):
                copy.drop()

        self.parameter = weakref.ref(parameter, died)


class _Copy:
    """The copy of one parameter in one form.

    Attributes:
        owner: the parameter.
        form: how it is computed.
        low: the copy; None until it is made, and when the parameter is gone.
        followed: the parameter as it is observed; None until the copy is made.
        touches: of it, when the copy was made.
        settled: whether the parameter alone held its memory when it was made, and the process did.
        version, pointer, storage: of the parameter, when it was made.
        readers: the graphs that hold `low`.
    """

    def __init__(self, owner: _Watched, form: Form) -> None:
        self.owner, self.form = owner, form
        self.low: Tensor | None = None
        self.followed: observer.Followed | None = None
        self.settled = False
        self.touches = self.version = self.pointer = -1
        self.storage: parameters.StorageWeakRef | None = None
        self.readers: weakref.WeakSet[Copies] = weakref.WeakSet()

    def drop(self) -> None:
        """Free the memory."""
        self.low = self.followed = None
        for reader in list(self.readers):
            reader.forget(self)

    def holds(self, parameter: Tensor) -> bool:
        """Whether the copy is what the parameter would give now."""
        return (
            self.low is not None
            and self.storage is not None
            and self.settled
            and self.followed is not None
            and self.touches == self.followed.touches
            and self.version == parameter._version
            and self.pointer == parameter.data_ptr()
            and owners(self.storage.cdata) == owns_alone
            and self.form.fits(self.low, parameter)
        )

    def prepare(self, parameter: Tensor) -> Tensor:
        """The memory for the next copy; changes seen from now on count as later than it."""
        self.followed = observer.follow(parameter)
        self.touches = self.followed.touches
        self.version, self.pointer = parameter._version, parameter.data_ptr()
        self.storage = weak_storage(parameter)
        self.settled = owners(self.storage.cdata) == owns_alone and parameters.is_private(parameter)
        low = self.low
        if low is None or not self.form.fits(low, parameter):
            for reader in list(self.readers):
                reader.forget()
            low = self.form.empty(parameter)
        return low


_watched: Final[weakref.WeakValueDictionary[int, _Watched]] = weakref.WeakValueDictionary()
# Held while copies are made: a graph that finds one made by another thread must find it filled.
# A copy that a thread was making is not there in a forked child.
_making: Final = new_lock(lost=lambda: changed())


class _Order:
    """On a device with streams: a copy that one stream makes is there for another only after a wait."""

    def __init__(self) -> None:
        self._last: dict[torch.device, tuple[torch.cuda.Event, set[int | None]]] = {}

    def wait(self, device: torch.device) -> None:
        """Let the current stream wait for the last copies that were made on the device."""
        last = self._last.get(device)
        if last is not None and stream_of(device) not in last[1]:
            torch.cuda.current_stream(device).wait_event(last[0])
            last[1].add(stream_of(device))

    def made(self, device: torch.device) -> None:
        """Note that the current stream has made copies."""
        if stream_of(device) is None:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        self._last[device] = (event, {stream_of(device)})

    def clear(self) -> None:
        self._last.clear()


_order: Final = _Order()


class _Known:
    """What a graph knows to hold; compared as a whole in each call, and exchanged as a whole.

    Attributes:
        lows: the copies, in the graph's order; None where one has to be renewed in each call.
        pick: takes the parameters of the others out of the wanted ones.
        each: positions of those that are to be renewed.
    """

    def __init__(self, mark: object, wanted: Sequence[Tensor], copies: Sequence[_Copy | None]) -> None:
        self.mark = mark
        steady = [index for index, copy in enumerate(copies) if copy is not None and copy.settled]
        self.pick = parameters.picker(steady) if len(steady) < len(wanted) else None
        self.each = [index for index in range(len(wanted)) if index not in set(steady)]
        picked = [copies[index] for index in steady]
        self.ids = [id(wanted[index]) for index in steady]
        self.versions = [copy.version for copy in picked if copy is not None]
        self.storages = [copy.storage.cdata for copy in picked if copy is not None and copy.storage is not None]
        self.refs = [copy.storage for copy in picked if copy is not None]  # so that no cdata is given away
        self.alone = [owns_alone] * len(steady)
        self.lows: tuple[Tensor | None, ...] = tuple(
            copy.low if copy is not None and copy.settled else None for copy in copies
        )

    def holds(self, wanted: tuple[Tensor, ...]) -> bool:
        steady = wanted if self.pick is None else self.pick(wanted)
        return (
            self.mark is observer.mark()
            and list(map(id, steady)) == self.ids
            and [value._version for value in steady] == self.versions
            and list(map(owners, self.storages)) == self.alone
        )


class Copies:
    """What one compiled graph reads: copies of some of its parameters, which hold when they are asked for.

    One graph may serve many modules in turn, such as the layers of a model that are compiled one by one: what it knows
    is kept by the first of the parameters.
    """

    def __init__(self, forms: Sequence[Form], devices: Sequence[torch.device]) -> None:
        """Prepare the copies; nothing is copied yet.

        Args:
            forms: of the copies, one a parameter.
            devices: that the parameters are on.
        """
        self._forms = tuple(forms)
        self._streams = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._known: dict[int, _Known] = {}
        self._held: set[_Copy] = set()

    def forget(self, gone: _Copy | None = None) -> None:
        """Check every parameter again in the next call, and release the copy of a parameter that is gone."""
        self._known = {}
        if gone is not None:
            self._held.discard(gone)

    def __call__(self, wanted: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The copies of these parameters, which hold now.

        A tensor that is no plain `torch.nn.Parameter`, such as one that `torch.func.functional_call` passes, and one of
        inference mode, whose versions nobody counts, is cast. So is everything while a CUDA graph is recorded by the
        user: a replay looks at nothing, so what it replays has to cast.

        Raises:
            RuntimeError: there is no memory for a copy.
        """
        if self._streams:
            if torch.cuda.is_current_stream_capturing():
                with torch.no_grad():
                    return tuple(form.of(value) for value, form in zip(wanted, self._forms, strict=True))
            self._wait()
        known = self._known.get(id(wanted[0]))
        if known is None or not known.holds(wanted):
            return self._look(wanted)
        if not known.each:
            return known.lows  # type: ignore[return-value]
        return self._renew_some(known, wanted)

    def bytes(self) -> tuple[int, int]:
        """Memory of the copies that this graph holds: of those that no other reads, and of the others."""
        alone = shared = 0
        for copy in list(self._held):
            size = 0 if copy.low is None else copy.low.numel() * copy.low.element_size()
            if len(copy.readers) > 1:
                shared += size
            else:
                alone += size
        return alone, shared

    def count(self) -> int:
        """How many it holds."""
        return len(self._held)

    def _wait(self) -> None:
        for device in self._streams:
            _order.wait(device)

    def _renew_some(self, known: _Known, wanted: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        lows: list[Any] = list(known.lows)
        with _making, torch.inference_mode(False), torch.no_grad():
            found = {index: self._find(wanted[index], self._forms[index]) for index in known.each}
            _renew([(wanted[index], copy) for index, copy in found.items() if copy is not None])
            for index, copy in found.items():
                lows[index] = self._forms[index].of(wanted[index]) if copy is None else copy.low
                if copy is not None and copy.settled:
                    self._known.pop(id(wanted[0]), None)  # it may hold on in the next call
        return tuple(lows)

    def _look(self, wanted: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with _making, torch.inference_mode(False), torch.no_grad():
            mark = observer.mark()
            found = [self._find(value, form) for value, form in zip(wanted, self._forms, strict=True)]
            self._held.update(copy for copy in found if copy is not None)
            _renew([(value, copy) for value, copy in zip(wanted, found, strict=True) if copy is not None])
            self._wait()  # for what another thread made meanwhile
            lows = tuple(
                form.of(value) if copy is None or copy.low is None else copy.low
                for value, form, copy in zip(wanted, self._forms, found, strict=True)
            )
            for copy in found:
                if copy is not None:
                    copy.readers.add(self)
            if found[0] is not None:  # a parameter says when it dies; ids of other tensors would pile up
                self._known[id(wanted[0])] = _Known(mark, wanted, found)
        return lows

    def _find(self, value: Tensor, form: Form) -> _Copy | None:
        """The copy of a parameter, which may not be made yet; None for a tensor without a copy."""
        if type(value) is not Parameter or value.is_inference():
            return None
        watched = _watched.get(id(value))
        if watched is None or watched.parameter() is not value:
            watched = _watched[id(value)] = _Watched(value)
        copy = watched.copies.get(form)
        if copy is None:
            copy = watched.copies[form] = _Copy(watched, form)
        return copy


def _renew(pairs: Sequence[tuple[Tensor, _Copy]]) -> None:
    """Make the copies that do not hold, those of one device together."""
    stale = {copy: value for value, copy in pairs if not copy.holds(value)}
    by_device: dict[torch.device, list[tuple[Tensor, Tensor, _Copy]]] = {}
    try:
        for copy, value in stale.items():
            by_device.setdefault(value.device, []).append((copy.prepare(value), value, copy))
        for device, group in by_device.items():
            casts = [(low, value) for low, value, copy in group if copy.form.is_plain]
            if casts:
                torch._foreach_copy_([low for low, _ in casts], [value for _, value in casts])
            for low, value, copy in group:
                if not copy.form.is_plain:
                    low.copy_(copy.form.of(value))
                copy.low = low
            _order.made(device)
    except BaseException:
        for copy in stale:
            copy.touches = -1
        raise


def changed(written: Iterable[Tensor] | None = None) -> None:
    """Say that parameters were written by what torch does not count, such as a kernel that got their address.

    Their copies are renewed when a graph reads them next.

    Args:
        written: parameters; by default all that have a copy.
    """
    for parameter in [parameter for parameter, _ in copies()] if written is None else written:
        observer.touched(parameter)


def copies() -> list[tuple[Tensor, Tensor]]:
    """The parameters of this process that have a copy now, each with its copy."""
    found: list[tuple[Tensor, Tensor]] = []
    for watched in list(_watched.values()):
        parameter = watched.parameter()
        lows = [copy.low for copy in list(watched.copies.values())]
        found += [(parameter, low) for low in lows if parameter is not None and low is not None]
    return found


def clear() -> None:
    """Free all copies; a graph that is called again makes its copies again."""
    with _making:
        for watched in list(_watched.values()):
            for copy in list(watched.copies.values()):
                copy.drop()
        _watched.clear()
        _order.clear()
        observer.stop()
