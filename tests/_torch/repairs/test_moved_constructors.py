from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.fx_passes.post_grad import ConstructorMoverPass
from torch.fx import Graph, Node

from omnicomp._torch.repairs import moved_constructors
from omnicomp._torch.repairs.moved_constructors import constructors_moved, move_constructors

aten = torch.ops.aten
CPU = {"device": torch.device("cpu")}
FIVE, ONE = torch.zeros(5, dtype=torch.int64), torch.tensor(0)


class Made(Graph):
    """A graph with a table on another device; operators are made with their values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.placeholder("table")
        self.table.meta["val"] = torch.empty(8, 4, device="meta")

    def make(self, target: Any, value: Tensor, *args: Any, **kwargs: Any) -> Node:
        node = self.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node

    def zeros(self) -> Node:
        return self.make(aten.full.default, FIVE, [5], 0, **CPU)

    def read(self, indices: Node) -> Node:
        return self.make(aten.index.Tensor, torch.empty(5, 4, device="meta"), self.table, [indices])


def device(node: Node) -> str:
    return node.kwargs["device"].type  # type: ignore[union-attr]


def moved(graph: Graph) -> None:
    with constructors_moved():
        ConstructorMoverPass("meta", allow_outputs=True, allow_inputs=True)(graph)


def test_indices_with_a_number_written_into_them_are_computed_where_the_table_is() -> None:
    graph = Made()
    zeros = graph.zeros()
    number = graph.make(aten.full.default, ONE, [], 3, **CPU)
    written = graph.make(aten.copy.default, ONE, graph.make(aten.select.int, ONE, zeros, 0, 0), number)
    indices = graph.make(aten.select_scatter.default, FIVE, zeros, written, 0, 0)
    graph.output((graph.read(indices),))
    moved(graph)
    assert [device(node) for node in (zeros, number)] == ["meta", "meta"]


def test_what_is_returned_stays_where_the_program_has_it() -> None:
    graph = Made()
    returned, read = graph.zeros(), graph.zeros()
    more = graph.make(aten.add.Tensor, FIVE, returned, 1)
    graph.output((graph.read(returned), graph.read(read), more))
    moved(graph)
    assert [device(node) for node in (returned, read)] == ["cpu", "meta"]


@pytest.mark.parametrize("release", ["2.11.0", "2.13.0"])
def test_a_number_that_comes_in_and_is_returned_is_moved_where_its_copy_is_not_returned(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved_constructors.torch, "__version__", release)
    graph = Made()
    scale = graph.placeholder("scale")
    scale.meta["val"] = torch.tensor(2.0)
    product = graph.make(aten.mul.Tensor, torch.empty(8, 4, device="meta"), graph.table, scale)
    graph.output((product, scale))
    mover = ConstructorMoverPass("meta", allow_outputs=True, allow_inputs=True)
    with constructors_moved():
        found = mover.find_movable_constructors(graph, [scale])
    assert list(found) == ([scale] if release == "2.13.0" else [])


@pytest.mark.parametrize("eager", [True, False])
def test_random_numbers_of_the_host_are_drawn_there_if_eagers_are_asked_for(eager: bool) -> None:
    graph = Made()
    drawn, zeros = graph.make(aten.randint.default, FIVE, 8, [5], **CPU), graph.zeros()
    graph.output((graph.read(drawn), graph.read(zeros)))
    with constructors_moved(), config.patch(fallback_random=eager):
        ConstructorMoverPass("meta")(graph)
    assert [device(node) for node in (drawn, zeros)] == ["cpu" if eager else "meta", "meta"]


def test_a_joint_graph_has_what_its_backward_reads_moved_with_its_values() -> None:
    graph = Made()
    zeros = graph.zeros()
    indices = graph.make(aten.add.Tensor, FIVE, zeros, 1)
    again = graph.make(aten.view.default, FIVE, indices, [5])
    graph.output((graph.read(indices), graph.read(again)))
    move_constructors(graph, "meta")
    assert device(zeros) == "meta"
    assert [node.meta["val"].device.type for node in (zeros, indices, again)] == ["meta", "meta", "meta"]


def test_a_joint_graph_keeps_what_it_returns_what_it_draws_and_what_it_names_the_cpu_for() -> None:
    graph = Made()
    returned, copied = graph.zeros(), graph.zeros()
    drawn = graph.make(aten.randint.default, FIVE, 8, [5], **CPU)
    again = graph.make(aten._to_copy.default, FIVE, copied, **CPU)
    graph.output((graph.read(returned), returned, graph.read(drawn), graph.read(again)))
    move_constructors(graph, "meta")
    assert [device(node) for node in (returned, copied, drawn)] == ["cpu", "cpu", "cpu"]
    assert returned.meta["val"].device.type == "cpu"
