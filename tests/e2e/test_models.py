"""Real models through omni and Inductor: values, gradients, and what the audit says of their attention."""

import dataclasses
from typing import Any

import pytest
import torch
from tiers import fast

import omnicomp
from omnicomp.testing.models import MODELS, SIZES, Case, build

pytestmark = [pytest.mark.model, pytest.mark.inductor]


def gradients(case: Case, model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    case.model.zero_grad(set_to_none=True)
    output = case.output(model(**case.inputs))
    output.square().mean().backward()
    return output.detach(), {n: p.grad.clone() for n, p in case.model.named_parameters() if p.grad is not None}


def assert_near(actual: torch.Tensor, expected: torch.Tensor, scale: float, tolerance: float = 2e-4) -> None:
    """Compare on the scale of the whole: some gradients (of key biases, say) are zero but for rounding."""
    assert (actual - expected).abs().max().item() <= tolerance * scale


# Inductor compiles one model of each kind of layer, as small as it can be: omni does the same for the others in eager.
@pytest.mark.parametrize(
    ("name", "layers", "sites", "lowering"),
    fast(
        [
            ("llama", 2, 2, "inductor"),
            ("resnet", 1, 0, "inductor"),
            ("unet", 0, 2, "inductor"),
            ("bert", 2, 2, "eager"),
            ("vit", 2, 2, "eager"),
            ("t5", 2, 6, "eager"),
            ("unet", 2, 10, "eager"),
        ],
        lambda case: case[0] == "llama",
    ),
)
def test_values_gradients_and_sites(name: str, layers: int, sites: int, lowering: str) -> None:
    case = MODELS[name](dataclasses.replace(SIZES["tiny"], layers=layers))
    case.model.eval()
    compiled = torch.compile(case.model, backend="omni", options={"lowerings": [lowering]})
    with torch.no_grad():
        expected = case.output(case.model(**case.inputs))
        torch.testing.assert_close(case.output(compiled(**case.inputs)), expected, rtol=1e-4, atol=1e-5)
    audit = omnicomp.audit()
    assert len(audit.sites.fused) == case.sites == sites
    assert audit.sites.near_misses == ()

    omnicomp.timeline.clear()
    expected_output, expected_gradients = gradients(case, case.model)
    output, actual_gradients = gradients(case, compiled)
    assert_near(output, expected_output, expected_output.abs().max().item())
    assert actual_gradients.keys() == expected_gradients.keys()
    scale = max(gradient.abs().max().item() for gradient in expected_gradients.values())
    for parameter, gradient in expected_gradients.items():
        assert_near(actual_gradients[parameter], gradient, scale)
    audit = omnicomp.audit()
    assert len(audit.sites.fused) == audit.sites.total == sites
    assert {part.name for graph in audit.graphs for part in graph.parts} == {"forward", "backward"}
    assert {(row.planned, row.ran) for row in audit.subgraphs} == {(lowering, lowering)}
    assert not audit.fallbacks


@pytest.mark.slow
def test_bf16_policy_on_a_real_model() -> None:
    case = build("llama")
    compiled = torch.compile(case.model, backend="omni", options={"dtype_policy": "bf16"})
    with torch.no_grad():
        expected = case.output(case.model(**case.inputs))
        actual = case.output(compiled(**case.inputs))
    assert actual.dtype == expected.dtype == torch.float32
    error = ((actual - expected).norm() / expected.norm()).item()
    assert 0 < error < 2e-2
    lowered = [e for e in omnicomp.timeline.events() if e.type == "rewrite" and e.kind == "dtype"]
    # Seven linears and one attention a layer.
    assert len(lowered) == 16


def test_a_router_of_experts_uses_the_override() -> None:
    """Mixtral's way to choose experts, on as many tokens as make the kernel pay."""

    def route(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden, weight)
        probabilities = torch.nn.functional.softmax(logits, dim=-1, dtype=torch.float)
        values, indices = torch.topk(probabilities, 2, dim=-1)
        return values / values.sum(dim=-1, keepdim=True), indices

    hidden, weight = torch.randn(4096, 32), torch.randn(16, 32)
    with torch.no_grad():
        actual = torch.compile(route, backend="omni")(hidden, weight)
        torch.testing.assert_close(actual, route(hidden, weight))
    rows = omnicomp.audit().subgraphs
    assert [(row.planned, row.ran) for row in rows] == [("inductor", "inductor"), ("override", "override")]
    assert rows[1].sources, "the override's row names the user's line"
