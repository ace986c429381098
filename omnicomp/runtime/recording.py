"""CUDA graphs that record themselves: a compiled graph is recorded if replays are measured to be faster than calls.

Nobody but autograd ever holds memory of a recording: what a call returns to the program is copied out of the pool, so
that no later call can overwrite it. What autograd holds, torch's trees keep, as long as it is held.

The first calls of a graph run as they would without. Some of them are timed, and then as many replays, each between
two events on the stream, so that what is compared is the time that the program's own calls take, copies included;
nothing waits for the device. The faster way is kept, and asked for again after eight times as many calls, as a program
may begin slowly. Both ways give the same values, and each call is made once.

A call takes as long as the device or the host, whichever is busy for longer. What the host does between the calls is
not seen in them: where the device has begun with a call before the host is through with it, the program may wait for
the host all the time, and a replay need only save the host's time. The device begins with a replay when all of it is
prepared, and with a plain call at the first kernel. So a replay may take longer there from begin to end, if calls
follow each other faster.

Layers may share a graph. In a step of training, the recording of a layer follows that of the layer before it, and is
not replayed behind another one. So a graph goes from plain calls to replays, and is timed again, at the beginning of a
round only: with the first layer of a step's forward or backward.
"""

import collections
import dataclasses
import itertools
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import torch

from omnicomp._torch.autograd.compiled_function import keeps_graph
from omnicomp._torch.inductor.pool_copies import PoolCopies
from omnicomp._torch.inductor.recordable import Boxed, Piece, Recordable
from omnicomp._torch.user_code import is_of_program
from omnicomp.errors import harmless
from omnicomp.lowerings import Executable, LoweringContext
from omnicomp.lowerings.overrides.registry import registered
from omnicomp.timeline import CudaGraph, Reason, Timeline

_FEW: Final = 2  # kernels, of which plain calls are faster than a replay and its copies
_FIRST: Final = 8  # calls before the first one that is timed: they compile kernels
_SAMPLES: Final = 4  # calls of each way that are timed
_AGAIN: Final = 8  # times as many calls, after which they are timed again
_WAITED: Final = 3  # of the timed plain calls, those that the device waited for
_FASTER: Final = 0.95  # what a replay may take of a plain call's time
_SECONDS: Final = 5e-6  # and the seconds that it must save
_HOST: Final = 0.8  # what a replay may take of the host's time alone, where the device waited
_HOST_SECONDS: Final = 2e-5  # and the seconds of it that it must save
_DEVICE: Final = 1.02  # what it may take of the device's time then, for its copies
_LATENCY: Final = 1.1  # the same where calls follow each other faster
_SIZES: Final = 16  # combinations of sizes of a graph that are recorded
_NODES: Final = 64  # warm-ups and recordings of one of them, or, if that is more,
_NODES_OF_LAYER: Final = 6  # for each layer that shares the graph: recorded anew where another graph comes before it
_STABLE: Final = 2  # warm-ups and recordings of a function whose inputs stay where they are
_UNSTABLE: Final = 16  # beside two for each layer, after which replays must be in the majority
_ATTEMPTS: Final = 2  # at that, as inputs move in the pool while other graphs are still measured
_APART: Final = 64  # calls in a row that could not be replayed: on other streams, or of a backward without its forward
_APART_ROUNDS: Final = 4  # or rounds of a backward without its forward, if that is more
_ROUND: Final = 256  # calls of a graph after which a new round begins, should the first weights not recur


class Mark(Protocol):
    """A point in time on a stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it has passed."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds between two."""
        ...


class Recorder(Protocol):
    """What records and replays: `Trees`, or a fake without a device."""

    lock: threading.Lock
    work: int
    plain: int
    failure: str
    users: weakref.WeakSet[Any]

    def refuses(self, part: str) -> str:
        """Why a call must not use the recordings now."""
        ...

    def recorded(self, piece: Piece, model: Boxed) -> Boxed:
        """The function as one that is warmed up, recorded, and replayed."""
        ...

    def owns(self, address: int) -> bool:
        """Whether a storage lies in the pool."""
        ...

    def bytes_held(self) -> int:
        """Size of the pool."""
        ...

    def over_budget(self, expected: int, limit: int | None) -> str:
        """Why recordings must not hold so many bytes, or, for 0, what they hold now; empty if they may."""
        ...

    def mark(self) -> Mark:
        """An event on the current stream."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorders:
    """Where recorders come from."""

    of: Callable[[int], Recorder]  # the recorder of a device
    retire: Callable[[Any], None]  # lets go of one, with all that it recorded
    release_retired: Callable[[], None]  # frees what was still held when it was let go of, and is not any longer
    capturing: Callable[[], bool]  # whether the program captures the current stream itself


def cuda_recorders() -> Recorders:
    """Torch's trees, which are imported when the first graph is to be recorded."""
    from omnicomp._torch.inductor import cuda_graphs

    return Recorders(
        of=cuda_graphs.trees_of,
        retire=cuda_graphs.retire,
        release_retired=cuda_graphs.release_retired,
        capturing=cuda_graphs.capturing,
    )


