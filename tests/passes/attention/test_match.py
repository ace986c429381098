"""Sites: every spelling of products, ranks, softmaxes and heads is the same attention; never compiled."""

import math

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


def exponentials(scores, least=None):
    largest = scores.amax(-1, keepdim=True)
    largest = largest if least is None else largest.clamp(min=least)
    return (scores - largest).exp(), largest


def quiet(scores, number):
    e, largest = exponentials(scores, 0.0)
    return e / (number * torch.exp(-largest) + e.sum(-1, keepdim=True))


def beside_the_sum(e, number):
    return e / (number + e.sum(-1, keepdim=True))


def behind_the_product(e, v, number):
    return (e @ v) / (e.sum(-1, keepdim=True) + number)


def over_ones(out, number):
    return out[..., :-1] / (out[..., -1:] + number)


def times_the_reciprocal(e, number):
    return e * (e.sum(-1, keepdim=True) + number).reciprocal()


ADDED = {
    "one": lambda s, v: beside_the_sum(s.exp(), 1) @ v,
    "a small number": lambda s, v: beside_the_sum(s.exp(), 1e-3) @ v,
    "a tensor of ones": lambda s, v: beside_the_sum(s.exp(), torch.ones_like(s[..., :1])) @ v,
    "behind the product": lambda s, v: behind_the_product(s.exp(), v, 0.5),
    "times the reciprocal": lambda s, v: times_the_reciprocal(s.exp(), 2) @ v,
    "shifted by what is at least zero": lambda s, v: quiet(s, 1.0) @ v,
    "shifted, with three": lambda s, v: quiet(s, 3.0) @ v,
    "rows without a key": lambda s, v: beside_the_sum((s + torch.ones(6, 8).tril(-1).log()).exp(), 1) @ v,
    "masked exponentials": lambda s, v: beside_the_sum(s.exp() * torch.ones(6, 8).tril(-1), 0.25) @ v,
    "beside ones": lambda s, v: over_ones(s.exp() @ torch.cat([v, torch.ones_like(v[..., :1])], -1), 1e-6),
    "a column behind": lambda s, v: F.pad(s, (0, 1)).softmax(-1)[..., :-1] @ v,
    "a column before": lambda s, v: F.pad(s, (1, 0), value=-0.5).softmax(-1)[..., 1:] @ v,
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ADDED)
def test_a_number_beside_the_sum_is_a_sink(name, training):
    run = differentiate if training else fuse
    backend = run(lambda q, k, v: ADDED[name](q @ k.mT * 0.3, v), *inputs()[:3])
    assert backend.rewrite().target == "omnicomp.attention_with_sink"


