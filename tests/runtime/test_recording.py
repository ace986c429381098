"""Recording: which calls are recorded, what they return, and what is said of them; with a recorder without a device."""

import copy
import dataclasses
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor.cudagraph_utils import CudagraphCachedInfo
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._ordered_set import OrderedSet

import omnicomp
from omnicomp._torch.inductor.recordable import Boxed, Piece, Recordable
from omnicomp.lowerings import LoweringContext
from omnicomp.lowerings.overrides.registry import registered, unregister
from omnicomp.options.policy import parse
from omnicomp.runtime import recording as module
from omnicomp.runtime.recording import Recorders, Recording, _uncapturable
from omnicomp.timeline import CudaGraph, Timeline, events


@dataclasses.dataclass
class FakeMark:
    at: float
    late: bool  # whether the device has not come to it when it is first asked

    def query(self) -> bool:
        late, self.late = self.late, False
        return not late

    def elapsed_time(self, end_event: "FakeMark") -> float:
        return end_event.at - self.at


host = types.SimpleNamespace(ms=0.0)
"""The host's clock."""


@pytest.fixture(autouse=True)
def fake_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: host.ms * 1e-3))


@dataclasses.dataclass
class FakeRecorder:
    """Each replay writes to the same memory, as a recording does; clocks of its own say what calls take."""

    plain_ms: float = 2.0
    replay_ms: float = 1.0
    plain_host_ms: float = 0.0
    replay_host_ms: float = 0.0
    busy: bool = True  # whether the device is behind the host
    refusal: str = ""
    failure: str = ""
    held: int = 100
    work: int = 0
    plain: int = 0
    capturing: bool = False
    retired: int = 0
    clock: float = 0.0
    fixed: bool = False  # whether another address of an input takes another recording
    replayed: bool = False  # whether the last call was a replay

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.pool: dict[int, torch.Tensor] = {}

    def refuses(self, part: str) -> str:
        return self.refusal

    def recorded(self, piece: Piece, model: Boxed) -> Boxed:
        memory: list[Any] = []
        calls = 0
        seen: set[int] = set()

        def call(inputs: list[Any]) -> Sequence[Any]:
            nonlocal calls
            calls += 1
            self.clock -= self.plain_ms - self.replay_ms
            host.ms -= self.plain_host_ms - self.replay_host_ms
            address = inputs[0].data_ptr() if self.fixed else 0
            if calls <= 2 or (address not in seen):
                self.work += 1
            seen.add(address)
            outputs = model(inputs)
            self.replayed = True
            if not memory:
                memory.extend(each if each is None else torch.empty_like(each) for each in outputs)
                self.pool.update({each.untyped_storage().data_ptr(): each for each in memory if each is not None})
            for each, value in zip(memory, outputs, strict=True):
                if each is not None:
                    each.copy_(value)
            return list(memory)

        return call

    def owns(self, address: int) -> bool:
        return address in self.pool

    def bytes_held(self) -> int:
        return self.held

    def over_budget(self, expected: int, limit: int | None) -> str:
        held, allowed = expected or self.held, (256 << 20) if limit is None else limit
        return f"recordings would hold {held} bytes, and may hold {allowed}" if held > allowed else ""

    def mark(self) -> FakeMark:
        return FakeMark(self.clock, self.busy)


class FakeCompiled:
    def __init__(self, call: Boxed) -> None:
        self.current_callable = call


def recording(
    recorder: FakeRecorder,
    call: Callable[..., list[torch.Tensor]] = lambda x: [x * 2],
    *,
    always: bool = False,
    limit: int | None = None,
    part: str = "inference",
    visible: int = -1,
    static: tuple[int, ...] = (),
) -> tuple[Callable[..., Any], Callable[[], list[CudaGraph]]]:
    """A function whose calls may be recorded, and the events of them."""

    def plain(inputs: list[Any]) -> list[torch.Tensor]:
        recorder.replayed = False
        recorder.clock += recorder.plain_ms
        host.ms += recorder.plain_host_ms
        arguments = list(inputs)
        inputs.clear()
        return call(*arguments)

    compiled: Any = FakeCompiled(plain)
    piece = Piece(part=part, static=static, mutated=(), constants=(), placeholders=())
    recordable = Recordable(part=part, device=0, static=static, visible=visible, pieces=[piece], _compiled=compiled)

    def retire(_: Any) -> None:
        recorder.retired += 1

    timeline = Timeline()
    recorders = Recorders(
        of=lambda _: recorder, retire=retire, release_retired=lambda: None, capturing=lambda: recorder.capturing
    )
    where = {"graph": "g0", "part": part, "subgraph": f"g0.{part}.0"}
    Recording(recordable, recorders, always=always, limit=limit, timeline=timeline, where=where)

    def told() -> list[CudaGraph]:
        return [event for event in timeline.events() if isinstance(event, CudaGraph)]

    return lambda *arguments: compiled.current_callable(list(arguments)), told


