"""The JSON form: what is written is right by its schema, and reads back as it was."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import reports
from drawn import generator
from hypothesis import given
from hypothesis import strategies as st

from omnicomp.audit import AUDIT_SCHEMA, Audit, audit, build, diff
from omnicomp.audit.schema import FILE, generate, load
from omnicomp.audit.views.jsonform import from_dict, from_json, to_dict
from omnicomp.errors import ReportError
from omnicomp.timeline import Boundary, Capture, Event, Memory, NodePlacement, Placement, Stage, Subgraph, Timing

Events = list[Event]


@pytest.fixture
def report(events: Events) -> dict[str, Any]:
    more: Events = [
        Stage(graph="g0", stage="lowering", part="forward", seconds=0.5),
        Boundary(graph="g0", part="forward", source="g0.forward.0", target="g0.forward.1", tensors=1, casts=1),
        Memory(graph="g0", part="forward", subgraph="g0.forward.0", device="cpu", call=0, peak_bytes=5),
        Timing(graph="g0", part="forward", subgraph="g0.forward.0", device="cpu", calls=1, seconds=0.5, fastest=0.5),
    ]
    return to_dict(build([*events, *more]))


def test_the_schema_that_is_shipped_is_that_of_the_dataclasses() -> None:
    assert load() == generate(), "run python -m omnicomp.audit.schema"
    assert FILE == f"report-{AUDIT_SCHEMA}.json"
    jsonschema.Draft202012Validator.check_schema(load())


def test_a_report_is_right_by_the_schema_and_reads_back(report: dict[str, Any]) -> None:
    reports.check(report)
    jsonschema.validate(report, load())
    assert to_dict(from_dict(json.loads(json.dumps(report)))) == report
    reports.check_audit(Audit())


@pytest.mark.parametrize(
    "break_it",
    [
        lambda report: report.pop("graphs"),
        lambda report: report.update(schema=AUDIT_SCHEMA + 1),
        lambda report: report["graphs"][0].update(nodes="many"),
        lambda report: report["graphs"][0]["parts"][0]["subgraphs"][0].update(share="half"),
        lambda report: report["graphs"][0]["parts"][0]["declined"][0]["chain"][0].pop("code"),
        lambda report: report["graphs"][0]["parts"][0]["subgraphs"][0]["attempts"][0].update(ok=1),
    ],
)
def test_what_is_wrong_is_refused_by_the_schema_and_by_the_reader(
    report: dict[str, Any], break_it: Callable[[dict[str, Any]], object]
) -> None:
    break_it(report)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, load())
    with pytest.raises(ReportError) as caught:
        from_dict(report, "r.json")
    assert str(caught.value).startswith("r.json ")
    assert "\n" not in str(caught.value)


def test_a_newer_version_is_refused_in_one_sentence(report: dict[str, Any]) -> None:
    with pytest.raises(ReportError, match=r"^r.json has schema 3 and this version reads up to 2; upgrade omnicomp$"):
        from_dict({**report, "schema": 3}, "r.json")


def test_the_first_version_is_read(report: dict[str, Any]) -> None:
    graph = report["graphs"][0]
    for key in ("identity", "settings", "stages", "pid", "left_out"):
        del graph[key]
    for row in graph["parts"][0]["subgraphs"]:
        del row["shares"], row["timing"]
    found = Audit.of(from_dict({"schema": 1, "events": 21, "graphs": [graph]}))
    assert found.summary().startswith("omni: 1 graph, 3 subgraphs: inductor 80.0 %")
    assert found.graphs[0].settings == ()


def test_unknown_keys_are_ignored(report: dict[str, Any]) -> None:
    report["graphs"][0]["colour"] = "red"
    assert "colour" not in to_dict(from_dict(report))["graphs"][0]


def test_the_same_views_come_from_a_report_as_from_its_timeline(tmp_path: Path, events: Events) -> None:
    found = build(events)
    for name, text in (("indented", found.to_json()), ("compact", json.dumps(to_dict(found)))):
        (tmp_path / f"{name}.json").write_text(text)
        again = audit(tmp_path / f"{name}.json")
        assert again.to_text() == found.to_text()
        assert again.to_html() == found.to_html()
        assert again.to_json() == found.to_json()


def test_a_large_report_on_one_line_is_told_from_a_timeline(tmp_path: Path, events: Events) -> None:
    declined = tuple(NodePlacement(node=f"n{i}", op="aten.topk.default", lowering="eager") for i in range(2000))
    found = build([*events, Placement(graph="g0", part="forward", nodes={"eager": 2000}, declined=declined)])
    (tmp_path / "r.json").write_text(json.dumps(to_dict(found)))
    assert audit(tmp_path / "r.json").to_json() == found.to_json()
    (tmp_path / "sorted.json").write_text(json.dumps(to_dict(found), sort_keys=True))
    assert to_dict(audit(tmp_path / "sorted.json")) == to_dict(found)


def test_a_report_that_was_cut_off_is_one_sentence(tmp_path: Path, events: Events) -> None:
    text = build(events).to_json()
    (tmp_path / "r.json").write_text(text[: len(text) // 2])
    with pytest.raises(ReportError, match="is no report") as caught:
        audit(tmp_path / "r.json")
    assert "\n" not in str(caught.value)


def test_an_option_of_any_shape_is_written(events: Events) -> None:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    found = build([Capture(graph="g0", options={"deep": deep, "number": float("inf"), "type": object})])
    assert json.loads(found.to_json())["graphs"][0]["options"]["number"] is None
    reports.check_audit(found)


PARTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.dictionaries(st.sampled_from(["schema", "graphs", "events", "share_basis"]), PARTS), graph=PARTS)
def test_any_data_is_a_report_or_one_sentence(data: dict[str, Any], graph: Any) -> None:
    for candidate in (data, {"schema": 2, "graphs": [{"id": "g0", "parts": [graph]}]}, {**data, "schema": 2}):
        try:
            found = Audit.of(from_dict(candidate))
        except ReportError as error:
            found = None
            assert "\n" not in str(error)  # noqa: PT017
        if found is not None:
            found.to_json()
            found.to_text()


@given(st.text())
def test_any_text_is_a_report_or_one_sentence(text: str) -> None:
    with pytest.raises(ReportError, match=r"^r.json is no report[^\n]*$"):
        from_json(text, "r.json")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def test_a_report_with_a_wrong_value_anywhere_is_a_report_or_one_sentence(
    report: dict[str, Any], events: Events
) -> None:
    values = [None, True, -1, 10**30, float("nan"), "", "x\ny", [], {}, ["a"], {"a": 1}, [[]], {"code": "x"}]
    draw, every, read = generator("wrong values"), list(places(report)), 0
    right = jsonschema.Draft202012Validator(load())
    for _ in range(200):
        *path, last = draw.choice(every)
        broken = target = copy.deepcopy(report)
        for key in path:
            target = target[key]
        target[last] = draw.choice(values)
        try:
            found = Audit.of(from_dict(broken, "r.json"))
        except ReportError as error:
            assert "\n" not in str(error)  # noqa: PT017
            continue
        read += 1
        right.validate(json.loads(json.dumps(to_dict(found))))
        assert found.to_text()
        assert diff(events, found).to_markdown()
    assert 10 < read < 190


def test_every_key_is_documented() -> None:
    docs = Path(__file__).parents[3] / "docs"
    documented = set(re.findall(r"`(\w+)`", (docs / "audit.md").read_text() + (docs / "timeline.md").read_text()))
    schema = load()
    keys = set(schema["properties"])
    for definition in schema["$defs"].values():
        keys |= set(definition["properties"])
    assert keys <= documented, sorted(keys - documented)


def test_every_definition_of_the_schema_says_what_it_is() -> None:
    assert all(definition["description"] for definition in load()["$defs"].values())


def test_subgraphs_leave_out_what_their_place_says(report: dict[str, Any]) -> None:
    row = report["graphs"][0]["parts"][0]["subgraphs"][0]
    assert not {"graph", "part"} & set(row)
    assert not {"graph", "part", "subgraph", "seq", "schema", "type"} & set(row["runs"][0])
    again = from_dict(report).subgraphs[0]
    assert (again.graph, again.part, again.runs[0].subgraph) == ("g0", "forward", "g0.forward.0")
    assert isinstance(from_dict(report).graphs[0].parts[0].boundaries[0], Boundary)
    assert Subgraph.type == "subgraph"
