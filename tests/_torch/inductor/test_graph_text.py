"""A graph survives as text: its code, its constants, and the graphs that it calls."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from omnicomp._torch.fx import boxed
from omnicomp._torch.inductor import graph_text as sources
from omnicomp._torch.inductor.graph_text import from_source, to_source


def with_constant(constant: Any) -> GraphModule:
    root = torch.nn.Module()
    root.constant = constant
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.add, (x, graph.get_attr("constant"))), graph.get_attr("constant")))
    module = GraphModule(root, graph)
    boxed(module)
    return module


@pytest.mark.parametrize(
    "constant",
    [
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.tensor(2.5),
        torch.zeros(0, 4),
        torch.randn(3, 4).bfloat16(),
        torch.arange(12).reshape(3, 4),
        torch.randn(3, 4) > 0,
        torch.randn(3, 4, dtype=torch.complex64),
        torch.randn(3, 1).expand(3, 4),
    ],
    ids=lambda value: f"{value.dtype} {list(value.shape)} {value.stride()}",
)
def test_constants_keep_values_dtypes_and_shapes(constant: Tensor) -> None:
    data = to_source(with_constant(constant))
    x = torch.zeros(())
    inputs: list[Any] = [x]
    result, same = from_source(data)(inputs)
    torch.testing.assert_close(result, x + constant, rtol=0, atol=0)
    torch.testing.assert_close(same, constant, rtol=0, atol=0)
    assert inputs == []
    assert to_source(with_constant(constant.clone())) == to_source(with_constant(constant.clone()))


def test_what_cannot_travel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the constant constant is a Tensor"):
        to_source(with_constant(torch.randn(3).to_sparse()))
    monkeypatch.setattr(sources, "MAX_CONSTANT_BYTES", 16)
    with pytest.raises(ValueError, match="has 20 bytes"):
        to_source(with_constant(torch.randn(5)))


def test_graphs_that_are_called_travel_along() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() + 1, (x,))

    module = make_fx(lambda x: (function(x),), tracing_mode="fake")(torch.ones(3))
    boxed(module)
    data = to_source(module)
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(from_source(data)([x])[0], function(x))
