"""A compiled function can be called while another thread compiles, and still refuses symbolic tracing."""

import threading

import pytest
import torch
import torch.fx
from torch import Tensor

from omnicomp._torch.dynamo.control_flow import compile_lock


def test_a_compilation_in_another_thread_is_no_symbolic_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(torch.sin, backend="omni", options={"lowerings": ["eager"]})
    x = torch.randn(3)
    compiled(x)
    tracing, finished = threading.Event(), threading.Event()

    def compiles() -> None:
        with compile_lock:
            monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
            tracing.set()
            finished.wait(30)
            monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", False)

    thread = threading.Thread(target=compiles)
    thread.start()
    try:
        tracing.wait(30)
        torch.testing.assert_close(compiled(x), x.sin())
    finally:
        finished.set()
        thread.join()


def test_symbolic_tracing_in_this_thread_is_refused_as_before() -> None:
    compiled = torch.compile(torch.sin, backend="omni", options={"lowerings": ["eager"]})

    def calls(x: Tensor) -> Tensor:
        return compiled(x)

    with pytest.raises(RuntimeError, match="symbolically trace"):
        torch.fx.symbolic_trace(calls)
