"""Forward-mode derivatives of compiled functions: calls with tangents run eager, as generated code would drop them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

import omnicomp
from omnicomp._torch.dynamo.forward_mode import carries_tangents
from omnicomp.devices import resolve_device
from omnicomp.lowerings import Executable, GraphRecord, LoweringContext
from omnicomp.options.policy import Policy
from omnicomp.runtime.guard import Guard, recorded_as_cudagraph
from omnicomp.timeline import Capture, Ran, Reason, Retreat, Timeline, current


def test_a_tangent_is_seen_inside_of_a_level_only() -> None:
    x = torch.randn(3)
    assert not carries_tangents([x, 2, None])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(3))
        assert carries_tangents([1, x, dual])
        assert not carries_tangents([1, x, torch.arange(3)])
    assert not carries_tangents([dual])


@pytest.mark.parametrize("obstacle", [None, recorded_as_cudagraph("g0.inference")])
@pytest.mark.parametrize("draws", [(), (torch.device("cpu"),)])
@pytest.mark.parametrize("keep_inputs", [True, False])
def test_only_calls_with_tangents_are_eagers(
    obstacle: Reason | None, draws: tuple[torch.device, ...], keep_inputs: bool
) -> None:
    called: list[str] = []

    def code(args: list[Any]) -> Sequence[Any]:
        called.append("code")
        return [torch.from_numpy(args[0].detach().numpy() * 2)]  # it knows of no tangents

    def eager(args: list[Any]) -> Sequence[Any]:
        called.append("eager")
        return [args[0] * 2]

    timeline = Timeline()
    context = LoweringContext(
        graph=GraphRecord(id="g0"), part="inference", device=resolve_device("cpu"), policy=Policy(), timeline=timeline
    )
    call = Guard(
        call=code,
        inputs=["x"],
        build=lambda: Executable(lowering="eager", call=eager, attest=lambda: ("below", {})),
        context=context,
        subgraph="g0.inference.0",
        lowering="inductor",
        obstacle=obstacle,
        draws=draws,
        keep_inputs=keep_inputs,
    ).boxed()
    x = torch.randn(3)
    call([x])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(3))
        for _ in range(2):
            (got,) = call([dual])
            torch.testing.assert_close(forward_ad.unpack_dual(got).tangent, torch.full((3,), 2.0))
        call([x])
    call([x])
    assert called == ["code", "eager", "eager", "code", "code"]
    (retreat,) = [event for event in timeline.events() if isinstance(event, Retreat)]
    assert retreat.reason is not None
    assert (retreat.reason.code, retreat.source_lowering, retreat.target_lowering) == (
        "forward_mode",
        "inductor",
        "eager",
    )
    assert [event.lowering for event in timeline.events() if isinstance(event, Ran)] == ["eager"]


@pytest.mark.inductor
@pytest.mark.parametrize("tangent_first", [True, False])
@torch.no_grad()
def test_tangents_through_what_inductor_compiled(tangent_first: bool) -> None:
    """The convolution alone would have a tangent, and the code that writes over its result would leave it as it was."""
    weight = torch.randn(2, 2, 3)

    def program(x: Tensor) -> Tensor:
        return F.conv1d(x, weight).mul(3).sin()

    compiled = torch.compile(program, backend="omni")
    x, direction = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    if not tangent_first:
        torch.testing.assert_close(compiled(x), program(x))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, direction)
        got, want = (forward_ad.unpack_dual(f(dual)) for f in (compiled, program))
        torch.testing.assert_close(got.primal, want.primal)
        torch.testing.assert_close(got.tangent, want.tangent)
    torch.testing.assert_close(compiled(x), program(x))
    # Torch 2.15 leaves a function to eager that has tangents in its first call.
    captured = any(isinstance(event, Capture) for event in current())
    assert captured or (tangent_first and torch.__version__ >= (2, 14))
    codes = [event.reason.code for event in current() if isinstance(event, Retreat) and event.reason]
    assert codes == ["forward_mode"] * captured
    assert omnicomp.audit().mismatches == ()