UNSEEN = {
    "added": lambda s, v: beside_the_sum(exponentials(s)[0], 1e-9) @ v,
    "added behind the product": lambda s, v: behind_the_product(exponentials(s)[0], v, 1e-8),
    "a bound": lambda s, v: (lambda e: e / e.sum(-1, keepdim=True).clamp(min=1e-6))(exponentials(s)[0]) @ v,
    "zero": lambda s, v: beside_the_sum(exponentials(s)[0], 0.0) @ v,
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_sum_of_the_dtype_sees_is_left_out(name, training):
    run = differentiate if training else fuse
    backend = run(lambda q, k, v: UNSEEN[name](q @ k.mT * 0.3, v), *inputs()[:3])
    assert backend.rewrite().target == "scaled_dot_product_attention"


SEEN = {
    "one beside the greatest": lambda s, v: beside_the_sum(exponentials(s)[0], 1) @ v,
    "a number that sums see": lambda s, v: beside_the_sum(exponentials(s)[0], 1e-6) @ v,
    "a number that wider sums see": lambda s, v: (
        lambda e: (e @ v.bfloat16()) / (e.sum(-1, keepdim=True).float() + 1e-3)
    )(exponentials(s.bfloat16())[0]),
    "another shift": lambda s, v: (
        (lambda e, m: e / (torch.exp(-2 * m) + e.sum(-1, keepdim=True)))(*exponentials(s)) @ v
    ),
    "a bound of more": lambda s, v: (lambda e: e / e.sum(-1, keepdim=True).clamp(min=1.5))(exponentials(s)[0]) @ v,
    "a bound without a shift": lambda s, v: (lambda e: e / e.sum(-1, keepdim=True).clamp(min=1e-6))(s.exp()) @ v,
    "masked behind the shift": lambda s, v: beside_the_sum(exponentials(s)[0] * torch.ones(6, 8).tril(-1), 1e-9) @ v,
    "less than nothing": lambda s, v: beside_the_sum(s.exp(), torch.full_like(s[..., :1], -0.5)) @ v,
    "another number for each query": lambda s, v: beside_the_sum(s.exp(), v[..., :6, :1].exp()) @ v,
}


@pytest.mark.parametrize("name", SEEN)
def test_what_changes_sums_in_another_way_is_told(name):
    reason = fuse(lambda q, k, v: SEEN[name](q @ k.mT * 0.3, v), *inputs()[:3]).miss()
    assert "the sums of the exponentials" in reason.sentence
    assert "torch.cat([scores, zeros], -1)" in reason.lever


def test_columns_of_numbers_that_are_no_sink_are_told():
    def two(q, k, v):
        return F.pad(q @ k.mT, (1, 1)).softmax(-1)[..., 1:-1] @ v

    def another_column_is_left_out(q, k, v):
        return F.pad(q @ k.mT, (1, 0)).softmax(-1)[..., :-1] @ v

    for function in (two, another_column_is_left_out):
        torch._dynamo.reset()
        assert "more columns than there are keys" in fuse(function, *inputs()[:3]).miss().sentence


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


@pytest.mark.parametrize(
    "close",
    [
        lambda e, seen: e * seen,
        lambda e, seen: seen.float() * e,
        lambda e, seen: e * (1.0 - (~seen).float()),
        lambda e, seen: e.masked_fill(~seen, 0.0),
        lambda e, seen: torch.where(seen, e, 0.0),
        lambda e, seen: e.masked_fill_(~seen, 0),
    ],
    ids=["times bool", "times numbers", "times the opposite", "filled", "chosen", "in place"],
)
@pytest.mark.parametrize("shifted", [True, False])
def test_exponentials_that_a_mask_sets_to_zero_before_they_are_summed_are_a_mask_of_the_scores(close, shifted):
    def attention(q, k, v):
        scores = q @ k.mT / 4
        seen = torch.arange(8) <= torch.arange(6)[:, None] + 2
        e = close((scores - scores.amax(-1, keepdim=True) if shifted else scores).exp(), seen)
        return (e / e.sum(-1, keepdim=True)) @ v

    backend = fuse(attention, *inputs()[:3])
    assert "mask (" in backend.rewrite().detail
    assert len(backend.attentions()) == 1


def test_rows_whose_exponentials_are_all_zero_are_nan_as_in_eager():
    q, k, v, _ = inputs()

    def attention(q, k, v, seen):
        e = (q @ k.mT).exp() * seen[:, None, None]
        return (e * e.sum(-1, keepdim=True).reciprocal()) @ v

    seen = torch.tensor([[False] * 8, [True] * 5 + [False] * 3])
    backend = Backend()
    out = compiled(attention, backend)(q, k, v, seen)
    assert backend.rewrite()
    assert out[0].isnan().all()
    torch.testing.assert_close(out, attention(q, k, v, seen), equal_nan=True)


def test_exponentials_times_numbers_that_may_be_any_are_told():
    q, k, v, m = inputs()
    backend = fuse(lambda q, k, v, m: ((e := (q @ k.mT).exp() * m) / e.sum(-1, keepdim=True)) @ v, q, k, v, m.abs())
    assert "not known to be a mask of ones and zeros" in backend.miss().sentence


def test_scores_that_are_interpolated_with_a_number_by_a_condition_are_masked():
    least = torch.finfo(torch.float32).min

    def attention(q, k, v, number):
        hidden = torch.arange(8) > torch.arange(6)[:, None] + 2
        return torch.lerp(q @ k.mT, torch.full((), number, dtype=q.dtype), hidden.to(q.dtype)).softmax(-1) @ v

    assert "mask (" in fuse(lambda q, k, v: attention(q, k, v, least), *inputs()[:3]).rewrite().detail
    q, k, v, _ = inputs()
    backend = Backend()
    assert compiled(lambda q, k, v: attention(q, k, v, -math.inf), backend)(q, k, v).isnan().all()
    assert backend.miss()


def late(scores, v, *, shifted=True):
    e = torch.exp(scores - scores.amax(-1, keepdim=True) if shifted else scores)
    return (e @ v) / e.sum(-1, keepdim=True)


def late_in_place(q, k, v):
    e = (q @ k.mT).exp_()
    out = e @ v
    out /= e.sum(-1)[..., None]
    return out


def late_and_transposed(q, k, v):
    e = torch.einsum("bhqd,bhkd->bhqk", q, k).exp()
    return torch.einsum("bhqk,bhkd->bqhd", e, v) / e.sum(-1).transpose(1, 2).unsqueeze(-1)


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: late(q @ k.mT, v),
        lambda q, k, v: late(q @ k.mT, v, shifted=False),
        lambda q, k, v: late((q @ k.mT).masked_fill(torch.ones(6, 8).triu(3).bool(), -math.inf), v),
        lambda q, k, v: ((e := (q @ k.mT).exp()) @ v) * (1 / e.sum(-1, keepdim=True)),
        lambda q, k, v: ((e := (q @ k.mT).exp()) @ v) / torch.einsum("bhqk->bhq", e)[..., None],
        late_in_place,
        late_and_transposed,
    ],
    ids=["shifted", "plain", "causal", "reciprocal", "summed by einsum", "in place", "transposed"],
)
def test_a_product_that_is_divided_by_the_sums_later(function):
    arguments = inputs()[:3]
    backend = fuse(function, *arguments)
    assert len(backend.of(Rewrite)) == 1
    torch.testing.assert_close(compiled(function, Backend())(*arguments), function(*arguments))


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: ((e := (q @ k.mT).exp()) @ v) / e.sum(-2)[..., :6].unsqueeze(-1),
        lambda q, k, v: ((e := (q[..., :4, :] @ k[..., :4, :].mT).exp()) @ v[..., :4, :4]) / e.sum(-1).unsqueeze(-2),
        lambda q, k, v: ((e := (q @ k.mT).exp()) @ v) / e.sum(-1, keepdim=True).flip(1),
        lambda q, k, v: ((e := (q @ k.mT).exp()) @ v) * e.sum(-1, keepdim=True),
        lambda q, k, v: torch.div((e := (q @ k.mT).exp()) @ v, e.sum(-1, keepdim=True), rounding_mode="floor"),
    ],
    ids=["of keys", "of columns", "of other heads", "multiplied", "rounded"],
)
def test_sums_of_something_else_are_none(function):
    arguments = inputs()[:3]
    backend = Backend()
    torch.testing.assert_close(compiled(function, backend)(*arguments), function(*arguments))
    assert backend.of(Rewrite) == []


