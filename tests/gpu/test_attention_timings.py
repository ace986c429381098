"""On a CUDA device: the kernel of an attention is the one that was measured to be the fastest, once."""

import dataclasses
import math

import pytest
import torch

import omnicomp
from omnicomp._torch.autograd.attention import KERNELS
from omnicomp._torch.autograd.sdpa_bench import Bench, Problem
from omnicomp.passes.attention import timings
from omnicomp.passes.attention.timings import STORE, UNFUSED
from omnicomp.timeline import NearMiss, Rewrite, current

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))
    timings.forget()
    yield
    timings.forget()


def layout(*shape):
    tensor = torch.empty(shape[0], shape[2], shape[1], shape[3], device="meta").transpose(1, 2)
    return tuple(tensor.shape), tensor.stride()


SWIN = Problem(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    query=layout(512, 4, 49, 32),
    key=layout(512, 4, 49, 32),
    value=layout(512, 4, 49, 32),
    mask=((1, 4, 49, 49), (9604, 2401, 49, 1)),
)


@pytest.mark.parametrize("training", [False, True])
def test_all_candidates_can_be_timed(training):
    state = torch.cuda.get_rng_state()
    with Bench(dataclasses.replace(SWIN, training=training, mask_grad=False)) as bench:
        times = {name: bench.kernel(name) for name in KERNELS if name != "flash"}
        times |= {"eager": bench.unfused(), "generated": bench.generated()}
        assert bench.has_room_for_scores
    assert all(0 < ms < 50 for ms in times.values()), times
    assert times["efficient"] < times["cudnn"]
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_generated_code_with_groups_a_causal_mask_and_a_trained_mask():
    grouped = dataclasses.replace(
        SWIN, query=layout(4, 8, 128, 64), key=layout(4, 2, 128, 64), value=layout(4, 2, 128, 64), mask=None
    )
    with Bench(dataclasses.replace(grouped, grouped=True, is_causal=True, training=True)) as bench:
        assert 0 < bench.generated() < 50
    with Bench(dataclasses.replace(SWIN, training=True, mask_grad=True)) as bench:
        assert 0 < bench.generated() < 50
        assert 0 < bench.unfused() < 50


def windows(q, k, v, bias):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def operands():
    made = [torch.randn(512, 49, 4, 32, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    return [*made, torch.randn(1, 4, 49, 49, device="cuda", dtype=torch.bfloat16)]


def sites():
    return [event for event in current() if isinstance(event, (Rewrite, NearMiss)) and event.kind == "attention"]


def test_the_fastest_is_taken_and_kept(monkeypatch):
    args = operands()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: windows(windows(*x), *x[1:]), backend="omni")
    compiled(*args)
    first, second = sites()
    assert first.timed == second.timed
    assert set(first.timed) == {"cudnn", "efficient", UNFUSED}
    best = min(first.timed, key=first.timed.get)
    assert best in first.detail
    assert len(list(STORE.folder.glob("*.json"))) == 1
    # Another process reads the file.
    timings.forget()
    torch._dynamo.reset()
    omnicomp.timeline.clear()
    monkeypatch.setattr("omnicomp._torch.autograd.sdpa_bench.Bench", lambda problem: pytest.fail("measured again"))
    torch.compile(windows, backend="omni")(*args)
    assert sites()[0].timed == first.timed


def test_rules_where_it_is_switched_off():
    torch._dynamo.reset()
    omnicomp.timeline.clear()
    args = operands()
    out = torch.compile(windows, backend="omni", options={"attention_seconds": 0})(*args)
    torch.testing.assert_close(out, windows(*args), atol=0.05, rtol=0.05)
    assert sites()[0].timed == {}
    assert "efficient" in sites()[0].detail
    assert not STORE.folder.exists()
