"""The attention pass against eager: spellings, heads, masks, and what is left alone; never compiled."""

import operator

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from fusion import FLASH, Backend, compiled, fuse, inputs, plain
from torch.fx.experimental.proxy_tensor import make_fx

from omnicomp.options.policy import Policy
from omnicomp.passes.attention_fusion import AttentionFusion
from omnicomp.timeline import NearMiss, PassRun, Rewrite


def spell_functions(q, k, v, m):
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 + m
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.1, training=False), v).transpose(1, 2).contiguous()


def spell_methods(q, k, v, m):
    scores = q.matmul(k.permute(0, 1, 3, 2)).mul(0.5).add(m)
    return scores.softmax(dim=-1).matmul(v).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


def spell_in_place(q, k, v, m):
    scores = q @ k.mT
    scores *= 0.5
    scores /= 2.0
    scores += m
    return F.softmax(scores, -1) @ v


def spell_in_place_methods(q, k, v, m):
    scores = q @ k.mT
    scores.mul_(0.5)
    scores.add_(m)
    scores = scores.div_(1.0)
    return F.softmax(scores, -1) @ v


def spell_module(q, k, v, m):
    weights = torch.nn.Softmax(dim=-1)(m + (q * 0.5) @ (k / 2.0).swapaxes(-2, -1))
    return torch.nn.Dropout(0.0)(weights).type_as(v).contiguous() @ v


def spell_upcast(q, k, v, m):
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * torch.tensor(0.25)
    return torch.softmax(scores.float() + m, -1).to(v.dtype) @ v


def spell_subtracted(q, k, v, m):
    return (0.25 * (q @ k.mT) - m - m).softmax(3) @ v


def spell_stored_transposed(q, k, v, m):
    stored = k.transpose(-1, -2).contiguous()
    return (q @ stored + m).softmax(-1) @ v


def spell_constant(q, k, v, m):
    scores = q @ k.mT / torch.full([], 4.0, dtype=q.dtype)
    return ((scores / torch.sqrt(torch.tensor(4.0))) + m).softmax(-1) @ v


def spell_3d(q, k, v, m):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.25 + m[0, 0], dim=2), v)


def spell_baddbmm(q, k, v, m):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    bias = m.expand(-1, 4, -1, -1).flatten(0, 1)
    return torch.baddbmm(bias, q, k.mT, beta=1, alpha=0.25).softmax(-1).bmm(v)


