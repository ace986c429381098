"""The fused attention in the old one's place: layouts that can be seen, other users, and nothing left over."""

import pytest
import torch
from fusion import Backend, compiled, differentiate, fuse, inputs, plain

from omnicomp.timeline import Rewrite


def split_heads(x, heads=4):
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


FINISHES = {
    "itself": lambda o: o,
    "transposed": lambda o: o.transpose(1, 2),
    "pointwise": lambda o: o * 2,
    "view": lambda o: o.view(2, -1),
    "contiguous": lambda o: o.transpose(1, 2).contiguous().view(2, 6, -1),
    "reshape": lambda o: o.transpose(1, 2).reshape(2, 6, -1).sin(),
    "in place": lambda o: o.add_(1),
    "in place through a view": lambda o: o.transpose(1, 2).mul_(2),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", FINISHES)
def test_layouts_are_those_of_eager(name, training):
    mask = torch.zeros(2, 1, 1, 6)
    mask[0, ..., 4:] = torch.finfo(torch.float32).min

    def function(x):
        heads = split_heads(x)
        return FINISHES[name](plain(heads, heads.sin(), heads.cos(), mask.to(x.dtype)))

    assert (differentiate if training else fuse)(
        lambda x: function(x.float()).to(x.dtype), torch.randn(2, 6, 32)
    ).rewrite()


@pytest.mark.parametrize(
    "product",
    [
        lambda w, v: torch.einsum("bhqk,bkhd->bqhd", w, v),
        lambda w, v: torch.einsum("bhqk,bkhd->bqhd", w, v).flatten(2),
        lambda w, v: (w @ v.transpose(1, 2)).transpose(1, 2),
        lambda w, v: (v.permute(0, 2, 3, 1) @ w.mT).mT,
    ],
)
def test_a_layout_that_only_the_output_has_is_kept(product):
    def function(q, k, v, m):
        return product((q @ k.mT + m).softmax(-1), v.transpose(1, 2))

    assert differentiate(function, *inputs()).rewrite()


def merged(x, heads=4):
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2).reshape(x.shape[0] * heads, x.shape[1], -1)


def test_heads_that_are_merged_and_taken_apart_again_are_not_copied():
    def function(x):
        out = plain(merged(x), merged(x.sin()), merged(x.cos()), 0.0)
        return out.view(2, 4, 6, 8).transpose(1, 2).reshape(2, 6, 32)

    for run in (fuse, differentiate):
        backend = run(function, torch.randn(2, 6, 32))
        assert backend.rewrite()
        (attention,) = backend.attentions()
        (user,) = attention.users
        assert user.target == "transpose"


def test_merged_heads_that_are_written_to_stay_merged():
    def function(x):
        out = plain(merged(x), merged(x.sin()), merged(x.cos()), 0.0)
        heads = out.view(2, 4, 6, 8)
        out.add_(1)
        return heads.transpose(1, 2).reshape(2, 6, 32)

    assert fuse(function, torch.randn(2, 6, 32)).rewrite()


@pytest.mark.parametrize("run", [fuse, differentiate])
def test_a_layout_is_kept_where_its_strides_are_symbolic(run):
    def function(q, k, v):
        return torch.einsum("bhqk,bkhd->bqhd", (q.transpose(1, 2) @ k.mT).softmax(-1), v.transpose(1, 2))

    q, k, v, _ = inputs()
    backend = run(function, q.transpose(1, 2).contiguous(), k, v, dynamic=True)
    assert backend.rewrite()
    (placeholder, *_) = backend.graphs[0].graph.find_nodes(op="placeholder")
    assert isinstance(placeholder.meta["example_value"], torch.SymInt), "the sizes were to be symbolic"


def test_no_copy_where_the_layout_is_hidden():
    def function(x):
        heads = split_heads(x)
        out = ((heads @ heads.mT).softmax(-1) @ heads).transpose(1, 2).contiguous()
        return out.view(2, 6, -1)

    backend = fuse(function, torch.randn(2, 6, 32))
    contiguous = [n for n in backend.graphs[0].graph.nodes if "contiguous" in str(n.target)]
    assert len(contiguous) == 1
    assert contiguous[0].args[0].meta["example_value"].is_contiguous()


def test_shapes_and_dtypes_of_what_is_gone_may_still_be_asked_for():
    def function(q, k, v):
        weights = torch.softmax(q @ k.mT, -1)
        return (weights @ v) * weights.shape[-1] * weights.dim()

    assert fuse(function, *inputs()[:3]).rewrite()


def test_a_copy_of_the_mask_that_only_the_scores_were_added_to_goes():
    def function(q, k, v, m):
        scores = q @ k.mT
        scores += m
        scores.mul_(0.5)
        return scores.softmax(-1) @ v

    backend = fuse(function, *inputs())
    assert backend.rewrite()
    assert not [n for n in backend.graphs[0].graph.nodes if n.name in ("scores", "mul_", "softmax", "matmul")]


def test_random_numbers_that_were_drawn_beside_it_are_still_drawn():
    def function(q, k, v):
        torch.rand(3)
        return torch.softmax(q @ k.mT, -1) @ v

    backend = Backend()
    torch.manual_seed(3)
    expected, after = function(*inputs()[:3]), torch.rand(1)
    torch.manual_seed(3)
    found = compiled(function, backend)(*inputs()[:3])
    torch.testing.assert_close(found, expected)
    assert torch.equal(torch.rand(1), after)


def test_scores_that_two_attentions_share_are_kept_for_both_or_neither():
    def function(q, k, v, m):
        scores = q @ k.mT
        return scores.softmax(-1) @ v + (scores + m).softmax(-1) @ v

    backend = fuse(function, *inputs())
    assert len(backend.of(Rewrite)) + len(backend.reasons()) == 2


def test_the_next_attention_reads_the_fused_output_of_the_last():
    def function(q, k, v):
        first = torch.softmax(q @ k.mT, -1) @ v
        return torch.softmax(first @ k.mT, -1) @ v

    backend = fuse(function, *inputs()[:3])
    first, second = backend.attentions()
    assert second.args[0] is first
