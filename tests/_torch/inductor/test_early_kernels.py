"""A C++ kernel is submitted when it is defined, once, and the generated module takes it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache, PyCodeCache

from omnicomp._torch.inductor import libraries
from omnicomp.backend import pipeline as pipeline

pytestmark = pytest.mark.inductor


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
