"""Assumptions about inputs: the checks that are made of them, what is refused, and what pays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

import omnicomp
from omnicomp.passes.assumptions import Assumption, assumption, worth
from omnicomp.passes.base import PassContext
from omnicomp.timeline import Reason


def slice_of(function: Callable[..., torch.Tensor], *args: Any, equals: float | None = None) -> Assumption | Reason:
    """The assumption on what a function computes, which is the operand of the `sinh` behind it."""
    found: list[Assumption | Reason] = []

    def backend(module: GraphModule, inputs: list[Any]) -> Any:
        (last,) = [n for n in module.graph.nodes if n.op == "call_method" and n.target == "sinh"]
        assert isinstance(last.args[0], Node)
        found.append(assumption(module, last.args[0], sentence="it is so", equals=equals))
        return module.forward

    torch.compile(lambda *tensors: function(*tensors).sinh(), backend=backend)(*args)
    return found[0]


def full_check() -> Assumption:
    found = slice_of(lambda mask: mask != 0, torch.ones(3))
    assert isinstance(found, Assumption)
    return found


@pytest.mark.parametrize(
    ("function", "nodes"),
    [
        (lambda mask: mask.bool()[:, None, None, :].expand(2, 1, 3, 3), 0),
        (lambda mask: mask[:, None, None, :].to(torch.bool), 0),
        (lambda mask: (mask == 1).unsqueeze(1).contiguous(), 1),
        (lambda mask: mask[:, :2] > 0, 2),
        (lambda mask: (torch.arange(3) < 3) & mask.bool(), 4),
        (lambda mask: torch.where(mask > 0, mask, 0), 2),
        (lambda mask: torch.logical_not(mask.eq(0)), 2),
    ],
)
def test_checks_are_the_smallest_that_decide(function: Callable[..., torch.Tensor], nodes: int) -> None:
    full = torch.ones(2, 3, dtype=torch.long)
    found = slice_of(function, full)
    assert isinstance(found, Assumption)
    assert found.inputs == ("l_tensors_0_",)
    assert sum(n.op.startswith("call_") for n in found.check.graph.nodes) == nodes + 1, "and the reduction"
    for mask in (full, torch.tensor([[1, 1, 1], [0, 1, 1]])):
        assert bool(found.check(mask)) == bool(function(mask).all())


def test_an_additive_mask_can_be_assumed_to_be_zero() -> None:
    found = slice_of(lambda mask: (1.0 - mask[:, None, :]) * -1e9, torch.ones(2, 3), equals=0.0)
    assert isinstance(found, Assumption)
    assert bool(found.check(torch.ones(2, 3)))
    assert not bool(found.check(torch.tensor([[1.0, 0.0, 1.0]])))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda mask: torch.rand(3) < mask, "does not repeat"),
        (lambda mask: (mask.float() @ mask.float().t()) > 0, "does not repeat"),
        (lambda mask: mask.mul_(2) > 0, "does not repeat"),
        (lambda mask: (mask > 0, mask.add_(1))[0], "writes to it in place"),
        (lambda mask: (mask.bool(), mask[0].zero_())[0], "writes to it in place"),
    ],
)
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
def test_what_can_not_be_checked_is_refused_with_a_reason(
    function: Callable[..., torch.Tensor], sentence: str, inference: bool
) -> None:
    with torch.inference_mode(inference):
        found = slice_of(function, torch.ones(2, 3, dtype=torch.long))
    assert isinstance(found, Reason)
    assert found.code == "not_checkable"
    assert sentence in found.sentence


def test_functions_that_only_have_the_name_of_a_cheap_one_are_not_repeated() -> None:
    @torch.library.custom_op("omnicomp_test::gather", mutates_args=())
    def gather(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    gather.register_fake(torch.empty_like)

    def pad(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    for function in (gather, torch.compiler.allow_in_graph(pad)):
        found = slice_of(lambda mask, function=function: function(mask) > 0, torch.ones(2, 3))
        assert isinstance(found, Reason)
        assert "does not repeat" in found.sentence


def test_what_gradients_flow_to_is_not_assumed() -> None:
    found = slice_of(lambda mask: mask * 2, torch.zeros(2, 3, requires_grad=True), equals=0.0)
    assert isinstance(found, Reason)
    assert "gradients flow to it" in found.sentence


def test_a_pass_may_not_assume_where_nothing_is_speculated_on() -> None:
    context = PassContext(
        graph_id="g0",
        device=omnicomp.devices.resolve_device("cpu"),
        timeline=omnicomp.timeline.Timeline(),
        training=False,
    )
    with pytest.raises(omnicomp.errors.PassError, match="may not be speculated on"):
        context.assume(full_check())
    context.speculate = True
    context.assume(full_check())
    context.assume(full_check())
    assert len(context.assumptions) == 1, "the layers of a model share one check"


def test_speculation_pays_for_much_attention_only() -> None:
    def attention(batch: int, tokens: int) -> int:
        return 4 * batch * 32 * tokens * tokens * 128

    assert worth("cuda", flops=attention(4, 4096), causal=True) is None
    refused = worth("cuda", flops=attention(1, 16), causal=True)
    assert refused is not None
    assert refused.code == "not_profitable"
    assert worth("cpu", flops=attention(1, 1024), causal=True) is None
    assert worth("cpu", flops=attention(1, 16), causal=True) is not None
    assert worth("cpu", flops=attention(1, 1024), causal=False) is not None, "a padding mask alone costs nothing there"
    assert worth("cuda", flops=attention(1, 512), causal=True, checked_bytes=1 << 32) is not None