def other_exponentials():
    return {
        "two": lambda s: (e := s.exp2()) / e.sum(-1, keepdim=True),
        "two, causal": lambda s: (
            (e := s.masked_fill(torch.ones(6, 8).triu(3).bool(), -math.inf).exp2()) / e.sum(-1, keepdim=True)
        ),
        "three": lambda s: (e := 3.0**s) / e.sum(-1, keepdim=True),
        "reciprocal": lambda s: (e := s.exp()) * e.sum(-1).reciprocal()[..., None],
        "reciprocal first": lambda s: e.sum(-1, keepdim=True).reciprocal() * e if (e := s.exp()) is not None else None,
        "unsqueezed": lambda s: (e := s.exp()) / e.sum(-1).unsqueeze(-1),
        "summed by einsum": lambda s: (e := s.exp()) / torch.einsum("bhqk->bhq", e).unsqueeze(-1),
        "softmin": lambda s: F.softmin(-s, -1),
    }


@pytest.mark.parametrize("name", other_exponentials())
def test_softmaxes_of_other_spellings(name):
    softmax = other_exponentials()[name]
    backend = differentiate(lambda q, k, v: softmax(q @ k.mT / 4) @ v, *inputs()[:3])
    assert len(backend.of(Rewrite)) == 1


def test_a_late_sum_to_another_base():
    backend = fuse(lambda q, k, v: ((e := (q @ k.mT / 4).exp2()) @ v) / e.sum(-1, keepdim=True), *inputs()[:3])
    assert "scale=0.173287" in backend.rewrite().detail


@pytest.mark.parametrize(
    "weights",
    [
        lambda e: e / e.sum(-1).unsqueeze(-2),
        lambda e: e * e.sum(-1).reciprocal().unsqueeze(-2),
        lambda e: e / e.sum(-1, keepdim=True).mT,
        lambda e: F.normalize(e, p=1, dim=-1),
        lambda e: e / (e.sum(-1, keepdim=True) - 1),
    ],
    ids=["of others", "reciprocals of others", "transposed", "norm", "one less"],
)
def test_exponentials_over_something_else_are_told(weights):
    q, k, v, _ = inputs(queries=8)
    backend = fuse(lambda q, k, v: weights((q @ k.mT).exp()) @ v, q, k, v)
    assert "not divided by their sums as they are" in backend.miss().sentence


