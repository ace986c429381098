"""Calls of `scaled_dot_product_attention`: what is made better, and what stays exactly the call that it was."""

import pytest
import torch
import torch._dynamo
import torch.nn.attention
import torch.nn.functional as F
from fusion import FLASH, Backend, compiled, differentiate, fuse, inputs

from omnicomp.options.policy import Policy
from omnicomp.passes.attention import sdpa as sdpa_parts
from omnicomp.timeline import NearMiss, Rewrite

sdpa = F.scaled_dot_product_attention


def operands(*, heads=4, queries=8, keys=8, size=16, dtype=torch.float32):
    return inputs(dtype, heads=heads, queries=queries, keys=keys, size=size)[:3]


def tril(q, k):
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


def added(mask, dtype, value):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, value)


CAUSAL = {
    "ones": lambda q, k, v: sdpa(q, k, v, tril(q, k)),
    "positional": lambda q, k, v: sdpa(q, k, v, tril(q, k), 0.0, False, scale=0.5),
    "compared": lambda q, k, v: sdpa(
        q, k, v, attn_mask=torch.arange(q.shape[-2])[:, None] >= torch.arange(k.shape[-2])
    ),
    "expanded": lambda q, k, v: sdpa(q, k, v, attn_mask=tril(q, k)[None, None].expand(q.shape[0], 1, -1, -1)),
    "infinite": lambda q, k, v: sdpa(q, k, v, attn_mask=added(tril(q, k), q.dtype, -torch.inf)),
    "lowest": lambda q, k, v: sdpa(q, k, v, attn_mask=added(tril(q, k), q.dtype, torch.finfo(q.dtype).min)),
    "triu": lambda q, k, v: sdpa(
        q, k, v, attn_mask=torch.full((q.shape[-2], k.shape[-2]), -torch.inf, dtype=q.dtype).triu(1)
    ),
    "generated": lambda q, k, v: sdpa(
        q, k, v, attn_mask=torch.nn.Transformer.generate_square_subsequent_mask(q.shape[-2], dtype=q.dtype)
    ),
}


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_causal_mask_becomes_is_causal(name, dtype):
    backend = fuse(CAUSAL[name], *operands(dtype=dtype))
    rewrite = backend.rewrite()
    assert "is_causal" in rewrite.detail
    assert not rewrite.kept
    (node,) = backend.attentions()
    assert node.kwargs["is_causal"] is True
    assert "attn_mask" not in node.kwargs
    # Nothing of the mask is left.
    assert not [n for n in backend.graphs[0].graph.nodes if n.name in ("ones", "tril", "full", "arange")]


def test_layers_whose_calls_have_one_mask_make_it_once():
    table = torch.nn.Parameter(torch.randn(15, 4), requires_grad=False)

    def layers(q, k, v):
        bias = table[torch.arange(8)[:, None] - torch.arange(8) + 7].permute(2, 0, 1)[None].to(q.dtype)
        for _ in range(3):
            mask = torch.where(torch.ones(8, 8, dtype=torch.bool).tril(), bias, torch.finfo(q.dtype).min)
            q = sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), mask)
        return q

    q, k, v = operands()
    backend = fuse(layers, q, k[:, :2], v[:, :2])
    assert {rewrite.detail for rewrite in backend.of(Rewrite)} == {
        f"scale=0.25, dense mask (causal and bias), enable_gqa; kernel {FLASH}"
    }
    assert len({node.kwargs["attn_mask"] for node in backend.attentions()}) == 1
    assert sum(node.target is torch.where for node in backend.graphs[0].graph.nodes) == 1


def test_a_full_mask_is_dropped():
    backend = fuse(lambda q, k, v: sdpa(q, k, v, attn_mask=torch.ones(8, 8, dtype=torch.bool)), *operands())
    (node,) = backend.attentions()
    assert node.kwargs == {"scale": 0.25}
    backend = fuse(lambda q, k, v: sdpa(q, k, v, attn_mask=torch.zeros(8, 8)), *operands())
    assert backend.attentions()[0].kwargs == {"scale": 0.25}


