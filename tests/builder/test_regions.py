"""Repeated regions of a part: rewritten graphs compute the same, and what is built once is recorded."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Interpreter

import omnicomp
from omnicomp._torch.fx import copy_module, traced_call
from omnicomp.analysis.certify import PROVED
from omnicomp.builder import regions
from omnicomp.builder.part import build_part
from omnicomp.builder.regions import Shared, share_regions
from omnicomp.devices import resolve_device
from omnicomp.lowerings.base import GraphRecord, LoweringContext
from omnicomp.options.policy import parse
from omnicomp.timeline import Ran, Subgraph, Timeline


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "PAYS", 8)
    monkeypatch.setattr(regions, "SMALLEST", 4)
    monkeypatch.setattr(regions, "WORTH", 4)


def context(part: str = "inference", **options: Any) -> LoweringContext:
    policy = parse(None, options)
    device = resolve_device("cpu")
    return LoweringContext(graph=GraphRecord(id="g0"), part=part, device=device, policy=policy, timeline=Timeline())


def shared(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Shared, GraphModule]:
    """Rewrite a traced function; it is certified, and compared with what the function returns."""
    module, _ = traced_call(function, inputs)
    plain = copy_module(module)
    result = share_regions(module, context(certify="new"))
    assert [event.verdict for event in result.certificates] == [PROVED] * bool(result.calls)
    expected = Interpreter(plain).run(*inputs)
    got = Interpreter(module).run(*inputs)
    for one, another in zip(got, expected, strict=True):
        assert torch.equal(one, another)
        assert one.stride() == another.stride()
    return result, module


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x @ weight.t()
    return torch.sin(y) * 2 + y


def weights(count: int) -> list[torch.Tensor]:
    return [torch.randn(8, 8) for _ in range(count)]


def calls(module: GraphModule) -> list[torch.fx.Node]:
    return module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)


def test_one_body_is_called_for_each_layer() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor]:
        for weight in all:
            x = layer(x, weight)
        return (x,)

    result, module = shared(run, torch.randn(4, 8), *weights(5))
    assert list(result.calls.values()) == [5]
    assert len({str(node.args[0]) for node in calls(module)}) == 1


def test_what_only_some_layers_return_is_returned_by_all() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept: list[torch.Tensor] = []
        for index, weight in enumerate(all):
            middle = torch.sin(x) * 2
            x = (middle + x) @ weight.t()
            kept += [middle] if index == 2 else []
        return (*kept, x)

    result, module = shared(run, torch.randn(4, 8), *weights(5))
    assert result.calls
    assert len(calls(module)[0].meta["val"]) == 2


def test_views_are_made_outside() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept: list[torch.Tensor] = []
        for weight in all:
            y = torch.sin(x) * 2 + x
            kept += [y.t(), y[1:], x[0], weight.t(), y]
            x = y @ weight.t()
        return (*kept, x)

    result, module = shared(run, torch.randn(4, 8), *weights(5))
    assert result.calls
    body: Any = getattr(module, str(calls(module)[0].args[0].target))  # type: ignore[union-attr]
    returned = body.graph.output_node().args[0]
    assert all(node.op == "call_function" and node.target is not torch.ops.aten.t.default for node in returned)
    assert len(returned) == 2


def test_a_product_and_its_view_are_one_result() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept: list[torch.Tensor] = []
        for weight in all:
            product = torch.mm(x, weight)
            seen = torch.ops.aten._unsafe_view.default(product, [2, 2, 8])
            kept += [product, seen]
            x = torch.sin(seen.view(4, 8)) * 2
        return (*kept, x)

    result, module = shared(run, torch.randn(4, 8), *weights(5))
    assert result.calls
    values = calls(module)[0].meta["val"]
    assert len({value.untyped_storage()._cdata for value in values}) == len(values) == 2


def test_results_in_parts_stay_with_their_operator() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for weight in all:
            a, b = torch.split(torch.sin(x) * 2, 4, dim=1)
            values, _ = torch.max(x, dim=1, keepdim=True)
            x = torch.cat([b, a + values], dim=1) @ weight
        return (x,)

    result, _ = shared(run, torch.randn(4, 8), *weights(4))
    assert result.calls


def test_operands_that_are_the_same_tensor() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for weight in all:
            x = layer(x, weight) @ all[0]
        return (x,)

    shared(run, torch.randn(4, 8), *weights(5))


def test_a_small_graph_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "PAYS", 100)
    module, _ = traced_call(lambda x, w: (layer(layer(x, w), w),), [torch.randn(4, 8), torch.randn(8, 8)])
    assert share_regions(module, context()) == Shared()


def test_nothing_that_repeats_is_told_of() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor]:
        for function in (torch.sin, torch.cos, torch.tanh, torch.exp, torch.sigmoid, torch.relu, torch.neg, torch.abs):
            x = function(x)
        return (x,)

    result, _ = shared(run, torch.randn(4))
    assert result.left_whole is not None
    assert result.left_whole.code == "left_whole"


def test_never() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor]:
        for weight in all:
            x = layer(x, weight)
        return (x,)

    module, _ = traced_call(run, [torch.randn(4, 8), *weights(5)])
    assert share_regions(module, context(regions="never")) == Shared()
    assert not calls(module)


def test_where_calls_were_not_measured_they_are_asked_for() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor]:
        for weight in all:
            x = layer(x, weight)
        return (x,)

    module, _ = traced_call(run, [torch.randn(4, 8), *weights(5)])
    other = copy.copy(resolve_device("cpu"))
    other.type = "other"
    found = share_regions(module, dataclasses.replace(context(), device=other))
    assert found.left_whole is not None
    assert "not measured on other" in found.left_whole.sentence
    assert not calls(module)
    assert share_regions(module, dataclasses.replace(context(regions="always"), device=other)).calls


class Patches(nn.Module):
    """Layers on what a convolution makes of images, and convolutions among them."""

    def __init__(self, count: int, *, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inside = nn.Conv2d(3, 8, 4, 4), inside
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        self.mixing = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for linear, mix in zip(self.layers, self.mixing, strict=True):
            heads = torch.sin(linear(x)).view(x.shape[0], -1, 2, 4).transpose(1, 2)
            x = (heads.softmax(-1) @ heads.transpose(2, 3) @ heads).transpose(1, 2).reshape(x.shape) + x
            if self.inside:
                x = mix(x.transpose(1, 2).view(x.shape[0], 8, 4, 4)).flatten(2).transpose(1, 2).cos()
        return x


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_layers_beside_convolutions_are_shared(inside: bool, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[GraphModule] = []
    put_calls = regions.Body.put_calls

    def noting(self: regions.Body, module: GraphModule, name: str) -> list[torch.fx.Node]:
        bodies.append(self.module)
        return put_calls(self, module, name)

    monkeypatch.setattr(regions.Body, "put_calls", noting)
    model, image = Patches(5, inside=inside).double(), torch.randn(2, 3, 16, 16, dtype=torch.double)
    found: list[list[torch.Tensor]] = []
    with torch.set_grad_enabled(training):
        for call in (compiled(model), model):
            y = call(image)
            found.append([y, *(torch.autograd.grad(y.cos().sum(), model.layers.parameters()) if training else ())])
    for one, another in zip(*found, strict=True):
        torch.testing.assert_close(one, another)
    assert bodies
    assert set(repeated()) <= ({"forward", "backward"} if training else {"inference"})
    if not training:  # in training Inductor does not lay these out, so that they may be shared, too
        for body in bodies:
            assert not any("conv" in str(node.target) for node in body.graph.nodes)
            crossing = [*body.graph.find_nodes(op="placeholder"), *body.graph.output_node().all_input_nodes]
            assert all(node.meta["val"].dim() < 4 for node in crossing if "val" in node.meta)


class Layer(nn.Module):
    """A feed-forward block with a norm, dropout, and a residual sum."""

    def __init__(self, size: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def stack(count: int = 4, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(dropout=dropout) for _ in range(count)))


def compiled(model: nn.Module, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend="omni", options=options or None)


def repeated() -> dict[str, dict[str, int]]:
    return {row.part: row.repeats for row in omnicomp.audit().subgraphs if row.repeats}


def test_training_has_the_values_of_the_whole_build() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    found: list[list[torch.Tensor]] = []
    for option in ("never", "auto"):
        model = stack()
        y = compiled(model, regions=option)(x)
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters() if p.grad is not None)])
        assert set(repeated()) == (set() if option == "never" else {"forward", "backward"})
    for one, another in zip(*found, strict=True):
        torch.testing.assert_close(one, another)
    assert "built once, called" in str(omnicomp.audit())


def test_random_numbers_are_those_of_the_whole_build() -> None:
    x = torch.randn(4, 8)
    found: list[torch.Tensor] = []
    for option in ("never", "auto"):
        model = compiled(stack(dropout=0.5), regions=option)
        torch.manual_seed(1)
        found.append(model(x))
    assert repeated()
    assert torch.equal(*found)


def test_dynamic_sizes() -> None:
    model = stack().eval()
    with torch.no_grad():
        run = torch.compile(model, backend="omni", dynamic=True)
        for length in (4, 7, 16):
            x = torch.randn(length, 8)
            torch.testing.assert_close(run(x), model(x))
    assert repeated()


def test_a_warm_start_says_the_same() -> None:
    model, x, found = stack(5).eval(), torch.randn(6, 8), list[dict[str, dict[str, int]]]()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(model)(x), model(x))
            found.append(repeated())
    assert found[0] == found[1]
    assert found[0]


def test_results_are_compared_with_the_graph_before_it_was_rewritten() -> None:
    model, x = stack(5).eval(), torch.randn(6, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, verify="first")(x), model(x))
    [row] = omnicomp.audit().subgraphs
    assert row.repeats
    assert row.ran == "inductor"


def test_gradients_of_inputs_that_are_written_to() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack(5)
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layers(x)
            self.get_buffer("seen").add_(y.detach().mean(0))
            return y

    found: list[list[torch.Tensor]] = []
    x = torch.randn(4, 8)
    for option in ("never", "auto"):
        torch.manual_seed(0)
        model = Counting()
        run = compiled(model, regions=option)
        for _ in range(2):
            run(x).square().sum().backward()
        found.append([model.get_buffer("seen"), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert repeated()
    for one, another in zip(*found, strict=True):
        torch.testing.assert_close(one, another)


def test_a_body_that_can_not_be_built_leaves_the_part_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor.ir import InvokeSubgraph

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no subgraphs today")

    monkeypatch.setattr(InvokeSubgraph, "create", refuse)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = stack().eval(), torch.randn(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x))
    [row] = omnicomp.audit().subgraphs
    assert row.ran == "inductor"
    assert row.left_whole is not None
    assert "no subgraphs today" in row.left_whole.sentence


def test_eager_operators_beside_regions() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = stack(), stack()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.erf(self.first(x)))

    model, x = Cut().eval(), torch.randn(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, lowerings={"aten.erf": "eager"})(x), model(x))
    assert [bool(row.repeats) for row in omnicomp.audit().subgraphs] == [True, False, True]


@pytest.mark.parametrize("cut", [False, True])
def test_what_a_forward_saved_in_padded_rows_is_read_as_it_lies(cut: bool) -> None:
    """Inductor pads rows on GPUs, but not of what a call returns; AOTAutograd traces the backward before it does."""

    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor]:
        for weight, saved in zip(all[::2], all[1::2], strict=True):
            x = torch.sin(x @ weight / 8) * 2 + saved
        return (torch.topk(x, 8)[0] + all[3],) if cut else (x,)

    inputs = [torch.randn(4, 8), *(each for weight in weights(6) for each in (weight, torch.randn(4, 8)))]
    module, _ = traced_call(run, inputs)
    inputs[4] = torch.zeros(4, 16)[:, :8].copy_(inputs[4])
    mode: Any = next(node.meta["val"].fake_mode for node in module.graph.nodes if node.op == "placeholder")
    within = context("backward", lowerings={"aten.topk": "eager"})
    call = build_part(module, [mode.from_tensor(each) for each in inputs], within)
    torch.testing.assert_close(call(list(inputs))[0], run(*inputs)[0])
    told = [each for each in within.timeline.events() if isinstance(each, Subgraph) and each.lowering == "inductor"]
    assert [each.left_whole for each in told if each.repeats] == [None]
    assert sum(sum(each.repeats.values()) for each in told) in (4, 5)
    assert {event.lowering for event in within.timeline.events() if isinstance(event, Ran)} == (
        {"inductor", "eager"} if cut else {"inductor"}
    )
