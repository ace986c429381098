"""With the option `memory`, each call of a subgraph leaves a sample of the device's memory in the timeline."""

import ast
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import omnicomp
from omnicomp.devices import resolve_device
from omnicomp.devices.cpu import CpuDevice
from omnicomp.lowerings import Executable, GraphRecord, LoweringContext
from omnicomp.options.policy import parse
from omnicomp.runtime import wrappers
from omnicomp.runtime.wrappers import Surroundings
from omnicomp.timeline import Memory, Timeline, Timing, current


def program(x: Tensor) -> Tensor:
    return (x.sin() * 2).cos().sum()


def samples(**options: Any) -> list[Memory]:
    compiled = torch.compile(program, backend="omni", options=options)
    for _ in range(2):
        x = torch.ones(4, requires_grad=True)
        compiled(x).backward()
        torch.testing.assert_close(x.grad, torch.autograd.grad(program(y := x.detach().requires_grad_()), y)[0])
    return [event for event in current() if isinstance(event, Memory)]


@pytest.mark.parametrize(
    "lowerings",
    [["eager"], pytest.param({"*": ["inductor"], "aten.cos": "eager"}, marks=pytest.mark.inductor)],
    ids=["eager", "cut"],
)
def test_every_call_of_every_subgraph_is_sampled(lowerings: Any) -> None:
    events = samples(lowerings=lowerings, memory=True)
    by_subgraph = {event.subgraph: [e.call for e in events if e.subgraph == event.subgraph] for event in events}
    assert {name.split(".")[1] for name in by_subgraph} == {"forward", "backward"}
    assert all(calls == [0, 1] for calls in by_subgraph.values())
    assert all(0 < event.before_bytes <= event.peak_bytes for event in events)


def test_what_the_device_does_not_tell_is_minus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("allocated_bytes", "peak_bytes", "reserved_bytes", "total_bytes")
    monkeypatch.setattr(CpuDevice, "memory_stats", lambda self: dict.fromkeys(keys))
    event = samples(lowerings=["eager"], memory=True)[0]
    assert (event.before_bytes, event.after_bytes, event.peak_bytes, event.device) == (-1, -1, -1, "cpu")


def test_on_cuda_a_call_is_profiled_and_is_not_among_those_that_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "type", "cuda")
    monkeypatch.setattr("omnicomp.devices.limits.known", lambda type: None)
    monkeypatch.setattr("omnicomp.runtime.kernels.kernels_of", lambda call: (call(), 7, 3e-3))
    timeline, made = Timeline(), list[int]()
    policy = parse(None, {"timing": True})
    context = LoweringContext(
        graph=GraphRecord(id="g0"), part="inference", device=CpuDevice(), policy=policy, timeline=timeline
    )
    call = wrappers.timed(lambda inputs: made.append(1) or inputs, context, "g0.inference.0")
    for index in range(17):
        assert call([index]) == [index]
    assert len(made) == 17
    told = [event for event in timeline.events() if isinstance(event, Timing)]
    assert [(e.calls, e.kernels, e.kernel_seconds) for e in told[:4]] == [(n, 0, 0.0) for n in (1, 2, 4, 8)]
    assert [(e.calls, e.kernels, e.kernel_seconds) for e in told[4:]] == [(8, 7, 3e-3), (16, 7, 3e-3)]
    assert {(event.copy_rate, event.product_rate) for event in told} == {(0.0, 0.0)}


def test_nothing_is_sampled_unasked() -> None:
    assert samples(lowerings=["eager"]) == []


def names(call: object) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()  # type: ignore[operator]
    return sorted({event.name for event in found.events() if event.name.startswith("omni ")})


def step(compiled: object, x: torch.Tensor) -> None:
    compiled(x).sum().backward()  # type: ignore[operator]


def test_each_subgraph_of_forward_and_backward_is_a_range() -> None:
    options = {"ranges": True, "lowerings": {"aten.sin": ["eager"], "*": ["eager"]}}
    compiled = torch.compile(lambda x: (x.sin() + 1).sum(), backend="omni", options=options)
    x = torch.ones(3, requires_grad=True)
    step(compiled, x)
    (first, second) = names(lambda: step(compiled, x))
    assert first.startswith("omni g")
    assert first.endswith(".backward.0 (eager)")
    assert second.endswith(".forward.0 (eager)")


