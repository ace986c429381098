"""Which blocks are left as they are, and with which reason."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tagged import EAGER, MLP, Model, compiled, declare, refusals, train
from torch import Tensor, nn

import omnicomp
from omnicomp.timeline import Reason

pytestmark = pytest.mark.usefixtures("own_overrides")


@pytest.mark.parametrize("options", [{}, {"training": "forward only"}])
def test_without_a_derivative_it_is_for_inference(options: dict[str, Any]) -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls, **options)
    model, x = Model(depth=1), torch.randn(3, 6)
    run = compiled(model)
    for got, expected in zip(train(model, run, x), train(model, model, x), strict=True):
        torch.testing.assert_close(got, expected)
    assert calls == []
    (reason,) = refusals()
    assert (reason.code, reason.by) == ("override_refused", "block_mlp")
    assert "differentiated" in reason.sentence
    assert "tagged.py:" in reason.source
    with torch.no_grad():
        run(x)
    assert len(calls) == 1


class InPlace(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x.mul_(2))))


class OwnInPlace(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x), inplace=True))


class View(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 6)


class Wide(MLP):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.down(F.silu(self.up(x))) + (x if other is None else other)


class Other(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x))).double()


class Turned(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return (self.down.weight @ (self.up.weight @ x.T + self.up.bias[:, None]).sin()).T + self.down.bias


@pytest.mark.parametrize(
    ("make", "observed", "words"),
    [
        (lambda: MLP(drop=0.5), "random numbers", "more than computation"),
        (InPlace, "x", "does not change the same values"),
        (View, "parameters none", "is not entered as"),
        (Other, "torch.float32", "returns something else"),
        (Turned, "strides", "returns something else"),
    ],
)
@torch.no_grad()
def test_a_block_that_does_more_or_else_is_left(make: Any, observed: str, words: str) -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls, module="mlp")
    model = Model(make, depth=1)
    x, y = torch.randn(3, 6), torch.randn(3, 6)
    with torch.random.fork_rng():
        expected = model(x.clone()), model(y.clone())
    run = compiled(model)
    with torch.random.fork_rng():
        got = run(x.clone()), run(y.clone())
    assert calls == []
    (reason,) = refusals()
    assert words in reason.sentence
    assert observed in reason.observed
    assert reason.needed
    assert reason.lever
    torch.testing.assert_close(got, expected)


@torch.no_grad()
def test_changes_of_its_own_values_and_dropout_that_is_off_are_no_obstacle() -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls, module="mlp")
    model, x = Model(OwnInPlace, depth=1), torch.randn(3, 6)
    torch.testing.assert_close(compiled(model)(x), model(x))
    quiet = Model(lambda: MLP(drop=0.5), depth=1).eval()
    torch.testing.assert_close(compiled(quiet)(x), quiet(x))
    assert len(calls) == 2


@torch.no_grad()
def test_weights_of_another_module_are_not_taken_for_activations() -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 10, bias=False)
            self.mlp = MLP()
            self.mlp.up.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).sum() + self.mlp(x)

    model, x = Tied(), torch.randn(3, 6)
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert calls == []
    (reason,) = refusals()
    assert reason.observed == "first.weight"


@torch.no_grad()
def test_a_value_that_is_given_from_outside_counts() -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls, module="block")

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Wide()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x, x.sin())

    model, x = Two(), torch.randn(3, 6)
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert calls == []
    (reason,) = refusals()
    assert reason.observed.startswith("activations l_x_, ")
    assert "Tensor up_weight" in reason.needed


@torch.no_grad()
def test_symbolic_sizes_are_no_activations_and_get_no_guard() -> None:
    calls: list[tuple[Any, ...]] = []

    class Flat(MLP):
        def forward(self, x: Tensor) -> Tensor:
            batch, length, width = x.shape
            return super().forward(x.reshape(batch * length, width)).view(batch, length, width)

    declare(calls, module="mlp")
    model = Model(Flat, depth=1)
    run = torch.compile(model, backend="omni", options=EAGER, dynamic=True)
    for shape in ((2, 3, 6), (5, 4, 6), (7, 9, 6)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(x), model(x))
    assert len(calls) == 3
    assert {graph.compile_id for graph in omnicomp.audit().graphs} == {"0/0"}


@torch.no_grad()
def test_a_number_that_no_shape_tells_is_not_dropped() -> None:
    calls: list[int] = []

    @omnicomp.override(module="Scaled", reference=lambda x: x + 0)
    def scaled(x: Tensor) -> Tensor:
        calls.append(1)
        return x + 0

    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: int) -> Tensor:
            return x * by

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Scaled()

        def forward(self, x: Tensor, by: int) -> Tensor:
            return self.block(x, by)

    run = torch.compile(Outer(), backend="omni", options=EAGER, dynamic=True)
    x = torch.randn(3, 6)
    torch.testing.assert_close(run(x, 17), x * 17)
    assert calls == []
    assert "activations l_x_, " in refusals()[0].observed


@torch.no_grad()
def test_a_check_sees_the_block_and_its_literals() -> None:
    class Norm(nn.Module):
        def __init__(self, eps: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(6))
            self.eps = eps

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    def check(x: Tensor, *, weight: Tensor, block: Any) -> Reason | None:
        assert x.shape[-1] == weight.shape[0] == 6
        if 1e-5 in block.literals:
            return None
        return Reason(code="override_refused", by="norm", sentence="another eps", needed="1e-5", lever="use 1e-5")

    calls: list[int] = []

    @omnicomp.override(module=Norm, reference=reference, check=check)
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        calls.append(1)
        return reference(x, weight)

    x = torch.randn(3, 6)
    model = nn.Sequential(Norm(1e-5), Norm(1e-2))
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert calls == [1]
    assert [reason.sentence for reason in refusals()] == ["another eps"]


@pytest.mark.parametrize("what", ["check", "reference"])
@torch.no_grad()
def test_what_raises_is_a_reason(what: str) -> None:
    def explode(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("in between")

    calls: list[tuple[Any, ...]] = []
    declare(calls, **{what: explode})
    model, x = Model(depth=1), torch.randn(3, 6)
    torch.testing.assert_close(compiled(model)(x), model(x))
    (reason,) = refusals()
    assert reason.observed == "ZeroDivisionError"
    assert "in between" in reason.sentence


@torch.no_grad()
def test_a_failure_of_ours_costs_the_override_and_not_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a bug")

    monkeypatch.setattr("omnicomp.lowerings.overrides.tag.admit", explode)
    calls: list[tuple[Any, ...]] = []
    declare(calls)
    model, x = Model(depth=1), torch.randn(3, 6)
    torch.testing.assert_close(compiled(model, on_error="retreat")(x), model(x))
    assert calls == []
    assert "can't be judged: a bug" in refusals()[0].sentence
    torch.compiler.reset()
    with pytest.raises(Exception, match="a bug"):
        compiled(model)(x)


@torch.no_grad()
def test_devices_and_dtypes_are_asked_first() -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls, dtypes=(torch.float64,))
    run = compiled(Model(depth=1))
    run(torch.randn(3, 6))
    (reason,) = refusals()
    assert (reason.observed, reason.needed) == ("dtype=torch.float32", "one of torch.float64")


def test_a_rule_of_placement_keeps_a_block() -> None:
    calls: list[tuple[Any, ...]] = []
    declare(calls)
    options = {"lowerings": {"*": ["override", "eager"], "layers.0.mlp": "eager"}}
    with torch.no_grad():
        compiled(Model(), **options)(torch.randn(3, 6))
    assert len(calls) == 1
    (reason,) = refusals()
    assert reason.code == "lowering_excluded"


@torch.no_grad()
def test_declared_changes_must_be_those_of_the_block() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return x * self.seen

    def reference(x: Tensor, seen: Tensor) -> Tensor:
        seen.add_(1)
        return x * seen

    calls: list[int] = []

    @omnicomp.override(module=Counter, reference=reference, mutates=("seen",))
    def counter(x: Tensor, seen: Tensor) -> Tensor:
        calls.append(1)
        return reference(x, seen)

    model, x = nn.Sequential(Counter()), torch.randn(3)
    run = compiled(model)
    torch.testing.assert_close(run(x), x)
    torch.testing.assert_close(run(x), x * 2)
    assert model[0].seen == 2
    assert calls == [1, 1]
    assert refusals() == []
