"""Files tell that a process began, and that it ended; a killed one has no end."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from processes import python

from omnicomp.audit import load
from omnicomp.timeline import Capture, Process, Timeline
from omnicomp.timeline.files import read_records
from omnicomp.timeline.sinks.jsonl import JsonLinesSink

PROGRAM = """
import os, sys
from omnicomp.timeline import Capture, Timeline
from omnicomp.timeline.sinks.jsonl import JsonLinesSink
timeline = Timeline()
timeline.add_sink("file", JsonLinesSink(sys.argv[1]))
timeline.begin()
timeline.append(Capture(graph="g0", run="x"))
"""


def states(path: Path) -> list[str]:
    return [event.state if isinstance(event, Process) else event.type for _, event in read_records(path)]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("", "ended"),
        ("raise RuntimeError('mine')", "ended"),
        ("raise KeyboardInterrupt", "ended"),
        ("sys.exit(3)", "ended"),
        ("import atexit; atexit.register(os.kill, os.getpid(), 9)", ""),
        ("import threading; threading.Thread(target=timeline.append, args=(Capture(graph='g1'),)).start()", "ended"),
        ("os._exit(0)", ""),
        ("os.kill(os.getpid(), 9)", ""),
        ("os.abort()", ""),
    ],
)
def test_an_end_is_written_unless_the_process_was_killed(tmp_path: Path, end: str, expected: str) -> None:
    path = tmp_path / "t.jsonl"
    python("-c", PROGRAM + end, path)
    found = states(path)
    assert found[:2] == ["began", "capture"]
    assert ("ended" in found) == (expected == "ended")
    assert found.count("ended") <= 1


def test_children_of_multiprocessing_have_an_end_of_their_own(tmp_path: Path) -> None:
    program = PROGRAM + (
        "import multiprocessing\n"
        "def work(dies):\n"
        "    timeline.append(Capture(graph='g1'))\n"
        "    if dies: os._exit(1)\n"
        "def idle(): pass\n"
        "for target, args in ((work, (False,)), (work, (True,)), (idle, ())):\n"
        "    child = multiprocessing.get_context('fork').Process(target=target, args=args)\n"
        "    child.start(); child.join()\n"
    )
    path = tmp_path / "t.jsonl"
    python("-c", program, path, check=True)
    found = load(path)
    assert [process.state for process in found.processes if process.began] == ["ended", "ended", "unfinished"]


def test_a_raw_fork_that_leaves_in_order_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    program = PROGRAM + "child = os.fork()\ntimeline.append(Capture(graph='g1'))\nif child: os.wait()\n"
    python("-c", program, path, check=True)
    assert sorted(states(path)) == ["began", "began", "capture", "capture", "capture", "ended", "ended"]


def test_a_sink_that_is_closed_tells_the_end(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    timeline = Timeline()
    timeline.add_sink("file", JsonLinesSink(str(path)))
    timeline.begin()
    timeline.begin()
    timeline.clear()
    assert states(path) == ["began", "ended"]
    assert json.loads(path.read_text().splitlines()[0])["pid"] == os.getpid()


def test_a_file_that_follows_a_rotated_one_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    timeline = Timeline()
    timeline.add_sink("file", JsonLinesSink(str(path), 4000))
    timeline.begin()
    for number in range(20):
        timeline.append(Capture(graph=f"g{number}"))
    assert json.loads(path.read_text().splitlines()[0])["state"] == "began"
    timeline.clear()
    assert [process.state for process in load(path).processes] == ["ended"]


def test_a_sink_of_another_kind_needs_to_know_nothing_of_it() -> None:
    class Sink:
        def write(self, record: dict[str, Any]) -> None:
            assert record["type"] == "capture"

        def close(self) -> None: ...

    timeline = Timeline()
    timeline.add_sink("mine", Sink())
    timeline.begin()
    timeline.append(Capture(graph="g0"))
    assert timeline.has_sink("mine")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
def test_a_full_disk_costs_the_file_alone(caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline()
    timeline.add_sink("file", JsonLinesSink("/dev/full"))
    timeline.begin()
    timeline.append(Capture(graph="g0"))
    assert ["No space left" in record.message for record in caplog.records] == [True]
