"""`numerics="eager"`: a graph that differs from eager in a bit runs eager, and the audit says what differed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import omnicomp
from omnicomp.backend import pipeline
from omnicomp.timeline import Option, Retreat, current

OPTIONS: dict[str, Any] = {"numerics": "eager", "lowerings": ["eager"], "summary": False}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="omni", options={**OPTIONS, **options})


class _Nudged(torch.autograd.Function):
    """The identity, with a gradient whose last bits are others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * (1 + 2**-20)


def _drawing(value: Tensor) -> Tensor:
    torch.rand(())
    return value


PLANTED: dict[str, Callable[[Tensor], Tensor]] = {
    "result 0": lambda value: value * (1 + 2**-20),
    "the gradient of input": _Nudged.apply,  # type: ignore[dict-item]
    "generator 0": _drawing,
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_difference_anywhere_makes_the_graph_run_eager(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.compared

    def planted(call: Callable[..., Any], *more: Any, owned: bool) -> Any:
        return real(lambda *arguments: [PLANTED[what](value) for value in call(*arguments)], *more, owned=owned)

    monkeypatch.setattr(pipeline, "compared", planted)
    x = torch.randn(8, requires_grad=True)
    call = compiled(lambda x: x.sin() * 3)
    torch.manual_seed(0)
    found, state = call(x), torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found, x.sin() * 3)
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad((x.sin() * 3).sum(), x)[0])
    (retreat,) = [event for event in current().events() if isinstance(event, Retreat)]
    assert retreat.target_lowering == "eager"
    assert retreat.reason.sentence.startswith(what)


@pytest.mark.parametrize("wrong", [False, True])
def test_what_two_runs_of_eager_differ_in_is_said_and_not_blamed_on_the_graph(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a gradient that is added up by atomic additions on a GPU."""
    real, runs = pipeline.compared, iter(range(99))

    def planted(call: Callable[..., Any], plain: Any, *more: Any, owned: bool) -> Any:
        plain.register_forward_hook(lambda _, __, results: (results[0] + next(runs), results[1]))
        other = (lambda *x: (call(*x)[0], call(*x)[1] * 2)) if wrong else call
        return real(other, plain, *more, owned=owned)

    monkeypatch.setattr(pipeline, "compared", planted)
    x = torch.randn(8)
    found = compiled(lambda x: (x.sin() * 3, x.cos() * 3))(x)
    assert torch.equal(found[1], x.cos() * 3)
    retreats = [event.reason.sentence for event in current().events() if isinstance(event, Retreat)]
    assert retreats == (["result 1 is not eager's in every bit, and the graph runs eager"] if wrong else [])
    said = [event.reason.sentence for event in current().events() if isinstance(event, Option) and event.reason]
    assert any("two runs of eager differ in result 0" in each for each in said) is not wrong


def test_what_is_equal_stays_compiled_and_draws_eagers_numbers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8)).train()
    call, x = compiled(model), torch.randn(4, 8)
    for seed in range(3):
        results: list[tuple[Tensor, ...]] = []
        for function in (call, model):
            torch.manual_seed(seed)
            found = function(x)
            gradients = torch.autograd.grad(found.square().sum(), list(model.parameters()))
            results.append((found, *gradients, torch.get_rng_state()))
        assert all(map(torch.equal, *results))
    assert not omnicomp.audit().retreats


def test_comparing_writes_nothing() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count: Tensor
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x * self.count

    model = Counting()
    call = compiled(model)
    for number in range(1, 4):
        assert call(torch.ones(3)).tolist() == [number] * 3
    assert model.count == 3
    assert not omnicomp.audit().retreats


def test_comparing_leaves_running_statistics() -> None:
    model, x = nn.BatchNorm1d(3), torch.randn(4, 3)
    expected = nn.BatchNorm1d(3)
    for _ in range(3):
        assert torch.equal(compiled(model)(x), expected(x))
    assert all(map(torch.equal, model.buffers(), expected.buffers()))


def test_comparing_leaves_what_an_optimizer_steps() -> None:
    values = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.SGD([value], lr=0.5, momentum=0.5) for value in values]
    step = compiled(optimizers[0].step)
    for number in range(3):
        for value in values:
            value.grad = torch.full((3,), float(number + 1))
        step()
        optimizers[1].step()
    assert torch.equal(*values)


def test_what_can_not_be_compared_is_said() -> None:
    def writing(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sin()

    x = torch.randn(3, requires_grad=True).clone()
    expected = writing(x.detach().clone())
    assert torch.equal(compiled(writing)(x), expected)
    (event,) = [event for event in current().events() if isinstance(event, Option) and event.key == "numerics"]
    assert event.reason is not None
    assert "requires a gradient" in event.reason.sentence


def test_passes_that_may_change_a_bit_are_left_out() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v

    q, k, v = (torch.randn(1, 2, 16, 16) for _ in range(3))
    assert torch.equal(compiled(attention)(q, k, v), attention(q, k, v))
    (found,) = [item for item in omnicomp.audit().graphs[0].passes if item.name == "attention_fusion"]
    assert not found.applied
    assert "numerics" in found.note


@pytest.mark.usefixtures("own_overrides")
def test_an_override_that_the_user_places_is_compared_as_well() -> None:
    @omnicomp.override(op=torch.ops.aten.cumsum.default)
    def by_product(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        n = x.shape[-1]
        return x @ torch.ones(n, n, dtype=x.dtype).triu()

    x = torch.randn(64, 64)
    call = compiled(lambda x: x.cumsum(-1), lowerings={"aten.cumsum": ["override", "eager"]})
    assert torch.equal(call(x), x.cumsum(-1))
    assert any(retreat.target_lowering == "eager" for retreat in omnicomp.audit().retreats)


@pytest.mark.inductor
def test_a_fused_layer_is_eagers_in_every_bit() -> None:
    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        h = torch.relu((x @ w) * 0.1 + b) * x
        return torch.softmax(h - 1, -1) * h + h

    operands = [torch.randn(8, 8, dtype=torch.float32, requires_grad=True) for _ in range(3)]
    call = torch.compile(layer, backend="omni", options={"numerics": "eager"})
    for _ in range(3):
        found, expected = call(*operands), layer(*operands)
        assert torch.equal(found, expected)
        assert all(
            map(torch.equal, torch.autograd.grad(found.sum(), operands), torch.autograd.grad(expected.sum(), operands))
        )
    report = omnicomp.audit()
    assert not report.retreats
    assert any(row.lowering == "inductor" for row in report.subgraphs)