_Sample = tuple[Mark, Mark, float]
"""Before and after a call, and the seconds until it returned."""


@dataclasses.dataclass
class _Phase:
    """Whether the calls on a device are those of forwards or of backwards, and how often that has changed."""

    backward: bool = False
    number: int = 0


_phases: Final = collections.defaultdict[int, _Phase](_Phase)


@dataclasses.dataclass(eq=False)
class _Sizes:
    """What is known of the calls of one combination of sizes.

    A round is the calls of a graph in one phase, or those from one with some weights to the next one with the same.
    """

    sizes: tuple[int, ...]
    calls: int = 0
    phase: int = -1  # that of the last call
    first: int = 0  # which weights the round began with
    round: int = 0  # calls in it so far
    layers: int = 0  # calls of the longest round
    replaying: bool = False  # whether it is replays that are timed now
    replays: int = 0
    work: int = 0
    attempts: int = 0
    apart: int = 0
    refused: int = 0
    copied: int = 0
    copies: PoolCopies = dataclasses.field(default_factory=PoolCopies)
    weights: set[int] = dataclasses.field(default_factory=set[int])  # addresses that tell sets of weights apart
    made: int = 0  # bytes that a plain call left behind
    keeps: bool = False  # whether the first backward that was recorded left what is saved for another one
    verdict: str = ""  # `recorded` or `plain`, once it is settled
    before: str = ""  # the one before, while it is asked for again
    final: bool = False  # whether that is for good
    begin: int = _FIRST  # the call behind which calls are timed
    waited: int = 0  # timed plain calls that the device waited for
    plain: list[_Sample] = dataclasses.field(default_factory=list[_Sample])
    recorded: list[_Sample] = dataclasses.field(default_factory=list[_Sample])


