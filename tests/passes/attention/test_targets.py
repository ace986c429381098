"""Which fused kernel is chosen on the CPU, and what is left alone because nothing is faster."""

import math

import pytest
import torch
import torch.nn.functional as F
from fusion import FLASH, Backend, compiled, differentiate, fuse, inputs

import omnicomp
from omnicomp.options.policy import Policy
from omnicomp.passes.attention import targets
from omnicomp.timeline import Rewrite


def attend(scores, v):
    return scores.softmax(-1) @ v


def test_a_causal_mask_is_not_made():
    def function(q, k, v):
        return attend((q @ k.mT).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -math.inf), v)

    backend = fuse(function, *inputs(queries=8)[:3])
    assert backend.rewrite().detail == f"scale=1, is_causal; kernel {FLASH}"
    assert backend.attentions()[0].kwargs == {"scale": 1.0, "is_causal": True}
    assert not [n for n in backend.graphs[0].graph.nodes if n.name in ("triu", "ones", "masked_fill")]


@pytest.mark.parametrize("training", [False, True])
def test_a_causal_mask_with_a_negative_scale(training):
    q, k, v, _ = inputs(queries=40, keys=40)
    later = lambda: torch.ones(40, 40, dtype=torch.bool).triu(1)  # noqa: E731
    function = lambda q, k, v: attend((q @ k.mT * -0.25).masked_fill(later(), -math.inf), v)  # noqa: E731
    rewrite = (differentiate if training else fuse)(function, q, k, v).rewrite()
    assert "scale=0.25, is_causal" in rewrite.detail


def test_a_mask_that_hides_nothing_is_not_made():
    backend = fuse(lambda q, k, v: attend(q @ k.mT + torch.zeros(6, 8), v), *inputs()[:3])
    assert backend.attentions()[0].kwargs == {"scale": 1.0}


def test_a_causal_mask_with_an_offset_is_dense_and_named():
    def function(q, k, v):
        return attend((q @ k.mT).masked_fill(torch.ones(6, 8, dtype=torch.bool).triu(3), -math.inf), v)

    backend = fuse(function, *inputs()[:3])
    assert backend.rewrite().detail == f"scale=1, dense mask (causal, offset 2); kernel {FLASH}"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        lambda i, j: j <= i,
        lambda i, j: (j <= i) & (j > i - 4),
        lambda i, j: (j <= i) | (j < 3),
        lambda i, j: i // 4 == j // 4,
        lambda i, j: j <= i + (j.shape[-1] - i.shape[-2]),
    ],
    ids=["causal", "window", "prefix", "chunks", "bottom right"],
)
def test_masks_of_lengths_that_change_are_right_without_compiling_again(mask, training):
    def function(q, k, v):
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        return attend((q @ k.mT * 0.25).masked_fill(~mask(i, j), torch.finfo(q.dtype).min), v)

    backend = Backend(training=training)
    run = compiled(function, backend, dynamic=True)
    for queries, keys in ((12, 17), (9, 31), (31, 31)):
        arguments = [a.requires_grad_(training) for a in inputs(queries=queries, keys=keys)[:3]]
        torch.testing.assert_close(run(*arguments), function(*arguments))
    assert len(backend.graphs) == len(backend.of(Rewrite)) == 1


def test_a_symbolic_size_that_no_tensor_has_is_told_as_that():
    def function(x, b):
        q = x.flatten(2).mT
        bias = (q.unflatten(1, (4, -1)) @ b).flatten(1, 2)
        return attend(q @ q.mT + bias[:, :, :1] * torch.arange(q.shape[1]), q)

    backend, arguments = Backend(), (torch.randn(2, 8, 6, 6), torch.randn(8, 4))
    torch.testing.assert_close(compiled(function, backend, dynamic=True)(*arguments), function(*arguments))
    assert "no tensor at hand has the symbolic size" in backend.miss().sentence
    assert "dynamic=False" in backend.miss().lever


@pytest.mark.parametrize("trained", ["table", "bias", "slopes", "temperature"])
def test_gradients_of_learned_biases(trained):
    where = (torch.arange(6)[:, None] - torch.arange(8)).abs()
    forms = {
        "table": (lambda q, k, v, t: attend(q @ k.mT + F.embedding(where, t).permute(2, 0, 1), v), torch.randn(9, 4)),
        "bias": (lambda q, k, v, t: attend(q @ k.mT * 0.25 + t, v), torch.randn(1, 4, 6, 8)),
        "slopes": (lambda q, k, v, t: attend(q @ k.mT - t[:, None, None] * where, v), torch.rand(4)),
        "temperature": (lambda q, k, v, t: attend(q @ k.mT * t.exp().view(1, 4, 1, 1), v), torch.rand(4) - 0.5),
    }
    function, parameter = forms[trained]
    assert differentiate(function, *inputs()[:3], parameter).rewrite()


def test_a_bias_that_requires_grad_takes_the_operator_that_has_its_gradient():
    q, k, v, m = inputs()
    backend = Backend(training=True)
    compiled(lambda q, k, v, m: attend(q @ k.mT + m, v), backend)(q, k, v, m.requires_grad_())
    assert backend.rewrite().target == "omnicomp.attention_with_bias"