def spell_filled(q, k, v, m):
    scores = (q @ k.mT * 0.25).masked_fill(m > 1, torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ v


def spell_where(q, k, v, m):
    scores = torch.where(m <= 1, q @ k.mT * 0.25, torch.finfo(q.dtype).min) + m
    return scores.softmax(-1) @ v


def spell_temperature(q, k, v, m):
    heads = m[0, 0, 0, :4].exp().view(4, 1, 1)
    return (q @ k.mT * heads / m[0, 0, 0, 0].exp() + m).softmax(-1) @ v


def spell_scaled_late(q, k, v, m):
    return torch.softmax((q @ k.mT + m) * 0.5, -1) @ v


def spell_number_added(q, k, v, m):
    return (q @ k.mT + 1e-3).softmax(-1) @ v + m.sum()


def spell_batch_broadcast(q, k, v, m):
    return (q @ k[:1].mT + m).softmax(-1) @ v


def spell_changed_behind(q, k, v, m):
    scores = q @ k.mT
    weights = torch.softmax(scores + m, -1)
    m = m.clone().mul_(2)
    return weights @ v + m.sum()


def spell_index_put(q, k, v, m):
    scores = q @ k.mT
    scores[(m > 1).expand_as(scores)] = -torch.inf
    return torch.nn.functional.softmax(scores, dim=-1).matmul(v)


def spell_square(q, k, v, m):
    return torch.softmax(v @ v.mT, -1) @ v


SPELLINGS = [value for name, value in list(globals().items()) if name.startswith("spell_")]


HALF = [plain, spell_functions, spell_upcast, spell_constant, spell_3d, spell_where, spell_temperature]
CASES = [*((f, torch.float32) for f in [plain, *SPELLINGS]), *((f, torch.bfloat16) for f in HALF), (plain, torch.half)]


@pytest.mark.parametrize(("function", "dtype"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_spellings_are_fused_and_equal(function, dtype):
    backend = fuse(function, *inputs(dtype))
    assert backend.reasons() == []
    (rewrite,) = backend.of(Rewrite)
    assert (rewrite.kind, rewrite.target) == ("attention", "scaled_dot_product_attention")
    assert FLASH in rewrite.detail
    assert rewrite.source.startswith(f"{function.__code__.co_filename}:")
    (run,) = backend.of(PassRun)
    assert run.modified
    assert run.rewrites == 1
    # Nothing of the old attention is left behind.
    names = {n.name for n in backend.graphs[0].graph.nodes if not n.users and n.op != "output"}
    assert not [n for n in names if "log_api_usage" not in n]
    assert not [n for n in backend.graphs[0].graph.nodes if "softmax" in n.name]


def test_everything_read_is_reported():
    backend = fuse(lambda q, k, v, m: torch.softmax(2 * (q @ (k * 0.25).mT) + m, -1) @ v, *inputs())
    (rewrite,) = backend.of(Rewrite)
    assert rewrite.detail == f"scale=0.5, dense mask (bias); kernel {FLASH}"
    (node,) = backend.attentions()
    assert node.kwargs["scale"] == 0.5
    assert isinstance(node.meta["example_value"], torch.Tensor)
    assert "stack_trace" in node.meta


def test_scale_is_explicit_where_there_is_none():
    backend = fuse(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *inputs()[:3])
    assert backend.attentions()[0].kwargs == {"scale": 1.0}


def repeat_heads(x, n):
    b, kv, s, d = x.shape
    return x[:, :, None, :, :].expand(b, kv, n, s, d).reshape(b, kv * n, s, d)


def repeat_unsqueezed(x, n):
    return x.unsqueeze(2).expand(-1, -1, n, -1, -1).flatten(1, 2)


@pytest.mark.parametrize(
    "repeat",
    [
        repeat_heads,
        repeat_unsqueezed,
        lambda x, n: x.repeat_interleave(n, dim=1),
        lambda x, n: torch.repeat_interleave(x, n, 1),
        lambda x, n: x[:, :1],
    ],
    ids=["expand", "unsqueeze", "method", "function", "single"],
)
def test_repeated_heads_are_grouped(repeat):
    q, k, v, m = inputs()
    backend = fuse(lambda q, k, v, m: plain(q, repeat(k, 2), repeat(v, 2), m), q, k[:, :2], v[:, :2], m)
    assert backend.attentions()[0].kwargs["enable_gqa"] is True
    assert backend.attentions()[0].args[1].meta["example_value"].shape[1] <= 2


def test_heads_in_another_order_are_grouped_all_the_same():
    """`repeat` puts the copies in another order than grouped heads have them."""
    q, k, v, m = inputs()
    backend = fuse(lambda q, k, v, m: plain(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), m), q, k[:, :2], v[:, :2], m)
    assert backend.attentions()[0].kwargs["enable_gqa"] is True


@pytest.mark.parametrize(
    "function",
    [lambda q, k, v, m: plain(q, k, v[:, :2].repeat_interleave(2, 1), m), lambda q, k, v, m: plain(q, k[:, :1], v, m)],
    ids=["values", "keys"],
)
def test_heads_that_keys_and_values_do_not_share_are_not_grouped(function):
    assert "enable_gqa" not in fuse(function, *inputs()).attentions()[0].kwargs


@pytest.mark.parametrize("shape", [(8,), (6, 8), (1, 8), (4, 1, 8), (1, 4, 6, 8), (2, 1, 1, 8), (2, 4, 6, 1)], ids=str)
def test_masks_of_any_shape(shape):
    q, k, v, _ = inputs()
    assert len(fuse(plain, q, k, v, torch.randn(shape)).of(Rewrite)) == 1


@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.float16])
def test_masks_of_narrower_dtypes_are_cast(mask_dtype):
    q, k, v, m = inputs()
    backend = fuse(plain, q, k, v, (m > 0).to(mask_dtype))
    assert backend.attentions()[0].kwargs["attn_mask"].meta["example_value"].dtype == torch.float32


