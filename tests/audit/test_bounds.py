"""A timeline or a report of any size is read in bounded memory, and what was left out is said."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from processes import peaks_of_memory

from omnicomp.audit import source
from omnicomp.audit.fold import fold
from omnicomp.audit.source import load
from omnicomp.audit.views.html import to_html
from omnicomp.audit.views.tree import to_tree
from omnicomp.cli.check import run_check
from omnicomp.errors import ReportError, TimelineError
from omnicomp.timeline import Capture, Event, NearMiss, Placement, Reason, Subgraph


def written(path: Path, graphs: int, pids: int = 1) -> Path:
    with path.open("w") as file:
        for number in range(graphs):
            name = f"g{number // pids}"
            events: list[Event] = [
                Capture(graph=name, nodes=1),
                Placement(graph=name, part="forward", nodes={"eager": 1}),
            ]
            row = Subgraph(graph=name, part="forward", subgraph=f"{name}.forward.0", lowering="eager", nodes=1, ops={})
            for event in [*events, row]:
                file.write(json.dumps({**event.to_dict(), "pid": number % pids, "rank": 0}) + "\n")
    return path


def test_later_graphs_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["omnicomp.audit.fold"], "_MOST_GRAPHS", 10)
    monkeypatch.setattr(source, "_NAMES", 20)
    path = written(tmp_path / "t.jsonl", 60, pids=2)
    found = load(path)
    assert [graph.id for graph in found.graphs[:3]] == ["g0", "g0@2", "g1"]
    assert (len(found.graphs), found.left_out, found.events) == (10, 50, 180)
    assert all(len(tuple(graph.subgraphs)) == 1 for graph in found.graphs)
    for view in (found.to_text(), to_tree(found)):
        assert "left out of this report: 50 later graphs" in view
    assert '"later graphs, left out":50' in to_html(found)
    again = tmp_path / "report.json"
    again.write_text(found.to_json())
    assert load(again).left_out == 50
    with pytest.raises(TimelineError, match="50 graphs more than are judged"):
        run_check(path)


BOUNDED = """
from omnicomp.audit import load, source

sys.modules["omnicomp.audit.fold"]._MOST_GRAPHS = 20
source._NAMES = 40
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{count}.jsonl", count) for count in (200, 2000)]
    short, long = peaks_of_memory("load", paths, setup=BOUNDED)
    assert long < 1.2 * short


def test_subgraphs_and_events_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["omnicomp.audit.fold"], "_MOST_ROWS", 5)
    monkeypatch.setattr(sys.modules["omnicomp.audit.fold"], "_MOST_EVENTS", 3)
    miss = NearMiss(graph="g0", kind="pass", name="p", node="n", reason=Reason(code="build_failed", sentence="x"))
    row = Subgraph(graph="g0", part="forward", subgraph="", lowering="eager", nodes=1, ops={})
    rows = [dataclasses.replace(row, subgraph=f"g0.forward.{number}") for number in range(9)]
    found = fold([Capture(graph="g0"), *[miss] * 5, *rows])
    assert (len(found.subgraphs), found.graphs[0].left_out) == (5, {"near_misses": 2, "subgraphs": 4})
    assert found.gaps == "left out of this report: 6 events"


def test_a_report_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text(load(written(tmp_path / "t.jsonl", 3)).to_json())
    monkeypatch.setattr(source, "_LARGEST", 1000)
    monkeypatch.setattr(source, "_BEGINNING", 100)
    with pytest.raises(ReportError, match="give the timeline that it was made of"):
        load(path)


@pytest.mark.parametrize("field", ["nodes", "time"])
def test_a_number_that_no_float_holds_is_one_sentence(tmp_path: Path, field: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({**Capture(graph="g0").to_dict(), field: 10**400}) + "\n")
    with pytest.raises(TimelineError, match=r"line 1 .* 1329 bits"):
        load(path)
    report = tmp_path / "report.json"
    report.write_text(load(written(path, 1)).to_json().replace('"nodes": 1', f'"nodes": {10**400}'))
    with pytest.raises(ReportError, match="1329 bits"):
        load(report)
