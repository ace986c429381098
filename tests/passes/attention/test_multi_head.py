"""`nn.MultiheadAttention` whose weights are dropped calls a fused kernel, and gives what it gave."""

import pytest
import torch
from fusion import Backend, compiled
from torch import nn

from omnicomp.timeline import Rewrite

PADDING = torch.tensor([[False] * 5 + [True] * 2, [True] * 7, [False] * 7])


class Attention(nn.Module):
    def __init__(self, *, weights=False, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, **options)
        self.weights = weights

    def forward(self, query, key, **masks):
        out, weights = self.attention(query, key, key, **masks)
        return (out, weights) if self.weights else (out * 2,)


def run(*, training=False, queries=7, shape=(3,), masks=None, **options):
    """Compile, compare the value and the parameters' gradients with eager's, and return the backend."""
    module = Attention(**options).train(training)
    query, key = torch.randn(*shape, queries, 16), torch.randn(*shape, 7, 16)
    backend = Backend(training=training)
    function = compiled(module, backend)
    with torch.set_grad_enabled(training):
        pairs = zip(function(query, key, **(masks or {})), module(query, key, **(masks or {})), strict=True)
    for found, want in pairs:
        assert found.stride() == want.stride()
        torch.testing.assert_close(found, want, equal_nan=True)
        if training and masks is None:
            grads = [torch.autograd.grad(out.sum(), list(module.parameters())) for out in (found, want)]
            torch.testing.assert_close(*grads)
    return backend


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("queries", [7, 1])
def test_weights_that_are_dropped_are_not_made(queries, training):
    rewrite = run(queries=queries, training=training).rewrite()
    assert (rewrite.target, rewrite.detail) == (
        "multi_head_attention_forward",
        "need_weights=False, as the weights are dropped",
    )


LATER = torch.ones(7, 7).triu(1) > 0
MASKS = {
    "padding": {"key_padding_mask": PADDING},
    "padding in numbers": {"key_padding_mask": torch.zeros(3, 7).masked_fill(PADDING, -1e9)},
    "causal": {"attn_mask": LATER},
    "both": {"attn_mask": LATER, "key_padding_mask": PADDING.flip(1)},
    "each head": {"attn_mask": torch.randn(6, 7, 7).masked_fill(torch.rand(6, 7, 7) < 0.6, -torch.inf)},
    "each head and padding": {"attn_mask": torch.rand(6, 7, 7) < 0.3, "key_padding_mask": PADDING},
    "a wrong hint": {"attn_mask": LATER.T, "is_causal": True},
}


@pytest.mark.parametrize("name", MASKS)
def test_queries_without_a_key_stay_undefined(name):
    assert run(masks=MASKS[name]).rewrite()


@pytest.mark.parametrize("name", ["padding", "both", "each head and padding"])
def test_masks_in_training(name):
    assert run(masks=MASKS[name], training=True).rewrite()


@pytest.mark.parametrize("mask", [LATER, torch.rand(2, 7, 7) < 0.3], ids=["all heads", "each head"])
def test_one_sequence(mask):
    assert run(shape=(), masks={"key_padding_mask": PADDING[0], "attn_mask": mask}).rewrite()


@pytest.mark.parametrize(
    ("options", "sentence", "lever"),
    [
        ({"weights": True}, "the weights of multi_head_attention_forward are used", "need_weights=False"),
        (
            {"masks": {"attn_mask": torch.randn(7, 7)}, "training": True},
            "weights that are dropped",
            "need_weights=False",
        ),
    ],
)
def test_weights_that_are_needed_are_named(options, sentence, lever):
    reason = run(**options).miss()
    assert sentence in reason.sentence
    assert lever in reason.lever


def test_dropout_is_named():
    backend, module = Backend(training=True), Attention(dropout=0.5)
    compiled(module, backend)(torch.randn(3, 7, 16), torch.randn(3, 7, 16))
    assert "dropout" in backend.miss().lever


def test_a_causal_mask_is_told_where_weights_are_dropped():
    backend = run(masks={"attn_mask": LATER})
    assert "is_causal" not in backend.rewrite().detail  # an input

    class Causal(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.attention, self.options = nn.MultiheadAttention(16, 2, batch_first=True), options

        def forward(self, x, padding=None):
            mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
            return self.attention(x, x, x, attn_mask=mask, key_padding_mask=padding, **self.options)[0]

    for options in ({}, {"need_weights": False}):
        module, x = Causal(**options), torch.randn(3, 7, 16)
        backend = Backend()
        torch.testing.assert_close(compiled(module, backend)(x), module(x))
        assert "is_causal, as the mask is" in backend.rewrite().detail
        (call,) = (n for n in backend.graphs[0].graph.nodes if "multi_head" in n.name)
        assert call.kwargs["is_causal"] is True
        assert not [n for n in backend.graphs[0].graph.nodes if "isneginf" in n.name]
        padding = torch.zeros(3, 7, dtype=torch.bool)
        padding[:, 5:] = True
        backend = Backend()
        torch.testing.assert_close(compiled(module, backend)(x, padding), module(x, padding))
        assert not any("is_causal, as" in event.detail for event in backend.of(Rewrite))


@pytest.mark.parametrize("mask", [torch.zeros, lambda *s: torch.zeros(*s, dtype=torch.bool)], ids=["numbers", "bools"])
@pytest.mark.parametrize("weights", [True, False])
def test_a_full_mask_is_dropped(mask, weights):
    module, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(3, 7, 16)
    call = lambda x: module(x, x, x, attn_mask=mask(7, 7), need_weights=weights)[0]  # noqa: E731
    backend = Backend()
    torch.testing.assert_close(compiled(call, backend)(x), call(x))
    (node,) = (n for n in backend.graphs[0].graph.nodes if "multi_head" in n.name)
    assert node.kwargs["attn_mask"] is None


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_a_mask_beside_appended_keys_stays(option):
    module, x = nn.MultiheadAttention(16, 2, batch_first=True, **{option: True}), torch.randn(3, 7, 16)
    call = lambda x: module(x, x, x, attn_mask=torch.ones(7, 7).triu(1) > 0, need_weights=False)[0]  # noqa: E731
    backend = Backend()
    torch.testing.assert_close(compiled(call, backend)(x), call(x))
    (event,) = backend.of(Rewrite)
    assert event.kept
