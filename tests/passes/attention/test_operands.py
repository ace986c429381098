"""Queries, keys and values behind their views: what is taken out pays, and gradients end where they ended."""

import pytest
import torch
from fusion import differentiate, fuse, inputs
from traced import site_of

Q, K, V, M = inputs()


def attend(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


def test_copies_repeats_casts_and_factors_are_left_behind():
    def function(q, k, v):
        q = q.float() * 0.5 / 2.0
        k = k[:, :2].repeat_interleave(2, 1).contiguous()
        v = v[:, :2].repeat_interleave(2, 1)
        return attend(q, k, v)

    site, _, _ = site_of(function, Q, K, V)
    assert site.scale == 0.25
    held = [operand.node for operand in (site.query, site.key, site.value)]
    assert held[0].op == "placeholder"
    assert [node.meta["example_value"].shape[1] for node in held] == [4, 2, 2]


def test_an_upcast_of_queries_and_keys_is_left_behind():
    function = lambda q, k, v: (q.float() @ k.float().mT).softmax(-1).to(v.dtype) @ v  # noqa: E731
    site, backend, _ = site_of(function, *(x.bfloat16() for x in (Q, K, V)))
    assert site.query.node is backend.node("l_q_")
    assert site.dtype == torch.bfloat16


def test_a_cast_that_would_make_the_attention_narrower_stays():
    """The product is of float32 queries; only the values are of bfloat16."""
    function = lambda q, k, v: (q @ k.mT).softmax(-1) @ v.to(q.dtype)  # noqa: E731
    site, _, _ = site_of(function, Q, K, V.bfloat16())
    assert site.dtype == torch.float32
    assert site.query.value.fake.dtype == torch.float32
    assert differentiate(function, Q, K, V.bfloat16()).rewrite()


def test_numbers_of_eight_bits_were_rounded_on_purpose():
    function = lambda q, k, v: attend(q.to(torch.float8_e4m3fn).to(q.dtype), k, v)  # noqa: E731
    assert fuse(function, Q, K, V).rewrite()


@pytest.mark.parametrize(
    "cut",
    [
        lambda q, k, v: attend(q.detach() * 0.5, k, v),
        lambda q, k, v: attend(q, k.detach()[:, :1].expand(2, 4, 8, 16).contiguous(), v),
        lambda q, k, v: attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1).detach()),
        lambda q, k, v: attend(q.flatten(0, 1).detach().clone(), k.flatten(0, 1), v.flatten(0, 1)),
    ],
    ids=["queries", "keys", "values", "a copy"],
)
def test_what_was_detached_gets_no_gradient(cut):
    assert differentiate(cut, Q, K, V).rewrite()


def test_an_operand_that_was_scaled_without_gradients_gets_none():
    def function(q, k, v):
        with torch.no_grad():
            q = q * 0.5
        return attend(q, k, v)

    assert differentiate(function, Q, K, V).rewrite()


@pytest.mark.parametrize("which", [0, 1])
def test_an_operand_that_was_changed_since_is_read_before_the_change_or_not_at_all(which):
    def function(*arguments):
        changed = [a.clone() for a in arguments]
        scores = changed[0] @ changed[1].mT
        changed[which].mul_(3)
        return scores.softmax(-1) @ changed[2] + changed[which].sum()

    fuse(function, Q, K, V)


def test_values_that_were_partly_written_are_left_alone():
    def function(q, k, v):
        v = v.clone()
        weights = torch.softmax(q @ k.mT, -1)
        v[:, ::2] = 1
        return weights @ v

    assert "changed in place since" in fuse(function, Q, K, V).miss().sentence


def test_heads_split_off_one_projection_are_taken_where_they_lie():
    def function(x):
        q, k, v = x.unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return attend(q, k, v).transpose(1, 2).flatten(2)

    backend = differentiate(function, torch.randn(2, 6, 96))
    assert backend.rewrite()
    copies = [n for n in backend.graphs[0].graph.nodes if "contiguous" in str(n.target) or "clone" in str(n.target)]
    assert copies == []
