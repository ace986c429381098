import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from omnicomp.timeline import (
    CODES,
    EVENT_TYPES,
    SCHEMA_VERSION,
    Agreement,
    Artefacts,
    Attempt,
    Background,
    Boundary,
    Cache,
    Calibration,
    Candidate,
    Capture,
    Certified,
    CudaGraph,
    Event,
    Memory,
    NearMiss,
    NodePlacement,
    Option,
    Outcome,
    PassRun,
    Placement,
    Process,
    Ran,
    Reason,
    Retreat,
    Rewrite,
    Speculation,
    Stage,
    Subgraph,
    Timing,
    Verification,
    Weights,
)
from omnicomp.timeline.files import event_from_dict

WHY = Reason(code="match_ended", sentence="it ended", observed="a", needed="b", node="n", source="m.py:1", lever="do")
EVENTS: list[Event] = [
    Process(state="ended", run="12-ab", pid=12, rank=1),
    Outcome(graph="g0", state="raised", part="forward", subgraph="g0.forward.0", error="RuntimeError"),
    Capture(graph="g0", compile_id="0/1", nodes=3, options={"lowerings": ["eager"]}, versions={"torch": "2.13"}),
    Background(graph="g0", state="failed", calls=8, seconds=0.5, reason=WHY),
    Option(graph="g0", key="k", requested="True", effective="False", reason=WHY),
    PassRun(graph="g0", name="p", seconds=0.5, node_diff={"aten.mm.default": -1}),
    Rewrite(graph="g0", name="p", kind="attention", node="n"),
    Certified(graph="g0", name="p", node="n", verdict="proved", methods=("algebra",), nodes=("n",), probability=-80.0),
    NearMiss(graph="g0", name="p", kind="attention", node="n", reason=WHY),
    Speculation(graph="g0", state="stopped", variant="general", sentence="it is full", inputs=("x",), reason=WHY),
    Placement(
        graph="g0",
        part="forward",
        nodes={"eager": 1},
        declined=(NodePlacement(node="n", op="aten.foo.default", lowering="eager", chain=(WHY, WHY)),),
    ),
    Subgraph(graph="g0", part="forward", subgraph="g0.forward.0", lowering="eager", nodes=1, modules=("a", "b")),
    Subgraph(graph="g0", part="forward", subgraph="g0.forward.1", lowering="inductor", nodes=1, left_whole=WHY),
    Attempt(graph="g0", part="", subgraph="g0", lowering="inductor", ok=False, reason=WHY),
    Attempt(graph="g0", part="", subgraph="g0", lowering="eager", ok=True, selected=True),
    Retreat(graph="g0", part="", subgraph="g0", source_lowering="inductor", target_lowering="eager", reason=WHY),
    Ran(graph="g0", part="", subgraph="g0", lowering="eager", kernels={"mm": 2}),
    Verification(graph="g0", part="forward", subgraph="g0.forward.0/o", name="o", state="right", seconds=0.5),
    Cache(graph="g0", part="", cache="fx_graph", verdict="hit"),
    Artefacts(path="file", state="missed", counts={"library": 2}, bytes=3, reason=WHY),
    Calibration(graph="g0", state="measured", bound=1e-2, lowered=5, kept=1, before=0.5, after=1e-3, reason=WHY),
    Memory(graph="g0", part="forward", subgraph="g0.forward.0", device="cuda", call=2, peak_bytes=3),
    Weights(graph="g0", copies=3, bytes=128, shared=64, total=256),
    Candidate(
        graph="g0",
        candidate="openvino",
        lowerings=("override", "openvino", "eager"),
        clock="wall",
        seconds=2e-3,
        fastest=1e-3,
        spread=0.02,
        speed=0.9,
        rounds=5,
        error=1e-6,
        own=1e-6,
        build_seconds=0.5,
        reason=WHY,
    ),
    Agreement(graph="g0", part="forward", state="differs", ranks=(1, 3), seconds=0.5, reason=WHY),
    Stage(graph="g0", stage="lowering", seconds=0.5, part="forward"),
    Timing(graph="g0", part="forward", subgraph="g0.forward.0", device="cpu", calls=4, seconds=0.5, fastest=0.1),
    CudaGraph(graph="g0", part="forward", subgraph="g0.forward.0", state="plain", sizes=(4,), reason=WHY),
    Boundary(graph="g0", part="forward", source="g0.forward.0", target="g0.forward.1", tensors=2, bytes="4*s0"),
]


def test_every_type_is_tested() -> None:
    assert {event.type for event in EVENTS} == set(EVENT_TYPES)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.type)
def test_round_trip(event: Event) -> None:
    assert event_from_dict(json.loads(json.dumps(event.to_dict()))) == event


def test_types_are_named_after_the_classes() -> None:
    assert (NearMiss.type, PassRun.type, Ran.type) == ("near_miss", "pass_run", "ran")


def test_unknown_fields_and_types_are_ignored() -> None:
    data = Capture(graph="g0").to_dict()
    assert event_from_dict({**data, "colour": "red"}) == Capture(graph="g0")
    assert event_from_dict({**data, "type": "party"}) is None


def test_a_newer_schema_is_refused() -> None:
    data = {**Capture(graph="g0").to_dict(), "schema": SCHEMA_VERSION + 1}
    with pytest.raises(ValueError, match="upgrade omnicomp"):
        event_from_dict(data)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "1"},
        {"graph": 3},
        {"nodes": "3"},
        {"nodes": True},
        {"dynamic": "no"},
        {"versions": "2.13"},
        {"time": "noon"},
        {"options": []},
    ],
)
def test_a_field_of_the_wrong_kind_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        event_from_dict({**Capture(graph="g0").to_dict(), **change})


def test_options_that_json_does_not_know_become_text() -> None:
    assert Capture(graph="g0", options={"a": object, "b": (1, 2)}).to_dict()["options"] == {
        "a": "<class 'object'>",
        "b": [1, 2],
    }


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_does_not_know_are_text_and_come_back(number: float) -> None:
    event = PassRun(graph="g0", name="p", seconds=number)
    text = json.dumps(event.to_dict(), allow_nan=False)
    assert repr(event_from_dict(json.loads(text))) == repr(event)
    assert Capture(graph="g0", options={"a": [number]}).to_dict()["options"] == {"a": [str(number)]}


def test_reasons_have_known_codes() -> None:
    with pytest.raises(ValueError, match="unknown reason code"):
        Reason(code="because", sentence="no")
    assert all(sentence for sentence in CODES.values())


def test_a_reason_of_a_newer_version_keeps_its_code() -> None:
    reason = Reason.from_dict({"code": "from_the_future", "sentence": "no", "colour": "red"})
    assert (reason.code, reason.lever) == ("from_the_future", "")


def test_a_reason_in_one_line() -> None:
    assert str(WHY) == "it ended (observed a; needed b) at n m.py:1. To change this: do"
    assert str(Reason(code="match_ended", sentence="it ended")) == "it ended"


def test_every_field_and_code_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "timeline.md").read_text()
    for name, cls in EVENT_TYPES.items():
        section = text[text.index(f"### `{name}`:") :].split("\n### ")[0]
        own = {field.name for field in dataclasses.fields(cls)} - {"graph", "time", "seq"}
        documented = set(re.findall(r"`(\w+)`", section))
        assert own <= documented | {"source", "node", "module"}, name
    assert all(f"| `{code}` |" in text for code in CODES)
