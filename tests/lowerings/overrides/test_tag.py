"""Overrides of whole blocks: what they are called with, and what comes out."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tagged import EAGER, MLP, Model, backward, compiled, declare, events, keep, plain, refusals, train
from torch import Tensor, nn
from torch.fx import GraphModule

import omnicomp
from omnicomp.lowerings.override import planned_call
from omnicomp.timeline import Ran, Rewrite

pytestmark = pytest.mark.usefixtures("own_overrides")


@pytest.mark.parametrize(
    "tag",
    [
        MLP,
        nn.Module,
        "MLP",
        f"{MLP.__module__}.MLP",
        "mlp",
        "layers.*.mlp",
        "layers.[01].mlp",
        "layers.1.mlp",
        "*.1.mlp",
    ],
)
@torch.no_grad()
def test_a_block_is_tagged_by_class_name_or_path(tag: str | type) -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls, module=tag)
    model, x = Model(), torch.randn(3, 6)
    torch.testing.assert_close(compiled(model)(x), model(x))
    expected = 0 if tag is nn.Module else 1 if "1" in str(tag).split(".") else 2
    assert len(calls) == expected, "a class with another forward is not meant"
    assert [e.lowering for e in events(Ran)].count("override") == expected
    assert [e.module for e in events(Rewrite)] == [f"layers.{i}.mlp" for i in range(2)][2 - expected :]


@pytest.mark.parametrize("tag", ["MLPs", "layers.*", "layers.2.mlp", "down.mlp"])
@torch.no_grad()
def test_other_blocks_are_not_asked_about(tag: str) -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls, module=tag)
    compiled(Model())(torch.randn(3, 6))
    assert calls == []
    assert refusals() == []


@torch.no_grad()
def test_it_gets_activations_in_the_order_of_first_use_and_parameters_by_name() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)
            self.register_buffer("scale", torch.rand(4))

        def forward(self, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
            gate = torch.sigmoid(third)
            return gate * self.scale + second, self.inner(first)

    def reference(
        third: Tensor, scale: Tensor, second: Tensor, first: Tensor, inner_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(third) * scale + second, first @ inner_weight.T

    calls: list[int] = []

    @omnicomp.override(module="Gated", reference=reference)
    def gated(
        third: Tensor, scale: Tensor, second: Tensor, first: Tensor, inner_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return reference(third, scale, second, first, inner_weight)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Gated()

        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            left, right = self.block(a, b, c)
            return left.sin() - right

    model, args = Outer(), [torch.randn(3, 4) for _ in range(3)]
    torch.testing.assert_close(compiled(model)(*args), model(*args))
    assert calls == [1]


@torch.no_grad()
def test_parameters_with_a_default_may_be_missing() -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls)
    model, x = Model(lambda: MLP(bias=False), depth=1), torch.randn(3, 6)
    torch.testing.assert_close(compiled(model)(x), model(x))
    ((_, up_weight, _, up_bias, down_bias),) = calls
    assert torch.equal(up_weight, model.layers[0]["mlp"].up.weight)
    assert up_bias is down_bias is None


def test_a_derivative_that_is_given_trains() -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls, backward=backward, setup_context=keep, training=True)
    model, x = Model(), torch.randn(3, 6)
    run = compiled(model, verify="off")
    for got, expected in zip(train(model, run, x), train(model, model, x), strict=True):
        torch.testing.assert_close(got, expected)
    assert len(calls) == 2
    assert refusals() == []


def test_a_derivative_that_is_registered_later_trains() -> None:
    calls: list[int] = []

    @omnicomp.override(module="MLP", name="block_custom")
    @torch.library.custom_op("omnicomp_test_tag::mlp", mutates_args=())
    def mlp(x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor) -> Tensor:
        calls.append(1)
        return plain(x, up_weight, down_weight, up_bias, down_bias)

    mlp.register_fake(lambda x, *rest: torch.empty_like(x))
    model, x = Model(depth=1), torch.randn(3, 6)
    expected = train(model, model, x)
    train(model, compiled(model), x)
    (reason,) = refusals()
    assert reason.observed == "no derivative is registered for its operator"
    assert calls == []

    def differentiate(ctx: Any, grad: Tensor) -> Any:
        x, a, b, c, d = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(plain(x, a, c, b, d), (x, a, b, c, d), grad)

    mlp.register_autograd(differentiate, setup_context=keep)
    torch.compiler.reset()
    for got, wanted in zip(train(model, compiled(model, verify="off"), x), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert calls == [1]


@torch.no_grad()
def test_the_same_module_may_be_called_twice() -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = MLP()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.mlp(x).sin())

    model, x = Twice(), torch.randn(3, 6)
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert len(calls) == 2


@torch.no_grad()
def test_the_higher_priority_is_taken_and_of_equal_ones_the_first(caplog: pytest.LogCaptureFixture) -> None:
    low, high, equal = [], [], []
    declare(low, "low", priority=-1)
    declare(high, "high", module="mlp")
    declare(equal, "equal", module="MLP")
    with caplog.at_level(logging.INFO, "omnicomp.overrides"):
        compiled(Model(depth=1))(torch.randn(3, 6))
    assert (len(low), len(high), len(equal)) == (0, 1, 0)
    assert "equal, of equal priority, registered later, is left out" in caplog.text
    assert "low, of lower priority, is left out" in caplog.text
    assert refusals() == []


@torch.no_grad()
def test_of_nested_blocks_the_outer_one_is_taken() -> None:
    class Deep(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).sin() + self.up(x).sum()

    def reference(
        x: Tensor,
        inner_up_weight: Tensor,
        inner_up_bias: Tensor,
        inner_down_weight: Tensor,
        inner_down_bias: Tensor,
        up_weight: Tensor,
        up_bias: Tensor,
    ) -> Tensor:
        inner = plain(x, inner_up_weight, inner_down_weight, inner_up_bias, inner_down_bias)
        return inner.sin() + F.linear(x, up_weight, up_bias).sum()

    calls: list[tuple[Any, ...]] = []
    declare(calls, name="inner", module="inner", priority=-1)
    omnicomp.override(module="layers.*.*", name="outer", reference=reference)(reference)
    declare(calls, name="all", module="*")
    model, x = Model(Deep), torch.randn(3, 6)
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert [(e.name, e.module) for e in events(Rewrite)] == [("outer", f"layers.{i}.mlp") for i in range(2)]


def test_a_block_in_a_checkpointed_region_is_left() -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls, backward=backward, setup_context=keep)
    mlp = Model(depth=1)

    def function(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(mlp, x, use_reentrant=False)

    x = torch.randn(3, 6, requires_grad=True)
    torch.testing.assert_close(torch.compile(function, backend="omni", options=EAGER)(x), mlp(x))
    assert calls == []
    assert "region" in refusals()[0].sentence


def test_what_was_replaced_is_known_after_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    from omnicomp.builder import part as ladder

    seen: list[GraphModule] = []
    original = ladder.place

    def spy(module: GraphModule, *others: Any) -> Any:
        seen.append(module)
        return original(module, *others)

    monkeypatch.setattr(ladder, "place", spy)

    @omnicomp.override(module=MLP, name="known")
    @torch.library.custom_op("omnicomp_test_tag::known", mutates_args=())
    def known(x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor) -> Tensor:
        return plain(x, up_weight, down_weight, up_bias, down_bias)

    known.register_fake(lambda x, *rest: torch.empty_like(x))
    model = Model(depth=1)
    with torch.no_grad():
        compiled(model)(torch.randn(3, 6))
    (node,) = seen[0].graph.find_nodes(op="call_function", target=torch.ops.omnicomp_test_tag.known.default)
    call = planned_call(node, "")
    assert call is not None
    function = call.truth
    assert function is not None
    block, x = model.layers[0]["mlp"], torch.randn(5, 6).double()
    block.double()
    arguments = (x, block.up.weight, block.up.bias, block.down.weight, block.down.bias)
    torch.testing.assert_close(function(*arguments), block(x))


@pytest.mark.inductor
def test_it_stays_inside_inductors_graph_in_inference_and_training() -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls, backward=backward, setup_context=keep)
    model, x = Model(depth=1), torch.randn(3, 6)
    run = torch.compile(model, backend="omni", options={"verify": "off"})
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    for got, expected in zip(train(model, run, x), train(model, model, x), strict=True):
        torch.testing.assert_close(got, expected)
    assert len(calls) == 2
    rows = omnicomp.audit().subgraphs
    assert [row.ran for row in rows] == ["inductor", "override", "inductor", "override", "inductor"]
