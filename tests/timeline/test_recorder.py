"""A step down is recorded in one place, with the same events wherever it happens."""

import ast
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

import omnicomp
from omnicomp.timeline import Attempt, Capture, Ran, Reason, Retreat, Timeline, rank
from omnicomp.timeline.recorder import Where, record_step_down


class Kept:
    def __init__(self, fails: bool = False) -> None:
        self.records: list[dict[str, Any]] = []
        self.closed = 0
        self.fails = fails

    def write(self, record: dict[str, Any]) -> None:
        if self.fails:
            raise OSError("disk full")
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1


def test_events_are_stamped_in_order() -> None:
    timeline = Timeline()
    for name in ("g0", "g1", "g0"):
        timeline.append(Capture(graph=name))
    assert [event.seq for event in timeline] == [0, 1, 2]
    assert [event.seq for event in timeline.events("g0")] == [0, 2]
    assert all(event.time > 0 for event in timeline)
    assert len(timeline) == 3


def test_graph_ids_go_on_after_clear() -> None:
    timeline = Timeline()
    assert [timeline.next_graph(), timeline.next_graph()] == ["g0", "g1"]
    timeline.append(Capture(graph="g0"))
    timeline.clear()
    assert len(timeline) == 0
    assert timeline.next_graph() == "g2"


def test_threads_lose_nothing() -> None:
    timeline, sink = Timeline(), Kept()
    timeline.add_sink("kept", sink)
    start = threading.Barrier(8)

    def work(name: str) -> None:
        start.wait()
        for _ in range(200):
            timeline.append(Capture(graph=name, nodes=1))

    threads = [threading.Thread(target=work, args=(f"g{i}",), name=f"worker-{i}") for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.seq for event in timeline] == list(range(1600))
    assert [record["seq"] for record in sink.records] == list(range(1600))
    assert {record["thread"] for record in sink.records} == {f"worker-{i}" for i in range(8)}


def test_a_sink_gets_what_only_the_recorder_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    timeline, sink = Timeline(), Kept()
    timeline.add_sink("kept", sink)
    timeline.append(Capture(graph="g0"))
    assert {"pid", "rank", "thread", "schema", "type", "time", "seq"} <= set(sink.records[0])
    assert sink.records[0]["rank"] == 3


@pytest.mark.parametrize("value", ["", "first"])
def test_a_rank_that_is_no_number_is_zero(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("RANK", value)
    assert rank() == 0


def test_a_failing_sink_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    timeline, good = Timeline(), Kept()
    timeline.add_sink("bad", Kept(fails=True))
    timeline.add_sink("good", good)
    with caplog.at_level(logging.WARNING, "omnicomp.timeline"):
        timeline.append(Capture(graph="g0"))
        timeline.append(Capture(graph="g1"))
    assert len(caplog.records) == 1
    assert "disk full" in caplog.text
    assert not timeline.has_sink("bad")
    assert len(good.records) == len(timeline) == 2


def test_a_second_sink_of_the_same_key_is_closed() -> None:
    timeline, first, second = Timeline(), Kept(), Kept()
    timeline.add_sink("kept", first)
    timeline.add_sink("kept", second)
    timeline.append(Capture(graph="g0"))
    assert (len(first.records), len(second.records), second.closed) == (1, 0, 1)
    timeline.clear()
    assert first.closed == 1


WHERE = Where(graph="g0", part="forward", subgraph="g0.forward.1")
RAN = ("seen", {"aten.sin.default": 1})
REASON = Reason(code="call_failed", sentence="it raised")


@pytest.mark.parametrize("attempts", [True, False])
@pytest.mark.parametrize("ran", [True, False])
def test_the_events(attempts: bool, ran: bool) -> None:
    timeline = Timeline()
    record_step_down(timeline, WHERE, "inductor", "eager", REASON, attempts=attempts, ran=RAN if ran else None)
    expected = [
        Retreat(**WHERE, source_lowering="inductor", target_lowering="eager", reason=REASON),
        *([Attempt(**WHERE, lowering="inductor", ok=False, reason=REASON)] if attempts else []),
        *([Attempt(**WHERE, lowering="eager", ok=True, selected=True)] if attempts else []),
        *([Ran(**WHERE, lowering="eager", evidence="seen", kernels={"aten.sin.default": 1})] if ran else []),
    ]
    unplaced = [{**event.to_dict(), "time": 0, "seq": 0} for event in timeline.events()]
    assert unplaced == [{**event.to_dict(), "time": 0, "seq": 0} for event in expected]


def test_no_other_module_makes_such_an_event() -> None:
    package = Path(omnicomp.__file__).parent
    makers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Retreat":
                makers.add(str(path.relative_to(package)))
    assert makers == {"timeline/recorder.py"}
