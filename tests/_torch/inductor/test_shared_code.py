"""Functions of generated code: what calls are given is compared with what they were made for when code is made."""

import operator
from typing import Any

import pytest
import torch
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from omnicomp._torch.inductor import shared_code

pytestmark = pytest.mark.inductor


def calling(*strides: tuple[int, int], rows: int = 4) -> tuple[GraphModule, list[torch.Tensor]]:
    """A graph that calls one body for inputs with these strides, and such inputs."""
    inputs = [torch.randn(32).as_strided((rows, 8), each) for each in strides]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) for each in inputs]
        body = Graph()
        x = body.placeholder("x")
        doubled = body.call_function(
            torch.ops.aten.mul.Tensor, (body.call_function(torch.ops.aten.sin.default, (x,)), 2)
        )
        body.output((doubled,))
        for node in body.nodes:
            node.meta["val"] = fakes[0].clone()
        graph = Graph()
        given = [graph.placeholder(f"x{index}") for index in range(len(fakes))]
        for node, fake in zip(given, fakes, strict=True):
            node.meta["val"] = fake
        fetched = graph.get_attr("body")
        results: list[torch.fx.Node] = []
        for node, fake in zip(given, fakes, strict=True):
            call = shared_code.invoke(fetched, "body", [node], (fake.clone(),))
            results.append(graph.call_function(operator.getitem, (call, 0)))
            results[-1].meta["val"] = fake.clone()
        graph.output(tuple(results))
        return GraphModule({"body": GraphModule({}, body)}, graph), inputs


def compiled(module: GraphModule) -> Any:
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with shared_code.calls_compared(), fresh_cache(), torch._inductor.config.patch(fx_graph_cache=False):
        with torch._guards.tracing(torch._guards.TracingContext(inputs[0].fake_mode)):
            return compile_fx_inner(module, inputs)


def test_a_function_that_is_called_alike_asserts_nothing() -> None:
    module, inputs = calling((8, 1), (8, 1))
    found, [code] = run_and_get_code(lambda: compiled(module)(list(inputs)))
    for value, given in zip(found, inputs, strict=True):
        torch.testing.assert_close(value, given.sin() * 2)
    body, _, main = code.partition("def body(args)")[2].partition("def call(")
    assert main.count("assert_size_stride(") == 2
    assert "args.clear()" in body
    assert "assert_size_stride(" not in body


@pytest.fixture
def _compared_here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before torch 2.13, which looks at the strides of calls where a pass changed the graph."""
    monkeypatch.setattr(FakeTensorUpdater, "incremental_update", lambda self: 0)


@pytest.mark.usefixtures("_compared_here_alone")
def test_a_call_with_another_layout_is_an_error_where_code_is_generated() -> None:
    module, _ = calling((8, 1), (1, 4))
    with pytest.raises(Exception, match=r"body is called with \w+ laid out as .* and not"):
        compiled(module)


@pytest.mark.usefixtures("_compared_here_alone")
@pytest.mark.parametrize("rows", [0, 1])
def test_strides_of_one_row_or_of_none_say_nothing(rows: int) -> None:
    module, inputs = calling((8, 1), (16, 1), rows=rows)
    for value, given in zip(compiled(module)(list(inputs)), inputs, strict=True):
        torch.testing.assert_close(value, given.sin() * 2)