@pytest.mark.parametrize(("queries", "keys"), [(8, 12), (12, 8), (1, 8)])
def test_alignment_is_that_of_the_mask(queries, keys):
    """`is_causal` is aligned at the top left, whatever the lengths; a mask of another alignment stays a mask."""
    arguments = operands(queries=queries, keys=keys)
    top = fuse(lambda q, k, v: sdpa(q, k, v, attn_mask=tril(q, k)), *arguments)
    assert top.attentions()[0].kwargs.get("is_causal") is True
    bottom = fuse(
        lambda q, k, v: sdpa(q, k, v, attn_mask=torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)),
        *arguments,
    )
    assert "is_causal" not in bottom.attentions()[0].kwargs


REPEATS = {
    "interleave": lambda x: x.repeat_interleave(2, 1),
    "expand": lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], -1, *x.shape[2:]),
    "contiguous": lambda x: x.repeat_interleave(2, dim=1).contiguous(),
}


@pytest.mark.parametrize("name", REPEATS)
@pytest.mark.parametrize("masked", ["none", "causal", "is_causal", "dense"])
def test_repeated_heads_become_grouped(name, masked):
    repeat = REPEATS[name]

    def call(q, k, v, m):
        mask = {"none": None, "is_causal": None, "causal": tril(q, k), "dense": m > 0}[masked]
        return sdpa(q, repeat(k), repeat(v), attn_mask=mask, is_causal=masked == "is_causal")

    q, k, v, m = inputs(queries=8)
    m[..., 0] = 1
    backend = fuse(call, q, k[:, :2], v[:, :2], m)
    (node,) = backend.attentions()
    assert node.kwargs["enable_gqa"] is True
    assert node.args[1].meta["example_value"].shape[1] == 2
    assert node.kwargs.get("is_causal", False) is ("causal" in masked)
    assert ("attn_mask" in node.kwargs) is (masked == "dense")


def test_grouped_heads_stay_grouped():
    q, k, v = operands()
    backend = fuse(lambda q, k, v: sdpa(q, k, v, attn_mask=tril(q, k), enable_gqa=True), q, k[:, :2], v[:, :2])
    (node,) = backend.attentions()
    assert node.kwargs == {"scale": 0.25, "is_causal": True, "enable_gqa": True}


KEPT = {
    "plain": (lambda q, k, v, m: sdpa(q, k, v), ""),
    "is_causal": (lambda q, k, v, m: sdpa(q, k, v, is_causal=True), "is_causal"),
    "scale": (lambda q, k, v, m: sdpa(q, k, v, scale=-0.5), ""),
    "bias": (lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), "dense mask (bias)"),
    "input": (lambda q, k, v, m: sdpa(q, k, v, attn_mask=m > 0), "dense mask (unknown)"),
    "window": (
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=tril(q, k) & ~tril(q, k).tril(-4)),
        "dense mask (sliding window of 4)",
    ),
    "copied": (lambda q, k, v, m: sdpa((q * 2).contiguous(), k.clone(), v), ""),
    "negative": (lambda q, k, v, m: sdpa(q, k, v, is_causal=True, scale=-1.0), "is_causal"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_can_not_be_made_better_is_the_call_that_it_was(name):
    function, words = KEPT[name]
    q, k, v, m = inputs(queries=8)
    backend = Backend()
    plain = []
    torch.compile(function, backend=lambda g, e: plain.append(str(g.graph)) or g.forward)(q, k, v, m)
    torch._dynamo.reset()
    result = compiled(function, backend)(q, k, v, m)
    assert torch.equal(result, function(q, k, v, m)) or result.isnan().any()
    assert str(backend.graphs[0].graph) == plain[0]
    (event,) = backend.of(Rewrite)
    assert event.kept
    assert words in event.detail
    assert backend.of(NearMiss) == []


def test_operands_that_were_written_in_place():
    def call(q, k, v):
        made = torch.empty_like(k)
        made[..., :8], made[..., 8:] = k[..., 8:], k[..., :8]
        return sdpa(q, made, v, attn_mask=tril(q, k))

    assert fuse(call, *operands()).attentions()[0].kwargs["is_causal"] is True


def test_a_bias_that_only_the_decomposed_call_takes():
    q, k, v, m = inputs(queries=8)
    backend = fuse(lambda q, k, v, m: sdpa(q, k[:, :1], v[:, :1], attn_mask=m), q, k, v, m)
    assert FLASH in backend.rewrite().detail


def test_rows_without_a_key_are_those_of_the_call():
    q, k, v, m = inputs(queries=8)
    m = m.new_ones(2, 1, 8, 8).tril() > 0
    m[:, :, 3] = False
    function = lambda q, k, v, m: sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=m)  # noqa: E731
    backend = fuse(function, q, k[:, :2], v[:, :2], m)
    assert "enable_gqa" in backend.attentions()[0].kwargs
    out = compiled(function, Backend())(q, k[:, :2], v[:, :2], m)
    assert not out[:, :, 3].any()


