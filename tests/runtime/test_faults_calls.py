"""Calls that raise, of every lowering, forward and backward: eager's values and gradients, or eager's error."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import fragile
import pytest
import torch
from faults import EAGER, WHOLE, without_caches
from fragile import program, schedule, step
from tagged import Model, backward, declare, keep, train
from tiers import fast
from torch import Tensor

import omnicomp
from omnicomp.timeline import Retreat, current

# The piece behind the operator is eager, or the one in front of it, or the operator itself.
CUTS = {name: {"lowerings": {"*": ["inductor", "eager"], f"aten.{name}": "eager"}} for name in ("exp", "sin")}
ALONE = {"lowerings": {"*": ["inductor", "eager"], "omnicomp_tests.fragile": "eager"}}
OVERRIDES = {
    "alone": {"lowerings": ["override", "eager"]},
    "inside": pytest.param({}, marks=pytest.mark.inductor),
}
MOMENTS = pytest.mark.parametrize("when", ["first", "later", "always"])
PARTS = pytest.mark.parametrize("part", ["forward", "backward"])


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, own_overrides: None) -> Iterator[None]:
    """Nothing raises afterwards."""
    fragile.a_compilers(monkeypatch)
    with without_caches():
        yield
    schedule.set("", "")


def retreats() -> list[tuple[str, str, str]]:
    return [(e.part, e.source_lowering, e.target_lowering) for e in current() if isinstance(e, Retreat)]


@pytest.mark.inductor
@pytest.mark.parametrize("options", [WHOLE, *CUTS.values()], ids=["whole", *CUTS])
@pytest.mark.parametrize("when", fast(["first", "later", "always"], "first".__eq__))
@PARTS
def test_generated_code_gives_way_to_eager(part: str, when: str, options: dict[str, Any]) -> None:
    expected = step(program)
    schedule.set(part, when, compiled=True)
    compiled = torch.compile(program, backend="omni", options=options)
    for _ in range(3):
        torch.testing.assert_close(step(compiled), expected)
    assert schedule.raised == 1, "it is not called again"
    assert retreats() == [(part, "inductor", "eager")]
    assert omnicomp.audit().mismatches == ()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(EAGER, id="eager"),
        pytest.param(ALONE, marks=pytest.mark.inductor, id="eager piece"),
        pytest.param(WHOLE, marks=pytest.mark.inductor, id="inductor"),
    ],
)
@PARTS
def test_what_raises_in_eager_as_well_is_the_programs_own_error(part: str, options: dict[str, Any]) -> None:
    expected = step(program)
    compiled = torch.compile(program, backend="omni", options=options)
    for _ in range(2):
        schedule.set(part, "always")
        with pytest.raises(RuntimeError) as eagers:
            step(program)
        with pytest.raises(RuntimeError) as caught:
            step(compiled)
        assert (type(caught.value), str(caught.value)) == (type(eagers.value), str(eagers.value))
        schedule.set("", "")
        torch.testing.assert_close(step(compiled), expected)  # it is kept, and called again
    assert retreats() == []
    assert omnicomp.audit().mismatches == ()


def digamma(x: Tensor) -> Tensor:
    return torch.digamma(x.sin() + 3).exp()


def declare_digamma() -> None:
    @omnicomp.override(op=torch.ops.aten.digamma.default, name="fragile_digamma")
    def own(x: Tensor) -> Tensor:
        schedule.call("forward")
        return torch.special.digamma(x)


@pytest.mark.parametrize("options", OVERRIDES.values(), ids=OVERRIDES)
@pytest.mark.parametrize("verify", ["overrides", "off"])
@MOMENTS
def test_an_overrides_kernel_gives_way_to_its_reference(when: str, verify: str, options: dict[str, Any]) -> None:
    declare_digamma()
    expected = step(digamma)
    schedule.set("forward", when)
    compiled = torch.compile(digamma, backend="omni", options={**options, "verify": verify})
    for _ in range(3):
        torch.testing.assert_close(step(compiled), expected)
    assert schedule.raised == 1
    assert retreats() == [("forward", "override" if options else "inductor", "eager")]
    assert omnicomp.audit().mismatches == ()


def train_with(derivative: Callable[..., Any], options: dict[str, Any], calls: int = 3) -> None:
    """Train with an override of a block that has this derivative, and compare with eager."""
    declare([], backward=derivative, setup_context=keep)
    model, x = Model(depth=1), torch.randn(3, 6)
    expected = train(model, model, x)
    compiled = torch.compile(model, backend="omni", options=options)
    for _ in range(calls):
        torch.testing.assert_close(train(model, compiled, x), expected)


def raises_in_a_call(ctx: Any, grad: Tensor) -> Any:
    return backward(ctx, fragile.fragile(grad, "backward") / 3)


@pytest.mark.parametrize("options", OVERRIDES.values(), ids=OVERRIDES)
@pytest.mark.parametrize("when", ["first", "always"])
def test_an_override_whose_backward_raises_is_not_used(when: str, options: dict[str, Any]) -> None:
    schedule.set("backward", when)
    train_with(raises_in_a_call, options)
    assert schedule.raised == 1, "when it was verified"
    (found,) = [e.reason.sentence for e in current() if isinstance(e, Retreat)]
    assert "has a backward that raises" in found


@pytest.mark.parametrize("options", OVERRIDES.values(), ids=OVERRIDES)
def test_an_overrides_backward_that_raises_later_is_an_error(options: dict[str, Any]) -> None:
    """The forward is over, and the reference's backward would need what only its own forward keeps."""
    schedule.set("backward", "later")
    with pytest.raises(RuntimeError, match=f"{fragile.MESSAGE}: backward"):
        train_with(raises_in_a_call, options)
    assert retreats() == []


@pytest.mark.parametrize("options", OVERRIDES.values(), ids=OVERRIDES)
def test_an_override_whose_backward_can_not_be_traced_is_not_used(options: dict[str, Any]) -> None:
    def can_not_be_traced(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError("planted failure of a trace")

    train_with(can_not_be_traced, options)
    assert [(source, target) for _, source, target in retreats()] == [("autograd" if options else "inductor", "eager")]
    assert any("planted failure" in json.dumps(e.to_dict(), default=str) for e in current())
