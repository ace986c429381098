"""Masks of attention: no row becomes NaN, and a bias keeps its bits and its gradient."""

import math

import pytest
import torch
import torch.nn.functional as F
from lowered import BOUND, DTYPES, check, compiled, error, rand

from omnicomp.devices import resolve_device
from omnicomp.timeline import Rewrite


def masked_attention(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask.expand(2, 2, 6, 6))


def masked_operands(fill, device="cpu"):
    mask = torch.zeros(2, 1, 6, 6)
    mask[0, :, :, 4:] = fill
    mask[1, :, 2] = fill  # a row that is masked throughout
    q, k, v = (rand(2, 2, 6, 16) for _ in range(3))
    v[0, :, 4:] = 1e4  # what is masked stays masked
    return [t.to(device) for t in (q, k, v, mask)]


@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -math.inf, -1e9])
def test_attention_mask(policy, fill):
    backend = check(masked_attention, *masked_operands(fill), policy=policy)
    assert len(backend.of(Rewrite)) == 1


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -math.inf, -1e9])
@pytest.mark.parametrize("policy", DTYPES)
def test_attention_mask_is_clamped_where_the_kernel_needs_the_dtype(policy, fill, monkeypatch):
    monkeypatch.setattr("omnicomp.passes.dtypes.rewrite.WIDE_MASKS", frozenset())
    q, k, v, mask = masked_operands(fill)
    expected = masked_attention(q, k, v, mask)
    fn, backend = compiled(masked_attention, policy)
    actual = fn(q, k, v, mask)
    (cast,) = [n for n in backend.casts(DTYPES[policy]) if n.args[0].name.startswith("masked_fill")]
    assert cast.meta["example_value"].shape == mask.shape  # not of the expanded one
    if policy == "fp16" and math.isfinite(fill):
        # float16's smallest number doesn't swallow the scores: the row attends as if nothing were masked.
        expected[1, :, 2] = F.scaled_dot_product_attention(q, k, v)[1, :, 2]
    assert error(actual, expected) < BOUND[policy]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -math.inf])
@pytest.mark.parametrize("policy", DTYPES)
def test_attention_mask_on_cuda(policy, fill):
    operands = masked_operands(fill, "cuda")
    fn, _ = compiled(masked_attention, policy, device=resolve_device("cuda"))
    actual, expected = fn(*operands), masked_attention(*operands)
    if policy == "fp16":  # see the test above for that row
        actual[1, :, 2] = expected[1, :, 2] = 0
    assert error(actual, expected) < BOUND[policy]


@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.parametrize("wide", [frozenset(), frozenset({"cpu"})])
def test_gradient_of_an_attention_bias(policy, wide, monkeypatch):
    monkeypatch.setattr("omnicomp.passes.dtypes.rewrite.WIDE_MASKS", wide)
    operands = [rand(2, 2, 6, 16).requires_grad_() for _ in range(3)] + [rand(2, 1, 6, 6).requires_grad_()]
    scale = rand(2, 2, 6, 16)
    fn, _ = compiled(masked_attention, policy, training=True)
    actual = torch.autograd.grad((fn(*operands) * scale).sum(), operands)
    expected = torch.autograd.grad((masked_attention(*operands) * scale).sum(), operands)
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == torch.float32
        assert error(got, want) < 1.5 * BOUND[policy]


def test_boolean_mask_and_grouped_heads():
    mask = torch.rand(2, 1, 6, 6) > 0.3
    mask[..., 0] = True
    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        rand(2, 4, 6, 16),
        rand(2, 2, 6, 16),
        rand(2, 2, 6, 16),
    )