def test_decomposed_calls_become_fused_ones():
    """On the CPU torch decomposes calls of three dimensions, and those whose values have another head size."""
    q, k, v = (x[:, 0] for x in operands(queries=64, keys=64))
    backend = fuse(lambda q, k, v: sdpa(q, k, v, attn_mask=tril(q, k)), q, k, v)
    assert "is_causal" in backend.rewrite().detail
    assert FLASH in backend.rewrite().detail
    backend = fuse(lambda q, k, v: sdpa(q, k, v), q, k, v)
    assert FLASH in backend.rewrite().detail


@pytest.mark.parametrize("kernel", ["of the CPU", "as of GPUs"])
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -torch.inf], ids=str)
@pytest.mark.parametrize("beside", ["nothing", "a bias"])
def test_rows_without_a_key_are_those_of_a_decomposed_call(beside, value, kernel, monkeypatch):
    """Kernels do not agree about them: the mask is guarded, with what torch's decomposition makes of them."""
    if kernel == "as of GPUs":
        monkeypatch.setattr(sdpa_parts, "_passes_gradients", lambda *args: False)
    policy = Policy(check_passes=True, empty_row_gradients=True)
    q, k, v = (x[:, 0] for x in operands())
    kept = torch.ones(2, 1, 8, dtype=torch.bool)
    kept[0] = False
    kept[1, :, :3] = False
    table = torch.nn.Parameter(torch.randn(15), requires_grad=False)

    def call(q, k, v, kept):
        bias = torch.zeros(8, 8) if beside == "nothing" else table[torch.arange(8)[:, None] - torch.arange(8) + 7]
        lowest = value if value == -torch.inf else torch.finfo(q.dtype).min
        return sdpa(q, k, v, attn_mask=torch.where(kept, bias.to(q.dtype), lowest))

    given = [x.detach() for x in (q, k, v)]
    for backend in (differentiate(call, q, k, v, kept, policy=policy), fuse(call, *given, kept)):
        rewrite = backend.rewrite()
        assert FLASH in rewrite.detail
        assert not rewrite.kept
    expected = call(*given, kept)
    assert bool(expected[0].any()) == (value != -torch.inf)


@pytest.mark.parametrize("name", ["ones", "infinite", "generated"])
def test_gradients(name):
    backend = differentiate(CAUSAL[name], *operands())
    assert backend.attentions()[0].kwargs["is_causal"] is True


def test_gradients_of_grouped_heads():
    q, k, v = operands()
    function = lambda q, k, v: sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=tril(q, k))  # noqa: E731
    backend = differentiate(function, q, k[:, :2].contiguous(), v[:, :2].contiguous())
    assert backend.attentions()[0].kwargs == {"scale": 0.25, "is_causal": True, "enable_gqa": True}


def test_a_kernel_that_the_program_chooses_stays():
    def call(q, k, v):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return sdpa(q, k, v, attn_mask=tril(q, k))

    (event,) = fuse(call, *operands()).of(Rewrite)
    assert event.kept
    assert "sdpa_kernel" in event.detail


def test_a_learned_bias_is_left_alone():
    q, k, v, m = inputs(queries=8)
    backend = differentiate(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), q, k, v, m)
    (event,) = backend.of(Rewrite)
    assert event.kept


def test_autocast():
    def call(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return sdpa(q, k, v, attn_mask=tril(q, k))

    q, k, v = operands()
    backend = Backend()
    out = compiled(call, backend)(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, call(q, k, v), rtol=2e-2, atol=2e-2)
    assert backend.attentions()[0].kwargs["is_causal"] is True


def test_symbolic_lengths():
    backend = Backend()
    function = compiled(CAUSAL["ones"], backend, dynamic=True)
    for length in (8, 24):
        arguments = operands(queries=length, keys=length)
        torch.testing.assert_close(function(*arguments), CAUSAL["ones"](*arguments))
    assert len(backend.graphs) == 1
    assert backend.attentions()[0].kwargs["is_causal"] is True
