"""Inductor's steps know of the time of a build while it goes on, in the threads that work for it, and not beyond."""

import concurrent.futures
import functools
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._inductor.config
from torch._inductor import codecache, cpp_builder, select_algorithm
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.autotune_process import TuningProcessPool
from torch._inductor.exc import CppCompileError
from torch._inductor.graph import GraphLowering

from omnicomp._torch.inductor import build_clock as meter
from omnicomp._torch.inductor import time_limit
from omnicomp._torch.inductor.time_limit import Meter, building, hooked, not_kept
from omnicomp.errors import BudgetSpentError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def skip(self, seconds: float = 1000.0) -> None:
        """Time passes, and then a step of Inductor's comes."""
        self.now += seconds
        active = meter.active()
        if active is not None:
            active.check()


@pytest.fixture
def threads() -> Iterator[None]:
    with torch._inductor.config.patch(compile_threads=2):
        yield


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter, "clock", clock)
    return clock


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = {(owner, name): owner.__dict__[name] for owner, name, _ in time_limit._WRAPPED}
    yield
    assert hooked() == []
    assert {key: key[0].__dict__[key[1]] for key in before} == before


def test_every_step_is_there_in_this_torch() -> None:
    with building(Meter(1.0)):
        assert len(hooked()) == len(time_limit._WRAPPED)


def test_hooks_stay_until_the_last_build_is_through() -> None:
    first, second = building(Meter(1e9)), building(Meter(1e9))
    first.__enter__()
    second.__enter__()
    second.__exit__(None, None, None)
    assert hooked() != []
    first.__exit__(None, None, None)
    assert hooked() == []


def test_a_forked_process_does_not_wait_for_a_build_of_its_parent() -> None:
    def child() -> int:
        with building(Meter(1e9)):
            inside = len(hooked())
        return 10 * (inside == len(time_limit._WRAPPED)) + (hooked() == [])

    entered, leave = threading.Event(), threading.Event()

    def build() -> None:
        with building(Meter(1e9)), time_limit._hooks._lock:
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=build)
    thread.start()
    assert entered.wait(60)
    pid = os.fork()
    if pid == 0:
        os._exit(child())
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 11


def test_what_somebody_wraps_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GraphLowering.run
    with building(Meter(1e9)):
        inner = GraphLowering.run

        def theirs(self, *args):
            return inner(self, *args)

        GraphLowering.run = theirs
    assert GraphLowering.run is theirs
    GraphLowering.run = original


def test_time_is_noted_by_what_it_went_on(clock: Clock) -> None:
    spent = Meter(100)
    with building(spent):
        clock.now += 1
        with spent.phase("lowering"):
            clock.now += 2
            with spent.phase(meter.AUTOTUNING), spent.phase("C++ compile"):
                clock.now += 4
            clock.now += 8
        with spent.timed("kernel"), spent.timed("inside"):
            clock.now += 16
    clock.now += 1000
    assert spent.phases == {"other": 17.0, "lowering": 10.0, "autotuning": 4.0}
    assert (spent.kernels, spent.used, spent.left) == ({"kernel": 16.0}, 31.0, 69.0)
    with pytest.raises(BudgetSpentError, match=r"took 100\.0 s, and 100 s"), building(spent):
        clock.skip(69)
    with pytest.raises(BudgetSpentError), building(spent):
        raise AssertionError("it must not begin")


def test_the_build_around_another_counts_too(clock: Clock) -> None:
    outer, inner = Meter(10), Meter(100)
    with pytest.raises(BudgetSpentError, match="10 s are allowed"), building(outer), building(inner):
        clock.skip(50)
    with building(inner):
        assert inner.left == 50


def test_an_error_that_follows_from_no_time_is_no_error_of_the_graph(clock: Clock) -> None:

    def swallowed() -> None:
        with pytest.raises(meter.Spent):
            clock.skip()
        raise ValueError("no choice is left")

    with pytest.raises(BudgetSpentError) as caught, building(Meter(10)):
        swallowed()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="planted"), building(Meter(10)):
        raise ValueError("planted")


def run_in(folder: Path, command: str) -> None:
    cpp_builder._run_compile_cmd(command, str(folder))


def test_a_compiler_that_ends_in_time_is_as_ever(tmp_path: Path) -> None:
    with building(Meter(1e6)):
        run_in(tmp_path, "touch -a done")
        with pytest.raises(CppCompileError, match="planted"):
            run_in(tmp_path, "sh -c 'echo planted; exit 3'")
    assert (tmp_path / "done").exists()


