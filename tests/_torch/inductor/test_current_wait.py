"""What a thread does inside torch, read from its frames."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import pytest
import torch

from omnicomp._torch.inductor import current_wait
from omnicomp._torch.inductor.current_wait import waits_for

ROOT = Path(torch.__file__).parent


def held(file: str, function: str, inside: Callable[[], None]) -> Callable[[], None]:
    """A function of that name in that file, which calls another one."""
    namespace: dict[str, object] = {"inside": inside}
    code: CodeType = compile(f"def {function}():\n    inside()\n", str(ROOT.parent / file), "exec")
    exec(code, namespace)
    return namespace[function]  # type: ignore[return-value]


def while_in(*places: tuple[str, str]) -> str:
    """What is said of a thread that is in functions, the first the outermost, while this one looks."""
    there, done = threading.Event(), threading.Event()

    def wait() -> None:
        there.set()
        done.wait(10)

    call = wait
    for file, function in reversed(places):
        call = held(file, function, call)
    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert there.wait(10)
        assert thread.ident is not None
        return waits_for(thread.ident)
    finally:
        done.set()
        thread.join()


def test_the_innermost_place_decides() -> None:
    graph, compiler = ("torch/_inductor/graph.py", "codegen"), ("torch/_inductor/cpp_builder.py", "run_compile_cmd")
    assert while_in(graph) == "generating code"
    assert while_in(graph, ("torch/_inductor/scheduler.py", "fuse_nodes")) == "fusing and scheduling"
    assert while_in(graph, compiler) == "waiting for the C++ compiler"
    assert while_in(("torch/nn/modules/module.py", "forward")) == ""


def test_who_waits_for_threads_that_compile_cpp_waits_for_the_compiler() -> None:
    waiting = ("torch/_inductor/async_compile.py", "wait")
    assert while_in(waiting) == "waiting for Triton's compile workers"
    there, done = threading.Event(), threading.Event()

    def compile_cpp() -> None:
        there.set()
        done.wait(10)

    other = threading.Thread(target=held("torch/_inductor/cpp_builder.py", "build", compile_cpp))
    other.start()
    try:
        assert there.wait(10)
        assert while_in(waiting) == "waiting for the C++ compiler"
    finally:
        done.set()
        other.join()


def test_a_thread_that_is_gone_waits_for_nothing() -> None:
    assert waits_for(-1) == ""


@pytest.mark.parametrize("place", current_wait._PLACES, ids=lambda place: f"{place[0]}:{place[1]}")
def test_torch_has_the_places(place: tuple[str, str, str]) -> None:
    file, function, _ = place
    path = ROOT.parent / file
    if not path.exists() and torch.__version__ < "2.13":
        pytest.skip("a file of a later torch")
    assert path.exists()
    assert not function or f"def {function}(" in path.read_text()
