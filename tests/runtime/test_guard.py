"""An executable that raises in a call: what else runs, when nothing else may, and what is recorded of it."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import fragile
import pytest
import torch
from concurrency import in_threads
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import omnicomp
from omnicomp.devices import resolve_device
from omnicomp.lowerings import Executable, GraphRecord, LoweringContext
from omnicomp.options.policy import Policy
from omnicomp.runtime.guard import Guard, drawing_devices, obstacle
from omnicomp.timeline import Attempt, Ran, Retreat, Timeline, current


class Kernel:
    """A boxed callable that doubles its input, and raises as often as it is told."""

    def __init__(self, failures: int = 0, error: type[Exception] = RuntimeError, *, clears: bool = True) -> None:
        self.failures, self.error, self.clears, self.calls = failures, error, clears, 0

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        return self.call(args)

    def call(self, args: list[Any]) -> Sequence[Any]:
        """As generated code is named, and as it unpacks its inputs."""
        self.calls += 1
        (x,) = args
        if self.clears:
            args.clear()
        if self.failures:
            self.failures -= 1
            raise self.error("planted failure")
        return [x * 2]


def guard(kernel: Kernel, below: Kernel, on_error: str = "retreat", **fields: Any) -> tuple[Any, Timeline]:
    timeline = Timeline()
    context = LoweringContext(
        graph=GraphRecord(id="g0"),
        part="forward",
        device=resolve_device("cpu"),
        policy=Policy(on_error=on_error),
        timeline=timeline,
    )
    made = Guard(
        call=kernel,
        build=lambda: Executable(lowering="eager", call=below, attest=lambda: ("below", {})),
        context=context,
        subgraph="g0.forward.0",
        lowering="inductor",
        **{"inputs": ["x"], **fields},
    )
    return made.boxed(), timeline


def of(timeline: Timeline, kind: type) -> list[Any]:
    return [event for event in timeline.events() if isinstance(event, kind)]


@pytest.mark.parametrize("keep_inputs", [True, False])
def test_the_next_level_takes_over_for_this_call_and_later_ones(keep_inputs: bool) -> None:
    kernel, below = Kernel(failures=9), Kernel()
    call, timeline = guard(kernel, below, keep_inputs=keep_inputs)
    assert [call([3])[0] for _ in range(3)] == [6, 6, 6]
    assert (kernel.calls, below.calls) == (1, 3)
    (retreat,) = of(timeline, Retreat)
    assert (retreat.source_lowering, retreat.target_lowering) == ("inductor", "eager")
    assert retreat.reason.code == "call_failed"
    assert "planted failure" in retreat.reason.sentence
    assert [(a.lowering, a.ok, a.selected) for a in of(timeline, Attempt)] == [
        ("inductor", False, False),
        ("eager", True, True),
    ]
    assert [(ran.lowering, ran.evidence) for ran in of(timeline, Ran)] == [("eager", "below")]


def test_a_call_that_does_not_raise_is_left_alone() -> None:
    kernel, below = Kernel(), Kernel()
    call, timeline = guard(kernel, below)
    assert call([3]) == [6]
    assert (below.calls, timeline.events()) == (0, ())


def test_an_error_that_eager_has_as_well_is_the_programs_own() -> None:
    kernel, below = Kernel(failures=1), Kernel(failures=1, error=IndexError)
    call, timeline = guard(kernel, below)
    with pytest.raises(IndexError) as caught:
        call([3])
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert call([3]) == [6]
    assert (kernel.calls, below.calls) == (2, 1), "the executable is kept"
    assert timeline.events() == ()


@pytest.mark.parametrize(("on_error", "error"), [("retry", RuntimeError), ("retreat", torch.OutOfMemoryError)])
def test_a_failed_call_is_repeated(on_error: str, error: type[Exception]) -> None:
    kernel, below = Kernel(failures=1, error=error), Kernel()
    call, timeline = guard(kernel, below, on_error)
    assert call([3]) == [6]
    assert call([3]) == [6]
    assert (kernel.calls, below.calls) == (3, 0)
    (retreat,) = of(timeline, Retreat)
    assert retreat.target_lowering == "inductor"
    twice, timeline = guard(Kernel(failures=2, error=error), below, on_error)
    assert twice([3]) == [6]
    assert of(timeline, Retreat)[0].target_lowering == "eager"


def test_what_may_not_be_repeated_is_raised_with_the_reason() -> None:
    call, timeline = guard(Kernel(failures=1), Kernel(), obstacle=obstacle(traced(lambda x: x.add_(1))))
    with pytest.raises(RuntimeError, match="planted failure") as caught:
        call([3])
    if hasattr(caught.value, "__notes__"):
        assert "writes to a tensor in place" in caught.value.__notes__[0]
    assert timeline.events() == ()


def test_inputs_that_the_code_has_freed_are_not_made_up() -> None:
    def call(args: list[Any]) -> Sequence[Any]:
        x, y = args
        args.clear()
        del x
        raise RuntimeError(f"planted failure with {y}")

    for fields in ({"keep_inputs": False}, {"overwritten": frozenset({"x"})}):
        guarded, timeline = guard(call, Kernel(), inputs=["x", "y"], **fields)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="planted failure") as caught:
            guarded([3, 4])
        if hasattr(caught.value, "__notes__"):
            assert "freed or overwritten" in caught.value.__notes__[0]
        assert timeline.events() == ()


def test_a_lost_device_is_not_asked_again() -> None:
    kernel = Kernel(failures=1)
    kernel.error = lambda _: RuntimeError("CUDA error: an illegal memory access was encountered")  # type: ignore[assignment]
    below = Kernel()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        guard(kernel, below)[0]([3])
    assert below.calls == 0


def test_threads_that_fail_together_make_one_retreat() -> None:
    kernel, below = Kernel(failures=10**6), Kernel()
    call, timeline = guard(kernel, below)
    found: list[Any] = []
    in_threads(lambda _: found.extend(call([3])[0] for _ in range(50)))
    assert found == [6] * 400
    assert len(of(timeline, Retreat)) == 1


def traced(function: Callable[..., Any]) -> GraphModule:
    return make_fx(function)(torch.ones(3))


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (lambda x: x.sin() + 1, ""),
        (lambda x: torch.rand_like(x) + x, "random"),
        (lambda x: torch.nn.functional.dropout(x, 0.5), "random"),
        (lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[x.expand(1, 1, 2, 3)] * 3)[0], ""),
        (lambda x: x.mul_(2), "in place"),
    ],
)
def test_what_stands_in_the_way(function: Callable[..., Any], word: str) -> None:
    reason = obstacle(traced(function))
    assert (reason is None) if not word else (reason is not None and word in reason.sentence)


def of_prims(seed_goes_out: bool = False, seed_comes_in: bool = False) -> GraphModule:
    """A graph as Inductor rewrites one that draws random numbers."""
    graph = Graph()
    prims = torch.ops.prims
    if seed_comes_in:
        seeds = graph.placeholder("seeds")
        seeds.meta["val"] = torch.ones(1, dtype=torch.int64)
    else:
        seeds = graph.call_function(prims.inductor_seeds.default, (1, torch.device("cpu")))
        seeds.meta["val"] = torch.ones(1, dtype=torch.int64)
    seed = graph.call_function(prims.inductor_lookup_seed.default, (seeds, 0))
    drawn = graph.call_function(prims.inductor_random.default, ([3], seed, "rand"))
    drawn.meta["val"] = torch.ones(3)
    graph.output((drawn, seed) if seed_goes_out else (drawn,))
    return GraphModule({}, graph)


def test_attention_draws_random_numbers_if_it_drops_weights() -> None:
    for arguments, draws in (((), False), ((0.1,), True), ((0.0, True), False)):
        graph = Graph()
        x = graph.placeholder("x")
        operator = torch.ops.aten._scaled_dot_product_flash_attention.default
        graph.output((graph.call_function(operator, (x, x, x, *arguments)),))
        assert (obstacle(GraphModule({}, graph)) is not None) is draws


def test_random_numbers_may_be_drawn_anew_where_nobody_makes_the_same_again() -> None:
    rand = traced(lambda x: torch.rand_like(x) + x)
    assert [obstacle(rand, part) for part in ("forward", "backward", "inference")] == [None] * 3
    assert drawing_devices(of_prims()) == (torch.device("cpu"),)
    assert obstacle(of_prims(), "forward") is obstacle(of_prims(seed_goes_out=True), "inference") is None
    handed_on = obstacle(of_prims(seed_goes_out=True), "forward")
    assert handed_on is not None
    assert "hands on the seed" in handed_on.sentence
    made_again = obstacle(of_prims(seed_comes_in=True), "backward")
    assert made_again is not None
    assert "from a seed" in made_again.sentence


@pytest.mark.parametrize("on_error", ["retreat", "retry"])
def test_generators_are_put_back_before_a_call_is_repeated(on_error: str) -> None:
    torch.manual_seed(5)
    expected = [torch.rand(3), torch.rand(3)]

    def draws(args: list[Any]) -> Sequence[Any]:
        torch.rand(7)
        raise RuntimeError("planted failure")

    torch.manual_seed(5)
    call, timeline = guard(draws, lambda _: [torch.rand(3)], on_error, draws=(torch.device("cpu"),))  # type: ignore[arg-type]
    for want in expected:
        assert torch.equal(call([3])[0], want)
    assert len(of(timeline, Retreat)) == 1


def test_what_a_failed_call_holds_is_freed_before_it_is_repeated() -> None:
    held: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def call(args: list[Any]) -> Sequence[Any]:
        alive.extend(ref() is not None for ref in held)
        big = torch.ones(10)
        held.append(weakref.ref(big))
        if len(held) == 1:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return [args[0] * 2]

    run, timeline = guard(call, Kernel())  # type: ignore[arg-type]
    assert run([3]) == [6]
    assert alive == [False]
    assert of(timeline, Retreat)[0].target_lowering == "inductor"


failures = {"forward": 0, "backward": 0}


@torch.library.custom_op("omnicomp_tests::fails_on_request", mutates_args=())
def fails_on_request(x: Tensor, part: str) -> Tensor:
    if failures[part]:
        failures[part] -= 1
        raise RuntimeError(f"planted failure of the {part}")
    return x * 3


fails_on_request.register_fake(lambda x, part: torch.empty_like(x))
fails_on_request.register_autograd(lambda ctx, grad: (fails_on_request(grad, "backward"), None))


def program(x: Tensor) -> Tensor:
    return fails_on_request(x.sin(), "forward")


def reuses(x: Tensor) -> Tensor:
    """Its backward writes to what was saved for it before it comes to the operator."""
    return program(x).cos()


@pytest.mark.inductor
def test_forward_and_backward_step_down_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fragile.a_compilers(monkeypatch)
    failures.update(forward=1, backward=1)
    x = torch.randn(5, requires_grad=True)
    with torch.compiler.config.patch(force_disable_caches=True):
        compiled = torch.compile(program, backend="omni")
        found = [torch.autograd.grad(compiled(x).sum(), x)[0] for _ in range(2)]
    assert failures == {"forward": 0, "backward": 0}
    (want,) = torch.autograd.grad(program(x).sum(), x)
    for each in found:
        torch.testing.assert_close(each, want)
    retreats = [e for e in current() if isinstance(e, Retreat)]
    assert [(e.part, e.source_lowering, e.target_lowering) for e in retreats] == [
        ("forward", "inductor", "eager"),
        ("backward", "inductor", "eager"),
    ]
    audit = omnicomp.audit()
    assert {row.ran for row in audit.subgraphs} == {"eager"}


@pytest.mark.inductor
def test_a_backward_that_wrote_to_what_was_saved_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    fragile.a_compilers(monkeypatch)
    failures.update(forward=0, backward=1)
    x = torch.randn(5, requires_grad=True)
    with torch.compiler.config.patch(force_disable_caches=True):
        out = torch.compile(reuses, backend="omni")(x).sum()
    with pytest.raises(RuntimeError, match="planted failure of the backward"):
        torch.autograd.grad(out, x)
    assert [e for e in current() if isinstance(e, Retreat)] == []


@pytest.mark.inductor
def test_an_input_that_is_written_to_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fragile.a_compilers(monkeypatch)

    def writes(x: Tensor) -> Tensor:
        x.add_(1)
        return program(x)

    failures.update(forward=1, backward=0)
    with torch.compiler.config.patch(force_disable_caches=True), pytest.raises(RuntimeError, match="planted failure"):
        torch.compile(writes, backend="omni")(torch.randn(5))
    failures.update(forward=0)
    assert [e for e in current() if isinstance(e, Retreat)] == []


@pytest.mark.inductor
@torch.no_grad()
def test_a_graph_that_draws_random_numbers_retreats_to_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """With eager's generator, the call that raised and was made again draws what eager draws."""
    fragile.a_compilers(monkeypatch)

    def noisy(x: Tensor) -> Tensor:
        return program(x + torch.rand_like(x))

    x = torch.randn(5)
    torch.manual_seed(3)
    expected = [noisy(x), noisy(x), torch.rand(2)]
    failures.update(forward=1)
    with torch.compiler.config.patch(force_disable_caches=True):
        run = torch.compile(noisy, backend="omni", options={"fallback_random": True})
        torch.manual_seed(3)
        found = [run(x), run(x), torch.rand(2)]
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    assert [e.target_lowering for e in current() if isinstance(e, Retreat)] == ["eager"]