class Recording:
    """The calls of one compiled graph."""

    def __init__(
        self,
        recordable: Recordable,
        recorders: Recorders,
        *,
        always: bool,
        limit: int | None,
        timeline: Timeline,
        where: dict[str, Any],
    ) -> None:
        """Surround a compiled graph; nothing is recorded yet.

        Args:
            recordable: the graph.
            recorders: what records it.
            always: whether it is recorded without being measured.
            limit: the bytes that recordings may hold; None is the recorder's own bound.
            timeline: gets an event for each combination of sizes.
            where: ids of the graph, its part and its subgraph.
        """
        self._recordable = recordable
        self._recorders = recorders
        self._always = always
        self._limit = limit
        self._timeline = timeline
        self._where: Any = where
        self._recorder: Recorder | None = None
        self._functions: dict[tuple[int, ...], Boxed] = {}
        self._sizes: dict[tuple[int, ...], _Sizes] = {}
        self._integers: tuple[int, ...] | None = None
        self._thread = 0  # the one whose call uses the recordings now
        self._addresses: tuple[int, ...] = ()
        self._saved: int | None = None  # index of an input of a backward that its forward left in the pool
        recordable.surround(self._piece, self._around)

    def _piece(self, index: int, plain: Boxed) -> Boxed:
        def piece(inputs: list[Any]) -> Sequence[Any]:
            if self._thread == 0 or self._thread != threading.get_ident():
                return plain(inputs)
            sizes = tuple(value for value in inputs if isinstance(value, int))
            key = (index, torch.is_inference_mode_enabled(), *sizes)
            recorded = self._functions.get(key)
            if recorded is None:
                assert self._recorder is not None
                made = self._recorder.recorded(self._recordable.pieces[index], plain)
                recorded = self._functions[key] = made
            return recorded(inputs)

        piece._boxed_call = True  # type: ignore[attr-defined]
        return piece

    def _around(self, call: Boxed) -> Boxed:
        part, phase = self._recordable.part, _phases[self._recordable.device]

        def around(inputs: list[Any]) -> Sequence[Any]:
            if part != "inference" and phase.backward != (part == "backward"):
                phase.backward, phase.number = part == "backward", phase.number + 1
            self._recorders.release_retired()
            if self._integers is None:
                self._integers = tuple(i for i, value in enumerate(inputs) if isinstance(value, int))
            key = (torch.is_inference_mode_enabled(), *(inputs[i] for i in self._integers))
            sizes = self._sizes.get(key)
            if sizes is None:
                sizes = self._sizes[key] = _Sizes(sizes=key[1:])
                if len(self._sizes) > _SIZES:
                    self._settle(sizes, f"it was called with more than {_SIZES} combinations of sizes")
            if (sizes.final and sizes.verdict == "plain") or self._recorders.capturing():
                return call(inputs)
            sizes.calls += 1
            if not self._records(sizes, inputs):
                return self._plain(call, inputs, sizes)
            return self._recorded(call, inputs, sizes)

        around._boxed_call = True  # type: ignore[attr-defined]
        return around

    def _records(self, sizes: _Sizes, inputs: list[Any]) -> bool:
        """Whether a call is one to record or to replay."""
        if self._always:
            return sizes.calls > 1 and sizes.verdict != "plain"
        begins = self._begins_round(sizes, inputs)
        if sizes.verdict:
            if sizes.final or sizes.calls <= sizes.begin or not begins:
                return sizes.verdict == "recorded"
            sizes.before, sizes.verdict, sizes.waited = sizes.verdict, "", 0
        if not sizes.replaying:
            if len(sizes.plain) < _SAMPLES or not begins:
                return False
            sizes.replaying = True
        return len(sizes.recorded) < _SAMPLES or self._decide(sizes)

    def _begins_round(self, sizes: _Sizes, inputs: list[Any]) -> bool:
        """Count a call in its round; whether it is the first of one.

        While the way is settled, weights are not looked at, and calls not counted.
        """
        number = _phases[self._recordable.device].number
        begins, sizes.phase = sizes.phase != number, number
        if not sizes.verdict or sizes.calls > sizes.begin:
            address = self._weights(inputs)
            again = begins or address == sizes.first
            if again:
                sizes.layers = max(sizes.layers, sizes.round)
            begins = again or sizes.round >= _ROUND
            if begins:
                sizes.first, sizes.round = address, 0
            sizes.round += 1
        return begins

    def _weights(self, inputs: list[Any]) -> int:
        """An address that tells sets of weights apart, or what a forward saved."""
        weight = inputs[self._recordable.static[0]] if self._recordable.static else None
        return weight.untyped_storage().data_ptr() if isinstance(weight, torch.Tensor) else 0

    def _plain(self, call: Boxed, inputs: list[Any], sizes: _Sizes) -> Sequence[Any]:
        timed = not self._always and sizes.calls > sizes.begin and not sizes.verdict and len(sizes.plain) < _SAMPLES
        if sizes.calls == 1:
            given = _storages(inputs)
            outputs = call(inputs)
            sizes.made = sum(size for address, size in _storages(outputs).items() if address not in given)
            return outputs
        if not timed:
            return call(inputs)
        recorder = self._current()
        begin, start = recorder.mark(), time.perf_counter()
        outputs = call(inputs)
        sizes.waited += begin.query()
        sizes.plain.append((begin, recorder.mark(), time.perf_counter() - start))
        return outputs

    def _recorded(self, call: Boxed, inputs: list[Any], sizes: _Sizes) -> Sequence[Any]:
        recorder, part = self._current(), self._recordable.part
        if not recorder.lock.acquire(blocking=False):  # another thread, or a graph that this one's operators call
            return call(inputs)
        try:
            if refusal := recorder.refuses(part):
                sizes.refused += 1
                if recorder.failure or sizes.refused > _APART:
                    self._settle(sizes, refusal)
                return call(inputs)
            sizes.refused = 0
            if part == "backward" and not self._can_follow(recorder, inputs):
                sizes.apart += 1
                if sizes.apart > max(_APART, _APART_ROUNDS * sizes.layers):
                    self._settle(sizes, "what its forward saves lies elsewhere in each call")
                return call(inputs)
            sizes.apart = 0
            keeps = part == "backward" and keeps_graph()
            if not sizes.work and not sizes.replays:
                pooled = sum(size for address, size in _storages(inputs).items() if recorder.owns(address))
                if reason := recorder.over_budget(pooled + sizes.made, self._limit):
                    self._settle(sizes, reason)
                    return call(inputs)
                sizes.keeps = keeps
            elif keeps and not sizes.keeps:  # the recording writes over what is saved
                return call(inputs)
            recorder.users.add(sizes)
            work, plain, sampled = recorder.work, recorder.plain, not sizes.verdict and not self._always
            address = self._weights(inputs)
            begin, start = recorder.mark() if sampled else None, time.perf_counter()
            self._thread = threading.get_ident()
            try:
                outputs = list(call(inputs))
            finally:
                self._thread = 0
            visible = range(len(outputs)) if self._recordable.visible < 0 else range(self._recordable.visible)
            sizes.copied = sizes.copies.copy_out(outputs, visible, recorder.owns)
            if recorder.plain > plain and not recorder.failure:
                self._settle(sizes, "torch leaves it unrecorded, as it writes to memory whose address may change")
            elif recorder.work == work and not recorder.failure:
                sizes.replays += 1
                # The first replay of a recording, of which there may be one for each set of weights, takes longer.
                if begin is not None and sizes.replays > sizes.work and len(sizes.recorded) < _SAMPLES:
                    sizes.recorded.append((begin, recorder.mark(), time.perf_counter() - start))
            else:
                sizes.work += recorder.work - work
                sizes.weights.add(address)
                self._bound(recorder, sizes)
            return outputs
        finally:
            recorder.lock.release()

    def _current(self) -> Recorder:
        """The recorder of the device; what an earlier one recorded is forgotten with it."""
        recorder = self._recorders.of(self._recordable.device)
        if recorder is not self._recorder:
            self._recorder = recorder
            self._functions.clear()
            for sizes in self._sizes.values():
                sizes.copies = PoolCopies()
        return recorder

    def _can_follow(self, recorder: Recorder, inputs: list[Any]) -> bool:
        """Whether what a backward gets lies where it did: in the pool, since its forward was replayed, or unmoved."""
        saved = inputs[self._saved] if self._saved is not None else None
        if isinstance(saved, torch.Tensor) and recorder.owns(saved.untyped_storage().data_ptr()):
            return True
        addresses: list[int] = []
        for index in self._recordable.static:
            value = inputs[index]
            if isinstance(value, torch.Tensor):
                address = value.untyped_storage().data_ptr()
                if recorder.owns(address):
                    self._saved = index
                    return True
                addresses.append(address)
        before, self._addresses = self._addresses, tuple(addresses)
        return before == self._addresses

    def _bound(self, recorder: Recorder, sizes: _Sizes) -> None:
        """Settle for plain calls where recordings would be too many, too large, or not used again."""
        if recorder.failure:
            return self._settle(sizes, recorder.failure)
        pieces = max(1, len(self._recordable.pieces))
        work = sizes.work / pieces
        many = work > max(_NODES, _NODES_OF_LAYER * sizes.layers)
        if many or (work - 2 * max(len(sizes.weights), sizes.layers) > _UNSTABLE and work > sizes.replays):
            why = f"{sizes.work} of its calls had to be recorded: addresses of inputs, or what is held, change"
            sizes.attempts += 1
            sizes.work = sizes.replays = 0
            sizes.weights.clear()
            return self._settle(sizes, why, final=self._always or sizes.attempts >= _ATTEMPTS)
        if self._recordable.part == "backward" and self._saved is None and work > _STABLE:
            return self._settle(sizes, "what its forward saves is not in the pool, and lies elsewhere at times")
        if reason := recorder.over_budget(0, self._limit):
            recorder.users.clear()
            self._settle(sizes, reason)
            self._recorders.retire(recorder)
        elif self._always and not sizes.verdict and work >= 2:
            self._settle(sizes)
        return None

    def _decide(self, sizes: _Sizes) -> bool:
        """Keep the faster way, once all marks have passed; whether a call is to be replayed."""
        if not all([mark.query() for *marks, _ in (*sizes.plain, *sizes.recorded) for mark in marks]):
            return True
        plain, recorded = _median(sizes.plain), _median(sizes.recorded)
        device, replayed = _on_device(sizes.plain), _on_device(sizes.recorded)
        host, replaying = _host(sizes.plain), _host(sizes.recorded)
        faster = recorded <= plain * _FASTER and plain - recorded >= _SECONDS
        relieves = replaying <= host * _HOST and host - replaying >= _HOST_SECONDS
        follow = _spacing(sizes.recorded) <= _spacing(sizes.plain) * _FASTER
        allowed = device * (_LATENCY if follow else _DEVICE)
        faster = faster or (relieves and sizes.waited >= _WAITED and replayed <= allowed)
        why = "" if faster else "replays are not faster"
        self._settle(sizes, why, plain=plain, recorded=recorded, final=False)
        return faster

    def _settle(
        self, sizes: _Sizes, why: str = "", *, plain: float = 0.0, recorded: float = 0.0, final: bool = True
    ) -> None:
        hosts = [_host(samples) if plain else 0.0 for samples in (sizes.plain, sizes.recorded)]
        sizes.verdict, sizes.final, sizes.begin = "plain" if why else "recorded", final, _AGAIN * sizes.calls
        sizes.replaying = False
        sizes.plain.clear()
        sizes.recorded.clear()
        recorder = self._recorder
        if why and recorder is not None and sizes in recorder.users:
            recorder.users.discard(sizes)
            if not recorder.users:  # nobody replays what the pool is held for
                self._recorders.retire(recorder)
        if sizes.verdict == sizes.before and not sizes.final:
            return
        with harmless("how a graph was recorded"):
            self._timeline.append(
                CudaGraph(
                    **self._where,
                    state=sizes.verdict,
                    sizes=sizes.sizes,
                    plain_seconds=plain,
                    recorded_seconds=recorded,
                    plain_host_seconds=hosts[0],
                    recorded_host_seconds=hosts[1],
                    bytes=self._recorder.bytes_held() if self._recorder is not None and not why else 0,
                    copied_bytes=sizes.copied,
                    reason=not_recorded(why) if why else None,
                )
            )