def beside_ones(scores, v, *, first=False, split=False):
    ones = torch.ones_like(v[..., :1])
    out = scores.exp() @ torch.cat([ones, v] if first else [v, ones], -1)
    above, below = out.split([16, 1], -1) if split else (out[..., :-1], out[..., -1:])
    return out[..., 1:] / out[..., 0].unsqueeze(-1) if first else above / below


@pytest.mark.parametrize("options", [{}, {"first": True}, {"split": True}], ids=["last", "first", "split"])
def test_sums_that_a_column_of_ones_makes(options):
    q, k, v = inputs()[:3]
    causal = torch.ones(6, 8).triu(3).bool()
    backend = differentiate(
        lambda q, k, v: beside_ones((q @ k.mT).masked_fill(causal, -math.inf), v, **options), q, k, v
    )
    assert len(backend.of(Rewrite)) == 1


def test_a_column_of_ones_that_divides_other_rows_is_no_sum():
    q, k, v = inputs()[:3]

    def function(q, k, v):
        out = (q @ k.mT).exp() @ torch.cat([v, torch.ones_like(v[..., :1])], -1)
        return out[..., :-1] / out[..., -1:].transpose(0, 1).reshape(2, 4, 6, 1)

    backend = Backend()
    torch.testing.assert_close(compiled(function, backend)(q, k, v), function(q, k, v))
    assert backend.of(Rewrite) == []


def written_out(scores):
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("softmax", [lambda scores: scores.softmax(-1), written_out], ids=["softmax", "written out"])
@pytest.mark.parametrize("value", [-math.inf, -1e9])
def test_weights_set_to_zero_where_the_scores_were_filled(value, softmax):
    """That is what they are already, save in rows without a key, which are zero then."""
    q, k, v = inputs()[:3]
    hidden = torch.ones(2, 1, 6, 8).triu(1).bool()
    hidden[1, 0, 2] = True

    def function(q, k, v, m):
        return softmax((q @ k.mT).masked_fill(m, value)).masked_fill(m, 0) @ v

    backend = differentiate(function, q, k, v, hidden)
    assert len(backend.of(Rewrite)) == 1


