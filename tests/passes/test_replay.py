"""Decisions of the attention pass that are done again without reading the graph."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import omnicomp
from omnicomp._torch.inductor.store import folder
from omnicomp.passes import replay
from omnicomp.passes.attention import fuse
from omnicomp.timeline import Cache, NearMiss, Rewrite

Q = torch.randn(2, 4, 16, 8)


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep what was decided for graphs of any size."""
    monkeypatch.setattr(replay, "_LEAST_NODES", 1)
    yield
    torch._dynamo.reset()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 8**-0.5, -1) @ v


def masked(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q @ q.transpose(-1, -2) * 8**-0.5
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ q


def with_eager(**options: Any) -> dict[str, Any]:
    return {"lowerings": ["eager"], **options}


def compiled(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[Any], list[Cache]]:
    """The result of a fresh compilation, its rewrites and near misses, and the verdicts on what was decided before."""
    torch._dynamo.reset()
    omnicomp.timeline.clear()
    call = torch.compile(function, backend="omni", options=with_eager(**options))
    found = call(*args)
    events = omnicomp.timeline.events()
    told = [dataclasses.replace(e, graph="", time=0.0, seq=0) for e in events if isinstance(e, Rewrite | NearMiss)]
    return found, told, [e for e in events if isinstance(e, Cache) and e.cache == replay.CACHE]


def verdicts(caches: list[Cache]) -> list[str]:
    return [cache.verdict for cache in caches]


def entry() -> Path:
    (path,) = (folder() / replay.CACHE).glob("*.json")
    return path


def unread(*_: Any) -> Any:
    raise AssertionError("the graph is read")


def test_is_done_again_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    first, told, caches = compiled(attention, Q, Q, Q)
    assert verdicts(caches) == ["miss"]
    assert any(isinstance(e, Rewrite) and not e.kept for e in told)
    monkeypatch.setattr(fuse, "trace", unread)
    second, again, caches = compiled(attention, Q, Q, Q)
    assert verdicts(caches) == ["hit"]
    assert again == told
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    torch.testing.assert_close(second, attention(Q, Q, Q))
    report = omnicomp.audit()
    assert len(report.sites.fused) == 1
    assert "decisions" in str(report.to_json())


def test_file_is_of_this_user_alone() -> None:
    compiled(attention, Q, Q, Q)
    assert entry().stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of files")
def test_of_another_writer_is_a_miss() -> None:
    compiled(attention, Q, Q, Q)
    entry().chmod(0o666)
    found, _, caches = compiled(attention, Q, Q, Q)
    assert verdicts(caches)[0] == "miss"
    assert "not trusted" in caches[0].note
    torch.testing.assert_close(found, attention(Q, Q, Q))


@pytest.mark.parametrize("damage", ["", "{}", "[1", "changed"])
def test_damaged_is_a_named_miss(damage: str) -> None:
    compiled(attention, Q, Q, Q)
    text = entry().read_text()
    entry().write_text(text.replace("transpose", "permute") if damage == "changed" else damage)
    found, _, caches = compiled(attention, Q, Q, Q)
    assert verdicts(caches) == ["miss"]
    assert any(word in caches[0].note for word in ("damaged", "version"))
    torch.testing.assert_close(found, attention(Q, Q, Q))
    assert verdicts(compiled(attention, Q, Q, Q)[2]) == ["hit"]


@pytest.mark.parametrize("step", ["new", "change", "stay"])
def test_one_that_leads_elsewhere_changes_nothing(step: str) -> None:
    _, told, _ = compiled(attention, Q, Q, Q)
    data = json.loads(entry().read_text())
    cases = data["value"]["cases"]
    steps = [item for item in cases[0]["steps"] if item[0] == step]
    if not steps:
        pytest.skip("there is no such step")
    cases[0]["steps"].remove(steps[-1])
    data["value"]["sum"] = replay._sum(cases)
    entry().write_text(json.dumps(data))
    found, again, caches = compiled(attention, Q, Q, Q)
    assert verdicts(caches) == ["miss"]
    assert "can't be used" in caches[0].note
    assert len(again) == len(told)
    torch.testing.assert_close(found, attention(Q, Q, Q))


def test_what_is_assumed_is_checked_as_before() -> None:
    def long(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return masked(q, mask)

    q = torch.randn(1, 8, 512, 32)
    causal = torch.ones(512, 512).tril().bool()[None, None]
    for expected in ("miss", "hit"):
        torch._dynamo.reset()
        omnicomp.timeline.clear()
        call = torch.compile(long, backend="omni", options=with_eager())
        torch.testing.assert_close(call(q, causal), long(q, causal))
        events = omnicomp.timeline.events()
        found = [(e.verdict, e.note) for e in events if isinstance(e, Cache) and e.cache == replay.CACHE]
        assert expected in [verdict for verdict, _ in found], found
        assert any(e.type == "speculation" for e in events)
        other = torch.ones_like(causal)
        other[..., 300:] = False
        torch.testing.assert_close(call(q, other), long(q, other))


def test_another_program_or_option_is_a_miss() -> None:
    def twice(q: torch.Tensor) -> torch.Tensor:
        return attention(q, q, q) * 2

    assert verdicts(compiled(attention, Q, Q, Q)[2]) == ["miss"]
    assert verdicts(compiled(attention, Q[:1], Q[:1], Q[:1])[2]) == ["miss"]
    assert verdicts(compiled(attention, Q, Q, Q, dtype_policy="bf16")[2]) == ["miss"]
    assert verdicts(compiled(twice, Q)[2]) == ["miss"]
    with torch.no_grad():
        assert verdicts(compiled(attention, Q, Q, Q)[2]) == ["miss"]


def test_symbolic_sizes() -> None:
    for expected in ("miss", "hit"):
        torch._dynamo.reset()
        omnicomp.timeline.clear()
        call = torch.compile(attention, backend="omni", dynamic=True, options=with_eager())
        for length in (16, 24):
            q = torch.randn(2, 4, length, 8)
            torch.testing.assert_close(call(q, q, q), attention(q, q, q))
        events = omnicomp.timeline.events()
        assert [e.verdict for e in events if isinstance(e, Cache) and e.cache == replay.CACHE] == [expected]
        assert len([e for e in events if e.type == "capture"]) == 1


def test_gradients() -> None:
    for expected in ("miss", "hit"):
        q = Q.clone().requires_grad_()
        found, _, caches = compiled(attention, q, q, q)
        assert verdicts(caches) == [expected]
        (gradient,) = torch.autograd.grad(found.square().sum(), q)
        (reference,) = torch.autograd.grad(attention(q, q, q).square().sum(), q)
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-4)  # a fused kernel rounds otherwise


def test_functions_of_the_program_are_not_kept() -> None:
    scale = 1.0

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    torch.compiler.allow_in_graph(scaled)

    def function(q: torch.Tensor) -> torch.Tensor:
        return attention(scaled(q), q, q)

    _, _, caches = compiled(function, Q)
    assert verdicts(caches) == ["bypass"]
    assert "scaled" in caches[0].note


def test_a_window_in_flex_attention() -> None:
    def window(q: torch.Tensor) -> torch.Tensor:
        at = torch.arange(q.shape[-2])
        seen = (at[:, None] >= at) & (at[:, None] - at < 64)
        scores = (q @ q.transpose(-1, -2) * 0.125).masked_fill(~seen, float("-inf"))
        return F.softmax(scores, -1) @ q

    q = torch.randn(1, 2, 512, 64)
    with torch.no_grad():
        told = [compiled(window, q)[1:] for _ in range(2)]
        torch.testing.assert_close(compiled(window, q)[0], window(q))
    assert told[0][0] == told[1][0]
    assert verdicts(told[1][1]) in (["hit"], ["miss", "bypass"])
