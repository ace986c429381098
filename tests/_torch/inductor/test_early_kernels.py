"""A C++ kernel is submitted when it is defined, once; idle processes compile a slow Triton kernel too."""

import threading
import types
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels
from torch._inductor.codecache import CppPythonBindingsCodeCache, PyCodeCache

from omnicomp._torch.inductor import early_kernels, libraries
from omnicomp.backend import pipeline as pipeline

pytestmark = pytest.mark.inductor

# What stands for the source of a kernel, and how many configurations it has.
KERNEL = "import types\nkernel = types.SimpleNamespace(configs=list(range({count})))"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What happens while a graph is built in an empty cache folder, with two compile threads."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    CppPythonBindingsCodeCache.cache_clear()
    happened: list[str] = []
    load, submit = PyCodeCache.load_by_key_path.__func__, AsyncCompile.cpp_pybinding  # type: ignore[attr-defined]

    def noting_load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        happened.append("module")
        return load(cls, *args, **kwargs)

    def noting_submit(self: AsyncCompile, types: list[str], source: str) -> Any:
        happened.append("kernel")
        return submit(self, types, source)

    monkeypatch.setattr(PyCodeCache, "load_by_key_path", classmethod(noting_load))
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", noting_submit)
    with torch._inductor.config.patch(compile_threads=2):  # type: ignore[attr-defined]
        yield happened


def two_kernels(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.mm(torch.cos(x), x)) + 1


def test_kernels_are_submitted_before_their_module_runs(events: list[str], tmp_path: Path) -> None:
    value = torch.rand(16, 16)
    torch.testing.assert_close(torch.compile(two_kernels, backend="omni")(value), two_kernels(value))
    assert events == ["kernel", "kernel", "module", "kernel", "kernel"]
    libraries = [path for path in tmp_path.rglob("*.main.so") if "omnicomp" not in path.parts]
    assert len(libraries) == 2


def test_one_thread_builds_kernels_where_it_needs_them(events: list[str]) -> None:
    value = torch.rand(16, 16)
    with torch._inductor.config.patch(compile_threads=1):  # type: ignore[attr-defined]
        torch.compile(two_kernels, backend="omni")(value)
    assert events == ["module", "kernel", "kernel"]


