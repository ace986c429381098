"""Sinks that are gates on the output: read as the sinks that they are, or left alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from fusion import Backend, compiled, differentiate, fuse, inputs
from torch import Tensor


def granite(q: Tensor, k: Tensor, v: Tensor, m: Tensor, s: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25 + m
    share = (torch.logsumexp(scores, -1) - s.view(1, -1, 1)).to(torch.float32).sigmoid()
    weights = F.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return (weights @ v * share.unsqueeze(-1).to(q.dtype)).transpose(1, 2).contiguous()


def beside(q: Tensor, k: Tensor, v: Tensor, m: Tensor, s: Tensor) -> Tensor:
    scores = q @ k.mT + m
    share = torch.sigmoid(-(s[:, None] - scores.logsumexp(-1)))
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    return (out * share.transpose(1, 2)[..., None]).flatten(2)


def written_out(q: Tensor, k: Tensor, v: Tensor, m: Tensor, s: Tensor) -> Tensor:
    scores = q @ k.mT
    total = scores.logsumexp(-1, keepdim=True)
    return torch.sigmoid(s[:, None, None] + total) * ((scores - total).exp() @ v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("function", [granite, beside, written_out])
def test_a_gate_by_the_log_sum_exp_is_a_sink(function, dtype):
    *operands, m = (x.to(dtype) for x in inputs())
    arguments = (*operands, m, torch.randn(4, dtype=dtype))
    assert fuse(function, *arguments).rewrite().target == "omnicomp.attention_with_sink"
    torch._dynamo.reset()
    backend = differentiate(lambda q, k, v, s: function(q, k, v, m, s), *operands, arguments[-1])
    assert "sink" in backend.rewrite().detail


def test_a_gate_of_lengths_that_change_is_compiled_once():
    backend = Backend()
    run = compiled(granite, backend, dynamic=True)
    for queries, keys in ((12, 17), (9, 31)):
        arguments = (*inputs(queries=queries, keys=keys), torch.randn(4))
        torch.testing.assert_close(run(*arguments), granite(*arguments))
    assert backend.rewrite().target == "omnicomp.attention_with_sink"


@pytest.mark.parametrize(
    ("hidden", "training"),  # gradients of rows that are NaN differ on purpose
    [(-math.inf, False), (torch.finfo(torch.float32).min, False), (torch.finfo(torch.float32).min, True), (-1e9, True)],
)
@pytest.mark.parametrize("filled", [False, True])
def test_rows_without_keys_are_those_of_eager(filled, hidden, training):
    """Without any key but by `-inf`, the output is NaN before it meets its gate."""
    hides = torch.zeros(2, 1, 6, 8, dtype=torch.bool)
    hides[0, 0, 2], hides[1, 0, 1, 3:] = True, True

    def function(q, k, v, s, mask):
        scores = q @ k.mT * 0.3
        scores = scores.masked_fill(mask, hidden) if filled else scores + torch.zeros(()).masked_fill(mask, hidden)
        return scores.softmax(-1) @ v * torch.sigmoid(scores.logsumexp(-1, keepdim=True) - s[:, None, None])

    q, k, v, _ = inputs()
    arguments = (q, k, v, torch.randn(4), hides)
    if training:
        backend = differentiate(function, *arguments)
    else:
        backend = Backend()
        found = compiled(function, backend)(*arguments)
        torch.testing.assert_close(found, function(*arguments), equal_nan=True)
    assert backend.rewrite().target == "omnicomp.attention_with_sink"


def gated(share):
    def function(q, k, v, s):
        scores = q @ k.mT
        return scores.softmax(-1) @ v * share(scores.logsumexp(-1, keepdim=True), s)

    return function


OTHER = {
    "for each feature": gated(lambda total, s: torch.sigmoid(total - s[0])),
    "of less than the sink": gated(lambda total, s: torch.sigmoid(s[..., :1] - total)),
    "of half of it": gated(lambda total, s: torch.sigmoid(total * 0.5 - s[..., :1])),
    "no sigmoid": gated(lambda total, s: torch.tanh(total - s[..., :1])),
    "of other queries": gated(lambda total, s: torch.sigmoid(total.flip(2) - s[..., :1])),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_gate_that_is_no_sink_is_left_alone(name):
    q, k, v, _ = inputs()
    assert fuse(OTHER[name], q, k, v, torch.randn(2, 4, 6, 16)).miss()


def test_gradients_that_stop_at_the_log_sum_exp_are_not_fused():
    def function(q, k, v, s):
        scores = q @ k.mT
        return scores.softmax(-1) @ v * torch.sigmoid(scores.logsumexp(-1, keepdim=True).detach() - s)

    assert differentiate(function, *inputs()[:3], torch.randn(4, 1, 1)).miss().code == "not_equal"


def test_a_log_sum_exp_that_is_returned_as_well_is_told():
    def function(q, k, v, s):
        scores = q @ k.mT
        total = scores.logsumexp(-1, keepdim=True)
        return torch.cat([scores.softmax(-1) @ v * torch.sigmoid(total - s), total], -1)

    assert "log-sum-exp" in fuse(function, *inputs()[:3], torch.randn(4, 1, 1)).miss().lever
