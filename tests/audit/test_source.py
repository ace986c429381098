import json
import os
import threading
from pathlib import Path

import pytest

from omnicomp.audit import Audit, audit
from omnicomp.errors import TimelineError
from omnicomp.timeline import Capture, Event, JsonLinesSink, Ran, Subgraph, Timeline


def write(path: Path, events: list[Event]) -> None:
    timeline = Timeline()
    timeline.add_sink("file", JsonLinesSink(str(path)))
    for event in events:
        timeline.append(event)
    timeline.clear()


def test_a_file_gives_the_audit_of_the_process(tmp_path: Path, events: list[Event]) -> None:
    write(tmp_path / "t.jsonl", events)
    found = audit(tmp_path / "t.jsonl")
    assert found.stable() == audit(events).stable()
    assert found.to_text() == audit(events).to_text()


def test_two_runs_in_one_file_do_not_mix(tmp_path: Path, events: list[Event]) -> None:
    write(tmp_path / "t.jsonl", events)
    write(tmp_path / "t.jsonl", events)
    found = audit(str(tmp_path / "t.jsonl"))
    assert [graph.id for graph in found.graphs] == ["g0", "g0@2"]
    assert [row.id for row in found.graphs[1].subgraphs][1] == "g0@2.forward.0/softmax_topk"
    assert sum(found.shares.values()) == pytest.approx(1)


def test_processes_that_share_a_file_do_not_mix(tmp_path: Path) -> None:
    def line(pid: int, event: Event) -> str:
        return json.dumps({**event.to_dict(), "pid": pid}) + "\n"

    def plan(lowering: str) -> Subgraph:
        return Subgraph(graph="g0", part="forward", subgraph="g0.forward.0", lowering=lowering, nodes=1)

    def ran(lowering: str) -> Ran:
        return Ran(graph="g0", part="forward", subgraph="g0.forward.0", lowering=lowering)

    lines = [
        line(1, Capture(graph="g0")),
        line(2, Capture(graph="g0")),
        line(1, plan("inductor")),
        line(2, plan("eager")),
        line(2, ran("eager")),
        line(1, ran("inductor")),
        line(3, ran("eager")),  # a forked child of the process that captured last
    ]
    (tmp_path / "t.jsonl").write_text("".join(lines))
    found = audit(tmp_path / "t.jsonl")
    assert {row.id: (row.ran, len(row.runs)) for row in found.subgraphs} == {
        "g0.forward.0": ("inductor", 1),
        "g0@2.forward.0": ("eager", 2),
    }
    assert not found.mismatches


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        '{"type": "capture"}',
        '{"schema": 1, "type": "ran", "graph": "g0"}',
        '{"schema": 1, "type": "capture", "graph": ["g0"]}',
        '{"schema": 1, "type": "capture", "graph": "g0", "nodes": "many"}',
        '{"schema": 1, "type": "placement", "graph": "g0", "part": "forward", "nodes": {"eager": "x"}}',
        '{"schema": 1, "type": "retreat", "graph": "g0", "part": "", "subgraph": "g0", "source_lowering": "a", '
        '"target_lowering": "b", "reason": "because"}',
        '{"schema": 99, "type": "capture", "graph": "g0"}',
    ],
)
def test_a_corrupt_file_is_one_sentence(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.jsonl").write_text(f"{line}\n")
    with pytest.raises(TimelineError, match=r"line 1 .*give a file that") as caught:
        audit(tmp_path / "t.jsonl")
    assert "\n" not in str(caught.value)


def stable(audit_: Audit) -> str:
    return json.dumps(audit_.stable())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("form", ["timeline", "report"])
@pytest.mark.parametrize("piece", [100, 2**20])
def test_a_pipe_is_read_from_its_beginning(tmp_path: Path, events: list[Event], form: str, piece: int) -> None:
    write(tmp_path / "t.jsonl", events)
    expected = audit(tmp_path / "t.jsonl")
    text = expected.to_json() if form == "report" else (tmp_path / "t.jsonl").read_text()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def fill() -> None:
        with pipe.open("wb", buffering=0) as stream:
            content = text.encode()
            for start in range(0, len(content), piece):
                stream.write(content[start : start + piece])

    thread = threading.Thread(target=fill)
    thread.start()
    found = audit(pipe)
    thread.join()
    assert found.graphs
    assert stable(found) == stable(expected)


def test_a_report_that_an_editor_gave_a_byte_order_mark_is_a_report(tmp_path: Path, events: list[Event]) -> None:
    (tmp_path / "r.json").write_text(audit(events).to_json(), encoding="utf-8-sig")
    assert stable(audit(tmp_path / "r.json")) == stable(audit(events))


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match="can't be read"):
        audit(tmp_path / "none.jsonl")
