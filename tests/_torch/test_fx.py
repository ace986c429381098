"""A compiled program keeps nothing alive that it does not use."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from omnicomp._torch.fx import copy_module, forget_tensors


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
