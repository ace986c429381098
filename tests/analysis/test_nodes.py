"""Names, source lines and module paths of nodes, as a reader of the audit sees them."""

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from omnicomp.analysis.nodes import (
    call_count,
    function_name,
    insert_call,
    module_path,
    op_name,
    plain_path,
    source_line,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
        self.table = nn.ModuleDict({"a b": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)  # the line of the layer
        x = self.table["a b"](x)
        return torch.softmax(x, -1).view(-1) + 1


@pytest.fixture
def nodes() -> list[Node]:
    found: list[Node] = []

    def backend(module: GraphModule, inputs: list[Any]) -> Any:
        found.extend(module.graph.nodes)
        return module.forward

    torch.compile(Model(), backend=backend)(torch.rand(2, 4))
    return found


def calls(nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if node.op.startswith("call_")]


def test_operators_have_the_names_that_users_write(nodes: list[Node]) -> None:
    assert [op_name(node) for node in calls(nodes)] == [
        "torch.nn.functional.linear",
        "torch.nn.functional.relu",
        "torch.nn.functional.linear",
        "torch.softmax",
        "Tensor.view",
        "operator.add",
    ]


def test_aten_operators_keep_their_overload() -> None:
    graph = Graph()
    assert op_name(graph.call_function(torch.ops.aten.topk.default, ())) == "aten.topk.default"
    assert op_name(graph.call_function(operator.getitem, ())) == "operator.getitem"
    assert op_name(graph.placeholder("x")) == "placeholder:x"


def test_a_source_line_is_the_users(nodes: list[Node]) -> None:
    line = next(i for i, text in enumerate(open(__file__), 1) if text.rstrip().endswith("# the line of the layer"))
    assert source_line(calls(nodes)[0]) == f"{__file__}:{line}"
    assert function_name(nodes) == f"forward ({__file__}:{line})"
    assert source_line(Graph().placeholder("x")) == ""


@pytest.mark.parametrize("kept", ["._modules['table']", ".__dict__['_modules']['table']", ".table", "['table']"])
def test_a_module_is_named_by_its_attribute_however_dynamo_came_to_it(kept: str) -> None:
    assert plain_path(f"L['self']{kept}.layers[3].mlp") == "table.layers.3.mlp"


def test_module_paths_are_qualified_names(nodes: list[Node]) -> None:
    assert [module_path(node) for node in calls(nodes)[:4]] == ["layers.0.0", "layers.0.1", "table.a b", ""]


def test_an_inserted_call_has_a_value_and_a_place(nodes: list[Node]) -> None:
    anchor = calls(nodes)[1]
    before = call_count(anchor.graph.owning_module)
    new = insert_call(anchor, torch.cat, ([anchor.args[0], anchor.args[0]],), {"dim": 0})
    assert new.meta["example_value"].shape == (4, 4)
    assert source_line(new) == source_line(anchor)
    assert module_path(new) == module_path(anchor)
    assert call_count(anchor.graph.owning_module) == before + 1
