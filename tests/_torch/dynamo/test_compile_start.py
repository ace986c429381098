"""A function is called when Dynamo begins to trace for a backend, with what `torch.compile` was given."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo import callback_handler
from torch.fx import GraphModule

from omnicomp._torch.dynamo import compile_start


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


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    torch.compiler.reset()  # which forgets all callbacks
    yield
    callback_handler.clear()


@pytest.mark.parametrize(
    ("given", "seen"),
    [({}, (None, None)), ({"options": {"a": 1}}, (None, {"a": 1})), ({"mode": "max-autotune"}, ("max-autotune", None))],
)
def test_it_is_called_in_front_of_the_trace(given: dict[str, Any], seen: Any) -> None:
    backend = Backend()
    compile_start.on_start(backend, backend.begin)
    call = torch.compile(lambda x: x.sin() + 1, backend=backend, **given)
    call(torch.ones(3))
    assert backend.order == [seen, "graph"]
    call(torch.ones(3))
    assert backend.order == [seen, "graph"]


def test_each_part_of_a_function_with_a_graph_break_is_a_start() -> None:
    backend = Backend()
    compile_start.on_start(backend, backend.begin)

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(function, backend=backend)(torch.ones(3))
    assert backend.order == [(None, None), "graph"] * 2


def test_other_backends_are_none_of_its_business() -> None:
    mine, other = Backend(), Backend()
    compile_start.on_start(mine, mine.begin)
    torch.compile(lambda x: x.sin() + 1, backend=other)(torch.ones(3))
    torch.compile(lambda x: x.cos() + 1, backend="eager")(torch.ones(3))
    torch._dynamo.optimize(_Wrapper(mine))(lambda x: x.tan() + 1)(torch.ones(3))
    assert mine.order == ["graph"]
    mine.order.clear()
    with callback_handler.install_callbacks(torch._dynamo.callback.CallbackTrigger.CUDAGRAPH_RECORDING, ""):
        pass
    assert not mine.order
    assert other.order == ["graph"]
