"""What a compilation leaves alone of the program around it, and when it begins."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch._dynamo import callback_handler
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from omnicomp._torch.dynamo import control_flow
from omnicomp._torch.dynamo.control_flow import compile_lock

OPTIONS: dict[str, Any] = {"lowerings": ["eager"], "dtype_policy": "bf16"}


def attention(x: Tensor) -> Tensor:
    q, k, v = x.chunk(3, dim=-1)
    return torch.softmax(q @ k.mT / 2, dim=-1) @ v


def layers() -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))


PROGRAMS = pytest.mark.parametrize("make", [layers, lambda: attention], ids=["layers", "attention"])


@PROGRAMS
def test_hooks_for_saved_tensors_see_what_the_program_saves(make: Callable[[], Callable[[Tensor], Tensor]]) -> None:
    """Not the fake tensors on which passes evaluate operators while the first call compiles."""
    compiled = torch.compile(make(), backend="omni", options=OPTIONS)
    x = torch.randn(2, 3, 12, requires_grad=True)
    packed: list[list[tuple[type, torch.dtype, torch.Size]]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed[-1].append((type(tensor), tensor.dtype, tensor.shape))
        return tensor

    for _ in range(2):
        packed.append([])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            compiled(x)
    first, second = packed
    assert first
    assert first == second


@PROGRAMS
def test_the_first_call_in_a_checkpointed_region(make: Callable[[], Callable[[Tensor], Tensor]]) -> None:
    program = make()
    compiled = torch.compile(program, backend="omni", options=OPTIONS)
    x = torch.randn(2, 3, 12, requires_grad=True)
    (got,) = torch.autograd.grad(checkpoint(lambda x: torch.sin(compiled(x)), x, use_reentrant=False).sum(), x)
    (want,) = torch.autograd.grad(torch.sin(program(x)).sum(), x)
    torch.testing.assert_close(got, want, atol=3e-2, rtol=3e-2)


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


class Backend:
    """A backend that runs graphs as they are, and notes in `order` when it is called."""

    def __init__(self) -> None:
        self.order: list[Any] = []

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        self.order.append("graph")
        return gm.forward

    def begin(self, mode: str | None, options: Mapping[str, Any] | None) -> None:
        self.order.append((mode, options))


class _Wrapper:
    """What a program puts around a backend."""

    def __init__(self, backend: Backend) -> None:
        self.compiler_fn = backend

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self.compiler_fn(gm, inputs)


@pytest.fixture
def callbacks() -> Iterator[None]:
    torch.compiler.reset()  # which forgets all callbacks
    yield
    callback_handler.clear()


@pytest.mark.usefixtures("callbacks")
@pytest.mark.parametrize(
    ("given", "seen"),
    [({}, (None, None)), ({"options": {"a": 1}}, (None, {"a": 1})), ({"mode": "max-autotune"}, ("max-autotune", None))],
)
def test_a_start_is_told_in_front_of_the_trace(given: dict[str, Any], seen: Any) -> None:
    backend = Backend()
    control_flow.watch_starts(backend, backend.begin)
    call = torch.compile(lambda x: x.sin() + 1, backend=backend, **given)
    call(torch.ones(3))
    assert backend.order == [seen, "graph"]
    call(torch.ones(3))
    assert backend.order == [seen, "graph"]


@pytest.mark.usefixtures("callbacks")
def test_each_part_of_a_function_with_a_graph_break_is_a_start() -> None:
    backend = Backend()
    control_flow.watch_starts(backend, backend.begin)

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(function, backend=backend)(torch.ones(3))
    assert backend.order == [(None, None), "graph"] * 2


@pytest.mark.usefixtures("callbacks")
def test_starts_for_other_backends_are_not_told() -> None:
    mine, other = Backend(), Backend()
    control_flow.watch_starts(mine, mine.begin)
    torch.compile(lambda x: x.sin() + 1, backend=other)(torch.ones(3))
    torch.compile(lambda x: x.cos() + 1, backend="eager")(torch.ones(3))
    torch._dynamo.optimize(_Wrapper(mine))(lambda x: x.tan() + 1)(torch.ones(3))
    assert mine.order == ["graph"]
    mine.order.clear()
    with callback_handler.install_callbacks(torch._dynamo.callback.CallbackTrigger.CUDAGRAPH_RECORDING, ""):
        pass
    assert not mine.order
    assert other.order == ["graph"]