def code(backend):
    reason = backend.miss()
    assert not backend.of(PassRun)[0].modified
    assert reason.by == "attention_fusion"
    assert reason.sentence
    assert reason.observed
    assert reason.needed
    assert reason.lever
    assert "fusion.py:" in reason.source
    return reason.code


def returns_weights(q, k, v, m):
    weights = torch.softmax(q @ k.mT + m, -1)
    return (weights @ v) + weights.sum()


def softcapped(q, k, v, m):
    return torch.softmax(torch.tanh(q @ k.mT / 50) * 50 + m, -1) @ v


def renormalised(q, k, v, m):
    return (torch.softmax(q @ k.mT + m, -1) * m.exp()) @ v


def written_elsewhere(q, k, v, m):
    m = m.expand(2, 4, 6, 8).clone()
    m += q @ k.mT
    return m.softmax(-1) @ v


def used_scores(q, k, v, m):
    scores = q @ k.mT
    return scores.softmax(-1) @ v + scores.amax()


def partly_written(q, k, v, m):
    scores = q @ k.mT
    scores[..., 6:] *= 2
    return scores.softmax(-1) @ v


def bounded(q, k, v, m):
    return (q @ k.mT + m).softmax(-1).clamp(max=0.9) @ v


def returned_scores(q, k, v, m):
    scores = q @ k.mT + m
    scores = scores.float()
    return scores.softmax(-1) @ v, scores.detach()


def divided_by_more(q, k, v, m):
    e = torch.exp(q @ k.mT + m)
    return (e @ v) / (e.sum(-1, keepdim=True) + m[..., :1].exp())


def masked_exponentials(q, k, v, m):
    e = torch.exp(q @ k.mT) * (m > 0)
    return (e @ v) / e.sum(-1, keepdim=True)


def masked_by_a_product(q, k, v, m):
    seen = (m > 0).float()
    return (q @ k.mT * seen - 1e4 * (1 - seen)).softmax(-1) @ v


def renormalised_weights(q, k, v, m):
    seen = (m > 0).float()
    weights = (q @ k.mT * seen).softmax(-1) * seen
    return (weights / (weights.sum(-1, keepdim=True) + 1e-13)) @ v


def combined(q, k, v, m):
    return (0.6 * (q @ k.mT).softmax(-1) + 0.4 * m.softmax(-1)) @ v


def relative_values(q, k, v, m):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + torch.einsum("bhij,ijd->bhid", weights, k[0, 0].expand(6, 8, 16))


def in_chunks_that_overlap(q, k, v, m):
    scores = torch.einsum("bhcxd,bhcyd->bhcxy", q.unflatten(2, (3, 2)), k.unfold(2, 4, 2).mT)
    weights = F.pad(scores, (0, 1)).flatten(3)[..., :-2].unflatten(3, (2, 4)).softmax(-1)
    return torch.einsum("bhcxy,bhcyd->bhcxd", weights, v.unfold(2, 4, 2).mT)


def with_log_sums(q, k, v, m):
    scores = q @ k.mT + m
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


CONVOLUTION = torch.randn(4, 4, 1, 1)


def mixed_by_a_convolution(q, k, v, m):
    return F.conv2d(q @ k.mT + m, CONVOLUTION).softmax(-1) @ v


MIXER = torch.nn.Linear(4, 4).requires_grad_(False)


def mixed_before(q, k, v, m):
    return MIXER((q @ k.mT + m).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1) @ v


