"""Declaring overrides, and putting them into graphs."""

from collections.abc import Iterator

import pytest
import torch

import omnicomp
from omnicomp.errors import OverrideError
from omnicomp.lowerings.overrides.registry import registered, unregister
from omnicomp.timeline import Placement, Ran, Reason, Subgraph, current

NAME = "test_override"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    if any(item.name == NAME for item in registered()):
        unregister(NAME)


def events(kind: type) -> list:
    return [event for event in current() if isinstance(event, kind)]


def declare(calls: list[str], **options) -> None:
    @omnicomp.override(op=torch.ops.aten.digamma.default, name=NAME, **options)
    def fast_digamma(x: torch.Tensor) -> torch.Tensor:
        """A digamma of our own."""
        calls.append(str(x.dtype))
        return torch.special.digamma(x)


def test_two_of_one_name_are_an_error() -> None:
    declare([])
    with pytest.raises(OverrideError, match=f"already is an override named '{NAME}'"):
        declare([])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one"),
        ({"op": torch.ops.aten.sin.default, "reference": torch.sin}, "exactly one"),
        ({"op": torch.sin}, "operator overload"),
        ({"op": torch.ops.aten.add_.Tensor}, "changes its inputs"),
        ({"reference": torch.sin}, "example="),
    ],
)
def test_a_wrong_declaration_is_answered_by_one_sentence(options: dict, words: str) -> None:
    with pytest.raises(OverrideError, match=words):
        omnicomp.override(name=NAME, **options)(lambda x: x)
    assert all(item.name != NAME for item in registered())


def test_an_operator_is_replaced_and_the_override_runs() -> None:
    calls: list[str] = []
    declare(calls, devices=("cpu",), dtypes=(torch.float32,))
    x = torch.rand(5) + 1
    compiled = torch.compile(
        lambda x: torch.digamma(x) * 2, backend="omni", options={"lowerings": ["override", "eager"]}
    )
    torch.testing.assert_close(compiled(x), torch.digamma(x) * 2)
    assert calls == ["torch.float32"]
    assert [e.lowering for e in events(Ran)] == ["override", "eager"]
    assert "fast_digamma" in events(Ran)[0].evidence


def test_gradients_flow_through_an_overridden_operator() -> None:
    calls: list[str] = []
    declare(calls)
    x = (torch.rand(5) + 1).requires_grad_()
    compiled = torch.compile(lambda x: torch.digamma(x), backend="omni", options={"lowerings": ["override", "eager"]})
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.special.polygamma(1, x.detach()))
    assert calls


def test_a_refusal_names_what_was_seen_and_needed() -> None:
    declare([], dtypes=(torch.float64,))
    compiled = torch.compile(
        lambda x: torch.digamma(x) * 2, backend="omni", options={"lowerings": ["override", "eager"]}
    )
    compiled(torch.rand(5) + 1)
    (declined,) = events(Placement)[0].declined
    (reason,) = declined.chain
    assert (reason.code, reason.by) == ("override_refused", NAME)
    assert "torch.float32" in reason.observed
    assert "torch.float64" in reason.needed
    assert reason.source.startswith(__file__)


def test_a_checker_decides() -> None:
    def check(x: torch.Tensor) -> Reason | None:
        return None if x.shape[0] > 100 else Reason(code="override_refused", sentence="too short", observed="5")

    calls: list[str] = []
    declare(calls, check=check)
    compiled = torch.compile(lambda x: torch.digamma(x), backend="omni", options={"lowerings": ["override", "eager"]})
    compiled(torch.rand(5) + 1)
    assert calls == []
    compiled(torch.rand(500) + 1)
    assert len(calls) == 1


def test_an_override_can_be_switched_off() -> None:
    calls: list[str] = []
    declare(calls)
    options = {"lowerings": ["override", "eager"], "disable_overrides": [NAME]}
    torch.compile(torch.digamma, backend="omni", options=options)(torch.rand(5) + 1)
    assert calls == []


@pytest.mark.inductor
def test_an_override_stays_inside_inductors_graph() -> None:
    calls: list[str] = []
    declare(calls)
    x = torch.rand(5) + 1
    compiled = torch.compile(lambda x: (torch.digamma(x.sin() + 2) * 2).cos(), backend="omni")
    torch.testing.assert_close(compiled(x), (torch.digamma(x.sin() + 2) * 2).cos())
    assert len(calls) == 1
    planned = {e.subgraph.partition(".")[2]: e.lowering for e in events(Subgraph)}
    assert planned == {"inference.0": "inductor", f"inference.0/{NAME}": "override"}
    ran = {e.subgraph.partition(".")[2]: e for e in events(Ran)}
    assert ran[f"inference.0/{NAME}"].lowering == "override"
    assert any(NAME in kernel for kernel in ran["inference.0"].kernels)
    by_module = {e["module"].partition(".")[2]: e for e in omnicomp.timeline.backend_timeline()}
    levels = {a["level"]: a for a in by_module[f"inference.0/{NAME}"]["attempts"]}
    assert levels["kernel_override"]["selected"]
    assert not levels["compile"]["selected"]


@pytest.mark.inductor
def test_a_pattern_is_replaced_in_inference() -> None:
    library = torch.library.Library("omnicomp_test", "FRAGMENT")
    library.define("scaled_tanh(Tensor x) -> Tensor")
    library.impl("scaled_tanh", lambda x: torch.tanh(x) * 3 + 1, "CompositeExplicitAutograd")
    library._register_fake("scaled_tanh", torch.empty_like)

    @omnicomp.override(
        name=NAME,
        reference=lambda x: torch.tanh(x) * 3 + 1,
        example=lambda: (torch.rand(4, 4),),
        operators=[torch.ops.omnicomp_test.scaled_tanh.default],
    )
    def scaled_tanh(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.omnicomp_test.scaled_tanh(x)

    x = torch.rand(6, 5)
    with torch.no_grad():
        compiled = torch.compile(lambda x: (torch.tanh(x.sin()) * 3 + 1).cos(), backend="omni")
        torch.testing.assert_close(compiled(x), (torch.tanh(x.sin()) * 3 + 1).cos())
    assert [e.lowering for e in events(Subgraph)] == ["inductor", "override"]
    assert {e.lowering for e in events(Ran)} == {"inductor", "override"}
