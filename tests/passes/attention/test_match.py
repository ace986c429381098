"""Sites: every spelling of products, ranks, softmaxes and heads is the same attention; never compiled."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from fusion import FLASH, Backend, compiled, differentiate, fuse, inputs
from traced import capture, site_of

from omnicomp.passes.attention.candidates import candidates
from omnicomp.passes.attention.site import Add, Fill, Function, Scale
from omnicomp.timeline import Rewrite


def flat(*tensors):
    return [t.flatten(0, 1) for t in tensors]


def handmade(scores):
    exponential = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return exponential / exponential.sum(-1, keepdim=True)


def quotient(scores):
    exponential = scores.exp()
    return exponential / exponential.sum(dim=-1, keepdim=True)


def baddbmm(q, k, v):
    q, k, v = flat(q, k, v)
    empty = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
    return torch.bmm(torch.baddbmm(empty, q, k.mT, beta=0, alpha=0.5).softmax(-1), v)


def einsum_of_rows(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


def einsum_grouped(q, k, v):
    q = q.unflatten(1, (2, 2))
    weights = torch.einsum("bgrqd,bgkd->bgrqk", q, k[:, :2]).softmax(-1)
    return torch.einsum("bgrqk,bgkd->bgrqd", weights, v[:, :2]).flatten(1, 2)


def products():
    return {
        "bmm": lambda q, k, v: torch.bmm(torch.bmm(*flat(q, k.mT)).softmax(-1), v.flatten(0, 1)),
        "baddbmm": baddbmm,
        "einsum": lambda q, k, v: torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v),
        "einsum, keys first": lambda q, k, v: torch.einsum(
            "bhkq,bhkd->bqhd", torch.einsum("bhkd,bhqd->bhkq", k, q).softmax(-2), v
        ),
        "einsum, heads last": lambda q, k, v: torch.einsum(
            "bqkh,bhkd->bhqd", torch.einsum("bhqd,bhkd->bqkh", q, k).softmax(2), v
        ),
        "einsum of rows": einsum_of_rows,
        "einsum, grouped": einsum_grouped,
        "keys times queries": lambda q, k, v: (v.mT @ (k @ q.mT).softmax(-2)).mT,
        "keys stored transposed": lambda q, k, v: (q @ k.mT.contiguous()).softmax(-1) @ v,
        "one matrix": lambda q, k, v: (q[0, 0] @ k[0, 0].T * 0.3).softmax(-1) @ v[0, 0],
        "five dimensions": lambda q, k, v: (q[:, None] * 0.5 @ k[:, None].mT).softmax(-1) @ v[:, None],
        "broadcast in five": lambda q, k, v: (q.unflatten(1, (2, 2)) @ k[:, :2, None].mT).softmax(-1) @ v[:, :2, None],
        "scale on both": lambda q, k, v: ((q * 0.5) @ (k / 2).mT * 3 / 1.5).softmax(-1) @ v,
        "negative scale": lambda q, k, v: (-(q @ k.mT)).softmax(-1) @ v,
        "scale by a head": lambda q, k, v: (q @ k.mT * v[0, :, :1, :1]).softmax(-1) @ v,
    }


@pytest.mark.parametrize("name", products())
def test_products_in_any_order_and_rank(name):
    rewrite = fuse(products()[name], *inputs()[:3]).rewrite()
    assert rewrite.target == "scaled_dot_product_attention"
    assert FLASH in rewrite.detail


SOFTMAXES = {
    "function": lambda s: F.softmax(s, dim=-1),
    "method": lambda s: s.softmax(3),
    "torch": lambda s: torch.softmax(s, -1, dtype=torch.float32).to(s.dtype),
    "upcast": lambda s: s.float().softmax(-1).type_as(s),
    "operator": lambda s: torch._softmax(s, -1, False),
    "special": lambda s: torch.special.softmax(s, -1),
    "module": torch.nn.Softmax(-1),
    "of the logarithm": lambda s: F.log_softmax(s, -1).exp(),
    "less its logarithm of the sum": lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(),
    "written out": handmade,
    "written out without maximum": quotient,
    "maximum first": lambda s: (s - s.amax(-1, keepdim=True)).softmax(-1),
    "maximum detached": lambda s: (s - s.detach().max(-1, keepdim=True)[0]).softmax(-1),
    "switched dropout": lambda s: F.dropout(s.softmax(-1), 0.3, training=False),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmaxes(name, training):
    softmax = SOFTMAXES[name]
    run = differentiate if training else fuse
    backend = run(lambda q, k, v: softmax(q @ k.mT * 0.3) @ v, *inputs()[:3])
    assert backend.rewrite().target == "scaled_dot_product_attention"


def test_weights_that_are_scaled_for_whole_queries_or_keys_keep_their_factor():
    def function(q, k, v, m):
        weights = (q @ k.mT).softmax(-1) * m[:, :, :, :1]
        return (weights * m[:, :, :1]).masked_fill(m[..., :1] > 1, 0.0) @ v

    assert differentiate(function, *inputs()).rewrite().target == "scaled_dot_product_attention"


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_regions(checkpointed, autocast):
    def attention(q, k, v):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return torch.softmax(torch.matmul(q, k.mT) * 0.25, -1) @ v

    def function(q, k, v):
        if checkpointed:
            return torch.utils.checkpoint.checkpoint(attention, q.sin(), k, v, use_reentrant=False)
        return attention(q.sin(), k, v)

    tolerance = {"rtol": 0.05, "atol": 0.05} if autocast else {}
    backend = differentiate(function, *inputs()[:3], **tolerance)
    assert backend.rewrite().target == "scaled_dot_product_attention"
    (node,) = backend.attentions()
    assert node.meta["example_value"].dtype == (torch.bfloat16 if autocast else torch.float32)


def test_a_region_without_gradients_is_fused_and_has_none():
    def function(q, k, v):
        with torch.no_grad():
            out = torch.softmax(q @ k.mT, -1) @ v
        return out + v.mean(2, keepdim=True)

    assert differentiate(function, *inputs()[:3]).rewrite()


def stops():
    def weights(q, k, v):
        with torch.no_grad():
            weights = torch.softmax(q @ k.mT, -1)
        return weights @ v

    def scores(q, k, v):
        with torch.no_grad():
            scores = q @ k.mT
        return torch.softmax(scores * 0.5, -1) @ v

    return {
        "weights": weights,
        "scores": scores,
        "detached weights": lambda q, k, v: torch.softmax(q @ k.mT, -1).detach() @ v,
        "detached scores": lambda q, k, v: torch.softmax((q @ k.mT).detach() + 1, -1) @ v,
    }


@pytest.mark.parametrize("name", stops())
def test_gradients_that_are_stopped_inside_stay_stopped(name):
    backend = differentiate(stops()[name], *inputs()[:3])
    assert backend.miss().code == "not_equal"
    assert "passes no gradients on" in backend.miss().sentence
    torch._dynamo.reset()
    assert fuse(stops()[name], *inputs()[:3]).rewrite(), "without gradients there is nothing to stop"


@pytest.mark.parametrize("training", [False, True])
def test_two_lengths_share_one_graph(training):
    run = lambda *a: torch.softmax(a[0] @ a[1].mT * 0.25 + a[3], -1) @ a[2]  # noqa: E731
    backend = Backend(training=training)
    function = compiled(run, backend, dynamic=True)
    for queries, keys in ((6, 8), (11, 11), (7, 19)):
        arguments = [a.requires_grad_(training and n < 3) for n, a in enumerate(inputs(queries=queries, keys=keys))]
        torch.testing.assert_close(function(*arguments), run(*arguments))
    assert len(backend.graphs) == len(backend.of(Rewrite)) == 1


def test_what_was_read_of_a_site():
    def function(q, k, v, m):
        scores = torch.tanh(q * 0.5 @ k.mT * 0.5) * 3.0 + m
        return scores.masked_fill(m > 1, -1e30).softmax(-1) @ v

    site, backend, _ = site_of(function, *inputs())
    assert [type(step) for step in site.steps] == [Scale, Function, Scale, Add, Fill]
    assert site.scale == 0.5, "of the queries; the other is a step"
    sizes = [[a.size for a in axes] for axes in (site.batch, site.queries, site.keys, site.features)]
    assert sizes == [[2, 4], [6], [8], [16]]
    assert site.output is backend.node("matmul_1")
    assert {n.name for n in site.chain} >= {"matmul", "tanh", "scores", "softmax"}


def test_candidates_are_between_two_products_of_what_was_computed():
    def function(x, y):
        attention = torch.softmax(x @ y.mT, -1) @ y
        return torch.softmax(attention, -1), torch.softmax(x, -1) @ y.mT, torch.softmax(x @ y.mT, -1)

    backend = capture(function, torch.randn(2, 6, 8), torch.randn(2, 6, 8))
    (found,) = candidates(backend.trace, backend.module.graph)
    assert [op.name for op in found] == ["_softmax", "bmm"]