def test_a_graph_whose_replays_are_faster_is_recorded_and_both_times_are_told() -> None:
    run, told = recording(FakeRecorder(plain_ms=2.0, replay_ms=0.5))
    for _ in range(25):
        run(torch.ones(3))
    (event,) = told()
    assert (event.state, event.plain_seconds, event.recorded_seconds) == ("recorded", 2e-3, 0.5e-3)
    assert event.bytes == 100
    assert event.copied_bytes == 12
    assert event.reason is None


@pytest.mark.parametrize("replay", [2.0, 1.95, 3.0])
def test_a_graph_whose_replays_are_not_faster_beyond_the_noise_runs_plainly(replay: float) -> None:
    recorder = FakeRecorder(plain_ms=2.0, replay_ms=replay)
    run, told = recording(recorder)
    for _ in range(25):
        run(torch.ones(3))
    (event,) = told()
    assert event.state == "plain"
    assert event.reason is not None
    assert "not faster" in event.reason.sentence
    clock = recorder.clock
    run(torch.ones(3))
    assert recorder.clock == clock + 2.0  # and nothing of a replay


@pytest.mark.parametrize(
    ("replay", "host", "busy", "state"),
    [
        (2.0, 3.0, True, "recorded"),  # the host's own time is the longer one
        (2.0, 1.9, True, "plain"),
        (2.0, 1.9, False, "recorded"),  # the device waits for what the host does between the calls
        (2.1, 1.9, False, "plain"),  # and would wait for copies
        (2.0, 0.11, False, "plain"),  # nothing is saved
    ],
)
def test_a_graph_for_which_the_device_waits_is_recorded(replay: float, host: float, busy: bool, state: str) -> None:
    recorder = FakeRecorder(plain_ms=2.0, replay_ms=replay, plain_host_ms=host, replay_host_ms=0.1, busy=busy)
    run, told = recording(recorder)
    for _ in range(25):
        run(torch.ones(3))
    (event,) = told()
    assert event.state == state


@pytest.mark.parametrize(
    ("replay", "gap", "state"),
    [
        (2.1, 0.5, "recorded"),  # the device begins late with a replay, and calls follow each other faster
        (2.1, 0.1, "plain"),  # not by enough
        (2.3, 0.5, "plain"),  # what waits for the call waits longer
    ],
)
def test_replays_that_follow_each_other_faster_may_take_longer(replay: float, gap: float, state: str) -> None:
    recorder = FakeRecorder(plain_ms=2.0, replay_ms=replay, plain_host_ms=1.9, replay_host_ms=0.1, busy=False)
    run, told = recording(recorder)
    for _ in range(25):
        run(torch.ones(3))
        recorder.clock += 0.0 if recorder.replayed else gap  # the device waits for the host
    (event,) = told()
    assert event.state == state


def test_a_program_that_begins_slowly_is_asked_again() -> None:
    recorder = FakeRecorder(plain_ms=2.0, replay_ms=0.5)
    run, told = recording(recorder)
    for _ in range(40):
        run(torch.ones(3))
    recorder.plain_ms = 0.4  # the host has become faster
    for _ in range(200):
        run(torch.ones(3))
    assert [event.state for event in told()] == ["recorded", "plain"]
    recorder.plain_ms = 2.0
    for _ in range(2000):
        run(torch.ones(3))
    assert [event.state for event in told()] == ["recorded", "plain", "recorded"]
    for _ in range(20_000):
        run(torch.ones(3))
    assert len(told()) == 3


@pytest.mark.parametrize("always", [True, False])
def test_what_a_call_returned_is_not_overwritten_by_later_ones(always: bool) -> None:
    run, _ = recording(FakeRecorder(), always=always)
    kept = [(float(n), run(torch.full((4,), float(n)))[0]) for n in range(30)]
    assert all(torch.equal(value, torch.full((4,), 2 * n)) for n, value in kept)


