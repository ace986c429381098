"""Weights of two attentions that are combined before they meet the values."""

import pytest
import torch
from fusion import Backend, compiled, differentiate, inputs
from torch.nn import functional as F

from omnicomp.timeline import Rewrite

LAM = torch.tensor(0.3)
HEADS = torch.rand(1, 4, 1, 1)


def weights(q, k):
    return (q @ k.mT).softmax(-1)


def others(q, k):
    return (q.flip(-1) @ k.mT * 0.5).softmax(-1)


def two(q, k, v):
    return (weights(q, k) - LAM * others(q, k)) @ v


def added(q, k, v):
    return torch.matmul(0.6 * weights(q, k) + others(q, k) * 0.4, v)


def for_each_head(q, k, v):
    return (weights(q, k) - HEADS * others(q, k)) @ v


def flattened(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(weights(q, k) - 0.3 * others(q, k), v)


def as_published(q, k, v):
    found = F.softmax(q @ k.mT, dim=-1, dtype=torch.float32).type_as(q).view(2, 2, 2, 6, 8)
    return (found[:, :, 0] - LAM * found[:, :, 1]) @ v[:, ::2]


def in_an_einsum(q, k, v):
    return torch.einsum("bhij,bhjd->bihd", torch.sub(weights(q, k), others(q, k), alpha=0.3), v)


def unbound(q, k, v):
    first, second = weights(q, k).unflatten(1, (2, 2)).unbind(2)
    return (first - LAM * second) @ v[:, ::2]


@pytest.mark.parametrize(
    ("function", "sites"),
    [(two, 2), (added, 2), (for_each_head, 2), (flattened, 2), (in_an_einsum, 2), (as_published, 1), (unbound, 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_each_of_them_is_fused(function, sites):
    arguments, backend = inputs()[:3], Backend()
    torch.testing.assert_close(compiled(function, backend)(*arguments), function(*arguments))
    assert len(backend.of(Rewrite)) == len(backend.attentions()) == sites
    assert backend.reasons() == []


@pytest.mark.parametrize("function", [two, as_published])
def test_gradients(function):
    backend = differentiate(function, *inputs()[:3])
    assert backend.attentions()


def a_factor_of_keys(q, k, v):
    return (weights(q, k) - torch.linspace(0, 1, 8) * others(q, k)) @ v


def a_factor_of_heads_in_an_einsum(q, k, v):
    return torch.einsum("bhij,bhjd->bihd", weights(q, k) - HEADS * others(q, k), v)


def returned(q, k, v):
    combined = weights(q, k) - LAM * others(q, k)
    return combined @ v, combined


def both_returned(q, k, v):
    first, second = weights(q, k), others(q, k)
    return (first - LAM * second) @ v, first, second


def changed_in_between(q, k, v):
    first, second = weights(q, k), others(q, k)
    combined = first - LAM * second
    first.zero_()
    return combined @ v


def some_heads(q, k, v):
    found = weights(q, k)
    return (found[:, 0] - LAM * found[:, 3]) @ v[:, 2]


def positions(q, k, v):
    return (weights(q, k) + q.sum() * torch.ones(2, 4, 6, 8).softmax(-1)) @ v


@pytest.mark.parametrize(
    "function",
    [
        a_factor_of_keys,
        a_factor_of_heads_in_an_einsum,
        returned,
        both_returned,
        changed_in_between,
        some_heads,
        positions,
    ],
)
def test_what_would_not_be_fused_is_left_as_it_was(function):
    arguments, backend = inputs()[:3], Backend()
    torch.testing.assert_close(compiled(function, backend)(*arguments), function(*arguments))
    assert backend.of(Rewrite) == []
    assert backend.reasons()
    assert all(reason.lever for reason in backend.reasons())
    (graph,) = backend.graphs
    products = [node for node in graph.graph.nodes if "matmul" in str(node.target) or "einsum" in str(node.target)]
    assert len(products) == (2 if function in (positions, some_heads) else 3)


def test_in_a_low_precision():
    arguments, backend = [x.bfloat16() for x in inputs()[:3]], Backend()
    got = compiled(two, backend)(*arguments)
    exact = two(*(x.double() for x in arguments))
    error, eager = ((x - exact).abs().max().item() for x in (got, two(*arguments)))
    assert error <= 2 * eager
    assert len(backend.attentions()) == 2
