"""What is slow to build is given up in time, leaves no trace, and only it goes to the next lowering.

Nothing here waits for a bound to pass: what is slow moves the clock that the budget reads.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch._inductor import lowering as inductor_lowering
from torch._inductor.codecache import CacheBase
from torch._inductor.select_algorithm import ExternKernelCaller, ExternKernelChoice, NoValidChoicesError

import omnicomp
from omnicomp._torch.inductor import build_clock as meter
from omnicomp._torch.inductor.time_limit import hooked
from omnicomp.builder import known_failures as verdicts
from omnicomp.builder import time_limit
from omnicomp.builder.known_failures import CACHE, entries
from omnicomp.errors import BudgetSpentError, OptionError
from omnicomp.options.policy import parse
from omnicomp.timeline import Reason

aten = torch.ops.aten
ALLOWED = 600
OTHER = ExternKernelChoice(torch.matmul, None, name="another_matmul")


class Clock:
    """The real time and what was added to it."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped

    def skip(self, seconds: float = 1000.0) -> None:
        self.skipped += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter, "clock", clock)
    return clock


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is planted here is in no key of Inductor's caches."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


class Seen:
    """How often something was done. It is no list: what a lowering refers to is part of a verdict's key."""

    times = 0


def make_slow(monkeypatch: pytest.MonkeyPatch, clock: Clock, operator, seconds: float = 1000.0) -> Seen:
    """Let Inductor take long over an operator."""
    original, seen = inductor_lowering.lowerings[operator], Seen()

    def slow(*args, **kwargs):
        seen.times += 1
        clock.skip(seconds)
        return original(*args, **kwargs)

    monkeypatch.setitem(inductor_lowering.lowerings, operator, slow)
    return seen


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Matrix products are no code of Inductor's, so that no compiler runs."""
    return (x @ w).neg() @ w


def inputs(grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 6, generator=generator).requires_grad_(grad) for _ in range(2)]


def compile_and_compare(
    function: Callable[..., torch.Tensor] = program, grad: bool = True, seconds: float | None = ALLOWED, **options
) -> None:
    """Values and gradients are eager's, and no hook is left."""
    torch.compiler.reset()
    omnicomp.timeline.clear()
    settings = {"build_seconds": seconds, "summary": False, "verify": "off", **options}
    compiled = torch.compile(function, backend="omni", options=settings)
    results = []
    for call in (compiled, function):
        arguments = inputs(grad)
        result = call(*arguments)
        if grad:
            result.sum().backward()
        results.append([result.detach(), *(each.grad for each in arguments if grad)])
    torch.testing.assert_close(*results)
    assert hooked() == []


def events(kind: str, part: str | None = None) -> list:
    return [e for e in omnicomp.timeline.events() if e.type == kind and part in (None, e.part)]


def ran(part: str) -> list[str]:
    """The lowerings of the subgraphs of a part, as they ran."""
    return [e.lowering for e in events("ran", part)]


def as_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_PROCESS", os.urandom(8).hex())


def test_the_option_takes_a_number_of_seconds() -> None:
    assert parse(None, None).build_seconds is None
    assert parse(None, {"build_seconds": 60}).build_seconds == 60.0
    assert parse(None, {"build_seconds": 60}).digest_parts() == parse(None, None).digest_parts()
    for wrong in (0, -1, "60", True, float("inf")):
        with pytest.raises(OptionError, match="build_seconds takes a positive number such as 60"):
            parse(None, {"build_seconds": wrong})


@pytest.mark.inductor
def test_a_slow_node_moves_alone_in_forward_and_backward(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    make_slow(monkeypatch, clock, aten.neg.default)
    compile_and_compare()
    assert ran("forward") == ["inductor", "eager", "inductor"]
    assert sorted(set(ran("backward"))) == ["eager", "inductor"]
    for part in ("forward", "backward"):
        (retreat,) = events("retreat", part)
        assert (retreat.source_lowering, retreat.target_lowering) == ("inductor", "eager")
        reason = retreat.reason
        assert (reason.code, reason.by, reason.needed) == ("budget_spent", "inductor", "at most 600 s")
        assert "600 s are allowed: lowering 1000." in reason.sentence
        assert "this node took most of that" in reason.sentence
        assert "aten.neg.default" in reason.node
        assert "build_seconds" in reason.lever
        eager = [e for e in events("subgraph", part) if e.lowering == "eager"]
        assert [set(e.ops) for e in eager] == [{"aten.neg.default"}]


def test_without_the_option_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    def never(*_) -> None:
        raise AssertionError("a hook was put")

    monkeypatch.setattr("omnicomp._torch.inductor.time_limit._Hooks.put", never)
    make_slow(monkeypatch, clock, aten.neg.default)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, w: x @ w, backend="omni", options={"verify": "off"})
    torch.testing.assert_close(compiled(*inputs(False)), inputs(False)[0] @ inputs(False)[1])