@pytest.mark.inductor
def test_whole_parts_and_pieces_of_inductor_are_ranges_cold_and_warm() -> None:
    options = {"ranges": True, "lowerings": {"aten.digamma": ["eager"]}}

    def cut(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() + 1).digamma().sin() * 2

    for _ in range(2):
        torch.compiler.reset()
        whole = torch.compile(lambda x: x.exp() + 3, backend="omni", options={"ranges": True})
        pieces = torch.compile(cut, backend="omni", options=options)
        for call in (whole, pieces):
            call(torch.ones(5))
        assert [name.split(".", 1)[1] for name in names(lambda: whole(torch.ones(5)))] == ["inference.0 (inductor)"]  # noqa: B023
        assert [name.split(".", 1)[1] for name in names(lambda: pieces(torch.ones(5)))] == [  # noqa: B023
            "inference.0 (inductor)",
            "inference.1 (eager)",
            "inference.2 (inductor)",
        ]


def test_without_the_option_the_callable_is_the_same() -> None:
    context = LoweringContext(
        graph=GraphRecord(id="g0"),
        part="forward",
        device=resolve_device("cpu"),
        policy=parse(None, {}),
        timeline=Timeline(),
    )

    def call(inputs: list[object]) -> list[object]:
        return inputs

    assert wrappers.named(call, context, "g0.forward.0") is call
    compiled = torch.compile(lambda x: x + 1, backend="omni", options={"lowerings": ["eager"]})
    compiled(torch.ones(2))
    assert names(lambda: compiled(torch.ones(2))) == []


WRAPPING = {"with_tf32", "sampled", "named", "within_budget", "FirstCallObserver"}


def test_the_wrappers_are_used_in_one_module() -> None:
    package = Path(omnicomp.__file__).parent
    users = set()
    for path in [*(package / "builder").rglob("*.py"), *(package / "backend").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in WRAPPING:
                users.add(str(path.relative_to(package)))
    assert users == set()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, bool, bool]]]:
    """The executables that were surrounded: subgraph, lowering, and whether a guard and a verifier are there."""
    found: list[tuple[str, str, bool, bool]] = []

    def probe(call: Any, at: Surroundings) -> Any:
        found.append((at.subgraph, at.lowering, at.guard is not None, at.verifier is not None))
        return call

    monkeypatch.setattr(wrappers, "WRAPPERS", (*wrappers.WRAPPERS, probe))
    with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
        yield found


@pytest.mark.inductor
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_each_place_of_use(cut: bool, seen: list[tuple[str, str, bool, bool]]) -> None:
    def run(**options: Any) -> list[tuple[str, str, bool, bool]]:
        torch.compiler.reset()
        omnicomp.timeline.clear()
        seen.clear()
        x = torch.ones(7, requires_grad=True)
        lowerings = {"aten.digamma": "eager"} if cut else ["inductor"]
        options = {"summary": False, "lowerings": lowerings, **options}
        torch.compile(lambda x: torch.digamma(x.sin() + 2) * 3, backend="omni", options=options)(x).sum().backward()
        ran = {e.subgraph for e in omnicomp.timeline.events() if e.type == "ran"}
        assert {subgraph for subgraph, *_ in seen} == ran
        return sorted((subgraph.partition(".")[2], *rest) for subgraph, *rest in seen)

    built = run()
    assert {lowering for _, lowering, *_ in built} == ({"inductor", "eager"} if cut else {"inductor"})
    assert all(guard == (lowering != "eager") and not verifier for _, lowering, guard, verifier in built)
    restored = run()
    assert {e.verdict for e in omnicomp.timeline.events() if e.type == "cache"} == {"hit"}
    assert restored == built
    assert all(verifier == (lowering != "eager") for _, lowering, _, verifier in run(verify="first"))


@pytest.mark.parametrize("where", ["guard", "verifier"])
def test_what_stepped_down_is_not_recorded_as_run(where: str) -> None:
    class Down:
        stepped_down = failed = True
        verdict = ""

        def around(self, call: Any) -> Any:
            return call

    class Context:
        policy = omnicomp.Policy()
        device = omnicomp.resolve_device("cpu")
        graph_id, part = "g0", "inference"

    emitted: list[Any] = []
    result = Executable(lowering="inductor", call=lambda inputs: inputs)
    downs: dict[str, Any] = {"guard": None, where: Down()}
    context: Any = Context()
    wrapped = wrappers.wrap(result, context, "g0.inference.0", lambda *found: emitted.append(found), **downs)
    assert wrapped.first([1]) == [1]
    assert emitted == []
    assert wrapped.later() is result.call