def record_calls(result: Executable, context: LoweringContext, subgraph: str) -> Executable:
    """Have the calls of an executable record themselves where the option `cudagraphs` asks for it."""
    recordable = result.recordable
    if recordable is None:
        return result
    always = context.policy.cudagraphs == "always"
    why = recordable.reason or _uncapturable(result.attest()[1])
    if not why and not always and recordable.launches is not None and recordable.launches <= _FEW:
        why = f"it launches no more than {_FEW} kernels"
    if why:
        context.timeline.append(CudaGraph(**context.where(subgraph), state="plain", reason=not_recorded(why)))
        return result
    Recording(
        recordable,
        cuda_recorders(),
        always=always,
        limit=context.policy.cudagraphs_bytes,
        timeline=context.timeline,
        where={**context.where(subgraph)},
    )
    whole = result.install is not None
    return dataclasses.replace(result, call=result.compiled.current_callable) if whole else result


def _uncapturable(kernels: Iterable[str]) -> str:
    """Which of the operators that a graph calls may do more than launch kernels; empty if none does."""
    own = sorted(filter(is_of_program, (name.removeprefix("torch.ops.") for name in kernels)))
    overrides = {str(operator): item for item in registered() for operator in item.operators} if own else {}
    for name in own:
        item = overrides.get(name)
        if item is None:
            return f"{name} may do on the host what no replay does"
        if not item.capturable:
            return (
                f"the override {item.name} may do on the host what no replay does, unless it declares capturable=True"
            )
    return ""


def not_recorded(why: str) -> Reason:
    """Why the calls of a graph are not recorded."""
    return Reason(
        code="not_recorded",
        by="execution",
        sentence=f"calls are not recorded as CUDA graphs: {why}",
        lever="none is needed; calls run as they would without CUDA graphs",
    )


def _storages(values: Iterable[Any]) -> dict[int, int]:
    """Addresses and bytes of the memory behind tensors."""
    found = (value.untyped_storage() for value in values if isinstance(value, torch.Tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def _median(samples: Iterable[_Sample]) -> float:
    return statistics.median(max(begin.elapsed_time(end) * 1e-3, seconds) for begin, end, seconds in samples)


def _on_device(samples: Iterable[_Sample]) -> float:
    return statistics.median(begin.elapsed_time(end) * 1e-3 for begin, end, _ in samples)


def _spacing(samples: Sequence[_Sample]) -> float:
    """The shortest time between the beginnings of two calls in a row, by the device."""
    return min(first.elapsed_time(second) * 1e-3 for (first, *_), (second, *_) in itertools.pairwise(samples))


def _host(samples: Iterable[_Sample]) -> float:
    return statistics.median(seconds for _, _, seconds in samples)