def test_where_no_node_is_to_blame_the_part_moves_as_a_whole(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    seen = make_slow(monkeypatch, clock, aten.neg.default, ALLOWED * 0.4)

    def three(x, w):
        return ((x @ w).neg() @ w).neg().sum(0).neg() @ w

    compile_and_compare(three, grad=False)
    assert ran("inference") == ["eager"]
    (retreat,) = events("retreat")
    assert "all that was not built leaves" in retreat.reason.sentence
    assert seen.times == 3  # there is no search by building again


def test_a_second_slow_node_moves_what_is_not_built(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    make_slow(monkeypatch, clock, aten.neg.default)
    make_slow(monkeypatch, clock, aten.abs.default)

    def two(x, w):
        return ((x @ w).neg() @ w).abs() @ w

    compile_and_compare(two, grad=False)
    assert ran("inference") == ["inductor", "eager"]
    assert [e.reason.code for e in events("retreat")] == ["budget_spent", "budget_spent"]
    assert clock.skipped <= 3 * 1000


def distances(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """No code of Inductor's at all."""
    return torch.cdist(x @ w, w, 1.0) @ w


def test_the_next_process_knows_and_a_larger_budget_tries_again(monkeypatch, clock: Clock) -> None:
    seen = make_slow(monkeypatch, clock, aten._cdist_forward.default)
    compile_and_compare(distances, grad=False)
    assert seen.times == 1
    ((_, entry),) = entries()
    assert (entry.seconds, entry.slow) == (600, frozenset(entry.cut))
    for _ in range(2):  # in the same process, where it is as slow as before, and in another one
        compile_and_compare(distances, grad=False)
        assert (seen.times, ran("inference")) == (1, ["inductor", "eager", "inductor"])
        assert [e.verdict for e in events("cache") if e.cache == CACHE] == ["hit"]
        (retreat,) = events("retreat")
        assert "known from an earlier" in retreat.reason.sentence
        as_another_process(monkeypatch)
    compile_and_compare(distances, grad=False, seconds=300)
    assert seen.times == 1
    compile_and_compare(distances, grad=False, seconds=5000)
    assert [e.note for e in events("cache") if e.cache == CACHE] == [
        "it was found with 600 s to build, and more are allowed now"
    ]
    assert seen.times == 2
    assert "eager" not in ran("inference")


def test_verdicts_of_other_failures_outlive_a_larger_budget(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    reason = Reason(code="cut_out", sentence="planted")
    slow = Reason(code="budget_spent", sentence="planted")
    entry = verdicts.Entry(key="k", cut={"a": reason, "b": slow}, slow=frozenset({"b"}), seconds=60.0, untuned=slow)
    assert verdicts.Entry.loads(entry.dumps()) == entry
    assert entry.with_more_time() == verdicts.Entry(key="k", cut={"a": reason})
    assert entry.only_slow().cut == {"b": slow}


def plant_choices(monkeypatch: pytest.MonkeyPatch, benchmark: Callable[..., float]) -> None:
    """What measuring a choice of autotuning does."""
    monkeypatch.setattr(ExternKernelCaller, "benchmark", benchmark)


def tuned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def tuned_inputs(size: int = 96) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(size, size, generator=generator) for _ in range(2)]


def compile_tuned(size: int, **options) -> None:
    torch.compiler.reset()
    omnicomp.timeline.clear()
    settings = {"max_autotune": True, "summary": False, "verify": "off", "freezing": False, **options}
    compiled = torch.compile(tuned, backend="omni", options=settings)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tuned_inputs(size)), tuned(*tuned_inputs(size)))
    assert hooked() == []


@pytest.fixture
def tunable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Lets a product have two choices on the CPU, where it needs a constant weight otherwise."""
    from torch._inductor.kernel import mm

    asked: list[bool] = []
    original = mm.autotune_select_algorithm

    def select(name, choices, nodes, layout, **kwargs):
        asked.append(bool(torch._inductor.config.max_autotune))
        if torch._inductor.config.max_autotune:
            choices = [*choices, OTHER.bind(nodes, layout)]
        return original(name, choices, nodes, layout, **kwargs)

    monkeypatch.setattr(mm, "autotune_select_algorithm", select)
    # What was measured is kept in a file that other tests and runs must not see.
    monkeypatch.setattr(CacheBase, "get_local_cache_path", lambda *_: tmp_path / "measured")
    return asked


@pytest.mark.inductor
def test_out_of_time_while_autotuning_builds_again_without(monkeypatch, clock: Clock, tunable: list[bool]) -> None:
    measured: list[str] = []

    def benchmark(self, *args, out) -> float:
        measured.append(self.name)
        clock.skip()
        return 1.0

    plant_choices(monkeypatch, benchmark)
    compile_tuned(91, build_seconds=ALLOWED)
    assert len(measured) == 1
    assert ran("inference") == ["inductor"]
    (retreat,) = events("retreat")
    assert (retreat.source_lowering, retreat.target_lowering) == ("inductor", "inductor")
    assert retreat.reason.code == "budget_spent"
    for words in ("autotuning 1000.", "under way was the choice", "without autotuning"):
        assert words in retreat.reason.sentence
    assert "max_autotune=False" in retreat.reason.lever

    as_another_process(monkeypatch)
    compile_tuned(91, build_seconds=ALLOWED)  # AOTAutograd's cache must not have kept it as if it were tuned
    assert (len(measured), ran("inference")) == (1, ["inductor"])
    (retreat,) = events("retreat")
    assert "known from an earlier process" in retreat.reason.sentence
    as_another_process(monkeypatch)
    compile_tuned(91, build_seconds=5000)
    assert len(measured) == 3
    assert events("retreat") == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), MemoryError("planted")])
def test_out_of_memory_while_autotuning_builds_again_without(monkeypatch, tunable, error: Exception) -> None:
    def benchmark(self, *args, out) -> float:
        raise error

    plant_choices(monkeypatch, benchmark)
    compile_tuned(93 if isinstance(error, MemoryError) else 94)
    assert ran("inference") == ["inductor"]
    (retreat,) = events("retreat")
    assert retreat.reason.code == "build_failed"
    assert "autotuning failed" in retreat.reason.sentence
    assert retreat.reason.observed in (type(error).__name__, NoValidChoicesError.__name__)
    # Torch takes a choice that ran out of memory for a slow one, and has none left in the end.
    assert len(entries()) == isinstance(error, torch.OutOfMemoryError)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), MemoryError("planted")])
def test_a_node_whose_lowering_runs_out_of_memory_moves_and_is_not_kept(monkeypatch, error: Exception) -> None:
    def fails(*_, **__):
        raise error

    monkeypatch.setitem(inductor_lowering.lowerings, aten.neg.default, fails)
    compile_and_compare()
    assert ran("forward") == ["inductor", "eager", "inductor"]
    assert entries() == []


def test_raise_is_the_documented_error(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    make_slow(monkeypatch, clock, aten.neg.default)
    compiled = torch.compile(program, backend="omni", options={"build_seconds": ALLOWED, "on_error": "raise"})
    with pytest.raises(Exception, match=r"building took 1000\.\d s, and 600 s are allowed") as caught:
        compiled(*inputs(False))
    causes = [caught.value, caught.value.__cause__, getattr(caught.value, "inner_exception", None)]
    assert any(isinstance(each, BudgetSpentError) for each in causes)
    assert hooked() == []


def test_what_no_other_lowering_takes_is_built_without_a_bound(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    seen = make_slow(monkeypatch, clock, aten.neg.default, ALLOWED * 0.4)
    spent = time_limit.PartBudget(ALLOWED)
    graph = torch.fx.Graph()
    stays, moves = (graph.call_function(function, (1,)) for function in (torch.sin, torch.cos))

    def check() -> None:
        clock.skip()
        meter.active().check()

    with pytest.raises(BudgetSpentError), spent.building([stays, moves]):
        check()
    error = BudgetSpentError("planted")
    verdict = spent.verdict([stays, moves], error, lambda node: node is moves)
    assert verdict is not None
    assert list(verdict.cut) == [moves.name]
    with pytest.raises(BudgetSpentError), spent.building([graph.placeholder("other")]):
        raise AssertionError("no time was left")
    with spent.building([stays]):
        assert meter.active() is None
    assert seen.times == 0


@pytest.mark.inductor
def test_two_threads_have_their_own_time(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    make_slow(monkeypatch, clock, aten.neg.default)
    settings = {"summary": False, "verify": "off", "verdicts": "off"}
    results: dict[float, torch.Tensor] = {}

    def work(seconds: float) -> None:
        options = {**settings, "build_seconds": seconds}
        function = [lambda x, w: (x @ w).neg() @ w, lambda x, w: (x @ w).neg() @ x][seconds > ALLOWED]
        results[seconds] = torch.compile(function, backend="omni", options=options)(*inputs(False))

    threads = [threading.Thread(target=work, args=(seconds,)) for seconds in (ALLOWED, 10**6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    x, w = inputs(False)
    torch.testing.assert_close(results, {ALLOWED: (x @ w).neg() @ w, 10**6: (x @ w).neg() @ x})
    assert [e.reason.needed for e in events("retreat")] == ["at most 600 s"]
    assert hooked() == []


SLOW_CXX = """#!/bin/sh
for each in "$@"; do
  case "$last" in -o) out="$each" ;; esac
  case "$each" in *.cpp) source="$each" ;; esac
  last="$each"
