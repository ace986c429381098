from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from omnicomp._torch.autograd.decompose import decomposed, with_decompositions
from omnicomp._torch.fx import copy_module
from omnicomp.builder.partition import extract

aten = torch.ops.aten


def traced(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "fake") -> tuple[GraphModule, list[Any]]:
    module = make_fx(function, tracing_mode=mode)(*inputs)
    return module, [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]


def targets(module: GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def test_an_engines_own_table() -> None:
    x = torch.randn(4, 6)
    module, fakes = traced(lambda x: (torch.nn.functional.silu(x) + 1,), x)
    before = str(module.graph)
    made = decomposed(module, fakes, {aten.silu.default: silu})
    assert targets(made) == [aten.sigmoid.default, aten.mul.Tensor, aten.add.Tensor]
    assert str(module.graph) == before
    torch.testing.assert_close(made(x)[0], module(x)[0])
    for node in made.graph.nodes:
        assert node.op == "output" or isinstance(node.meta["val"], torch.Tensor)


def test_nothing_to_decompose_is_left_alone() -> None:
    module, fakes = traced(lambda x: (x + 1,), torch.randn(3))
    assert decomposed(module, fakes, {aten.silu.default: silu}, whole=False) is module
    assert decomposed(module, fakes, {aten.silu.default: silu}) is not module


def test_sources_and_the_kept_outputs_travel() -> None:
    module, fakes = traced(lambda x: (torch.nn.functional.silu(x),), torch.randn(3))
    for node in module.graph.nodes:
        node.meta["stack_trace"] = f"line of {node.name}"
    next(iter(reversed(module.graph.nodes))).meta["user_visible_output_idxs"] = [0]
    made = decomposed(module, fakes, {aten.silu.default: silu})
    calls = [node for node in made.graph.nodes if node.op == "call_function"]
    assert {node.meta["stack_trace"] for node in calls} == {"line of silu"}
    assert next(iter(reversed(made.graph.nodes))).meta["user_visible_output_idxs"] == [0]


def test_placeholders_keep_their_names() -> None:
    """Those of a piece have the names of operators of another one, which the new graph may give away again."""
    module, _ = traced(lambda x: ((x.exp() + 1).sin() + 2,), torch.randn(3))
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    assert [node.name for node in nodes] == ["exp", "add", "sin", "add_1"]
    piece = extract(module, nodes[2:])
    assert [node.name for node in piece.module.graph.find_nodes(op="placeholder")] == ["add"]
    made = decomposed(piece.module, piece.fake_inputs, {aten.sin.default: lambda x: (x + 1) * 2})
    assert [node.name for node in made.graph.find_nodes(op="placeholder")] == ["add"]
    names = [node.name for node in made.graph.nodes]
    assert len(set(names)) == len(names)
    copy_module(made)  # which raises for a name that is there twice
    x = torch.randn(3)
    torch.testing.assert_close(made(x)[0], (x + 1) * 2 + 2)


def test_symbolic_sizes_stay() -> None:
    module, fakes = traced(lambda x: (torch.nn.functional.silu(x) * x.shape[0],), torch.randn(4, 6), mode="symbolic")
    made = decomposed(module, fakes, {aten.silu.default: silu})
    assert aten.silu.default not in targets(made)
    for size in (4, 7):
        x = torch.randn(size, 6)
        torch.testing.assert_close(made(x)[0], module(x)[0])


def test_what_inductor_would_have_got() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (6,))),)

    x = torch.randn(4, 6)
    module, fakes = traced(function, x)
    assert aten.native_layer_norm.default in targets(module)
    for part in ("forward", "inference"):
        made = with_decompositions(module, fakes, part)
        assert not {aten.native_layer_norm.default, aten.gelu.default} & set(targets(made))
        torch.testing.assert_close(made(x)[0], module(x)[0])


def test_training_mode_is_kept() -> None:
    module, fakes = traced(lambda x: (torch.nn.functional.silu(x),), torch.randn(3))
    module.train()
    assert decomposed(module, fakes, {aten.silu.default: silu}, whole=False).training
