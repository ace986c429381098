"""OpenTelemetry spans, taken by the SDK's exporter into memory."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import omnicomp
from omnicomp.timeline import Timeline
from omnicomp.timeline.sinks import opentelemetry

sdk = pytest.importorskip("opentelemetry.sdk.trace")
api = pytest.importorskip("opentelemetry.trace")

SECRET = "not-for-any-collector"


@pytest.fixture(scope="module")
def exporter() -> Any:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    found = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    api.set_tracer_provider(provider)
    return found


@pytest.fixture
def spans(exporter: Any) -> Iterator[Any]:
    exporter.clear()
    yield lambda: exporter.get_finished_spans()
    exporter.clear()


def f(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 1).sum()


def test_stages_and_attempts_are_spans_inside_one_another(spans: Any) -> None:
    torch.compile(f, backend="omni", options={"lowerings": ["eager"]})(torch.ones(3, requires_grad=True)).backward()
    found = spans()
    (graph,) = omnicomp.audit().graphs
    names = [span.name for span in found]
    assert names.count("omnicomp.part") == names.count("omnicomp.build") == 2
    assert names.count("omnicomp.compile") == 1
    assert {span.attributes["omnicomp.by"] for span in found if span.name == "omnicomp.pass"} >= {"attention_fusion"}
    by_id = {span.context.span_id: span for span in found}
    for span in found:
        assert span.attributes["omnicomp.graph"] == graph.id
        if span.name == "omnicomp.build":
            part = by_id[span.parent.span_id]
            assert part.name == "omnicomp.part"
            assert span.attributes["omnicomp.subgraph"] == f"{graph.id}.{part.attributes['omnicomp.part']}.0"
            assert span.attributes["omnicomp.lowering"] == "eager"
            assert span.start_time >= part.start_time
    attempts = [event for span in found for event in span.events if event.name == "omnicomp.attempt"]
    assert [event.attributes["omnicomp.selected"] for event in attempts] == [True, True]


def test_a_compilation_is_inside_the_programs_own_span(spans: Any) -> None:
    with api.get_tracer("program").start_as_current_span("request"):
        torch.compile(f, backend="omni", options={"lowerings": ["eager"]})(torch.ones(3))
    by_name = {span.name: span for span in spans()}
    assert by_name["omnicomp.compile"].parent.span_id == by_name["request"].context.span_id


def test_a_failed_stage_has_a_status_without_secrets(spans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTOR_TOKEN", SECRET)
    omnicomp.safety.privacy.refresh()
    with pytest.raises(ValueError, match=SECRET), opentelemetry.span("omnicomp.build", {"graph": "g0", "empty": ""}):
        raise ValueError(f"said {SECRET}\nand more")
    (span,) = spans()
    assert span.status.status_code is api.StatusCode.ERROR
    assert span.status.description == "ValueError: said ***"
    assert dict(span.attributes) == {"omnicomp.graph": "g0"}
    assert not span.events


def test_a_program_without_opentelemetry_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    timeline = Timeline()
    opentelemetry.attach(timeline)
    assert not timeline._sinks
    with opentelemetry.span("omnicomp.build", {"graph": "g0"}) as span:
        assert span is None
    opentelemetry.describe(None, {"graph": "g0"})
    assert "opentelemetry.trace" not in sys.modules