@pytest.mark.parametrize("training", [False, True])
def test_weights_set_to_zero_where_scores_with_a_bias_were_filled(training):
    """Rows that the fill hides whole are zero; a row that the bias hides with it is NaN."""
    q, k, v, bias = inputs()
    hidden = torch.ones(2, 1, 6, 8).triu(1).bool()
    hidden[1, 0, 2] = True
    bias = bias.clone()
    bias[..., 3, :4] = -math.inf

    def function(q, k, v):
        return (q @ k.mT + bias).masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0) @ v

    for value in (q, k, v):
        value.requires_grad_(training)
    backend = Backend(training=training)
    found, eager = compiled(function, backend)(q, k, v), function(q, k, v)
    torch.testing.assert_close(found, eager, equal_nan=True)
    assert backend.rewrite()
    assert not found[1, :, 2].any()
    assert found[:, :, 3].isnan().all()
    if training:
        known = torch.arange(6) != 3
        made, right = (torch.autograd.grad(out[:, :, known].square().sum(), (q,))[0] for out in (found, eager))
        torch.testing.assert_close(made[:, :, known], right[:, :, known], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("value", [-1e9, torch.finfo(torch.float32).min])
def test_weights_set_to_zero_where_scores_with_a_bias_got_a_number_stay(value):
    """A bias may be as low as the number, so that hidden keys take part in the sum."""
    q, k, v, bias = inputs()
    hidden = torch.ones(6, 8).triu(1).bool()
    bias = bias.clone()
    bias[..., 3, :4] = value
    backend = fuse(
        lambda q, k, v: (q @ k.mT + bias).masked_fill(hidden, value).softmax(-1).masked_fill(hidden, 0) @ v, q, k, v
    )
    assert backend.of(Rewrite) == []


def test_a_tensor_of_one_number_fills_as_the_number_does():
    causal = torch.ones(6, 8).tril(2).bool()

    def function(q, k, v):
        weights = torch.where(causal, q @ k.mT, -9e15 * torch.ones(6, 8)).softmax(-1)
        return torch.where(causal, weights, 0.0) @ v

    assert "dense mask" in differentiate(function, *inputs()[:3]).rewrite().detail


def test_weights_set_to_zero_elsewhere_stay():
    q, k, v = inputs()[:3]
    hidden, other = (torch.ones(6, 8).triu(n).bool() for n in (1, 2))
    backend = fuse(lambda q, k, v: (q @ k.mT).masked_fill(other, -1e9).softmax(-1).masked_fill(hidden, 0) @ v, q, k, v)
    assert backend.of(Rewrite) == []


@pytest.mark.parametrize("late_sum", [False, True, None])
@pytest.mark.parametrize(("shifted", "fused"), [(False, 0), (True, 1)])
def test_rows_without_a_key_are_what_the_spelling_makes_of_them(late_sum, shifted, fused):
    """Exponentials of the least number are zero, and so is their sum; with the maximum subtracted they are one."""
    q, k, v = inputs()[:3]
    hidden = torch.zeros(2, 1, 1, 8, dtype=torch.bool)
    hidden[0] = True

    def function(q, k, v):
        scores = (q @ k.mT).masked_fill(hidden, torch.finfo(torch.float32).min)
        scores = scores - scores.amax(-1, keepdim=True) if shifted else scores
        if late_sum is None:
            return beside_ones(scores, v)
        e = scores.exp()
        total = e.sum(-1, keepdim=True)
        return (e @ v) / total if late_sum else (e / total) @ v

    backend = Backend()
    torch.testing.assert_close(compiled(function, backend)(q, k, v), function(q, k, v), equal_nan=True)
    assert len(backend.of(Rewrite)) == fused


@pytest.mark.parametrize("bounds", [{"min": -5}, {"min": -50000, "max": 50000}])
@pytest.mark.parametrize("training", [False, True])
def test_a_maximum_of_all_scores_is_one_product_more(training, bounds):
    def function(q, k, v):
        scores = q @ k.mT
        return (scores - scores.max()).clamp(**bounds).softmax(-1) @ v

    operands = [torch.randn(2, 4, 128, 16).requires_grad_(training) for _ in range(3)]
    backend = Backend(training=training)
    torch.testing.assert_close(compiled(function, backend)(*operands), function(*operands))
    assert "a maximum of the scores" in backend.miss().sentence
    assert backend.miss().lever.startswith("subtract no maximum")


def test_all_that_keeps_scores_from_being_fused_is_told():
    """As in Grounding DINO, where images look at texts and texts at images."""

    def function(q, k, v, w):
        scores = q @ k.mT
        scores = (scores - scores.max()).clamp(min=-50000)
        back = scores.mT - scores.mT.max(-1, keepdim=True)[0]
        return scores.softmax(-1) @ v, back.softmax(-1) @ w

    backend = Backend()
    q, k, v = inputs()[:3]
    compiled(function, backend)(q, k, v, torch.randn(q.shape))
    for reason in backend.reasons():
        assert "subtract no maximum" in reason.lever
        assert "a product of its own" in reason.lever


def test_weights_that_are_mixed_and_normalized_are_told_as_mixed():
    """As in DeepViT, where a softmax, a product over heads and a layer norm of the heads follow each other."""

    def function(q, k, v, mixing):
        weights = torch.einsum("bhij,hg->bgij", (q @ k.mT).softmax(-1), mixing)
        return F.layer_norm(weights.movedim(1, -1), (4,)).movedim(-1, 1) @ v

    reason = fuse(function, *inputs()[:3], torch.randn(4, 4)).miss()
    assert "mixed between heads" in reason.sentence


def test_a_symbolic_size_that_only_a_merged_dimension_holds():
    """As in blocks of image models, whose output is as high and as wide as the image again."""

    def function(q, k, v):
        q, k, v = (x.flatten(2) for x in (q, k, v))
        return torch.bmm(v, (q.mT @ k).softmax(1)).view(2, 16, -1, 4)

    backend = Backend()
    run = compiled(function, backend)
    for height in (6, 10):
        arguments = [torch.randn(2, 16, height, 4) for _ in range(3)]
        torch.testing.assert_close(run(*arguments), function(*arguments))
    assert len(backend.of(Rewrite)) == 2
    assert backend.reasons() == []


def test_windows_of_a_symbolic_number_of_images_are_told_to_be_fixed():
    """As in Swin, whose masks of windows are added to scores that are viewed as images and windows."""

    def function(q, k, v, m):
        scores = (q @ k.mT).view(q.shape[0] // m.shape[0], m.shape[0], 4, 6, 6)
        return (scores + m[:, None]).view(-1, 4, 6, 6).softmax(-1) @ v

    backend = Backend()
    run = compiled(function, backend)
    for images in (2, 3):
        q, k, v, _ = inputs(batch=2 * images, keys=6)
        arguments = (q, k, v, torch.randn(2, 6, 6))
        torch.testing.assert_close(run(*arguments), function(*arguments))
    assert len(backend.of(Rewrite)) == 1
    assert "dynamic=False" in backend.reasons()[0].lever


def later(n):
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def by_letters(q, k, v):
    """As in PaLM of lucidrains: the rows of the product are heads, and within them queries."""
    scores = torch.einsum("bhid,bjd->bhij", q * 0.25, k[:, 0])
    scores = scores.masked_fill(later(8), -torch.finfo(scores.dtype).max)
    return torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v[:, 0])


def by_rows(q, k, v):
    """As in GPT-BigCode: the rows of the product are queries, and within them heads."""
    batch, queries, heads, size = q.transpose(1, 2).shape
    scores = torch.bmm(q.transpose(1, 2).reshape(batch, queries * heads, size) * 0.25, k[:, 0].mT)
    scores = scores.view(batch, queries, heads, -1).masked_fill(later(8)[:, None], -math.inf)
    out = scores.softmax(-1).view(batch, queries * heads, -1) @ v[:, 0]
    return out.view(batch, queries, heads, size)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [by_letters, by_rows])
