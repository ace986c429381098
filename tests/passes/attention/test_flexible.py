"""When FlexAttention is chosen, decided without a GPU; and that the CPU leaves such attentions alone."""

import math
from types import SimpleNamespace

import pytest
import torch
from fusion import fuse, inputs
from traced import site_of

from omnicomp.devices import resolve_device
from omnicomp.passes.attention.flexible import flex_pays, too_slow
from omnicomp.passes.attention.form import dense_form, open_form
from omnicomp.passes.attention.masking import read_masking
from omnicomp.passes.attention.session import Session
from omnicomp.passes.attention.site import MatchEnded, Site
from omnicomp.passes.attention.timings import Budget
from omnicomp.passes.base import PassContext
from omnicomp.timeline import Timeline


def pays(
    scores, length, monkeypatch, device="cuda", *, size=64, dtype=torch.bfloat16, training=False, seconds=2.0, batch=1
):
    """Whether FlexAttention is taken for such scores of such a device, which need not be there."""

    def function(q, k, v, p):
        return torch.softmax(scores(q @ k.mT, p), -1) @ v

    q, k, v = (torch.empty(batch, 4, length, size, device="meta", dtype=dtype) for _ in range(3))
    site, backend, reader = site_of(
        function, q, k, v, torch.empty(batch, 4, length, length, device="meta", dtype=dtype)
    )
    fake = site.fake()
    seen = SimpleNamespace(device=torch.device(device), requires_grad=training, dtype=fake.dtype, shape=fake.shape)
    monkeypatch.setattr(Site, "fake", lambda self: seen)
    try:
        form, decides = dense_form(site, reader), flex_pays
    except MatchEnded:  # there is no other kernel for these scores
        form, decides = open_form(site, reader), lambda site, form, *rest: not too_slow(site, *rest)
    timeline = Timeline()
    context = PassContext(
        graph_id="g0",
        device=resolve_device("cpu"),
        timeline=timeline,
        training=False,
        root=backend.module,
    )
    session = Session(backend.module, backend.trace, reader, context, budget=Budget(seconds))
    return decides(site, form, read_masking(site, form, reader), session)


def indices(scores):
    queries, keys = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    return queries[:, None], keys


def windowed(scores, _):
    queries, keys = indices(scores)
    return scores.masked_fill((keys > queries) | (queries - keys >= 128), -math.inf)


def causal(scores, _):
    queries, keys = indices(scores)
    return scores.masked_fill(keys > queries, -math.inf)


def distances(scores, _):
    queries, keys = indices(scores)
    return scores + (keys - queries).to(scores.dtype) * 0.5


@pytest.mark.parametrize(
    ("scores", "length", "expected"),
    [
        (windowed, 8192, True),
        (windowed, 512, False),
        (distances, 4096, True),
        (distances, 256, False),
        (lambda s, p: s + p, 8192, False),
        (lambda s, p: s, 8192, False),
        (causal, 8192, False),
    ],
    ids=["window", "short window", "ALiBi", "short ALiBi", "a mask that is read", "no mask", "causal"],
)
def test_blocks_pay_for_long_sparse_masks_and_computed_biases(scores, length, expected, monkeypatch):
    assert pays(scores, length, monkeypatch) is expected


def padded(scores, mask):
    queries, keys = indices(scores)
    return scores.masked_fill((keys > queries) | (mask[:, :1, :1] > 0), -math.inf)


def wide(scores, _):
    queries, keys = indices(scores)
    return scores.masked_fill((keys > queries) | (queries - keys >= 2048), -math.inf)


def both_ways(scores, _):
    queries, keys = indices(scores)
    return scores.masked_fill((keys - queries).abs() > 64, -math.inf)


def capped(scores, mask):
    return padded(50 * torch.tanh(scores / 50), mask)


# Of 64 by 64 blocks a query sees up to 33 (padded: half of all), 17 (wide: 23 %), 2 (windowed: 3 %) or 3 (both ways).
@pytest.mark.parametrize(
    ("scores", "size", "training", "tf32", "expected"),
    [
        (windowed, 64, True, False, True),
        (windowed, 256, True, False, True),
        (both_ways, 128, True, False, True),
        (wide, 64, False, False, True),
        (wide, 64, True, False, False),
        (wide, 128, True, True, True),
        (padded, 64, False, False, False),
        (padded, 64, False, True, True),
        (padded, 128, False, True, True),
        (padded, 128, True, True, True),
        (capped, 128, True, True, False),
        (capped, 128, False, True, True),
        (padded, 256, True, True, False),
        (distances, 64, False, False, False),
        (distances, 64, False, True, True),
    ],
)
def test_float32_takes_flex_attention_where_enough_is_left_out(scores, size, training, tf32, expected, monkeypatch):
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        assert pays(scores, 8192, monkeypatch, size=size, dtype=torch.float32, training=training) is expected
    finally:
        torch.set_float32_matmul_precision("highest")
    assert pays(scores, 8192, monkeypatch, size=size, training=training)


def test_wide_heads_are_trained_unfused_where_that_is_timed(monkeypatch):
    def wide(length, **more):
        return pays(padded, length, monkeypatch, **{"size": 256, "training": True, **more})

    assert not wide(2048)
    assert wide(2048, seconds=0.0)
    assert not wide(4096)
    assert wide(8192)
    assert wide(2048, size=128)
    assert wide(2048, training=False)
    assert pays(windowed, 2048, monkeypatch, size=256, training=True)
    assert wide(2048, batch=64)


def test_flex_attention_is_not_taken_on_the_cpu(monkeypatch):
    assert not pays(windowed, 8192, monkeypatch, "cpu")
    monkeypatch.undo()
    backend = fuse(lambda q, k, v, m: torch.softmax(torch.tanh(q @ k.mT / 30) * 30 + m, -1) @ v, *inputs())
    assert "tanh" in backend.miss().sentence
    assert "FlexAttention" in backend.miss().needed
    assert "with 128 keys or more, on CUDA or for inference on a CPU" in backend.miss().lever
