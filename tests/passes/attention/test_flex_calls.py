"""Calls of FlexAttention whose mask is proved to be full or causal become the faster call; the others stay."""

import pytest
import torch
from fusion import Backend, compiled
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from omnicomp.timeline import NearMiss, Rewrite

SHARED = torch.arange(256) // 64


def causal(b, h, q, k):
    return q >= k


def blocks(function, q, k, **options):
    return create_block_mask(function, None, None, q.shape[2], k.shape[2], device="cpu", **options)


def noop(b, h, q, k):
    return b >= 0


def operands(length=256, heads=4):
    return [torch.randn(2, heads, length, 16) for _ in range(3)]


def run(function, *arguments, **options):
    backend = Backend()
    result = compiled(function, backend, **options)(*arguments)
    torch.testing.assert_close(result, function(*arguments))
    return backend


def both(b, h, q, k):
    return (q >= k) & (k >= 0)


def through_where(b, h, q, k):
    return torch.where(q - k < 0, False, True)


@pytest.mark.parametrize("function", [causal, both, through_where])
@pytest.mark.parametrize("length", [256, 200])
def test_causal_blocks_become_is_causal(function, length):
    backend = run(lambda q, k, v: flex_attention(q, k, v, block_mask=blocks(function, q, k)), *operands(length))
    assert "is_causal" in backend.rewrite().detail
    (node,) = backend.attentions()
    assert node.kwargs == {"scale": 0.25, "is_causal": True}
    assert not [n for n in backend.graphs[0].graph.nodes if "flex" in n.name]


def test_no_mask_and_no_function():
    backend = run(lambda q, k, v: flex_attention(q, k, v, scale=0.5), *operands())
    assert backend.attentions()[0].kwargs == {"scale": 0.5}


def test_grouped_heads():
    q, k, v = operands()
    backend = run(
        lambda q, k, v: flex_attention(q, k, v, block_mask=blocks(causal, q, k), enable_gqa=True), q, k[:, :2], v[:, :2]
    )
    assert backend.attentions()[0].kwargs == {"scale": 0.25, "is_causal": True, "enable_gqa": True}


def test_blocks_of_another_mask_stay():
    """The blocks that are visited count as much as the function: causal by blocks of 128, or by elements in a part."""
    for function, other in ((noop, causal), (causal, noop), (causal, lambda b, h, q, k: q >= 128)):

        def call(q, k, v, function=function, other=other):
            made = blocks(function, q, k)
            made.mask_mod = other
            return flex_attention(q, k, v, block_mask=made)

        backend = run(call, *operands())
        (event,) = backend.of(Rewrite)
        assert event.kept


KEPT = {
    "window": lambda q, k, v: flex_attention(
        q, k, v, block_mask=blocks(lambda b, h, i, j: (i >= j) & (i - j < 32), q, k)
    ),
    "documents": lambda q, k, v: flex_attention(
        q, k, v, block_mask=blocks(lambda b, h, i, j: SHARED[i] == SHARED[j], q, k)
    ),
    "score": lambda q, k, v: flex_attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s + i, block_mask=blocks(causal, q, k)
    ),
    "log-sum-exp": lambda q, k, v: sum(
        x.sum() for x in flex_attention(q, k, v, block_mask=blocks(causal, q, k), return_lse=True)
    ),
    "built by hand": lambda q, k, v: flex_attention(
        q,
        k,
        v,
        block_mask=BlockMask.from_kv_blocks(
            torch.ones(1, 1, 2, dtype=torch.int32),
            torch.zeros(1, 1, 2, 2, dtype=torch.int32),
            BLOCK_SIZE=128,
            mask_mod=causal,
        ),
    ),
    "counted": lambda q, k, v: flex_attention(q, k, v, block_mask=blocks(lambda b, h, i, j: i.sum() >= j.max(), q, k)),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_calls_stay(name):
    backend = run(KEPT[name], *operands())
    (event,) = backend.of(Rewrite)
    assert event.kept
    assert event.target == "flex_attention"
    assert backend.of(NearMiss) == []
    assert backend.attentions() == []


def test_padding_is_assumed_to_be_none():
    def call(q, k, v, padding):
        def function(b, h, i, j):
            return (i >= j) & padding[b, j]

        made = create_block_mask(function, 2, None, 512, 512, device="cpu")
        return flex_attention(q, k, v, block_mask=made)

    q, k, v = operands(512)
    padding = torch.ones(2, 512, dtype=torch.bool)
    backend = Backend(speculate=True)
    compiled(call, backend)(q, k, v, padding)
    (event,) = backend.of(Rewrite)
    assert "is_causal" in event.detail


def test_a_block_mask_from_outside_stays():
    q, k, v = operands()
    made = blocks(causal, q, k)
    (event,) = run(lambda q, k, v: flex_attention(q, k, v, block_mask=made), q, k, v).of(Rewrite)
    assert event.kept
    assert "causal" in event.detail


def test_nothing_comes_of_the_log_sum_exp():
    def call(q, k, v):
        out, sums = flex_attention(q, k, v, block_mask=blocks(causal, q, k), return_lse=True)
        sums.to(v.dtype)
        return out

    assert "is_causal" in run(call, *operands()).rewrite().detail
