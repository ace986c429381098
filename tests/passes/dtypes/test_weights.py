"""Which casts of parameters leave a graph, and that the graph computes the same with copies as its inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from float8 import BOTH, FLOAT8, SCALES
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from omnicomp._torch.fx import copy_module
from omnicomp.passes.dtypes.weights import Lifted, are_weights, lift_casts
from omnicomp.weights.cast_copies import CAST, Form, scaled

LOW = torch.bfloat16


class Owner(nn.Module):
    """Has a parameter `w` of 6 by 4, a buffer `b` like it, and calls a function of itself and an input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(6, 4)), function
        self.register_buffer("b", torch.randn(6, 4))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def lift(model: nn.Module, x: Tensor, *, grad: bool = False) -> tuple[Lifted | None, GraphModule]:
    """Lift the casts of a model's graph, and check that it computes what the model does."""
    found: list[tuple[Lifted | None, GraphModule]] = []

    def backend(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        text = str(module.graph)
        narrow = copy_module(module)
        lifted = lift_casts(narrow, inputs)
        found.append((lifted, narrow))
        assert str(module.graph) == text, "Dynamo's own graph stays as it is"
        if lifted is None:
            assert str(narrow.graph) == text
            return module.forward

        def call(*args: Any) -> Any:
            copies = [form.of(args[i]) for i, form in zip(lifted.sources, lifted.forms, strict=True)]
            both = (*args, *copies)
            return narrow(*[both[i] for i in lifted.order])

        return call

    with torch.set_grad_enabled(grad):
        result = torch.compile(model, backend=backend, fullgraph=True)(x)
        assert torch.equal(result, model(x))
    ((lifted, narrow),) = found
    if lifted is not None:
        shapes = [tuple(node.meta["example_value"].shape) for node in narrow.graph.find_nodes(op="placeholder")]
        assert shapes == [tuple(value.shape) for value in lifted.inputs]
    return lifted, narrow


def dtype_of(node: torch.fx.Node) -> torch.dtype | None:
    return getattr(node.meta["example_value"], "dtype", None)


def casts(module: GraphModule) -> int:
    """How many tensors of low precision a graph makes of tensors of float32."""
    calls = [node for node in module.graph.nodes if node.op.startswith("call_") and node.all_input_nodes]
    return sum(dtype_of(node) is LOW and dtype_of(node.all_input_nodes[0]) is torch.float32 for node in calls)


LEAVING: dict[str, Callable[[Any, Tensor], Any]] = {
    "to": lambda m, x: x.sum() + m.w.to(LOW).sum(),
    "bfloat16": lambda m, x: x.sum() + m.w.bfloat16().sum(),
    "aten": lambda m, x: x.sum() + torch.ops.aten.to.dtype(m.w, LOW).sum(),
    "transposed": lambda m, x: x @ m.w.t().to(LOW).float(),
    "method": lambda m, x: x @ m.w.mT.to(LOW).float(),
    "reshaped": lambda m, x: x.sum() + m.w.view(2, 3, 4).permute(2, 0, 1).to(LOW).sum(),
    "detached": lambda m, x: x.sum() + m.w.detach().to(LOW).sum(),
    "in chunks": lambda m, x: x.sum() + sum(part.to(LOW).sum() for part in m.w.chunk(3)),
    "split": lambda m, x: x.sum() + sum(part.to(LOW).sum() for part in m.w.split([2, 4])),
    "in rows": lambda m, x: x.sum() + sum(row.to(LOW).sum() for row in m.w.unbind()),
    "in slices": lambda m, x: x.sum() + m.w[:3].to(LOW).sum() + m.w[3:].to(LOW).sum(),
    "cast to what it is": lambda m, x: x.sum() + m.w.type(torch.float32).t().to(LOW).sum(),
    "cast to what it is, and as it is": lambda m, x: x.sum() + m.w.float().to(LOW).sum() + m.w.to(LOW).sum(),
    "twice": lambda m, x: (x.sum() + m.w.to(LOW).sum()) * m.w.t().to(LOW).sum(),
}


@pytest.mark.parametrize("name", LEAVING)
def test_casts_that_leave(name: str) -> None:
    lifted, module = lift(Owner(LEAVING[name]), torch.randn(5, 4))
    assert lifted is not None
    assert lifted.forms == (Form(LOW),)
    assert casts(module) == 0
    assert len(lifted.order) == 2, "nothing else read the parameter"
    names = {node.name for node in module.graph.nodes}
    assert all(node.users or node.op == "output" for node in module.graph.nodes), names


def written(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.w.mul_(1)
    return x.sum() + m.w.to(LOW).sum()


def written_cast(m: Any, x: Tensor) -> Tensor:
    return x.sum() + m.w.to(LOW).mul_(2).sum()


STAYING: dict[str, Callable[[Any, Tensor], Any]] = {
    "an input": lambda m, x: x.to(LOW).sum() + m.w.sum(),
    "a buffer": lambda m, x: x.sum() + m.b.to(LOW).sum(),
    "written": written,
    "written after the cast": lambda m, x: x.sum() + m.w.to(LOW).sum() + m.w.detach().mul_(1).sum(),
    "a cast that is written": written_cast,
    "a cast that leaves": lambda m, x: m.w.to(LOW),
    "a view of a cast that leaves": lambda m, x: m.w.to(LOW).t()[1:],
    "a part": lambda m, x: x.sum() + m.w[:2].to(LOW).sum(),
    "not dense": lambda m, x: x.sum() + sum(part.to(LOW).view(-1).sum() for part in m.w.chunk(2, dim=1)),
    "viewed in its own dtype": lambda m, x: x.sum() + m.w.view(torch.float32).to(LOW).sum(),
    "expanded": lambda m, x: x.sum() + m.w.expand(2, 6, 4).to(LOW).sum(),
    "computed": lambda m, x: x.sum() + (m.w * 2).to(LOW).sum(),
    "float64": lambda m, x: x.sum() + m.w.to(torch.float64).sum(),
    "another device": lambda m, x: x.sum() + m.w.to("meta", LOW).numel(),
}


@pytest.mark.parametrize("name", STAYING)
def test_casts_that_stay(name: str) -> None:
    lifted, _ = lift(Owner(STAYING[name]), torch.randn(5, 4))
    assert lifted is None


def test_a_parameter_that_is_read_as_it_is_stays_beside_its_copy() -> None:
    def tied(m: Any, x: Tensor) -> Tensor:
        found = F.embedding(torch.tensor([1, 5]), m.w)
        return F.linear(found.to(LOW), m.w.to(LOW)).float() + x.sum()

    lifted, module = lift(Owner(tied), torch.randn(5, 4))
    assert lifted is not None
    assert len(lifted.inputs) == 3
    assert casts(module) == 1, "that of the activations"


def test_two_dtypes() -> None:
    lifted, _module = lift(Owner(lambda m, x: x.sum() + m.w.to(LOW).sum() + m.w.half().sum()), torch.randn(5, 4))
    assert lifted is not None
    assert lifted.forms == (Form(LOW), Form(torch.float16))
    assert lifted.sources[0] == lifted.sources[1]
    assert {value.dtype for value in lifted.inputs} == {LOW, torch.float16, torch.float32}
    assert len(lifted.inputs) == 3, "the parameter itself is not read any more"


def test_a_parameter_that_is_no_view_of_dense_memory() -> None:
    model = Owner(lambda m, x: x.sum() + m.w.to(LOW).sum())
    model.w = nn.Parameter(torch.randn(12, 4)[::2])
    lifted, _ = lift(model, torch.randn(5, 4))
    assert lifted is not None
    assert lifted.inputs[lifted.order.index(len(lifted.order))].is_contiguous()


def test_an_input_in_the_memory_of_the_parameter_that_is_written() -> None:
    model = Owner(lambda m, x: x.mul_(1).sum() + m.w.to(LOW).sum())
    lifted, _ = lift(model, model.w.detach()[0])
    assert lifted is None


def test_casts_inside_of_checkpointed_regions_stay() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return checkpoint(lambda y: F.linear(y.to(LOW), m.w.to(LOW)).float(), x, use_reentrant=False)

    lifted, _ = lift(Owner(forward), torch.randn(5, 4))
    assert lifted is None


def test_gradients_that_are_switched_on_inside() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        with torch.enable_grad():
            return (x.sum() + m.w.to(LOW).sum()).detach()

    lifted, _ = lift(Owner(forward), torch.randn(5, 4))
    assert lifted is None


def test_weights_of_symbolic_size_stay() -> None:
    model = Owner(lambda m, x: x.sum() + m.w.to(LOW).sum())
    torch._dynamo.mark_dynamic(model.w, 0)
    with torch._dynamo.config.patch(force_parameter_static_shapes=False):
        lifted, module = lift(model, torch.randn(5, 4))
    inputs = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    assert any(isinstance(value, torch.SymInt) for value in inputs)
    assert lifted is None


def in_float8(value: Tensor, weight: Tensor, scales: str = SCALES) -> Tensor:
    rows = scales == "row"
    low_x, scale_x = scaled(value.to(LOW), lambda op, *args: op(*args), rows=rows)
    low_w, scale_w = scaled(CAST(weight, LOW), lambda op, *args: op(*args), rows=rows)
    return torch._scaled_mm(low_x, low_w.t(), scale_x, scale_w.t() if rows else scale_w, out_dtype=LOW).float()


class Wide(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(16, 32)), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def float8_of(module: GraphModule) -> list[torch.fx.Node]:
    """What a graph makes in float8."""
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    return [node for node in calls if dtype_of(node) is FLOAT8 and node.target is CAST]


@pytest.mark.parametrize("scales", BOTH)
def test_the_numbers_and_scales_of_float8_leave(scales: str) -> None:
    lifted, module = lift(Wide(lambda m, x: in_float8(x, m.w, scales)), torch.randn(5, 32))
    assert lifted is not None
    assert lifted.forms == (Form(FLOAT8, scales), Form(torch.float32, scales))
    assert len(float8_of(module)) == 1, "the activations"
    assert len(lifted.order) == 3, "nothing else read the parameter"
    assert all(node.users or node.op == "output" for node in module.graph.nodes)


def test_one_weight_that_two_layers_have_in_float8() -> None:
    lifted, module = lift(Wide(lambda m, x: in_float8(x, m.w) + in_float8(x * 2, m.w)), torch.randn(5, 32))
    assert lifted is not None
    assert len(lifted.forms) == 2
    assert len(float8_of(module)) == 2, "the activations"


STAYING_IN_FLOAT8: dict[str, Callable[[Any, Tensor], Any]] = {
    "computed": lambda m, x: in_float8(x, m.w * 2),
    "an input": lambda m, x: in_float8(x, x + m.w.sum()),
    "scales that leave": lambda m, x: scaled(CAST(m.w, LOW), lambda op, *args: op(*args), rows=True)[1],
}


@pytest.mark.parametrize("name", STAYING_IN_FLOAT8)
def test_float8_that_stays(name: str) -> None:
    model = Wide(STAYING_IN_FLOAT8[name])
    lifted, module = lift(model, torch.randn(16, 32))
    assert lifted is None or all(form.scales is None for form in lifted.forms)
    assert len(float8_of(module)) >= 1


@pytest.mark.parametrize("operator", [torch.ops.aten.clamp.default, torch.ops.aten.div.Tensor])
def test_what_only_looks_like_float8_stays(operator: Any) -> None:
    def other(m: Any, x: Tensor) -> Tensor:
        def call(op: Any, *args: Any) -> Any:
            return op(args[0], *((arg / 2 if isinstance(arg, float) and op is operator else arg) for arg in args[1:]))

        low, scale = scaled(CAST(m.w, LOW), call, rows=True)
        return (low.float() * scale).sum() + x.sum()

    lifted, module = lift(Wide(other), torch.randn(16, 32))
    assert lifted is None or all(form.scales is None for form in lifted.forms)
    assert len(float8_of(module)) == 1


class Convolutions(nn.Module):
    """Convolutions whose results are seen as views, written to, and given back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1, bias=False)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)

    def forward(self, x: Tensor) -> Any:
        y = F.conv2d(x.to(LOW), self.first.weight.to(LOW), self.first.bias.to(LOW), padding=1).relu_()  # type: ignore[union-attr]
        z = torch.conv2d(y, self.second.weight.to(LOW))
        return z, z.view(2, -1), F.conv2d(z, self.grouped.weight.to(LOW), groups=2)


def test_weights_of_convolutions_are_kept_in_the_gpus_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is the CPU, which is asked as if it were a GPU."""
    monkeypatch.setattr(
        "omnicomp.passes.dtypes.weights._channels_last",
        lambda parameter, casts: are_weights(cast.node for cast in casts),
    )
    model, x = Convolutions(), torch.randn(2, 3, 8, 8)
    found: list[tuple[Lifted, GraphModule]] = []

    def backend(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        narrow = copy_module(module)
        lifted = lift_casts(narrow, inputs, layouts=True)
        assert lifted is not None
        found.append((lifted, narrow))

        def call(*args: Any) -> Any:
            copies = [form.of(args[i]) for i, form in zip(lifted.sources, lifted.forms, strict=True)]
            both = (*args, *copies)
            return narrow(*[both[i] for i in lifted.order])

        return call

    with torch.no_grad():
        results = torch.compile(model, backend=backend, fullgraph=True)(x)
        for result, right in zip(results, model(x), strict=True):
            torch.testing.assert_close(result, right, rtol=2e-2, atol=2e-2)
            assert result.stride() == right.stride()
    ((lifted, narrow),) = found
    layouts = {form.layout for form in lifted.forms}
    assert layouts == {torch.channels_last, torch.preserve_format}
    kept = {node.name: node.meta["example_value"] for node in narrow.graph.find_nodes(op="placeholder")}
    last = [value.shape for value in kept.values() if value.dim() == 4 and value.stride(1) == 1 and value.dtype is LOW]
    assert sorted(map(tuple, last)) == [(4, 8, 1, 1), (8, 3, 3, 3)], "the grouped one stays as it is"
    assert casts(narrow) == 1, "that of the input"
