"""Overrides are compared with their references when they are first used, and what ran is told by what was seen."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from tagged import MLP, Model, backward, declare, events, keep, plain, refusals, train
from torch import Tensor, nn

import omnicomp
from omnicomp.builder import part
from omnicomp.errors import LoweringError
from omnicomp.lowerings import LOWERINGS, Executable
from omnicomp.lowerings.overrides import trust
from omnicomp.lowerings.overrides.registry import unregister
from omnicomp.timeline import Placement, Ran, Retreat, Verification

ALONE = {"lowerings": ["override", "eager"]}


pytestmark = pytest.mark.usefixtures("own_overrides")


def cumsum(off: float = 0.0, name: str = "own_cumsum") -> list[Tensor]:
    """Register an override of `cumsum`, which is wrong by `off`; the list gets what it was called with."""
    calls: list[Tensor] = []

    @omnicomp.override(op=torch.ops.aten.cumsum.default, name=name)
    def own(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        calls.append(x)
        return torch.from_numpy(x.numpy().cumsum(axis=dim)) + off

    return calls


def program(x: Tensor) -> Tensor:
    return x.exp().cumsum(-1) + 1


def compiled(function: Any = program, **options: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend="omni", options={**ALONE, **options})


def states() -> list[str]:
    return [f"{e.direction} {e.state}" for e in events(Verification)]


def test_a_right_one_is_verified_once_for_each_class_of_arguments() -> None:
    calls = cumsum()
    run, x = compiled(), torch.randn(4, 8)
    for _ in range(3):
        torch.testing.assert_close(run(x), program(x))
    assert states() == ["forward right"]
    assert len(calls) == 3
    (event,) = events(Verification)
    assert event.seconds > 0
    assert "error" in event.detail
    compiled(lambda x: program(x) * 2)(x)
    compiled(lambda x: program(x) * 2)(torch.randn(4, 8, 3))
    compiled(lambda x: program(x) * 2)(x.double())
    assert states()[1:] == ["forward known", "forward right", "forward right"]
    assert omnicomp.audit().mismatches == ()


def test_what_an_earlier_process_verified_is_known(tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    cumsum()
    compiled()(x)
    trust.forget()
    compiled()(x)
    assert states() == ["forward right", "forward known"]
    (path,) = (tmp_path / "omnicomp").glob("overrides/trusted/*.json")
    path.write_text("{damaged")
    trust.forget()
    compiled()(x)
    assert states()[2:] == ["forward right"]


def test_a_wrong_one_gives_the_references_values_and_is_not_used_again() -> None:
    calls = cumsum(off=0.01)
    run, x = compiled(), torch.randn(4, 8)
    for _ in range(3):
        torch.testing.assert_close(run(x), program(x))
    assert len(calls) == 1
    assert states() == ["forward wrong"]
    (retreat,) = events(Retreat)
    assert (retreat.source_lowering, retreat.target_lowering) == ("override", "eager")
    assert retreat.reason.code == "verification_failed"
    audit = omnicomp.audit()
    assert audit.mismatches == ()
    assert [row.ran for row in audit.subgraphs] == ["eager"] * 3
    for _ in range(2):
        omnicomp.timeline.clear()
        torch.testing.assert_close(compiled()(x), program(x))
        (declined,) = [node for e in events(Placement) for node in e.declined]
        assert declined.chain[0].code == "verification_failed"
        trust.forget()  # it is on disk as well
    assert len(calls) == 1


def test_a_wrong_one_is_raised_if_that_is_asked_for() -> None:
    cumsum(off=0.01)
    with pytest.raises(LoweringError, match="own_cumsum is farther from fp64"):
        compiled(on_error="raise")(torch.randn(4, 8))


def test_nothing_is_compared_if_that_is_switched_off() -> None:
    cumsum(off=0.01)
    x = torch.randn(4, 8)
    assert not torch.allclose(compiled(verify="off")(x), program(x))
    assert states() == []


def test_sizes_of_another_class_are_verified_in_a_dynamic_graph() -> None:
    cumsum()
    run = torch.compile(program, backend="omni", options=ALONE, dynamic=True)
    for size in (8, 9, 8, 100, 101):
        x = torch.randn(4, size)
        torch.testing.assert_close(run(x), program(x))
    assert states() == ["forward right"] * 2


def test_numbers_that_tie_are_not_taken_for_wrong() -> None:
    @omnicomp.override(op=torch.ops.aten.topk.default, name="own_topk")
    def own(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
        values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
        return values[..., :k].contiguous(), indices[..., :k].contiguous()

    x = torch.tensor([[1.0, 5.0, 5.0, 5.0, 0.0, 5.0, 5.0], [0.0] * 7]).repeat(3, 4)
    compiled(lambda x: torch.topk(x, 3))(x)
    assert states() == ["forward right"]


def test_whole_numbers_that_are_wrong_are_found() -> None:
    @omnicomp.override(op=torch.ops.aten.topk.default, name="own_topk")
    def own(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(x, k, dim)
        return values.clone(), indices.roll(1, -1)

    x = torch.randn(5, 20)
    assert torch.equal(compiled(lambda x: torch.topk(x, 3)[1])(x), torch.topk(x, 3)[1])
    assert states() == ["forward wrong"]


def test_a_block_is_compared_with_what_the_module_computes() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.randn(6)), scale

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.weight) * self.scale

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x * weight) * 2.0

    omnicomp.override(module=Scaled, reference=reference, name="scaled")(reference)
    x = torch.randn(3, 6)
    with torch.no_grad():
        for model in (nn.Sequential(Scaled(2.0)), nn.Sequential(Scaled(2.0), Scaled(3.0))):
            torch.testing.assert_close(compiled(model)(x), model(x))
    assert states() == ["forward right", "forward known", "forward wrong"]


def test_gradients_are_verified_and_a_wrong_derivative_is_given_up() -> None:
    declare([], backward=backward, setup_context=keep)
    model, x = Model(depth=1), torch.randn(3, 6)
    expected = train(model, model, x)
    for got, want in zip(train(model, compiled(model), x), expected, strict=True):
        torch.testing.assert_close(got, want)
    assert states() == ["backward right", "forward right"]
    unregister("block_mlp")

    def wrong(ctx: Any, grad: Tensor) -> Any:
        found = backward(ctx, grad)
        return (*found[:2], found[2] * 1.001, *found[3:])

    declare([], backward=wrong, setup_context=keep, name="wrong_gradient")
    omnicomp.timeline.clear()
    run = compiled(model)
    for _ in range(2):
        for got, want in zip(train(model, run, x), expected, strict=True):
            torch.testing.assert_close(got, want)
    assert states() == ["backward wrong"]
    assert "down_weight" in events(Verification)[0].detail
    (retreat,) = events(Retreat)
    assert (retreat.part, retreat.target_lowering) == ("", "eager")
    assert omnicomp.audit().mismatches == ()
    compiled(model)(x)
    assert [reason.code for reason in refusals()] == ["verification_failed"]


def test_an_override_that_raises_gives_way_to_its_reference() -> None:
    @omnicomp.override(module=MLP, reference=plain, name="raising")
    def raising(x: Tensor, up_weight: Tensor, down_weight: Tensor, up_bias: Tensor, down_bias: Tensor) -> Tensor:
        raise RuntimeError("planted failure of the kernel")

    model, x = Model(depth=1), torch.randn(3, 6)
    with torch.no_grad():
        run = compiled(model)
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x))
    (retreat,) = events(Retreat)
    assert (retreat.source_lowering, retreat.target_lowering) == ("override", "eager")
    assert "planted failure of the kernel" in retreat.reason.sentence


class Liar:
    """Says that it is another lowering, and runs eager."""

    def __init__(self, name: str) -> None:
        self.name, self.supports = name, LOWERINGS["eager"].supports

    def lower(self, module: Any, inputs: Sequence[Any], context: Any) -> Executable:
        made = LOWERINGS["eager"].lower(module, inputs, context)
        return Executable(
            lowering=self.name, call=made.call, generated="/nowhere/generated.py", attest=lambda: (self.name, {})
        )


def test_a_lowering_that_lies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOWERINGS, "inductor", Liar("inductor"))
    rules = {"*": ["inductor", "eager"], "aten.cos": "eager"}
    x = torch.randn(3)
    # Inductor's place, as the whole of a part is Inductor's by itself.
    monkeypatch.setattr(part.Plan, "whole", property(lambda _: False))
    found = torch.compile(lambda x: x.sin().cos().exp(), backend="omni", options={"lowerings": rules})(x)
    torch.testing.assert_close(found, x.sin().cos().exp())
    audit = omnicomp.audit()
    assert [row.ran for row in audit.subgraphs] == ["eager", "eager", "eager"]
    assert [row.planned for row in audit.subgraphs] == ["inductor", "eager", "inductor"]
    assert len(audit.mismatches) == 2
    assert "the first call ran the code of an FX graph" in events(Ran)[0].evidence


def test_an_override_that_was_not_called_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    cumsum()
    original = LOWERINGS["override"].lower

    def lies(module: Any, inputs: Sequence[Any], context: Any) -> Executable:
        made = original(module, inputs, context)
        made.call = lambda args: (args[0].cumsum(-1),)
        return made

    monkeypatch.setattr(LOWERINGS["override"], "lower", lies)
    x = torch.randn(4, 8)
    torch.testing.assert_close(compiled(on_error="raise")(x), program(x))
    assert len(omnicomp.audit().mismatches) == 1


@pytest.mark.inductor
def test_inside_inductors_graph_a_wrong_one_is_replaced_for_good() -> None:
    calls = cumsum(off=0.01)
    x = torch.randn(4, 8)
    run = torch.compile(program, backend="omni")
    for _ in range(3):
        torch.testing.assert_close(run(x), program(x))
    assert len(calls) == 1
    audit = omnicomp.audit()
    assert [row.ran for row in audit.subgraphs] == ["inductor", "eager"]
    assert audit.mismatches == ()


@pytest.mark.inductor
def test_inside_inductors_graph_one_that_raises_leads_to_eager_with_its_reference() -> None:
    failing = [0, 1]

    @omnicomp.override(op=torch.ops.aten.cumsum.default, name="own_cumsum")
    def own(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        failing[0] += 1
        if failing[0] > failing[1]:
            raise RuntimeError("planted failure of the kernel")
        return torch.from_numpy(x.numpy().cumsum(axis=dim))

    x = torch.randn(4, 8)
    run = torch.compile(program, backend="omni")
    for _ in range(3):
        torch.testing.assert_close(run(x), program(x))
    assert failing[0] == 2
    assert omnicomp.audit().subgraphs[0].ran == "eager"
    assert omnicomp.audit().mismatches == ()


@pytest.mark.inductor
def test_gradients_are_verified_inside_inductors_graph() -> None:
    declare([], backward=backward, setup_context=keep)
    model, x = Model(depth=1), torch.randn(3, 6)
    expected = train(model, model, x)
    run = torch.compile(model, backend="omni")
    for _ in range(2):
        for got, want in zip(train(model, run, x), expected, strict=True):
            torch.testing.assert_close(got, want)
    assert states() == ["backward right", "forward right"]
    assert omnicomp.audit().mismatches == ()


@pytest.mark.inductor
def test_another_generated_module_than_the_one_that_is_shown_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8)
    monkeypatch.setattr("omnicomp._torch.inductor.compile_fx.generated_python", lambda _: "/nowhere/generated.py")
    torch.compile(lambda x: x.sin() + 2, backend="omni")(x)
    (row,) = omnicomp.audit().subgraphs
    assert (row.planned, row.ran) == ("inductor", "unknown")
    assert row.mismatch


def test_a_program_that_is_profiled_keeps_its_profile() -> None:
    code = """
