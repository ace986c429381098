from typing import Any

import torch
from torch import Tensor
from torch._inductor.fx_passes.post_grad import ConstructorMoverPass
from torch.fx import Graph, Node

from omnicomp._torch.repairs.moved_constructors import constructors_moved

aten = torch.ops.aten


def test_indices_with_a_number_written_into_them_are_computed_where_the_table_is() -> None:
    graph = Graph()

    def call(target: Any, value: Tensor, *args: Any, **kwargs: Any) -> Node:
        node = graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node

    table = graph.placeholder("table")
    table.meta["val"] = torch.empty(8, 4, device="meta")
    five, one, cpu = torch.zeros(5, dtype=torch.int64), torch.tensor(0), {"device": torch.device("cpu")}
    zeros = call(aten.full.default, five, [5], 0, **cpu)
    number = call(aten.full.default, one, [], 3, **cpu)
    written = call(aten.copy.default, one, call(aten.select.int, one, zeros, 0, 0), number)
    indices = call(aten.select_scatter.default, five, zeros, written, 0, 0)
    graph.output((call(aten.index.Tensor, torch.empty(5, 4, device="meta"), table, [indices]),))

    with constructors_moved():
        ConstructorMoverPass("meta", allow_outputs=True, allow_inputs=True)(graph)
    assert [node.kwargs["device"].type for node in (zeros, number)] == ["meta", "meta"]
