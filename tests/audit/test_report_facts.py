"""What the recorder tells beyond placement: stages, options, boundaries, times of calls, identities."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import omnicomp
from omnicomp.audit import Audit
from omnicomp.audit.views import rows
from omnicomp.backend import autograd
from omnicomp.devices.limits import Limits
from omnicomp.lowerings.overrides.registry import unregister
from omnicomp.options.policy import effective_options, parse
from omnicomp.timeline import Boundary, Capture, Stage, Timing, current


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.digamma(self.up(x).relu() + 1).double().float())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def report(calls: int = 1, *, train: bool = True, **options: Any) -> Audit:
    compiled = torch.compile(Stack(), backend="omni", options={"lowerings": ["eager"], **options})
    for _ in range(calls):
        with torch.set_grad_enabled(train):
            result = compiled(torch.randn(4, 8))
        if train:
            result.sum().backward()
    return omnicomp.audit()


def test_every_stage_of_a_compilation_has_its_time() -> None:
    found = report()
    stages = [(event.stage, event.part) for event in current() if isinstance(event, Stage)]
    assert sorted(stages) == [("autograd", ""), ("dynamo", ""), ("lowering", "backward"), ("lowering", "forward")]
    assert stages[0] == ("dynamo", "")
    (graph,) = found.graphs
    assert list(graph.compile_seconds) == ["dynamo", "passes", "autograd", "lowering"]
    assert all(0 < seconds < 60 for seconds in graph.compile_seconds.values())


def test_a_stage_inside_another_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr(autograd.time, "perf_counter", lambda: next(clock))
    with autograd.stage("autograd", "g0"), autograd.stage("lowering", "g0", "forward"):
        pass
    seconds = {event.stage: event.seconds for event in current() if isinstance(event, Stage)}
    assert seconds == {"lowering": 3.0, "autograd": 7.0}


def test_a_stage_that_raises_is_recorded_and_not_swallowed() -> None:
    with pytest.raises(KeyError), autograd.stage("autograd", "g0"):
        raise KeyError("x")
    assert [event.stage for event in current() if isinstance(event, Stage)] == ["autograd"]


def test_the_capture_says_what_and_where_it_is() -> None:
    (graph,) = report(train=False).graphs
    assert graph.module == "layers"
    assert graph.identity.startswith("layers/inference/")
    assert graph.versions["python"].count(".") == 2
    assert graph.platform
    assert graph.pid > 0
    (row,) = graph.subgraphs
    assert row.identity.startswith("layers/inference/")
    assert row.module == "layers"


def test_the_same_model_has_the_same_identities_again() -> None:
    first = [row.identity for row in report().subgraphs]
    torch.compiler.reset()
    omnicomp.timeline.clear()
    assert [row.identity for row in report().subgraphs] == first
    assert len(set(first)) == 2


def test_an_option_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICOMP_VERIFY", "off")
    monkeypatch.setenv("OMNICOMP_PLACE", "aten.topk:eager")
    options = {"max_builds": 3, "epilogue_fusion": False}
    values, origins = effective_options(parse("max-autotune-no-cudagraphs", options), options)
    assert (values["max_builds"], origins["max_builds"]) == ("3", "options")
    assert (values["verify"], origins["verify"]) == ("off", "environment OMNICOMP_VERIFY")
    assert (values["speculate"], origins["speculate"]) == ("True", "default")
    assert (values["lowerings"], origins["lowerings"]) == (
        "override, inductor, eager; aten.topk: eager",
        "environment OMNICOMP_PLACE",
    )
    assert (values["epilogue_fusion"], origins["epilogue_fusion"]) == ("False", "options")
    assert (values["max_autotune"], origins["max_autotune"]) == ("True", "mode max-autotune-no-cudagraphs")


def test_an_option_of_the_call_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICOMP_VERIFY", "off")
    values, origins = effective_options(parse(None, {"verify": "first"}), {"verify": "first"})
    assert (values["verify"], origins["verify"]) == ("first", "options")


def test_what_crosses_a_cut_is_told_with_its_casts() -> None:
    @omnicomp.override(op=torch.ops.aten.digamma.default, dtypes=(torch.float32,), name="facts_digamma")
    def facts_digamma(x: Tensor) -> Tensor:
        return torch.special.digamma(x)

    try:
        found = report(train=False, lowerings=["override", "eager"], overrides=["facts_digamma"])
    finally:
        unregister("facts_digamma")
    (graph,) = found.graphs
    (part,) = graph.parts
    assert [row.planned for row in part.subgraphs] == ["eager", "override", "eager", "override", "eager"]
    crossing = {(b.source[-1], b.target[-1]): b for b in part.boundaries}
    assert crossing["0", "1"].tensors == 1
    assert crossing["0", "1"].bytes_hint == 4 * 16 * 4
    assert (crossing["0", "1"].casts, crossing["1", "2"].casts) == (0, 1)
    assert [row.module for row in part.subgraphs] == ["layers.0", "layers.0", "layers", "layers.1", "layers.1"]


def test_calls_are_timed_if_asked_for() -> None:
    found = report(calls=5, timing=True)
    events = [event for event in current() if isinstance(event, Timing)]
    assert [event.calls for event in events if event.part == "forward"] == [1, 2, 4]
    for row in found.subgraphs:
        assert row.timing is not None
        assert row.timing.calls == 4
        assert 0 < row.timing.fastest <= row.timing.mean
    assert sum(found.shares_by["seconds"].values()) == pytest.approx(1)


def test_what_the_device_can_do_is_told_where_doctor_measured_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnicomp.devices.limits.known", lambda type: Limits(bytes=1e6, flops=1e9, dtype="float32"))
    row = report(calls=2, timing=True, train=False).subgraphs[0]
    assert row.timing is not None
    assert (row.timing.copy_rate, row.timing.product_rate, row.timing.kernels) == (1e6, 1e9, 0)
    assert 0 < row.timing.host_seconds <= row.timing.fastest
    text = rows.speed(row)
    assert rows.percent(row.bytes_hint / row.timing.fastest / 1e6) + " of the copy rate" in text
    assert "of the rate of float32 products" in text
    assert "kernel" not in text
    assert "host" not in text
    assert text in rows.what(row)


def test_nothing_is_timed_unasked() -> None:
    assert all(row.timing is None for row in report().subgraphs)
    assert not any(isinstance(event, (Timing, Boundary)) for event in current())


def test_captures_of_a_variant_agree() -> None:
    report()
    captures = [event for event in current() if isinstance(event, Capture)]
    assert len({event.fingerprint for event in captures}) == 1