def test_heads_that_are_rows_beside_masked_queries_are_heads(function, dynamic):
    arguments = inputs(queries=8)[:3]
    assert fuse(function, *arguments, dynamic=dynamic).rewrite().detail.startswith("scale=0.25, is_causal, enable_gqa;")
    torch._dynamo.reset()
    assert differentiate(function, *arguments, dynamic=dynamic).rewrite()


def test_heads_that_are_rows_stay_rows_where_no_query_is_masked():
    def function(q, k, v, slopes):
        scores = torch.einsum("bhid,bjd->bhij", q, k[:, 0]) + slopes[:, None, None] * torch.arange(8)
        return torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v[:, 0])

    assert "enable_gqa" not in fuse(function, *inputs()[:3], torch.rand(4)).rewrite().detail


NO_SOFTMAX = {
    "sigmoid": lambda q, k, v: torch.sigmoid(q @ k.mT / 4 - 2.0) @ v,
    "masked sigmoid": lambda q, k, v: ((q @ k.mT).masked_fill(torch.ones(6, 8).triu(1).bool(), -1e9).sigmoid()) @ v,
    "sigmoid of a type": lambda q, k, v: (q @ k.mT).sigmoid().type(torch.float64) @ v.double(),
    "squared relu": lambda q, k, v: torch.einsum("bhqk,bhkd->bhqd", F.relu(q @ k.mT).square() / 8, v),
    "einsum": lambda q, k, v: torch.einsum("bhqd,bhkd->bhqk", q, k).relu_() @ v,
}


@pytest.mark.parametrize("name", NO_SOFTMAX)
def test_weights_that_no_softmax_makes_are_told(name):
    reason = fuse(NO_SOFTMAX[name], *inputs()[:3]).miss()
    assert "no softmax over keys" in reason.sentence


LAYERS = {
    "two layers": lambda q, k, v: F.linear(F.relu(F.linear(q, k[0, 0])), v[0, 0].mT),
    "products of a matrix": lambda q, k, v: F.relu(q @ k[0, 0].mT) @ v[0, 0],
    "a gate": lambda q, k, v: (q @ k.mT) @ v * torch.sigmoid(q[..., :1]),
    "linear attention": lambda q, k, v: F.relu(q) @ (F.relu(k).mT @ v),
}


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_no_attention_is_not_told(name):
    backend = fuse(LAYERS[name], *inputs()[:3])
    assert (backend.reasons(), backend.of(Rewrite)) == ([], [])


def test_attention_inside_vmap_is_told_to_do_without():
    one = torch.vmap(lambda q, k, v: (q @ k.T).softmax(-1) @ v)
    reason = fuse(torch.vmap(one), *inputs()[:3]).miss()
    assert "inside torch.vmap" in reason.sentence
    assert "without vmap" in reason.lever