def test_each_call_is_made_once() -> None:
    made: list[int] = []

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        made.append(1)
        return [x + 1]

    run, _ = recording(FakeRecorder(), call)
    for _ in range(30):
        run(torch.ones(2))
    assert len(made) == 30


def test_what_autograd_alone_sees_stays_in_the_pool() -> None:
    recorder = FakeRecorder()
    run, _ = recording(recorder, lambda x: [x * 2, x * 3], always=True, part="forward", visible=1)
    visible, saved = [run(torch.ones(4)) for _ in range(4)][-1]
    assert not recorder.owns(visible.untyped_storage().data_ptr())
    assert recorder.owns(saved.untyped_storage().data_ptr())


def test_a_backward_follows_its_forward_into_the_pool_and_out_of_it() -> None:
    recorder = FakeRecorder()
    run, told = recording(recorder, always=True, part="backward", static=(0,))
    for saved in [torch.ones(3) for _ in range(6)]:
        run(saved)  # somewhere else each time: its forward ran plainly
    assert recorder.work == 0
    assert not told()
    pooled = torch.ones(3)
    recorder.pool[pooled.untyped_storage().data_ptr()] = pooled
    for _ in range(3):
        run(pooled)
    assert recorder.work == 2
    assert [event.state for event in told()] == ["recorded"]


@pytest.mark.parametrize("always", [True, False])
def test_a_backward_outside_of_the_pool_is_recorded_once(always: bool) -> None:
    recorder = FakeRecorder(plain_ms=2.0, replay_ms=0.5, fixed=True)
    run, told = recording(recorder, always=always, part="backward", static=(0,))
    here, there = torch.ones(3), torch.ones(3)
    for _ in range(40):
        run(here)
    assert [event.state for event in told()] == ["recorded"]
    assert recorder.work == 2
    for _ in range(3):
        run(there)
    assert recorder.work == 3  # once more, and then no more
    (_, event) = told()
    assert event.state == "plain"
    assert event.reason is not None
    assert "not in the pool" in event.reason.sentence
    run(here)
    assert recorder.work == 3


def test_a_backward_whose_forward_is_never_replayed_is_settled() -> None:
    recorder = FakeRecorder()
    run, told = recording(recorder, always=True, part="backward", static=(0,))
    for saved in [torch.ones(3) for _ in range(100)]:
        run(saved)
    (event,) = told()
    assert event.state == "plain"
    assert event.reason is not None
    assert "elsewhere" in event.reason.sentence


