"""Block masks that are inputs: what they visit is looked at, and full or causal ones become the faster call."""

import pytest
import torch
from fusion import Backend, compiled
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import omnicomp
from omnicomp.passes.attention import visited
from omnicomp.timeline import Rewrite, Speculation

LENGTH = 256
POSITIONS = torch.arange(LENGTH)[None].expand(2, -1).contiguous()
ONE_DOCUMENT = torch.zeros(2, LENGTH, dtype=torch.int64)
DOCUMENTS = POSITIONS // 100


def causal(b, h, q, k):
    return q >= k


def everything(b, h, q, k):
    return b >= 0


def packed(documents):
    return lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (POSITIONS[b, k] <= POSITIONS[b, q])


def blocks(function, length=LENGTH, batch=None, **options):
    return create_block_mask(function, batch, None, length, length, device="cpu", **options)


def with_function(mask, function):
    mask.mask_mod = function
    return mask


def by_hand(number, full, indices):
    """Two rows of blocks; `number` and `full` are how many of each row are listed."""
    lists = torch.tensor([[indices]], dtype=torch.int32)
    counts = [None if count is None else torch.tensor([[count]], dtype=torch.int32) for count in (number, full)]
    full_lists = None if full is None else lists
    return BlockMask.from_kv_blocks(counts[0], lists, counts[1], full_lists, BLOCK_SIZE=128, mask_mod=causal)


def operands(length=LENGTH):
    return [torch.randn(2, 1, length, 16) for _ in range(3)]


@pytest.fixture(autouse=True)
def small_calls_pay(monkeypatch):
    monkeypatch.setattr(visited, "worth", lambda *_, **__: None)


def run(mask, q, k, v, **options):
    backend = Backend(speculate=True)

    def call(q, k, v):
        return flex_attention(q, k, v, block_mask=mask, **options)

    torch.testing.assert_close(compiled(call, backend)(q, k, v), call(q, k, v))
    (event,) = backend.of(Rewrite)
    return event, backend


BETTER = {
    "causal": lambda: blocks(causal),
    "one block": lambda: blocks(causal, 128, batch=2),
    "a part of a block": lambda: blocks(causal, 200),
    "small blocks": lambda: blocks(causal, BLOCK_SIZE=(64, 32)),
    "no full blocks": lambda: by_hand([1, 2], None, [[0, 1], [0, 1]]),
    "offsets": lambda: blocks(lambda b, h, q, k: POSITIONS[b, k + 0] <= POSITIONS[b, 0 + q], batch=2),
    "positions": lambda: blocks(lambda b, h, q, k: POSITIONS[b, k] <= POSITIONS[b, q], batch=2),
}


@pytest.mark.parametrize("name", BETTER)
def test_causal_blocks_become_is_causal(name):
    mask = BETTER[name]()
    event, backend = run(mask, *operands(mask.seq_lengths[0]))
    assert "is_causal" in event.detail
    (node,) = backend.attentions()
    assert node.kwargs == {"scale": 0.25, "is_causal": True}


def test_full_blocks_become_none():
    event, backend = run(blocks(everything), *operands())
    assert not event.kept
    assert backend.attentions()[0].kwargs == {"scale": 0.25}


def test_a_packed_sequence_of_one():
    event, _ = run(blocks(packed(ONE_DOCUMENT), batch=2), *operands())
    assert "is_causal" in event.detail


KEPT = {
    "documents": lambda: blocks(packed(DOCUMENTS), batch=2),
    "more blocks than the function": lambda: with_function(blocks(everything), causal),
    "fewer blocks than the function": lambda: with_function(blocks(causal), everything),
    "a block is left out": lambda: by_hand([1, 1], [0, 0], [[0, 1], [1, 0]]),
    "a block is listed twice": lambda: by_hand([1, 2], [0, 1], [[0, 1], [0, 1]]),
    "a full block hides keys": lambda: by_hand([0, 1], [1, 1], [[0, 1], [1, 0]]),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_blocks_stay(name):
    q, k, v = operands()
    mask = KEPT[name]()
    event, backend = run(mask, q, k, v)
    assert event.kept
    assert "not known to be those of its mask" in event.detail
    assert backend.attentions() == []


def test_every_call_is_looked_at():
    q, k, v = operands()
    made = [with_function(blocks(f), causal) for f in (causal, everything)]
    call = torch.compile(
        lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask), backend="omni", options={"lowerings": ["eager"]}
    )
    with omnicomp.record() as run:
        for mask in (*made, made[0]):
            expected = flex_attention(q, k, v, block_mask=mask)
            torch.testing.assert_close(call(q, k, v, mask), expected)
    states = [(event.state, event.variant, event.sentence) for event in run if isinstance(event, Speculation)]
    assert ("held", "assumed", "the class of the mask: causal") in states
    assert ("failed", "general", "the class of the mask") in states


def test_a_look_that_costs_more_than_it_saves_is_not_made(monkeypatch):
    monkeypatch.undo()
    event, backend = run(blocks(causal), *operands())
    assert event.kept
    assert backend.contexts[0].assumptions == []
