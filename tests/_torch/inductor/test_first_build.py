"""What the first C++ build of a cache folder waits for is begun once, and only where it will be needed."""

import contextlib
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from processes import ROOT
from torch._inductor import codecache, cpu_vec_isa

import omnicomp
from omnicomp._torch.dynamo import control_flow
from omnicomp._torch.inductor import first_build, libraries
from omnicomp.backend import pipeline


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[threading.Thread]]:
    """The threads that are begun, in an empty cache folder and with two compile threads."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(first_build, "_begun", threading.Event())
    for each in cpu_vec_isa.supported_vec_isa_list:  # some know what another test's configuration said of them
        getattr(type(each).__bool__, "cache_clear", lambda: None)()
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def noting(thread: threading.Thread) -> None:
        if thread.name == "omnicomp-first-build":
            begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noting)
    with torch._inductor.config.patch({"compile_threads": 2, "cpp.vec_isa_ok": None}):  # type: ignore[attr-defined]
        yield begun
    for thread in begun:
        thread.join()


class _Sets:
    """Instruction sets that note which of them were tested."""

    def __init__(self, name: str, tested: list[str], *, works: bool = True) -> None:
        self._name, self._tested, self._works = name, tested, works

    def __str__(self) -> str:
        return self._name

    def __bool__(self) -> bool:
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # in the compilers that it starts, too
        self._tested.append(self._name)
        if not self._works:
            raise RuntimeError("no compiler")
        return True


def _watch(monkeypatch: pytest.MonkeyPatch, *, works: bool = True) -> list[str]:
    done: list[str] = []
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["one", "two"])
    names = ("three", "one two", "one")
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [_Sets(n, done, works=works) for n in names])
    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_async", lambda code: done.append("header"))
    return done


def test_the_best_set_of_the_processor_is_tested_and_the_header_made(
    threads: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = _watch(monkeypatch)
    first_build.begin("cpu", {"epilogue_fusion": False})
    first_build.begin("cpu", {})
    assert len(threads) == 1
    threads[0].join()
    assert done == ["one two", "header"]


def test_what_fails_is_left_to_the_build_that_needs_it(
    threads: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = _watch(monkeypatch, works=False)
    first_build.begin("cpu", {})
    threads[0].join()
    assert "header" not in done


@pytest.mark.parametrize("case", ["warm", "one thread", "options of C++", "another generator"])
def test_nothing_is_begun_where_it_may_be_for_nothing(
    case: str, threads: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    done, options, config = _watch(monkeypatch), dict[str, Any](), dict[str, Any]()
    if case == "warm":
        libraries.INDEX.write("0" * 64, "a library")
    elif case == "one thread":
        config["compile_threads"] = 1
    elif case == "options of C++":
        options["cpp.simdlen"] = 256
    else:
        config["cpu_backend"] = "triton"
    with torch._inductor.config.patch(config):  # type: ignore[attr-defined]
        first_build.begin("cpu", options)
    assert not threads
    assert not done


@pytest.mark.parametrize("lowerings", [["eager"], ["override", "inductor", "eager"]])
def test_a_graph_that_inductor_gets_begins_it(
    lowerings: list[str], threads: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = _watch(monkeypatch)
    monkeypatch.setattr("omnicomp._torch.inductor.compile_fx.compile_fx_inner", _refused)
    options: Any = {"lowerings": lowerings}
    torch.compile(torch.sin, backend="omni", options=options)(torch.ones(3))
    assert len(threads) == ("inductor" in lowerings)
    for thread in threads:
        thread.join()
    assert ("header" in done) == bool(threads)


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, ["cuda", "graph"]),
        ({"lowerings": ["eager"]}, ["graph"]),
        ({"background": True}, ["graph"]),
        ({"lowering": ["eager"]}, []),  # the compilation says that this is no option
    ],
)
def test_it_is_begun_in_front_of_the_trace(
    options: dict[str, Any], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def captured(*_: Any) -> Any:
        seen.append("graph")
        raise RuntimeError("no build is needed here")

    monkeypatch.setattr(first_build, "likely_device", lambda: "cuda")
    monkeypatch.setattr(first_build, "begin", lambda device, _: seen.append(device))
    monkeypatch.setattr(pipeline, "capture_graph", captured)
    torch.compiler.reset()  # which forgets all callbacks
    control_flow.watch_starts(pipeline.omni, pipeline._begin_first_build)
    with contextlib.suppress(omnicomp.OptionError):
        torch.compile(lambda x: x.sin() + 1, backend="omni", options=options)(torch.ones(3))
    assert seen == order


def test_a_first_build_that_cannot_be_begun_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(first_build, "begin", no_process)
    pipeline._begin_first_build(None, None)


@pytest.mark.parametrize(
    ("accelerator", "used", "device"),
    [(None, False, "cpu"), ("cuda", True, "cuda"), ("cuda", False, "cpu"), ("xpu", True, "xpu"), ("mps", True, "")],
)
def test_a_program_that_has_not_used_its_gpu_compiles_for_the_cpu(
    accelerator: str | None, used: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(torch, "get_device_module", lambda _: types.SimpleNamespace(is_initialized=lambda: used))
    assert first_build.likely_device() == device


@pytest.mark.parametrize(("device", "woken"), [("cuda", 1), ("xpu", 1), ("cpu", 0), ("meta", 0)])
def test_the_processes_that_compile_for_a_gpu_are_started(
    device: str, woken: int, threads: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    _watch(monkeypatch)
    monkeypatch.setattr(first_build.AsyncCompile, "wakeup", lambda: calls.append(1))
    first_build.begin(device, {"compile_threads": 1})
    assert not calls
    first_build.begin(device, {})
    assert len(calls) == woken
    assert len(threads) == (device == "cpu")


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no build is needed here")


@pytest.mark.inductor
def test_inductor_takes_what_was_begun(
    threads: list[threading.Thread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codecache.CppPythonBindingsCodeCache.cache_clear()
    first_build.begin("cpu", {})
    threads[0].join()
    assert not list(tmp_path.rglob("*.tmp"))
    tests = list(tmp_path.rglob("*.so"))
    assert tests
    call = torch.compile(lambda x: torch.sin(x) + 1, backend="omni")
    value = torch.linspace(-2, 2, 40)
    torch.testing.assert_close(call(value), torch.sin(value) + 1)
    assert set(tests) < set(tmp_path.rglob("*.so"))


KILLED = """
import os, signal, sys, threading, time
import torch, omnicomp
torch.set_grad_enabled(False)

