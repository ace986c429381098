"""What tells a subgraph from others is the same wherever it is made, and another for what is another."""

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from omnicomp.analysis.hashes import numbers_and_sizes, stable_identity


def of(function: Any, *inputs: torch.Tensor, symbolic: bool = False) -> str:
    mode = "symbolic" if symbolic else "fake"
    return stable_identity(make_fx(function, tracing_mode=mode)(*inputs).graph.nodes)


def test_names_order_and_numbers_are_not_in_it() -> None:
    one = of(lambda x: (x.sin() * 2, x.cos()), torch.randn(4, 8))
    other = of(lambda y: (y.cos(), y.sin() * 3), torch.randn(4, 8))
    assert one == other


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x.cos(), torch.randn(4, 8)),
        (lambda x: x.sin().sin(), torch.randn(4, 8)),
        (lambda x: x.sin(), torch.randn(4, 8, dtype=torch.float64)),
        (lambda x: x.sin(), torch.randn(4, 8, 1)),
    ],
)
def test_operators_dtypes_and_dimensions_are(function: Any, x: torch.Tensor) -> None:
    assert of(function, x).split("-")[0] != of(lambda x: x.sin(), torch.randn(4, 8)).split("-")[0]


def test_sizes_are_in_its_second_half_by_class() -> None:
    def of_size(*size: int, symbolic: bool = False) -> str:
        return of(lambda x: x.sin(), torch.randn(*size), symbolic=symbolic)

    assert of_size(33, 8) == of_size(47, 8)
    assert of_size(33, 8) != of_size(64, 8)
    assert of_size(33, 8).split("-")[0] == of_size(64, 8).split("-")[0]
    assert of_size(33, 8, symbolic=True) == of_size(64, 16, symbolic=True)


def test_a_graph_that_an_operator_calls_is_in_it() -> None:
    def choose(branch: Any) -> str:
        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, branch, lambda x: x.cos(), (x,))

        found: list[str] = []

        def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            found.append(stable_identity(gm.graph.nodes))
            return gm

        torch.compile(function, backend=backend)(torch.randn(4))
        return found[0]

    assert choose(lambda x: x.sin()) == choose(lambda y: y.sin())
    assert choose(lambda x: x.sin()) != choose(lambda x: x.tan())


def test_of_numbers_that_an_operator_takes_it_knows_nothing() -> None:
    assert of(lambda x: x.sum(0), torch.randn(4, 4)) == of(lambda x: x.sum(1), torch.randn(4, 4))


def test_numbers_and_sizes_tell_graphs_of_the_same_operators_apart() -> None:
    def graph(scale: float, size: int) -> torch.fx.GraphModule:
        module = torch.fx.symbolic_trace(lambda x: (x * scale)[:2])
        module.graph.find_nodes(op="placeholder")[0].meta["example_value"] = torch.empty(size)
        return module

    assert numbers_and_sizes(graph(2.0, 4)) == numbers_and_sizes(graph(2.0, 4))
    assert len({numbers_and_sizes(graph(scale, size)) for scale in (2.0, 3.0) for size in (4, 5)}) == 4