def test_what_fails_early_is_met_by_the_module(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    submit = AsyncCompile.cpp_pybinding

    def failing(self: AsyncCompile, types: list[str], source: str) -> Any:
        if "module" not in events:
            raise RuntimeError("no compiler")
        return submit(self, types, source)

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", failing)
    value = torch.rand(16, 16)
    torch.testing.assert_close(torch.compile(two_kernels, backend="omni")(value), two_kernels(value))
    assert events == ["module", "kernel", "kernel"]


def test_a_remote_cache_is_asked_and_given_each_library_once(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Remote:
        def get(self, name: str) -> None:
            asked.append(name)

        def put(self, name: str, data: dict[str, str]) -> None:
            given.append(name)

    asked, given = list[str](), list[str]()
    monkeypatch.setattr(libraries, "_remote", Remote)
    monkeypatch.setattr(libraries, "_used", {})
    monkeypatch.setattr(libraries, "_sent", set())
    torch.compile(two_kernels, backend="omni")(torch.rand(16, 16))
    assert events.count("kernel") == 4
    assert len(asked) == len(set(asked)) == 2
    assert sorted(given) == sorted(asked)


class _Processes:
    """Takes jobs as torch's pool does, and does those that are told to be quick."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], str]] = []

    def submit(self, job: Any, load: Any, *args: Any) -> Future[Any]:
        self.jobs.append((Future(), load.args[1]))
        return self.jobs[-1][0]

    def finish(self, *numbers: int) -> None:
        kernel = types.SimpleNamespace(**dict.fromkeys(("set_compile_info", "restore_after_unpickle"), _nothing))
        for number in numbers:
            self.jobs[number][0].set_result((kernel, 0))


def _nothing(*args: Any, **kwargs: Any) -> None: ...


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Processes]:
    found = _Processes()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(AsyncCompile, "process_pool", staticmethod(lambda: found))
    monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda _: True))
    monkeypatch.setattr(early_kernels, "_SLOW", 0.01)
    with torch._inductor.config.patch(compile_threads=16):  # type: ignore[attr-defined]
        yield found
    CompiledTritonKernels.cache_clear()


def _submitted(count: int, configurations: int) -> dict[str, Any]:
    compiler = AsyncCompile()
    source = KERNEL.format(count=configurations)
    return {f"kernel_{n}": compiler.triton("kernel", f"{source}  # {n}") for n in range(count)}


def _waited_for(scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are waited for; not until they are there, as nobody compiles them."""
    waited: list[Any] = []
    monkeypatch.setattr(early_kernels._helping, "before", lambda _, scope: waited.append(scope))
    AsyncCompile._wait_futures(AsyncCompile(), scope)
    assert waited == [scope]
    for thread in threading.enumerate():
        if thread.name == "omnicomp-early-kernels":
            thread.join(60)


def _configurations(source: str) -> list[int]:
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope["kernel"].configs


@pytest.mark.parametrize(
    ("kernels", "quick", "configurations", "helped"),
    [
        (3, 2, 6, [[5], [4], [3], [2], [1], [0], [0], [0]]),
        (3, 1, 6, [[5], [4], [3], [2], [1], [0], [0]] * 2),
        (1, 0, 20, [[19, 11, 3], [18, 10, 2], [17, 9, 1], [16, 8], [15, 7], [14, 6], [13, 5], [12, 4]]),
        (8, 0, 3, [[2, 1]] * 8),
        (3, 3, 6, []),
    ],
)
def test_configurations_of_slow_kernels_are_compiled_by_processes_with_nothing_to_do(
    kernels: int,
    quick: int,
    configurations: int,
    helped: list[list[int]],
    processes: _Processes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scope = _submitted(kernels, configurations)
    processes.finish(*range(quick))
    _waited_for(scope, monkeypatch)
    jobs = [source for _, source in processes.jobs]
    assert [_configurations(source) for source in jobs[kernels:]] == helped
    slow = jobs[quick:kernels]
    each = len(helped) // max(len(slow), 1)
    for number, source in enumerate(jobs[kernels:]):
        assert source.startswith(f"{slow[number // each]}\n")  # its lines have their numbers, which are in Triton's key


def test_none_helps_while_there_are_more_kernels_than_processes(
    processes: _Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = _submitted(9, 6)
    rounds: list[int] = []
    wait = early_kernels.wait

    def finishing(tasks: Any, **kwargs: Any) -> Any:
        if "return_when" in kwargs:
            rounds.append(len(processes.jobs))
            processes.finish(len(rounds) - 1)
        return wait(tasks, **kwargs)

    monkeypatch.setattr(early_kernels, "wait", finishing)
    _waited_for(scope, monkeypatch)
    assert rounds == [9]
    assert len(processes.jobs) == 9 + 8


def test_kernels_are_loaded_while_others_are_compiled(processes: _Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread waits for the slow ones, and for the many of a large graph."""
    scope, done = _submitted(9, 6), list[int]()

    def loading(_: AsyncCompile, scope: dict[str, Any]) -> None:
        done.append(len(processes.jobs))
        processes.finish(*range(9))

    monkeypatch.setattr(early_kernels._helping, "before", loading)
    AsyncCompile._wait_futures(AsyncCompile(), scope)
    assert done == [9]


def test_no_thread_waits_for_what_is_there(processes: _Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = _submitted(2, 6)
    processes.finish(0, 1)
    monkeypatch.setattr(early_kernels, "_help", _nothing)
    monkeypatch.setattr(threading, "Thread", None)
    _waited_for(scope, monkeypatch)


def test_processes_that_cannot_help_stop_nothing(processes: _Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = _submitted(1, 6)

    def broken(*args: Any) -> Any:
        raise RuntimeError("no processes")

    escaped: list[Any] = []
    monkeypatch.setattr(processes, "submit", broken)
    monkeypatch.setattr(threading, "excepthook", escaped.append)
    _waited_for(scope, monkeypatch)
    assert escaped == []