def test_what_costs_more_than_it_saves_is_left_alone(monkeypatch):
    monkeypatch.setattr(targets, "_NEGLIGIBLE_FLOPS", 0)
    function = lambda q, k, v, m: attend(q @ k.mT + m, v)  # noqa: E731
    q, k, v, m = inputs()
    backend = Backend(training=True)
    compiled(function, backend)(q, k, v, m.requires_grad_())
    assert backend.miss().code == "not_profitable"
    assert "requires grad" in backend.miss().sentence
    torch._dynamo.reset()
    backend = fuse(function, q, k, v[..., :8].contiguous(), m.detach())
    assert backend.miss().code == "not_profitable"
    assert "head sizes 16 and 8" in backend.miss().observed


@pytest.mark.parametrize("training", [False, True])
def test_sinks(training):
    def function(q, k, v, m, s):
        sinks = s.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        scores = torch.cat([q @ k.mT * 0.25 + m, sinks], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return scores.softmax(-1)[..., :-1] @ v

    q, k, v, m = inputs()
    if training:
        backend = differentiate(lambda q, k, v, s: function(q, k, v, m, s), q, k, v, torch.randn(4))
    else:
        backend = fuse(function, q, k, v, m, torch.randn(4))
    assert backend.rewrite().target == "omnicomp.attention_with_sink"
    assert "sink" in backend.rewrite().detail


@pytest.mark.parametrize("trained", [False, True])
def test_numbers_that_swallow_all_scores_beside_a_sink_are_uniform_in_the_backward(trained):
    def function(q, k, v, m, s):
        sinks = s.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        huge = 1e30 * torch.ones(q.shape[-2], k.shape[-2]).tril(-1)
        return torch.cat([q @ k.mT * 0.25 + (m * 0 + huge if trained else huge), sinks], -1).softmax(-1)[..., :-1] @ v

    q, k, v, m = inputs()
    backend = differentiate(lambda q, k, v, s: function(q, k, v, m, s), q, k, v, torch.randn(4))
    assert backend.rewrite().target == "omnicomp.attention_with_sink"


def test_dropout_keeps_its_reason_where_no_kernel_has_it():
    backend = Backend(training=True)
    function = lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.1, True) @ v  # noqa: E731
    compiled(function, backend)(*(a.requires_grad_() for a in inputs()[:3]))
    assert backend.miss().observed == "dropout=0.1"
    assert "dropout" in backend.miss().lever


def test_random_numbers_of_eager_are_kept_where_they_are_asked_for():
    backend = Backend(policy=Policy(inductor={"fallback_random": True}))
    function = lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.1, True) @ v  # noqa: E731
    compiled(function, backend)(*inputs()[:3])
    assert backend.miss().code == "not_equal"
    assert "fallback_random" in backend.miss().lever


def test_an_attempt_that_fails_leaves_the_graph_as_it_was(monkeypatch):
    monkeypatch.setattr(targets, "fused_kernel", lambda call: "")
    backend = fuse(lambda q, k, v, m: attend((q @ k.mT).masked_fill(m > 0, -math.inf), v), *inputs())
    assert backend.miss().code == "not_profitable"
    calls = [n.name for n in backend.graphs[0].graph.nodes if n.op == "call_function"]
    assert not [name for name in calls if name not in ("matmul", "gt", "getattr_1", "m_t", "matmul_1")]


@pytest.mark.parametrize("declared", [False, True])
def test_lengths_that_cudnns_tiles_divide_have_a_graph_of_their_own(monkeypatch, declared):
    """The CPU as Hopper, where cuDNN's backward is wrong at other lengths, and torch would take it for any."""

    def wrong(query, key, dtype, *, training, tiled=False):
        return training and not tiled

    monkeypatch.setattr(targets, "cudnn_is_wrong", wrong)
    monkeypatch.setattr(targets, "fused_kernel", lambda call: f"_scaled_dot_product_{pinned(call)}_attention")
    pinned = lambda call: call.args[2].get("kernel", "cudnn")  # noqa: E731
    options = {"lowerings": ["eager"], "on_error": "raise"}
    function = lambda q, k, v: attend(q @ k.mT * 0.25, v)  # noqa: E731
    run = torch.compile(function, backend="omni", dynamic=True, options=options)
    for length in (256, 384, 100, 77, 512):
        q, k, v = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
        if declared:
            for x in (q, k, v):
                torch._dynamo.mark_dynamic(x, 2)
        torch.testing.assert_close(run(q, k, v), function(q, k, v))
    rewrites = [event for event in omnicomp.timeline.events() if isinstance(event, Rewrite)]
    tiled = "scale=0.25, for multiples of 128; kernel _scaled_dot_product_cudnn_attention"
    others = "scale=0.25; kernel _scaled_dot_product_flash_attention"
    assert [event.detail for event in rewrites] == ([others] if declared else [tiled, others])