def test_a_compiler_is_ended_with_what_it_started_and_its_output_is_removed(tmp_path: Path, monkeypatch) -> None:
    started = tmp_path / "started"
    monkeypatch.setattr(meter, "clock", lambda: time.monotonic() + (1e9 if started.exists() else 0))
    # Neither it nor what it starts listens to the request to end.
    inner = f"trap '' TERM; echo $$ > {started}.new; mv {started}.new {started}; sleep 1000; sleep 1001"
    text = f"trap '' TERM; echo half > $1; sh -c \"{inner.replace('$', chr(92) + '$')}\"; true"
    (tmp_path / "compiler").write_text(text)
    with pytest.raises(BudgetSpentError), building(Meter(1e6)):
        run_in(tmp_path, "sh ./compiler out.so -o out.so")
    assert not (tmp_path / "out.so").exists()
    for _ in range(600):  # the system takes its time to end what it was told to end
        listed = subprocess.run(
            ["ps", "-o", "stat=", "-p", started.read_text().strip()], capture_output=True, text=True
        )
        if listed.stdout.strip()[:1] in ("", "Z"):
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"it goes on: {listed.stdout}")


def test_a_thread_works_for_the_build_that_hands_it_the_task(clock: Clock, threads: None) -> None:
    seen: list[tuple[Meter | None, Meter | None]] = []
    one, two = Meter(100), Meter(100)
    for each in (one, two):
        with building(each):
            AsyncCompile.submit(lambda: seen.append((meter.active(), meter.own()))).result()
    AsyncCompile.submit(lambda: seen.append((meter.active(), meter.own()))).result()
    assert seen == [(one, None), (two, None), (None, None)]


def test_who_waits_for_a_thread_waits_as_long_as_there_is_time(clock: Clock, threads: None) -> None:
    begun, go = threading.Event(), threading.Event()

    def task() -> str:
        begun.set()
        assert go.wait(60)
        clock.now += 1000
        return "done"

    def wait() -> None:
        futures.append(AsyncCompile.submit(task))
        assert begun.wait(60)
        clock.now += 1000
        futures[0].result()

    futures = []
    with pytest.raises(BudgetSpentError), building(Meter(100)):
        wait()
    assert not futures[0].done()
    go.set()
    assert futures[0].result() == "done"  # who has time gets it


def test_a_cpp_kernel_that_was_given_up_is_compiled_by_who_asks_next(clock: Clock, threads: None) -> None:
    def give_up(task) -> None:
        clock.now += 1000
        futures.append(AsyncCompile.submit(task))
        concurrent.futures.wait(futures)
        clock.skip()

    futures = []
    # As `CppCodeCache` hands it over; it looks afterwards whether the kernel is there.
    for task in (functools.partial(codecache._worker_compile_cpp, "no such folder/lock", ()), pytest.fail):
        with pytest.raises(BudgetSpentError), building(Meter(100)):
            give_up(task)
    assert futures[0].result() is None
    with pytest.raises(RuntimeError, match="was given up"):
        futures[1].result()


def test_choices_that_are_compiled_in_threads(clock: Clock) -> None:
    begun, go = threading.Event(), threading.Event()

    def choice() -> None:
        begun.set()
        assert go.wait(60)

    assert select_algorithm.ThreadPoolExecutor is concurrent.futures.ThreadPoolExecutor

    def compile_choices() -> None:
        executor = select_algorithm.ThreadPoolExecutor(1)
        futures.extend([executor.submit(choice), executor.submit(choice)])
        assert begun.wait(60)
        clock.now += 1000
        list(select_algorithm.as_completed(futures, timeout=3600))

    futures = []
    with pytest.raises(BudgetSpentError), building(Meter(100)):
        compile_choices()
    go.set()
    concurrent.futures.wait(futures)
    assert isinstance(futures[1].exception(), meter.Spent)  # it did not begin
    with building(Meter(100)), select_algorithm.ThreadPoolExecutor(1) as executor:
        futures = [executor.submit(int, str(i)) for i in range(3)]
        assert sorted(each.result() for each in select_algorithm.as_completed(futures)) == [0, 1, 2]


def test_no_time_is_not_kept_as_the_time_of_a_choice(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def target(self, choice) -> float:
        clock.now += 1000
        return float("inf")

    def benchmark(self, choices):
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            return dict(zip(choices, executor.map(self.target, choices), strict=True))

    monkeypatch.setattr(TuningProcessPool, "target", target)
    monkeypatch.setattr(TuningProcessPool, "benchmark", benchmark)
    pool = TuningProcessPool.__new__(TuningProcessPool)
    with pytest.raises(BudgetSpentError), building(Meter(100)):
        pool.benchmark(["one", "two"])
    assert pool.benchmark(["one"]) == {"one": float("inf")}
    monkeypatch.undo()


def test_a_part_that_is_not_what_its_key_says_is_not_kept() -> None:
    class Compiled:
        _fx_graph_cache_key = "key"

        def __call__(self, inputs: list[int]) -> list[int]:
            return [*inputs, 1]

    part = not_kept(Compiled())
    assert not hasattr(part, "_fx_graph_cache_key")
    assert part([2]) == [2, 1]
