"""Which operators communicate."""

from collections.abc import Generator
from typing import Any

import pytest
import torch

from omnicomp.analysis.collectives import collectives_of, communicates


@pytest.fixture
def gather() -> Generator[Any]:
    with torch.library._scoped_library("omnitest_collectives", "DEF") as library:
        library.define("gather(Tensor x, str pg_name) -> Tensor")
        library.define("scale(Tensor x, str mode, int groups) -> Tensor")
        yield torch.ops.omnitest_collectives


def test_collectives_of_torch_and_operators_that_are_told_a_group(gather: Any) -> None:
    ops = torch.ops
    for operator in (ops._c10d_functional.all_reduce, ops._c10d_functional_autograd.all_to_all_single.default):
        assert communicates(operator)
    assert communicates(gather.gather.default)
    assert not any(map(communicates, (gather.scale.default, ops.aten.conv2d.default, ops.aten.sin, torch.sin, "sin")))


def test_a_collective_inside_an_operator_is_one_of_the_graph(gather: Any) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    graph.output(graph.call_function(gather.gather.default, (x, "7")))
    assert collectives_of(torch.fx.GraphModule(torch.nn.Module(), graph)) == ("gather 7 float32[4]",)