def layer():
    three = [(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.LayerNorm(16)) for _ in range(3)]
    return torch.nn.Sequential(*sum(three, ()), torch.nn.GELU())

def die(moment, group):
    time.sleep(moment)
    (os.killpg if group else os.kill)(os.getpid(), signal.SIGKILL)

model, x = torch.nn.Sequential(*(layer() for _ in range(14))), torch.randn(8, 16)
if len(sys.argv) > 1:
    threading.Thread(target=die, args=(float(sys.argv[1]), sys.argv[2] == "group"), daemon=True).start()
assert torch.allclose(torch.compile(model, backend="omni")(x), model(x), atol=1e-4)
events = omnicomp.timeline.events()
assert {event.lowering for event in events if event.type == "ran"} == {"inductor"}
assert not [event for event in events if event.type == "retreat"]
assert "built once, called" in " ".join(omnicomp.audit().to_text().split())
time.sleep(1000 if len(sys.argv) > 1 else 0)
"""


def _first_build(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    variables["PYTHONPATH"] = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    del variables["TORCHINDUCTOR_VEC_ISA_OK"]
    command = [sys.executable, "-c", KILLED, *words]
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=900, check=False, start_new_session=True
    )


def _processes_of(cache: Path) -> list[str]:
    """The processes that were started for a cache folder, with their command lines."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(cache).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _is_whole(library: Path) -> bool:
    """Whether an ELF file is as long as its header says: the table of its sections is the last thing in it."""
    data = library.read_bytes()
    if len(data) < 64:
        return False
    (table,), (size, count) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 58)
    return 0 < table and table + size * count <= len(data)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes and libraries as Linux has them")
@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, 5))])
def test_a_first_build_that_is_killed_leaves_no_process_and_no_half_library(number: int, tmp_path: Path) -> None:
    for kind in ("program", "group"):  # with the program alone, its compilers go on
        died = _first_build(tmp_path, str(random.uniform(0, 30)), kind)
        assert died.returncode == -signal.SIGKILL, died.stderr
        end = time.monotonic() + 120
        while (left := _processes_of(tmp_path)) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left
        assert all(map(_is_whole, tmp_path.rglob("*.so")))
    done = _first_build(tmp_path)
    assert done.returncode == 0, done.stderr
    assert not _processes_of(tmp_path)
