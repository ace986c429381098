"""Padding masks that are inputs are assumed to be full where that pays, and the assumption says what is checked."""

import math

import pytest
import torch
from fusion import Backend, compiled, inputs

from omnicomp.passes.attention import assume
from omnicomp.passes.verdicts import Checker
from omnicomp.timeline import Rewrite

LOWEST = torch.finfo(torch.float32).min


def causal(q, k, v, padding, fill=LOWEST):
    length = q.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1) | (padding[:, None, None] == 0)
    return (q @ k.mT * 0.25).masked_fill(hidden, fill).softmax(-1) @ v


def run(function, *arguments, speculate=True):
    backend = Backend(speculate=speculate)
    with torch.no_grad():
        result = compiled(function, backend)(*arguments)
    return backend, backend.contexts[0].assumptions, result


@pytest.fixture
def pays(monkeypatch):
    """Any attention is large enough, so that small ones show what is done with large ones."""
    monkeypatch.setattr(assume, "worth", lambda *args, **kwargs: None)


def arguments():
    torch.manual_seed(5)
    q, k, v, _ = inputs(queries=8)
    return q, k, v, torch.ones(2, 8, dtype=torch.long)


def test_a_full_padding_mask_leaves_the_causal_one(pays):
    backend, assumptions, result = run(causal, *arguments())
    assert backend.attentions()[0].kwargs == {"scale": 0.25, "is_causal": True}
    (assumption,) = assumptions
    assert assumption.inputs == ("l_padding_",)
    assert str(assumption.holds) == "full"
    padded = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1]])
    for mask, kind in ((torch.ones(2, 8, dtype=torch.long), "full"), (padded, "general"), (padded.flip(1), "first")):
        assert [known.kind for known in Checker([assumption]).verdicts([[mask]])] == [kind]
    torch.testing.assert_close(result, causal(*arguments()))


def test_layers_share_an_assumption_and_nothing_of_it_is_left_in_the_graph(pays):
    def function(q, k, v, p):
        hidden = torch.ones(8, 8, dtype=torch.bool).triu(1) | (p[:, None, None] == 0)
        for _ in range(2):
            q = (q @ k.mT).masked_fill(hidden, LOWEST).softmax(-1) @ v
        return q

    backend, assumptions, _ = run(function, *arguments())
    assert len(backend.of(Rewrite)) == 2
    assert len(assumptions) == 1
    assert not [n for n in backend.graphs[0].graph.nodes if n.op == "call_method" and n.target == "all"]


def test_without_leave_nothing_is_assumed(pays):
    backend, assumptions, _ = run(causal, *arguments(), speculate=False)
    assert assumptions == []
    assert "attn_mask" in backend.attentions()[0].kwargs


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v, p: (q @ k.mT + p[:, None, None] * 1.0).softmax(-1) @ v,
        lambda q, k, v, p: (q @ k.mT).masked_fill((p[:, None] != p[..., None])[:, None], LOWEST).softmax(-1) @ v,
        lambda q, k, v, p: causal(q, k, v, p.cumsum(-1)),
    ],
    ids=["a bias", "documents", "what is computed at cost"],
)
def test_other_masks_are_made(function, pays):
    backend, _, result = run(function, *arguments())
    assert backend.of(Rewrite)
    torch.testing.assert_close(result, function(*arguments()))


def test_small_attentions_are_not_speculated_on():
    backend, assumptions, _ = run(causal, *arguments())
    assert assumptions == []
    assert "attn_mask" in backend.attentions()[0].kwargs


def test_the_general_graph_is_right_for_any_padding(pays):
    q, k, v, padding = arguments()
    padding[0, :3] = 0
    backend, _, result = run(lambda *a: causal(*a, fill=-math.inf), q, k, v, padding, speculate=False)
    assert backend.rewrite()
    torch.testing.assert_close(result, causal(q, k, v, padding, fill=-math.inf), equal_nan=True)