class ChainRecorder(FakeRecorder):
    """A recording follows those of the calls before it, as in torch's trees: behind others it is made anew."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path: tuple[Any, ...] = ()
        self.nodes: set[tuple[Any, ...]] = set()

    def recorded(self, piece: Piece, model: Boxed) -> Boxed:
        memory: dict[int, list[torch.Tensor]] = {}  # of each layer

        def call(inputs: list[Any]) -> Sequence[Any]:
            self.clock -= self.plain_ms - self.replay_ms
            address = inputs[0].data_ptr() if piece.static else 0
            self.path = (*self.path, (id(memory), address))
            if self.path not in self.nodes:
                self.nodes.add(self.path)
                self.work += 1
            outputs = model(inputs)
            self.replayed = True
            kept = memory.setdefault(address, [torch.empty_like(each) for each in outputs])
            self.pool.update({each.untyped_storage().data_ptr(): each for each in kept})
            for each, value in zip(kept, outputs, strict=True):
                each.copy_(value)
            return list(kept)

        return call


class Steps:
    """Training steps of layers that share a graph, of which the forward saves something in the pool."""

    def __init__(self, recorder: ChainRecorder, layers: int, *, small: bool = False) -> None:
        self.recorder = recorder
        self.weights = [torch.full((2,), float(number)) for number in range(layers)]
        self.forward, self.told_forward = recording(
            recorder, lambda weight, x: [weight + x, weight * x], part="forward", visible=1, static=(0,)
        )
        self.backward, self.told_backward = recording(
            recorder, lambda saved, x: [saved * x], part="backward", static=(0,)
        )
        self.small = recording(recorder, lambda x: [x + 1])[0] if small else lambda x: [x + 1]

    def step(self) -> tuple[set[bool], set[bool]]:
        """Whether calls of the forward were replays or recordings, and those of the backward."""
        self.recorder.path = ()  # nothing of the step before is held
        (x,) = self.small(torch.ones(2))
        saved, ways = [], (set[bool](), set[bool]())
        for weight in self.weights:
            expected = weight + x
            x, kept = self.forward(weight, x)
            ways[0].add(self.recorder.replayed)
            assert torch.equal(x, expected)
            saved.append(kept)
        while saved:
            self.backward(saved.pop(), torch.ones(2))
            ways[1].add(self.recorder.replayed)
        return ways


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("layers", [1, 3, 10, 12, 80])
def test_layers_of_a_step_go_one_way_and_are_recorded_once_for_each_path(layers: int, busy: bool) -> None:
    recorder = ChainRecorder(plain_ms=2.0, replay_ms=1.0, busy=busy)
    steps = Steps(recorder, layers)
    for _ in range(400 if layers < 80 else 60):
        for ways in steps.step():
            assert len(ways) == 1
    assert [event.state for event in steps.told_forward()] == ["recorded"]
    assert [event.state for event in steps.told_backward()] == ["recorded"]
    assert recorder.work <= 3 * layers  # the forwards, and the backwards behind them, or behind plain ones


def test_a_graph_that_is_timed_in_front_of_layers_has_them_recorded_once_more() -> None:
    recorder = ChainRecorder(plain_ms=2.0, replay_ms=1.0)
    steps = Steps(recorder, 12, small=True)
    for _ in range(400):
        steps.step()
    assert [event.state for event in steps.told_forward()] == ["recorded"]
    assert [event.state for event in steps.told_backward()] == ["recorded"]
    assert steps.step() == ({True}, {True})


def test_forwards_without_a_backward_begin_a_round_with_the_same_weights() -> None:
    recorder = ChainRecorder(plain_ms=2.0, replay_ms=1.0)
    steps = Steps(recorder, 10)
    for _ in range(40):
        recorder.path, ways = (), set[bool]()
        for weight in steps.weights:
            steps.forward(weight, torch.ones(2))
            ways.add(recorder.replayed)
        assert len(ways) == 1
    assert [event.state for event in steps.told_forward()] == ["recorded"]
    assert recorder.work == 10


def test_sizes_are_settled_each_and_those_beyond_the_bound_run_plainly() -> None:
    run, told = recording(FakeRecorder(), lambda n, x: [x * n], always=True)
    for _ in range(4):
        for size in range(20):
            run(size, torch.ones(2))
    states = {event.sizes: event.state for event in told()}
    assert sum(state == "recorded" for state in states.values()) == 16
    assert states[19,] == "plain"


def test_a_call_that_is_refused_runs_plainly_and_later_ones_replay() -> None:
    recorder = FakeRecorder()
    run, _ = recording(recorder, always=True)
    for refusal in ("", "", "", "another stream", ""):
        recorder.refusal = refusal
        (value,) = run(torch.ones(2))
        assert torch.equal(value, torch.full((2,), 2.0))
    recorder.capturing = True
    clock = recorder.clock
    run(torch.ones(2))
    assert recorder.clock == clock + recorder.plain_ms
    with recorder.lock:  # another thread is in a recorded call
        recorder.capturing = False
        run(torch.ones(2))
    assert recorder.clock == clock + 2 * recorder.plain_ms


@pytest.mark.parametrize("always", [False, True])
def test_calls_that_are_all_refused_are_settled_with_the_reason(always: bool) -> None:
    recorder = FakeRecorder(refusal="it is called on another stream than the recordings")
    run, told = recording(recorder, always=always)
    for _ in range(80):
        (value,) = run(torch.ones(2))
        assert torch.equal(value, torch.full((2,), 2.0))
    (event,) = told()
    assert event.state == "plain"
    assert event.reason is not None
    assert "on another stream" in event.reason.sentence
    recorder.refusal = ""
    run(torch.ones(2))
    assert recorder.work == 0


def test_recordings_beyond_the_bytes_are_dropped_with_a_reason() -> None:
    recorder = FakeRecorder(held=1000)
    run, told = recording(recorder, always=True, limit=999)
    for _ in range(5):
        run(torch.ones(2))
    (event,) = told()
    assert recorder.retired == 1
    assert event.state == "plain"
    assert event.reason is not None
    assert "999" in event.reason.sentence


def test_the_memory_is_asked_for_once_where_recordings_are_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    recorder = FakeRecorder()
    monkeypatch.setattr(recorder, "recorded", lambda piece, model: model)
    monkeypatch.setattr(recorder, "over_budget", lambda expected, limit: asked.append(expected))
    run, _ = recording(recorder, always=True)
    for _ in range(20):
        run(torch.ones(2))
    assert len(asked) == 1


def test_what_is_known_to_need_more_is_not_recorded_and_the_recordings_of_others_stay() -> None:
    saved = torch.ones(3)
    for limit, state in ((23, "plain"), (24, "recorded")):
        recorder = FakeRecorder(held=0)
        recorder.pool[saved.untyped_storage().data_ptr()] = saved
        run, told = recording(recorder, always=True, limit=limit, part="backward", static=(0,))
        for _ in range(5):
            run(saved)  # twelve bytes in the pool, and twelve that are left behind
        (event,) = told()
        assert event.state == state
        assert recorder.retired == 0
        if event.reason is not None:
            assert recorder.work == 0
            assert "would hold 24 bytes" in event.reason.sentence


def test_a_backward_that_is_to_be_repeated_is_not_replayed_over_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, kept = torch.ones(3), False
    monkeypatch.setattr(module, "keeps_graph", lambda: kept)
    for first in (False, True):
        recorder = FakeRecorder(plain_ms=1.0, replay_ms=0.0)
        recorder.pool[saved.untyped_storage().data_ptr()] = saved
        run, told = recording(recorder, always=True, part="backward", static=(0,))
        kept = first
        for _ in range(5):
            run(saved)
        assert [event.state for event in told()] == ["recorded"]
        kept, before = True, recorder.clock
        run(saved)
        assert recorder.clock - before == (0.0 if first else 1.0)  # what was kept in the recording, replays leave alone
        kept, before = False, recorder.clock
        run(saved)
        assert recorder.clock - before == 0.0


def test_memory_that_nobody_replays_is_freed() -> None:
    slower = FakeRecorder(plain_ms=1.0, replay_ms=2.0)
    run, told = recording(slower)
    for _ in range(40):
        run(torch.ones(2))
    assert [event.state for event in told()] == ["plain"]
    assert slower.retired == 1
    shared = FakeRecorder(plain_ms=1.0, replay_ms=2.0)
    other, _ = recording(shared, always=True)
    run, told = recording(shared)
    for _ in range(40):
        other(torch.ones(2))
        run(torch.ones(2))
    assert [event.state for event in told()] == ["plain"]
    assert shared.retired == 0


def test_memory_of_inputs_is_none_that_a_recording_would_hold() -> None:
    recorder = FakeRecorder(held=0)
    run, told = recording(recorder, lambda x: [x[1:], x], always=True, limit=4)
    for x in [torch.ones(3)] * 5:
        run(x)
    assert [event.state for event in told()] == ["recorded"]


@pytest.mark.parametrize("always", [True, False])
def test_what_torch_leaves_unrecorded_is_settled_with_a_reason(always: bool) -> None:
    recorder = FakeRecorder()

    def left(piece: Piece, model: Boxed) -> Boxed:
        def call(inputs: list[Any]) -> Sequence[Any]:
            recorder.plain += 1
            return model(inputs)

        return call

    recorder.recorded = left  # type: ignore[method-assign]
    run, told = recording(recorder, always=always)
    for _ in range(25):
        assert torch.equal(run(torch.ones(2))[0], torch.full((2,), 2.0))
    (event,) = told()
    assert event.state == "plain"
    assert event.reason is not None
    assert "torch leaves it unrecorded" in event.reason.sentence
    assert recorder.plain == 1


def test_a_graph_that_would_be_recorded_again_and_again_runs_plainly() -> None:
    recorder = FakeRecorder()
    original = recorder.recorded

    def never_replays(piece: Piece, model: Boxed) -> Boxed:
        call = original(piece, model)

        def again(inputs: list[Any]) -> Sequence[Any]:
            recorder.work += 1
            return call(inputs)

        return again

    recorder.recorded = never_replays  # type: ignore[method-assign]
    run, told = recording(recorder, always=True)
    for _ in range(40):
        run(torch.ones(2))
    assert [event.state for event in told()][-1] == "plain"
    work = recorder.work
    run(torch.ones(2))
    assert recorder.work == work


@pytest.mark.parametrize(("layers", "state"), [(8, "recorded"), (48, "recorded"), (256, "recorded"), (257, "plain")])
def test_layers_that_share_a_graph_are_recorded_each(layers: int, state: str) -> None:
    recorder = FakeRecorder(plain_ms=2.0, replay_ms=1.0, fixed=True)
    run, told = recording(recorder, lambda weight, x: [weight * x], static=(0,))
    weights = [torch.full((2,), float(number)) for number in range(layers)]
    for _ in range(6):
        for weight in weights:
            assert torch.equal(run(weight, torch.ones(2))[0], weight)
    assert [event.state for event in told()] == [state]
    assert recorder.work <= layers + 1


def test_weights_that_lie_elsewhere_for_a_while_are_tried_again_later() -> None:
    recorder = FakeRecorder(fixed=True)
    run, told = recording(recorder, lambda weight, x: [weight * x], static=(0,))
    held = [torch.full((2,), float(number)) for number in range(400)]
    for weight in (*held, *[held[0]] * 3000):
        run(weight, torch.ones(2))
    assert [event.state for event in told()] == ["plain", "recorded"]


def test_weights_that_lie_elsewhere_in_each_call_are_given_up() -> None:
    recorder = FakeRecorder(fixed=True)
    run, told = recording(recorder, lambda weight, x: [weight * x], static=(0,))
    held = [torch.full((2,), float(number)) for number in range(400)]
    for weight in held:
        run(weight, torch.ones(2))
    (event,) = told()
    assert event.state == "plain"
    assert event.reason is not None
    assert "had to be recorded" in event.reason.sentence
    held += [torch.full((2,), float(number)) for number in range(400, 4000)]
    for weight in held[400:]:
        run(weight, torch.ones(2))
    work = recorder.work
    assert work <= 130
    for number in range(40_000):
        run(held[number % 4000], torch.ones(2))
    assert recorder.work == work  # the second attempt was the last


def test_a_recording_that_fails_leaves_the_graph_plain_with_what_failed() -> None:
    recorder = FakeRecorder()
    run, told = recording(recorder, always=True)
    run(torch.ones(2))
    recorder.failure = "recording failed: operation not permitted"
    run(torch.ones(2))
    (event,) = told()
    assert event.state == "plain"
    assert event.reason is not None
    assert "not permitted" in event.reason.sentence


def test_an_error_of_the_program_is_raised_and_the_next_call_goes_on() -> None:
    broken = False

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        if broken:
            raise ValueError("the program's own")
        return [x * 2]

    recorder = FakeRecorder()
    run, _ = recording(recorder, call, always=True)
    for _ in range(4):
        run(torch.ones(2))
    broken = True
    with pytest.raises(ValueError, match="own"):
        run(torch.ones(2))
    broken = False
    assert torch.equal(run(torch.ones(2))[0], torch.full((2,), 2.0))
    assert not recorder.lock.locked()


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRecorder]:
    """Has graphs for the CPU be taken for such of CUDA, and a fake record them."""
    recorder = FakeRecorder()
    init: Any = CompiledFxGraph.__init__

    def on_cuda(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.device_types, self.device_idxs = OrderedSet(["cuda"]), OrderedSet([0])
        self.disabled_cudagraphs_reason = None
        self.cudagraph_info = CudagraphCachedInfo([], [], [])
        self.partition_maps = None

    monkeypatch.setattr(CompiledFxGraph, "__init__", on_cuda)
    monkeypatch.setattr(LoweringContext, "records", property(lambda self: self.policy.records))
    recorders = Recorders(
        of=lambda _: recorder, retire=lambda _: None, release_retired=lambda: None, capturing=lambda: False
    )
    monkeypatch.setattr("omnicomp.runtime.recording.cuda_recorders", lambda: recorders)
    with inductor.patch(graph_partition=False, fx_graph_cache=False):
        yield recorder


@pytest.mark.inductor
def test_a_training_step_is_recorded_in_both_directions_with_eagers_values(as_on_cuda: FakeRecorder) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    eager = copy.deepcopy(model)
    compiled: Any = torch.compile(model, backend="omni", options={"cudagraphs": "always"})
    kept: list[tuple[Any, Any]] = []
    for _ in range(6):
        x = torch.randn(3, 8)
        for each in (model, eager):
            each.zero_grad(set_to_none=True)
        results = compiled(x), eager(x)
        for result in results:
            result.square().sum().backward()
        kept.append((results[0].detach(), results[1].detach()))
        kept += [(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True)]
    for one, other in kept:  # none of what was held was overwritten
        torch.testing.assert_close(one, other)
    assert as_on_cuda.work == 4
    told = [event for event in events() if isinstance(event, CudaGraph)]
    assert {(event.part, event.state) for event in told} == {("forward", "recorded"), ("backward", "recorded")}


@pytest.mark.inductor
def test_the_pieces_of_a_cut_graph_are_recorded_each(as_on_cuda: FakeRecorder) -> None:
    options: Any = {"cudagraphs": "always", "lowerings": {"aten.topk": "eager"}}

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.topk(x.sin() * 2, 3)[0].cos() + 1

    compiled: Any = torch.compile(function, backend="omni", options=options)
    inputs = [torch.randn(4, 8) for _ in range(6)]
    found = [compiled(x) for x in inputs]
    for x, value in zip(inputs, found, strict=True):
        torch.testing.assert_close(value, function(x))
    told = [(event.subgraph.rpartition(".")[2], event.state) for event in events() if isinstance(event, CudaGraph)]
    assert sorted(told) == [("0", "recorded"), ("2", "recorded")]


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("launches", "how", "states"),
    [(2, "auto", ["plain"]), (3, "auto", []), (None, "auto", []), (2, "always", ["recorded"])],
)
def test_a_graph_of_two_kernels_is_not_recorded(
    as_on_cuda: FakeRecorder, monkeypatch: pytest.MonkeyPatch, launches: int | None, how: str, states: list[str]
) -> None:
    monkeypatch.setattr("omnicomp._torch.inductor.recordable._launches", lambda source: launches)
    compiled: Any = torch.compile(lambda x: x.sin() + 1, backend="omni", options={"cudagraphs": how})
    for _ in range(4):
        x = torch.randn(3)
        torch.testing.assert_close(compiled(x), x.sin() + 1)
    told = [event for event in events() if isinstance(event, CudaGraph)]
    assert [event.state for event in told] == states
    for event in told:
        assert event.reason is None or "no more than 2 kernels" in event.reason.sentence


@pytest.mark.inductor
def test_an_operator_of_the_program_is_not_recorded(as_on_cuda: FakeRecorder) -> None:
    with torch.library._scoped_library("recording_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        compiled: Any = torch.compile(
            lambda x: torch.ops.recording_test.twice(x.sin()), backend="omni", options={"cudagraphs": "always"}
        )
        for _ in range(4):
            compiled(torch.randn(3))
    (event,) = [event for event in events() if isinstance(event, CudaGraph)]
    assert event.state == "plain"
    assert event.reason is not None
    assert "recording_test.twice" in event.reason.sentence
    assert as_on_cuda.work == 0


@pytest.mark.parametrize(("capturable", "why"), [(False, "the override recorded_sin may do"), (True, "")])
def test_an_override_says_whether_it_can_be_captured(capturable: bool, why: str) -> None:
    @omnicomp.override(op=torch.ops.aten.sin.default, name="recorded_sin", capturable=capturable)
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    try:
        (item,) = (item for item in registered() if item.name == "recorded_sin")
        kernels = ["extern_kernels.mm", f"torch.ops.{item.operators[0]}"]
        assert _uncapturable(kernels).startswith(why)
        assert bool(_uncapturable(kernels)) is not capturable
        assert _uncapturable([*kernels, "torch.ops.z.program"]).startswith("z.program" if capturable else why)
    finally:
        unregister("recorded_sin")


@pytest.mark.parametrize("options", [{"triton.cudagraphs": False}, {"triton.cudagraphs": True}], ids=["off", "on"])
def test_inductors_own_option_goes_before(options: dict[str, Any]) -> None:
    assert not parse(None, {"cudagraphs": "always", **options}).records
    assert not parse("reduce-overhead", {"cudagraphs": "always"}).records
    assert parse(None, {"cudagraphs": "auto"}).records
    assert parse(None, {}).records
    assert not parse(None, {"cudagraphs": "never"}).records
    assert not parse(None, {"background": True}).records  # what is built in a worker
    assert parse(None, {"background": True, "cudagraphs": "auto"}).records
