"""Casts of weights and of their gradients in groups: the same values, and what must not be grouped is not."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule

from omnicomp._torch.inductor import group_casts as together
from omnicomp._torch.inductor.group_casts import cast_together

LOW = torch.bfloat16
FOREACH = torch.ops.aten._foreach_copy.default
CAST = torch.ops.prims.convert_element_type.default


class Layers(nn.Module):
    """Linear layers and a convolution, as a dtype policy leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            low = nn.functional.linear(x.to(LOW), layer.weight.to(LOW), layer.bias.to(LOW))  # type: ignore[arg-type]
            x = x + low.float().relu()
        image = x.view(1, 2, 4, 8).to(LOW)
        return nn.functional.conv2d(image, self.conv.weight.to(LOW), None, padding=1).float() + x.view(1, 2, 4, 8)


def calls(graph: Graph, target: Any) -> int:
    return sum(node.target is target for node in graph.nodes)


def graphs_of(model: nn.Module, x: Tensor, *, grouped: bool, device: str = "cpu") -> tuple[list[Tensor], list[Graph]]:
    """Gradients of a step, and the graphs that it ran."""
    found: list[Graph] = []

    def compiler(module: GraphModule, inputs: Any) -> Any:
        if grouped:
            cast_together(module.graph, device)
            module.recompile()
        found.append(module.graph)
        return make_boxed_func(module.forward)

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, decompositions=select_decomp_table())
    loss = torch.compile(model, backend=backend)(x).square().sum()
    parameters = list(model.parameters())
    return [loss.detach(), *torch.autograd.grad(loss, parameters[:-1])], found


def test_casts_of_weights_and_gradients_are_made_together() -> None:
    model, x = Layers(), torch.randn(8, 8)
    right, before = graphs_of(model, x, grouped=False)
    values, (forward, backward) = graphs_of(model, x, grouped=True)
    for value, expected in zip(values, right, strict=True):
        assert torch.equal(value, expected)
        assert (value.dtype, value.stride()) == (expected.dtype, expected.stride())
    assert calls(forward, FOREACH) == calls(backward, FOREACH) == 1
    # The input's, six of the linear layers and the convolution's; sums for biases are no products.
    assert calls(before[0], CAST) - calls(forward, CAST) == 8
    assert calls(before[1], CAST) - calls(backward, CAST) == 4


def test_groups_end_by_bytes_and_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Layers(), torch.randn(8, 8)
    right, _ = graphs_of(model, x, grouped=False)
    monkeypatch.setattr(together, "_MANY", 2)
    values, (forward, _) = graphs_of(model, x, grouped=True)
    assert calls(forward, FOREACH) == 4
    monkeypatch.setattr(together, "_BYTES", 4 * 64 + 4 * 8)
    monkeypatch.setattr(together, "_MANY", 64)
    others, (forward, _) = graphs_of(model, x, grouped=True)
    assert calls(forward, FOREACH) == 3, "the input is alone, and so is the convolution's weight"
    for value, other, expected in zip(values, others, right, strict=True):
        assert torch.equal(value, expected)
        assert torch.equal(other, expected)


def test_nothing_is_grouped_on_other_devices() -> None:
    _, graphs = graphs_of(Layers(), torch.randn(8, 8), grouped=True, device="cuda")
    assert [calls(graph, FOREACH) for graph in graphs] == [0, 0]


class Staying(nn.Module):
    """Weights that arithmetic reads, and one that a product reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.alone = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        low = x.to(LOW) + self.first.to(LOW) * self.second.to(LOW)
        return (low @ self.alone.to(LOW)).float()


def test_what_is_fused_elsewhere_and_what_is_alone_stay() -> None:
    _, graphs = graphs_of(Staying(), torch.randn(8, 8), grouped=True)
    assert [calls(graph, FOREACH) for graph in graphs] == [0, 0]
