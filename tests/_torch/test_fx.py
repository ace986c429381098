"""A compiled program keeps nothing alive that it does not use."""

import gc
import weakref
from typing import Any, cast

import pytest
import torch
from torch.fx import GraphModule

from omnicomp._torch.fx import copy_module, erase_unused, forget_tensors, read_attributes


@pytest.fixture
def without_collector() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_the_state_of_an_optimizer_goes_with_the_optimizer() -> None:
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer: Any = torch.optim.Adadelta(model.parameters(), lr=0.01)
    step = torch.compile(lambda: optimizer.step(), backend="omni", options={"lowerings": ["eager"]})
    model(torch.ones(8)).sum().backward()
    step()
    state = weakref.ref(optimizer.state[model.weight]["square_avg"])
    assert state() is not None
    optimizer = None
    assert state() is None


def test_the_original_keeps_its_tensors() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.sin, (graph.get_attr("weight"),)))
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(torch.rand(3))
    module = GraphModule(holder, graph)
    copy = copy_module(module)
    forget_tensors(copy)
    assert not hasattr(copy, "weight")
    torch.testing.assert_close(module(), torch.sin(holder.weight))


@pytest.mark.parametrize("training", [False, True])
def test_tensors_of_the_program_can_be_swapped_for_others(training: bool) -> None:
    """As `Module.to` does with parameters that are subclasses; torch swaps none that is referred to weakly."""
    model, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    compiled = torch.compile(model, backend="omni", options={"lowerings": ["eager"]})
    with torch.set_grad_enabled(training):
        out = compiled(x)
    if training:
        out.sum().backward()
    for tensor, other in ((x, torch.zeros(2, 3)), (model.weight, torch.nn.Parameter(torch.zeros(3, 3)))):
        torch.utils.swap_tensors(tensor, other)
        torch.testing.assert_close(compiled(x), model(x))


def test_a_constant_of_a_pass_is_no_buffer_of_a_copy() -> None:
    """AOTAutograd asks where each buffer of Dynamo's graph comes from, and raises if that is not known."""
    holder = torch.nn.Module()
    holder.register_buffer("buffer", torch.rand(3))
    holder.constant = torch.rand(3)
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.add, (graph.get_attr("buffer"), graph.create_node("get_attr", "constant"))))
    module = GraphModule(holder, graph)
    module._buffers.pop("constant", None)
    module.constant = holder.constant
    copy = copy_module(copy_module(module))
    assert dict(copy.named_buffers()).keys() == {"buffer"}
    torch.testing.assert_close(copy(), holder.buffer + holder.constant)


@pytest.mark.parametrize("name", ["T", "mT", "H", "mH"])
def test_attributes_of_tensors_are_read_as_such_whatever_dynamo_calls_them(name: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.add(getattr(x, name), 1)

    seen: list[GraphModule] = []

    def backend(module: GraphModule, inputs: list[torch.Tensor]) -> GraphModule:
        read_attributes(module)
        seen.append(module)
        return module

    x, captured = torch.randn(3, 5, dtype=torch.complex64), cast(Any, backend)
    torch.testing.assert_close(torch.compile(program, backend=captured)(x), program(x))
    (module,) = seen
    assert [node.args[1] for node in module.graph.nodes if node.target is getattr] == [name]


def test_operators_of_attributes_become_attributes() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.mT, (graph.placeholder("x"),)))
    module = GraphModule({}, graph)
    read_attributes(module)
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [getattr]
    x = torch.randn(2, 3)
    torch.testing.assert_close(module(x), x.mT)


def test_what_nobody_reads_is_erased_from_one_graph_alone() -> None:
    inner = torch.fx.symbolic_trace(lambda x: [x.add_(1), x][1])
    root = torch.nn.Module()
    root.body = inner
    graph = torch.fx.Graph()
    x, called = graph.placeholder("x"), graph.get_attr("body")
    graph.call_method("sin", (graph.call_method("cos", (x,)),))
    graph.call_method("sin_", (x,))
    graph.output(graph.call_function(torch.ops.higher_order.invoke_subgraph, (called, "body", x)))
    module = GraphModule(root, graph)
    erase_unused(graph, lambda node: node.op == "call_method" and not str(node.target).endswith("_"))
    assert [str(node.target) for node in graph.find_nodes(op="call_method", target="sin_")] == ["sin_"]
    assert not any(node.target in ("sin", "cos") for node in graph.nodes)
    body = cast("GraphModule", module.body)
    assert [node.target for node in body.graph.find_nodes(op="call_method", target="add_")] == ["add_"]
