"""Forms of copies of a parameter: a cast, or the numbers and the scales of its float8 form.

E4M3 has 4 significant bits and ends at 448, so that a tensor is divided by a scale first: of the whole, or of each row,
the last dimension, such as a token of the activations or an output of a weight.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from omnicomp import records
from omnicomp._torch import parameters
from omnicomp._torch.parameters import owners, owns_alone, stream_of, weak_storage
from omnicomp.safety.forks import new_lock
from omnicomp.weights import observer

FLOAT8: Final = torch.float8_e4m3fn
CAST: Final = torch.ops.aten.to.dtype  # an OpOverload: differentiable, and known to AOTAutograd's cache as safe
_LARGEST: Final = torch.finfo(FLOAT8).max
_TINY: Final = 1e-12  # keeps the scale of a row of zeros from being zero
_aten: Final = torch.ops.aten


def scaled(value: Any, call: Callable[..., Any], *, rows: bool) -> tuple[Any, Any]:
    """Scale to the range of float8, with the largest element at its end.

    Args:
        value: a floating-point tensor with at least one element, or what stands for one.
        call: gets an ATen operator and its arguments, and computes it or writes it down.
        rows: whether each row has a scale of its own.

    Returns:
        The numbers in float8, in the shape of the value, and the scale in float32: a scalar, or in the shape of the
        value with 1 for the last dimension. Their product is the value but for the rounding.
    """
    wide = call(CAST, value, torch.float32)
    size = call(_aten.abs.default, wide)
    largest = call(_aten.amax.default, size, [-1], True) if rows else call(_aten.amax.default, size)
    scale = call(_aten.div.Tensor, call(_aten.clamp_min.default, largest, _TINY), _LARGEST)
    ranged = call(_aten.clamp.default, call(_aten.div.Tensor, wide, scale), -_LARGEST, _LARGEST)
    return call(CAST, ranged, FLOAT8), scale


@records.dataclass(frozen=True)
class Form:
    """The form of a copy of a parameter."""

    dtype: torch.dtype  # of the copy
    # None for a cast to the dtype; else `row` or `tensor`, of which the numbers are kept if the dtype is float8, and
    # the scales if it is float32. They are those of the parameter in bfloat16, which is what an operator in float8 has
    # for an operand.
    scales: str | None = None
    # Of a cast of four dimensions, `torch.channels_last` or the parameter's own.
    layout: torch.memory_format = torch.preserve_format

    @property
    def is_plain(self) -> bool:
        """Whether it is a cast in the parameter's own layout."""
        return self.scales is None and self.layout is torch.preserve_format

    def of(self, parameter: Tensor) -> Tensor:
        """The copy of the parameter as it is now: a new tensor, or the parameter itself if it has this form already."""
        if self.scales is None:
            return parameter.to(self.dtype, memory_format=self.layout)
        numbers, scale = scaled(parameter.to(torch.bfloat16), _compute, rows=self.scales == "row")
        return numbers if self.dtype is FLOAT8 else scale

    def empty(self, parameter: Tensor) -> Tensor:
        """Memory for it."""
        if self.scales is None or self.dtype is FLOAT8:
            return torch.empty_like(parameter, dtype=self.dtype, requires_grad=False, memory_format=self.layout)
        shape = (*parameter.shape[:-1], 1) if self.scales == "row" else ()
        return torch.empty(shape, dtype=self.dtype, device=parameter.device)

    def fits(self, kept: Tensor, parameter: Tensor) -> bool:
        """Whether memory that was made for it is still laid out as it would be made now."""
        if kept.device != parameter.device:
            return False
        like = self.layout is torch.preserve_format and (self.scales is None or self.dtype is FLOAT8)
        if like and parameter.is_contiguous():
            return kept.shape == parameter.shape and kept.stride() == parameter.stride()
        there = self.empty(torch.empty_like(parameter, device="meta"))
        return kept.shape == there.shape and kept.stride() == there.stride()


def _compute(operator: Callable[..., Any], *args: Any) -> Any:
    return operator(*args)


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