done
if [ -n "$source" ] && grep -q 'cos()' "$source"; then
  echo half > "$out"
  echo "$out" > {mark}.new && mv {mark}.new {mark}
  sleep {sleep} & wait
fi
exec {cxx} "$@"
"""


# Another run of this test on the machine has another.
SLEEP = f"{10**6 + os.getpid()}"


def children(script: Path) -> set[str]:
    """Processes that run the script or its sleep."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            name = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if str(script) in name or f"sleep {SLEEP}" in name:
            found.add(name)
    return found


@pytest.mark.inductor
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")
def test_a_slow_compiler_is_ended_and_only_its_kernel_moves(monkeypatch, tmp_path: Path, clock: Clock) -> None:
    if "OMNICOMP_TEST_ALONE" not in os.environ:
        # A worker removes the half-written output a moment after the part has gone on. Among the threads of the whole
        # suite that moment is long enough for the look below to come first: the removal is not waited for yet.
        name = f"{__file__}::test_a_slow_compiler_is_ended_and_only_its_kernel_moves"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
        alone = {**os.environ, "OMNICOMP_TEST_ALONE": "1"}
        ran_alone = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=600, check=False)
        assert ran_alone.returncode == 0, ran_alone.stdout
        assert "1 passed" in ran_alone.stdout
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    mark, script = tmp_path / "started", tmp_path / "slow_cxx"
    script.write_text(SLOW_CXX.format(mark=mark, sleep=SLEEP, cxx=get_cpp_compiler()))
    script.chmod(0o755)
    compiler = get_cpp_compiler()
    patches = {"cpp.cxx": (str(script),), "compile_threads": 2}
    monkeypatch.setattr(meter, "clock", lambda: time.monotonic() + (10**6 if mark.exists() else 0))

    def two(x, w):
        return (x.cos() + 1) @ w

    with torch._inductor.config.patch(patches):
        compile_and_compare(two, grad=False, seconds=10**5)
    assert mark.exists()
    assert children(script) == set()
    (retreat,) = events("retreat")
    assert retreat.reason.code == "budget_spent"
    for words in ("C++ compile 1000", "under way was the kernel cpp_fused_add_cos_0"):
        assert words in retreat.reason.sentence
    assert ran("inference") == ["eager", "inductor"]
    begun = Path(mark.read_text().strip())
    assert begun.is_relative_to(tmp_path / "inductor")
    assert begun.parent.exists()
    assert not begun.exists()
    # Nothing in this process remembers the compilation that was ended.
    script.write_text(f'#!/bin/sh\nexec {compiler} "$@"\n')
    with torch._inductor.config.patch(patches):
        compile_and_compare(two, grad=False, seconds=10**7)
    assert ran("inference") == ["inductor"]