def mixed_after(q, k, v, m):
    return MIXER((q @ k.mT + m).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v


def mixed_by_a_product(q, k, v, m):
    matrix = m[0, 0, :4, :4]
    return torch.einsum("bhij,hg->bgij", (q @ k.mT + m).softmax(-1), matrix) @ v


def gated(q, k, v, m):
    gate = m[0, 0, 0, 0].sigmoid()
    weights = (1 - gate) * (q @ k.mT).softmax(-1) + gate * m.softmax(-1)
    weights /= weights.sum(-1).unsqueeze(-1)
    return weights @ v


def pairs_of_scores(q, k, v, m):
    return ((q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) + m).softmax(-1) @ v


def pairs_of_values(q, k, v, m):
    return ((q @ k.mT + m).softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)


def mixed_before_by_a_product(q, k, v, m):
    return torch.einsum("bhij,hg->bgij", q @ k.mT + m, m[0, 0, :4, :4]).softmax(-1) @ v


def mixed_before_by_rows(q, k, v, m):
    mixed = F.linear((q @ k.mT + m).permute(0, 2, 3, 1), m[0, 0, :4, :4])
    return mixed.permute(0, 3, 1, 2).softmax(-1) @ v


def with_its_own_sum(q, k, v, m):
    scores = q @ k.mT + m
    total = scores.logsumexp(-1, keepdim=True)
    return (scores - total).exp() @ v, total


def twice_the_sum(q, k, v, m):
    out = (q @ k.mT + m).exp() @ torch.cat([v, v.new_full((2, 4, 8, 1), 2.0)], -1)
    return out[..., :-1] / out[..., -1:]


def more_than_the_sum(q, k, v, m):
    out = (q @ k.mT + m).exp() @ torch.cat([v, v.new_ones(2, 4, 8, 1)], -1)
    return out[..., :-1] / (out[..., -1:] + m[..., :1].exp())


def interpolated(q, k, v, m):
    return torch.lerp((q @ k.mT).softmax(-1), m.softmax(-1), torch.tensor(0.3)) @ v


def joined_weights(q, k, v, m):
    return torch.cat([(q[:, :2] @ k[:, :2].mT).softmax(-1), m.softmax(-1).expand(-1, 2, -1, -1)], 1) @ v


def joined_scores(q, k, v, m):
    return torch.cat([part @ k.mT for part in q.chunk(2, 2)], 2).softmax(-1) @ v


def values_of_their_own(q, k, v, m):
    weights = torch.cat([q @ k[:, :, :3].mT, q @ k[:, :, 3:].mT], -1).softmax(-1)
    return weights[..., :3] @ v[:, :, :3] + weights[..., 3:] @ v[:, :, 3:]


def values_of_their_own_with_a_mask(q, k, v, m):
    weights = (torch.cat([q @ k[:, :, :3].mT, q @ k[:, :, 3:].mT], -1) + m).softmax(-1)
    return weights[..., :3] @ v[:, :, :3] + weights[..., 3:] @ v[:, :, 3:]


def slots(q, k, v, m):
    weights = (q @ k.mT + m).softmax(-2)
    return weights / weights.sum(-1, keepdim=True) @ v


LEARNED = torch.nn.Parameter(torch.ones(16))


class Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        return scores.softmax(-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def weights_of_a_function(q, k, v, m):
    return Weights.apply(q * LEARNED @ k.mT + m) @ v


def scores_with_a_hook(q, k, v, m):
    scores = q * LEARNED @ k.mT + m
    scores.register_hook(lambda gradient: gradient * 2)
    return scores.softmax(-1) @ v


def best_keys(q, k, v, m):
    values, places = (q @ k.mT + m).softmax(-1).topk(3, -1)
    return torch.zeros_like(m.expand(2, 4, 6, 8)).scatter(-1, places, values) @ v


def normalised_over_heads(q, k, v, m):
    return F.layer_norm((q @ k.mT + m).softmax(-1).permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2) @ v


def hidden_by_the_scores(q, k, v, m):
    scores = q @ k.mT + m
    return scores.masked_fill(scores < scores.mean(-1, keepdim=True), -torch.inf).softmax(-1) @ v


def mixed_in_one_einsum(q, k, v, m):
    return torch.einsum("bhij,hg,bhjd->bgid", (q @ k.mT + m).softmax(-1), m[0, 0, :4, :4], v)


def without_nan(q, k, v, m):
    return (torch.nan_to_num(q @ k.mT) + m).softmax(-1) @ v


def summed_by_a_product(q, k, v, m):
    e = (q @ k.mT + m).exp()
    return (e @ v) / (e @ torch.ones(8, 1))


def relative_values_by_rows(q, k, v, m):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + (weights.permute(2, 0, 1, 3).flatten(1, 2) @ v[0, 0]).view(6, 2, 4, 16).permute(1, 2, 0, 3)


@pytest.mark.parametrize(
    ("function", "sentence", "lever"),
    [
        (weights_of_a_function, "an autograd.Function with a backward of its own", "without the Function"),
        (scores_with_a_hook, "a hook changes the gradient", "leave the hook out"),
        (best_keys, "chosen or moved by their values", "does not depend on the scores"),
        (normalised_over_heads, "normalized by their mean", "leave the normalization out"),
        (hidden_by_the_scores, "the mask depends on the scores", "does not depend on the scores"),
        (mixed_in_one_einsum, "mixed between heads by another product", "outputs of the heads"),
        (without_nan, "go through nan_to_num", "leave nan_to_num out"),
        (summed_by_a_product, "not divided by their sums as they are", "torch.softmax(scores, -1) @ v"),
        (relative_values_by_rows, "also used by permute", "second product with the weights"),
        (returned_scores, "scores_1 is returned", "do not return"),
        (divided_by_more, "the sums of the exponentials are bounded, or", "leave out what is added"),
        (masked_exponentials, "not divided by their sums as they are", "mask the scores"),
        (
            masked_by_a_product,
            "multiplied by a tensor that differs between queries or keys",
            "scores.masked_fill(~mask",
        ),
        (renormalised_weights, "divided by their sums once more", "before the softmax"),
        (gated, "divided by their sums once more", "mix the outputs"),
        (interpolated, "are combined with others", "combine the outputs"),
        (joined_weights, "weights of several softmaxes are joined", "its own values"),
        (values_of_their_own, "cut into parts that meet values of their own", "join keys and values"),
        (values_of_their_own_with_a_mask, "cut into parts that meet values of their own", "join keys and values"),
        (slots, "the softmax is not over the keys", "along the dimension that the values are summed over"),
        (joined_scores, "scores of several products are joined", "join the queries"),
        (pairs_of_scores, "all pairs are multiplied and summed", "q @ k.transpose"),
        (pairs_of_values, "all pairs are multiplied and summed", "weights @ v"),
        (combined, "added to others", "multiply each with the values first"),
        (relative_values, "also used by einsum", "second product with the weights"),
        (in_chunks_that_overlap, "no product of queries and keys", "the window as a mask"),
        (with_log_sums, "the log-sum-exp logsumexp is used", "return_aux=AuxRequest(lse=True)"),
        (mixed_by_a_convolution, "mixed between heads", "outputs of the heads"),
        (mixed_before, "mixed between heads", "outputs of the heads"),
        (mixed_after, "mixed between heads", "outputs of the heads"),
        (mixed_by_a_product, "mixed between heads by another product", "outputs of the heads"),
        (mixed_before_by_a_product, "the scores are mixed between heads by another product", "outputs of the heads"),
        (mixed_before_by_rows, "the scores are mixed between heads by another product", "outputs of the heads"),
        (with_its_own_sum, "is returned", "do without the log-sum-exp"),
        (twice_the_sum, "not known to be the sum of its weights", "torch.softmax(scores, -1) @ v"),
        (more_than_the_sum, "the sums of the exponentials are bounded, or", "leave out what is added"),
    ],
)
def test_attention_of_another_form_is_named_with_what_helps(function, sentence, lever):
    backend, arguments = Backend(), inputs()
    torch.testing.assert_close(compiled(function, backend)(*arguments), function(*arguments))
    reason = backend.miss()
    assert sentence in reason.sentence
    assert lever in reason.lever
    assert "0x" not in reason.observed


@pytest.mark.parametrize(
    ("function", "node", "sentence", "needed"),
    [
        (returns_weights, "weights", "weights is also used by sum_1", "one user"),
        (used_scores, "scores", "scores is also used by amax", "one user"),
        (softcapped, "softmax", "the scores go through tanh", "FlexAttention"),
        (renormalised, "matmul_1", "the attention weights are changed", "a factor for each query, or for each key"),
        (partly_written, "setitem", "a part of the scores is written to", "one expression for all"),
        (bounded, "clamp", "the attention weights are changed", "dropout, casts, or a factor"),
    ],
)
def test_what_is_not_understood_is_left_alone_and_reported(function, node, sentence, needed):
    """Where the match ended: the node, the line, and what would have been taken."""
    backend = fuse(function, *inputs())
    assert code(backend) == "match_ended"
    reason = backend.miss()
    assert reason.node.startswith(f"{node} (")
    assert sentence in reason.sentence
    assert needed in reason.needed
    first = function.__code__.co_firstlineno
    assert first < int(reason.source.rpartition(":")[2]) <= first + 4


def test_a_mask_that_is_gone_when_the_output_is_made_is_left_alone():
    assert code(fuse(written_elsewhere, *inputs())) == "not_profitable"


def test_a_softmax_of_one_number_is_none():
    backend = Backend()
    compiled(lambda x: torch.softmax((x @ x.mT).sum(), 0), backend)(torch.randn(3, 4))
    assert not backend.of(NearMiss)


def test_weights_that_are_returned_are_not_fused_and_the_lever_says_how_not_to():
    def function(q, k, v, m):
        weights = torch.softmax(q @ k.mT + m, -1)
        return weights @ v, weights

    backend = Backend()
    q, k, v, m = inputs()
    out, weights = compiled(function, backend)(q, k, v, m)
    torch.testing.assert_close((out, weights), function(q, k, v, m))
    assert "weights is returned" in backend.miss().sentence
    assert "output_attentions=False" in backend.miss().lever


def test_active_dropout_is_left_alone_on_the_cpu():
    function = lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5, True) @ v  # noqa: E731
    for patches, expected in (({}, "not_profitable"), ({"fallback_random": True}, "not_equal")):
        torch._dynamo.reset()
        backend = Backend(policy=Policy(inductor=patches))
        compiled(function, backend)(*inputs()[:3])
        assert code(backend) == expected
        assert backend.miss().observed == "dropout=0.5"


class Router(torch.nn.Module):
    """Mixes learned vectors by a softmax over their products with the input."""

    def __init__(self):
        super().__init__()
        self.keys, self.values = (torch.nn.Parameter(torch.randn(5, 8)) for _ in range(2))

    def forward(self, x):
        return torch.softmax(x @ self.keys.t(), -1) @ self.values


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.softmax(F.linear(x, w), -1),
        lambda x, w: torch.softmax(x, -1).bmm(x.mT),
        lambda x, w: (x @ x.mT).exp() @ x,
    ],
    ids=["head", "pooling", "no normalization"],
)
def test_a_softmax_that_is_no_attention_is_not_reported(function):
    backend = fuse(function, torch.randn(2, 6, 8), torch.randn(5, 8))
    assert backend.of(Rewrite) == []
    assert backend.of(NearMiss) == []
    assert backend.of(PassRun)[0].applied
    assert not backend.of(PassRun)[0].modified


