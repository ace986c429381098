"""Runs of operators that repeat, found in graphs that are traced and never run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from omnicomp._torch.autograd.mutations import is_view
from omnicomp._torch.fx import traced_call
from omnicomp._torch.inductor.shared_code import is_called, is_movable
from omnicomp.analysis.repeats import Repeat, Rules, find_repeats

RULES = Rules(refused=lambda node: not is_movable(node), stops_fusion=is_called, is_view=is_view, smallest=4)


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product, in front of which it is cut without a loss, and three operators that are fused."""
    y = x @ weight.t()
    return torch.sin(y) * 2 + y


def other(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Not the same operators."""
    return torch.tanh(x @ weight).cos()


def found(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[list[Repeat], list[Node]]:
    """The repeats of a function, and its operators."""
    module, _ = traced_call(function, inputs)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    return find_repeats(nodes, RULES), nodes


def weights(count: int, size: int = 8) -> list[torch.Tensor]:
    return [torch.randn(size, size) for _ in range(count)]


def chain(*blocks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def run(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor]:
        for each, weight in zip(blocks, weights, strict=True):
            x = each(x, weight)
        return (x,)

    return run


def test_neighbours_are_found_whatever_their_weights_are_called() -> None:
    [repeat], nodes = found(chain(*[block] * 6), torch.randn(4, 8), *weights(6))
    assert len(repeat.starts) == 6
    assert repeat.length * 6 == len(nodes)
    assert repeat.saved == repeat.length * 5


def test_a_first_layer_that_differs_is_left_out() -> None:
    [repeat], nodes = found(chain(other, *[block] * 4), torch.randn(4, 8), *weights(5))
    assert len(repeat.starts) == 4
    assert repeat.starts[0] + 4 * repeat.length == len(nodes)


def test_occurrences_need_not_be_neighbours() -> None:
    def third(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.exp(x @ weight)

    [repeat], _ = found(chain(block, other, block, third, block), torch.randn(4, 8), *weights(5))
    assert len(repeat.starts) == 3


def test_the_larger_of_nested_repeats_is_taken() -> None:
    def twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return other(block(block(x, weight), weight), weight)

    repeats, nodes = found(chain(*[twice] * 4), torch.randn(4, 8), *weights(4))
    assert len(repeats[0].starts) * repeats[0].length > len(nodes) * 3 // 4 - 1
    positions = [i for repeat in repeats for start in repeat.starts for i in range(start, start + repeat.length)]
    assert len(positions) == len(set(positions))


def test_data_flow_counts() -> None:
    def crossed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x @ weight.t()
        s = torch.sin(y) * 2
        return s + s

    repeats, _ = found(chain(block, crossed, block, crossed), torch.randn(4, 8), *weights(4))
    for repeat in repeats:
        assert len(repeat.starts) == 2


def test_shapes_count() -> None:
    def run(x: torch.Tensor, *sizes: torch.Tensor) -> tuple[torch.Tensor]:
        for weight in sizes:
            x = block(x, weight)
        return (x,)

    inputs = [torch.randn(8 if i % 2 else 16, 16 if i % 2 else 8) for i in range(6)]
    repeats, nodes = found(run, torch.randn(4, 8), *inputs)
    assert [repeat.length for repeat in repeats] == [len(nodes) // 3]


@pytest.mark.parametrize("barrier", [lambda x: torch.rand_like(x), lambda x: x.bernoulli_(0.5)])
def test_what_draws_or_writes_is_in_no_run(barrier: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor]:
        for weight in all:
            x = block(x, weight) @ weight
            x = x + barrier(x.clone())
        return (x,)

    repeats, nodes = found(run, torch.randn(4, 8), *weights(4))
    assert repeats
    members = [nodes[i] for repeat in repeats for start in repeat.starts for i in range(start, start + repeat.length)]
    assert all(is_movable(node) for node in members)


def test_a_fusion_across_the_seam_is_not_given_up() -> None:
    def fused(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * 2 + weight.sum()

    repeats, _ = found(chain(*[fused] * 6), torch.randn(4, 8), *weights(6))
    assert repeats == []


def test_time_is_linear() -> None:
    count = 150
    [repeat], _ = found(chain(*[block] * count), torch.randn(4, 8), *weights(count))
    assert len(repeat.starts) == count
