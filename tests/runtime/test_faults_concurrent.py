"""The planted faults again: under threads that compile and call at once, and in forked workers of a data loader."""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fragile
import pytest
import torch
from concurrency import NO_GPU, ONE_THREAD, behind_a_fork, in_threads, many_compilations
from faults import CUT, EAGER, WHOLE, Place, check, planted, pretended, program, step, without_caches
from tiers import fast
from torch import Tensor

import omnicomp
from omnicomp.timeline import Retreat, Timeline, current

PLACES = {
    "capture": Place("omnicomp.backend.pipeline", "capture_graph", parts=False),
    "searches": Place("omnicomp.backend.block_overrides", "apply_searches", parts=False),
    "passes": Place("omnicomp.backend.run_passes", "run_pipeline", parts=False),
    "autograd": Place("torch._functorch._aot_autograd.graph_compile", "aot_dispatch_autograd_graph", parts=False),
    "placement": Place("omnicomp.builder.part", "place"),
    "extract": Place("omnicomp.builder.part", "extract"),
    "eager": Place("omnicomp.lowerings.eager", "EagerLowering.lower"),
    "attestation": Place("omnicomp.builder.record", "emit_ran", parts=False),
}
COMPILED = {
    "lowering": Place("torch._inductor.graph", "GraphLowering.run"),
    "module": Place("torch._inductor.codecache", "PyCodeCache.load_by_key_path"),
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing raises afterwards."""
    fragile.a_compilers(monkeypatch)
    with without_caches():
        yield
    fragile.schedule.set("", "")


def one_for_all(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same program with code of its own, so that Dynamo knows it as another."""
    return lambda *args: function(*args)


def threads_agree(options: dict[str, Any], *, shared: bool) -> None:
    """Eight threads call the program, one compiled for all or each its own, and all get eager's results."""
    expected = step(program)
    common = torch.compile(program, backend="omni", options=options)

    def work(_: int) -> None:
        compiled = common if shared else torch.compile(one_for_all(program), backend="omni", options=options)
        for _ in range(2):
            torch.testing.assert_close(step(compiled), expected)

    with many_compilations():
        in_threads(work)


SHARED = pytest.mark.parametrize("shared", fast([True, False], bool), ids=["shared", "own"])


@SHARED
@pytest.mark.parametrize("when", fast(["first", "always"], "first".__eq__))
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_build_fails_under_threads(place: Place, when: str, shared: bool) -> None:
    with planted(place, when) as raised:
        threads_agree(EAGER, shared=shared)
    assert raised[0] > 0


@SHARED
def test_nodes_are_cut_under_threads(shared: bool) -> None:
    with pretended(lambda part, names: "cos" in names):
        threads_agree(WHOLE, shared=shared)
    cut = {node.op for e in omnicomp.timeline.events() if e.type == "placement" for node in e.declined}
    assert cut == {"aten.cos.default"}


@pytest.mark.inductor
@pytest.mark.parametrize("place", COMPILED.values(), ids=COMPILED)
@pytest.mark.slow
def test_inductor_fails_under_threads(place: Place) -> None:
    with planted(place, "always") as raised:
        threads_agree(WHOLE, shared=False)
    assert raised[0] > 0


@pytest.mark.inductor
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_call_fails_under_threads(part: str) -> None:
    """Threads may all be in the code that raises: each call gets eager's results, and one retreat is recorded."""
    expected = fragile.step(fragile.program)
    compiled = torch.compile(fragile.program, backend="omni")
    torch.testing.assert_close(fragile.step(compiled), expected)
    fragile.schedule.set(part, "always", compiled=True)

    def work(_: int) -> None:
        for _ in range(5):
            torch.testing.assert_close(fragile.step(compiled), expected)

    in_threads(work)
    assert fragile.schedule.raised > 0
    assert [(e.part, e.target_lowering) for e in current() if isinstance(e, Retreat)] == [(part, "eager")]
    assert omnicomp.audit().mismatches == ()


def test_the_programs_own_error_under_threads() -> None:
    expected = fragile.step(fragile.program)
    compiled = torch.compile(fragile.program, backend="omni", options=EAGER)
    fragile.schedule.set("forward", "always")

    def work(_: int) -> None:
        with pytest.raises(RuntimeError, match=fragile.MESSAGE):
            fragile.step(compiled)

    in_threads(work)
    fragile.schedule.set("", "")
    torch.testing.assert_close(fragile.step(compiled), expected)


@NO_GPU
@pytest.mark.parametrize("when", fast(["first", "always"], "first".__eq__))
def test_builds_fail_in_a_forked_worker(when: str) -> None:
    """Compiled in the worker, with a fault at every place."""

    def work(place: Place) -> None:
        assert check(place, when, EAGER) > 0

    behind_a_fork([functools.partial(work, place) for place in PLACES.values()])


@NO_GPU
@pytest.mark.inductor
def test_inductor_fails_in_a_forked_worker() -> None:
    def work(place: Place, options: dict[str, Any]) -> None:
        with without_caches():
            assert check(place, "always", {**options, **ONE_THREAD}) > 0

    behind_a_fork([functools.partial(work, COMPILED["lowering"], options) for options in (WHOLE, CUT)])


@pytest.mark.parametrize(
    "options", [EAGER, pytest.param(ONE_THREAD, marks=pytest.mark.inductor)], ids=["eager", "inductor"]
)
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_call_fails_in_a_forked_worker(part: str, options: dict[str, Any]) -> None:
    """Compiled and called in the parent, and failing behind the fork: another way is taken, or eager's error raised."""
    expected = fragile.step(fragile.program)
    compiled = torch.compile(fragile.program, backend="omni", options=options)
    torch.testing.assert_close(fragile.step(compiled), expected)

    def work() -> None:
        fragile.schedule.set(part, "always", compiled="lowerings" not in options)
        if "lowerings" in options:
            with pytest.raises(RuntimeError, match=fragile.MESSAGE):
                fragile.step(compiled)
            fragile.schedule.set("", "")
        for _ in range(2):
            torch.testing.assert_close(fragile.step(compiled), expected)
        found = [(e.part, e.target_lowering) for e in current() if isinstance(e, Retreat)]
        assert found == ([] if "lowerings" in options else [(part, "eager")])

    behind_a_fork([work])


def test_a_fork_while_another_thread_records() -> None:
    """The lock that the other thread held is held by nobody behind the fork."""
    timeline, begun, done = current(), threading.Event(), threading.Event()

    def hold() -> None:
        with timeline._lock:
            begun.set()
            done.wait(240)

    def compiled_as_well() -> None:
        x: Tensor = torch.ones(3)
        torch.testing.assert_close(torch.compile(torch.sin, backend="omni", options=EAGER)(x), x.sin())
        assert len(timeline) > 0

    holder = threading.Thread(target=hold)
    holder.start()
    begun.wait()
    try:
        behind_a_fork([compiled_as_well], timeout=240)
    finally:
        done.set()
        holder.join()
    assert isinstance(timeline, Timeline)
