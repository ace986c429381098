"""What the first C++ build of a cache folder waits for is begun once, and only where it will be needed."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._inductor import codecache

from omnicomp._torch.inductor import first_build, libraries


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[threading.Thread]]:
    """The threads that are begun, in an empty cache folder and with two compile threads."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(first_build, "_begun", threading.Event())
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def noting(thread: threading.Thread) -> None:
        if thread.name == "omnicomp-first-build":
            begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noting)
    with torch._inductor.config.patch(compile_threads=2):  # type: ignore[attr-defined]
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
    monkeypatch.setattr(first_build.cpu_vec_isa, "x86_isa_checker", lambda: ["one", "two"])
    names = ("one two", "one", "three")
    monkeypatch.setattr(first_build.cpu_vec_isa, "supported_vec_isa_list", [_Sets(n, done, works=works) for n in names])
    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_async", lambda code: done.append("header"))
    return done


def test_sets_of_the_processor_are_tested_and_the_header_made(
    threads: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = _watch(monkeypatch)
    first_build.begin({"epilogue_fusion": False})
    first_build.begin({})
    assert len(threads) == 1
    threads[0].join()
    assert sorted(done[:2]) == ["one", "one two"]
    assert done[2:] == ["header"]


def test_what_fails_is_left_to_the_build_that_needs_it(
    threads: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = _watch(monkeypatch, works=False)
    first_build.begin({})
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
        first_build.begin(options)
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


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no build is needed here")


@pytest.mark.inductor
def test_inductor_takes_what_was_begun(
    threads: list[threading.Thread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codecache.CppPythonBindingsCodeCache.cache_clear()
    first_build.begin({})
    threads[0].join()
    assert not list(tmp_path.rglob("*.tmp"))
    tests = list(tmp_path.rglob("*.so"))
    call = torch.compile(lambda x: torch.sin(x) + 1, backend="omni")
    value = torch.linspace(-2, 2, 40)
    torch.testing.assert_close(call(value), torch.sin(value) + 1)
    assert set(tests) < set(tmp_path.rglob("*.so"))