def test_a_router_over_learned_vectors_is_not_reported():
    router, backend, x = Router(), Backend(), torch.randn(2, 6, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(router, backend)(x), router(x))
    assert backend.of(Rewrite) == backend.of(NearMiss) == []


class Streams(torch.nn.Module):
    """Mixes streams by a softmax over features of a linear layer, which reads streams that were mixed before."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Linear(4 * 8, 16)

    def forward(self, x, mixing):
        streams = mixing @ x
        return torch.softmax(self.weights(streams.flatten(2)).unflatten(-1, (4, 4)), -1) @ streams


def test_a_softmax_over_features_of_a_linear_layer_mixes_no_heads():
    streams, backend, x = Streams(), Backend(), torch.randn(2, 4, 4, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(streams, backend)(x, x @ x.mT), streams(x, x @ x.mT))
    assert backend.of(Rewrite) == backend.of(NearMiss) == []


def test_a_softmax_over_queries_is_left_alone_and_named():
    backend = fuse(lambda x: torch.softmax(x @ x.mT, 1) @ x, torch.randn(2, 6, 8))
    assert "not over the keys" in backend.miss().sentence
    assert backend.miss().node.startswith("softmax")


def test_keys_that_are_not_learned_are_attended_wherever_they_come_from():
    backend = fuse(lambda x, w: torch.softmax(x @ w.mT, -1) @ w, torch.randn(2, 6, 8), torch.randn(5, 8))
    assert backend.rewrite().target == "scaled_dot_product_attention"


def test_graphs_without_softmax_are_not_visited():
    backend = fuse(lambda x: x @ x.mT, torch.randn(2, 6, 8))
    assert not backend.of(PassRun)[0].applied


def test_sites_are_independent():
    def function(q, k, v, m):
        return plain(plain(q, k, v, m), k, v, m) + returns_weights(q, k, v, m)

    backend = fuse(function, *inputs())
    assert len(backend.of(Rewrite)) == 2
    assert len(backend.reasons()) == 1


def test_as_a_function_of_an_aten_graph() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(64, 64, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-2, -1) / 4).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = q.detach().requires_grad_()
        out = attention(q, k, v)
        return out, *torch.autograd.grad(out.sum(), [q])

    inputs = [torch.randn(2, 4, 64, 16) for _ in range(3)]
    graph_pass = AttentionFusion().as_function()
    assert graph_pass.__name__ == "attention_fusion"
    fused = graph_pass(make_fx(attention, tracing_mode="fake")(*inputs), inputs)
    calls = [node for node in fused.graph.nodes if node.op == "call_function"]
    assert all(isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem for node in calls)
    assert any("scaled_dot_product" in str(node.target) for node in calls)
    assert all("val" in node.meta for node in calls)
    torch.testing.assert_close(fused(*inputs), attention(*inputs))
    # Trainers that trace the backward with the forward keep the probabilities for it: that stays as it is.
    joint = make_fx(step, tracing_mode="fake")(*inputs)
    assert graph_pass(joint, inputs) is joint


def test_an_empty_batch_beside_symbolic_lengths():
    arguments = inputs(batch=0)
    backend = Backend()
    result = compiled(spell_functions, backend, dynamic=True)(*arguments)
    assert result.stride() == spell_functions(*arguments).stride()
    assert len(backend.of(NearMiss)) + len(backend.of(Rewrite)) == 1


def test_a_query_without_dimensions_beside_its_features():
    q, k, v = torch.randn(4), torch.randn(5, 4), torch.randn(5, 3)
    backend = fuse(lambda q, k, v: torch.softmax(q @ k.T, 0) @ v, q, k, v)
    assert len(backend.of(NearMiss)) + len(backend.of(Rewrite)) == 1


class DoubledWithAWrite(torch.autograd.Function):
    """Its gradient is made in place, by a method whose result nobody reads."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, *gradients):
        (x,) = ctx.saved_tensors
        made = gradients[0] * 2
        made.add_(x)
        return made


def write_by_views(x):
    made = x * 1
    made[0].mul_(3)
    made.select(0, 1).add_(5)
    return made.sin()


@pytest.mark.parametrize(
    "before",
    [
        DoubledWithAWrite.apply,
        lambda x: torch.utils.checkpoint.checkpoint(write_by_views, x, use_reentrant=False),
    ],
    ids=["autograd_function", "checkpoint"],
)
def test_writes_in_graphs_that_the_graph_calls_stay_where_attention_is_fused(before):
    def function(x):
        y = before(x)
        return (y @ y.mT).softmax(-1) @ y

    x = torch.randn(2, 3, 6, 16)
    results = []
    backend = Backend()
    for each in (function, compiled(function, backend)):
        given = x.clone().requires_grad_()
        value = each(given)
        value.square().sum().backward()
        results.append((value.detach(), given.grad))
    assert len(backend.attentions()) == 1
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-3)
