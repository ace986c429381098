"""Blocks of Dynamo graphs: what belongs to them, what they do, and when one call can stand for them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import omnicomp
from omnicomp.devices import resolve_device
from omnicomp.lowerings import GraphRecord, LoweringContext
from omnicomp.lowerings.overrides.blocks import Block, effects, find_blocks
from omnicomp.lowerings.overrides.late import Choice
from omnicomp.lowerings.overrides.registry import unregister
from omnicomp.lowerings.overrides.tag import apply_blocks
from omnicomp.options.policy import parse
from omnicomp.timeline import NodePlacement, current


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, act: Callable[[Tensor], Tensor] = torch.sin) -> Tensor:
        return act(x * self.scale) + 1


class Outer(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor] = torch.sin) -> None:
        super().__init__()
        self.inner = Inner()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.act).cos()


def capture(model: nn.Module, *args: Any) -> GraphModule:
    graphs: list[GraphModule] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch.compile(model, backend=backend, fullgraph=True)(*args)
    return graphs[0]


def block_of(module: GraphModule, path: str = "inner") -> Block:
    (found,) = (block for block in find_blocks(module) if block.path == path)
    return found


def take_out(node: Node) -> None:
    """Make a node look as if it came from outside of every module."""
    node.meta.pop("nn_module_stack")


@pytest.fixture
def override() -> Iterator[list[int]]:
    calls: list[int] = []

    @omnicomp.override(module="Inner", name="inner_block", reference=lambda x, scale: (x * scale).sin() + 1)
    def inner_block(x: Tensor, scale: Tensor) -> Tensor:
        calls.append(1)
        return (x * scale).sin() + 1

    yield calls
    unregister("inner_block")


def apply(module: GraphModule) -> tuple[NodePlacement, ...]:
    context = LoweringContext(
        graph=GraphRecord(id="g0"),
        part="",
        device=resolve_device("cpu"),
        policy=parse(None, {"lowerings": ["override", "eager"]}),
        timeline=current(),
    )
    return apply_blocks(module, context, Choice(), training=False)


def test_what_belongs_to_a_block() -> None:
    block = block_of(capture(Outer(), torch.rand(3, 4)))
    assert [node.name for node in block.nodes] == ["mul", "sin", "add"]
    assert [node.name for node in block.outputs] == ["add"]
    assert [name for name, _ in block.parameters] == ["scale"]
    assert [node.name for node in block.activations] == ["l_x_"]
    assert block.operators == ("operator.mul", "torch.sin", "operator.add")
    assert block.literals == (1,)
    assert block.convex
    assert block.between == ()


def test_a_copy_computes_what_the_block_does() -> None:
    module = capture(Outer(), torch.rand(3, 4))
    block = block_of(module)
    values = {"l_x_": torch.rand(3, 4)}
    given = [values.get(node.name, torch.full((4,), 2.0)) for node in block.inputs]
    (result,) = block.extract(module)(*given)
    torch.testing.assert_close(result, (values["l_x_"] * 2).sin() + 1)


def test_what_stands_between_and_comes_back_makes_it_no_call(override: list[int]) -> None:
    module = capture(Outer(), torch.rand(3, 4))
    take_out(block_of(module).nodes[1])
    assert not block_of(module).convex
    before = str(module.graph)
    (declined,) = apply(module)
    assert declined.module == "inner"
    assert "reads a value of it and makes one for it" in declined.chain[0].sentence
    assert declined.chain[0].observed == "sin"
    assert str(module.graph) == before


def between(module: GraphModule, target: Callable[..., Any], source: str) -> Node:
    """Put a call of another module's between the nodes of the block."""
    block = block_of(module)
    arguments = {"block": block.nodes[0], "input": block.activations[0]}
    with module.graph.inserting_after(block.nodes[1]):
        node = module.graph.call_function(target, (arguments[source],))
    node.meta["example_value"] = arguments[source].meta["example_value"].clone()
    output = module.graph.output_node()
    output.args = ((*output.args[0], node),)
    module.recompile()
    return node


@pytest.mark.parametrize("source", ["block", "input"])
def test_what_stands_between_and_only_computes_is_kept_in_order(override: list[int], source: str) -> None:
    module = capture(Outer(), torch.rand(3, 4))
    if source == "block":
        override_two()
    node = between(module, torch.tanh, source)
    x, scale = torch.rand(3, 4), torch.rand(4)
    order = [n.name for n in module.graph.find_nodes(op="placeholder")]
    given = [x if name == "l_x_" else scale for name in order]
    expected = module(*given)
    declined = apply(module)
    if source == "block":  # the product is one more result, which only one of the two overrides returns
        unregister("inner_two")
        assert [place.chain[0].by for place in declined] == ["inner_block"]
    else:
        assert declined == ()
        assert override == []
    torch.testing.assert_close(module(*given), expected)
    names = [n.name for n in module.graph.nodes]
    call = next(n for n in module.graph.nodes if "omnicomp_override" in str(n.target))
    assert (names.index(call.name) < names.index(node.name)) == (source == "block")
    assert not any(n.name in ("mul", "sin") for n in module.graph.nodes)


def override_two() -> None:
    def reference(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x * scale, (x * scale).sin() + 1

    omnicomp.override(module="Inner", name="inner_two", reference=reference)(_two)


def _two(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return x * scale, (x * scale).sin() + 1


@pytest.mark.parametrize(
    ("target", "words"),
    [(torch.Tensor.zero_, "moved past"), (torch.rand_like, "random numbers"), (torch.bernoulli, "random numbers")],
)
def test_what_stands_between_and_does_more_keeps_the_block(
    override: list[int], target: Callable[..., Any], words: str
) -> None:
    module = capture(Outer(), torch.rand(3, 4))
    between(module, target, "input")
    (declined,) = apply(module)
    assert words in declined.chain[0].sentence


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (torch.rand_like, "random"),
        (lambda x: torch.nn.functional.dropout(x, 0.5), "random"),
        (lambda x: torch.nn.functional.dropout(x, 0.5, training=False), ""),
        (lambda x: x.clone().mul_(2), ""),
        (lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x), ""),
        (lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5), "random"),
    ],
)
def test_effects(act: Callable[[Tensor], Tensor], words: str) -> None:
    block = block_of(capture(Outer(act), torch.rand(1, 1, 3, 4)))
    found = effects(block.nodes, block.outputs)
    assert bool(found.other) == bool(words)
    assert words in "".join(found.other)
    assert found.mutated == found.aliases == ()


def test_a_mode_is_an_effect() -> None:
    def act(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.mT

    block = block_of(capture(Outer(act), torch.rand(4, 4)))
    assert "changes a mode" in effects(block.between).other[0], "Dynamo says of no module that it changed it"


def test_memory_that_is_shared_is_seen() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            own = x + 1
            x.add_(1)
            return x.view(-1), own, own.t()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Views()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    block = block_of(capture(Model(), torch.rand(4, 4)))
    found = effects(block.nodes, block.outputs)
    assert [node.name for node in found.mutated] == ["l_x_"]
    assert len(found.aliases) == 2, "a view of the input, and a second view of a value of its own"