import cProfile, torch, omnicomp
run = torch.compile(lambda x: x.sin() + 1, backend="omni", options={"lowerings": ["eager"]})
with cProfile.Profile() as profile:
    run(torch.ones(3))
    torch.ones(3).cos()
assert any("cos" in str(key) for key in profile.getstats()), "the profile ended early"
assert not omnicomp.audit().mismatches
"""
    python("-c", code, check=True)


def test_the_class_of_arguments_tells_what_kernels_have_other_code_for() -> None:
    x = torch.empty(32, 8)
    cases = [x, x[:, 1:], x.t(), x[:1].expand(32, 8), x.double(), x[:31], x[0], x[:0], 3, 4, 100, 2.5, "sum", None]
    assert len({trust.classify((value,)) for value in cases}) == len(cases)
    assert trust.classify((torch.empty(48, 8),)) == trust.classify((x,))
    assert trust.classify((100,)) == trust.classify((101,))
    assert trust.classify((math.inf,)) == "inf"


@pytest.mark.inductor
def test_code_that_no_cache_keeps_is_recognised() -> None:
    with torch.compiler.config.patch(force_disable_caches=True):
        torch.compile(lambda x: x.sin() + 5, backend="omni")(torch.randn(4))
    assert [row.ran for row in omnicomp.audit().subgraphs] == ["inductor"]


@pytest.mark.parametrize("calls", [1, 2])
def test_an_override_that_is_all_of_an_inductor_graph_ran(calls: int) -> None:
    heard = cumsum()

    def alone(x: Tensor) -> Any:
        return x.cumsum(-1) if calls == 1 else (x.cumsum(-1), x.cumsum(0))

    compiled(alone, lowerings=["override", "inductor", "eager"])(torch.rand(3, 4))
    assert len(heard) == calls
    assert [row.ran for row in omnicomp.audit().subgraphs] == ["inductor", *["override"] * calls]
    assert not omnicomp.audit().mismatches
