"""The limit on the size of a timeline file, and what is left when a process is killed."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omnicomp.errors import OptionError
from omnicomp.options.policy import parse
from omnicomp.timeline import Capture, JsonLinesSink, Timeline, attach
from omnicomp.timeline.files import TimelineReader
from omnicomp.timeline.sinks.jsonl import LIMIT_VARIABLE, parse_size

LIMIT = 20_000


def write(path: Path, count: int, limit: int | None = LIMIT, name: str = "g") -> None:
    timeline = Timeline()
    timeline.add_sink("file", JsonLinesSink(str(path), limit))
    for number in range(count):
        timeline.append(Capture(graph=f"{name}{number}"))


def graphs(path: Path) -> list[str]:
    return [event.graph for _, event in TimelineReader(path)]


def test_without_a_limit_nothing_is_rotated(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", 200, None)
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize("count", [1, 20, 500])
def test_the_limit_holds_and_the_newest_events_are_read_in_order(tmp_path: Path, count: int) -> None:
    path = tmp_path / "t.jsonl"
    write(path, count)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= LIMIT
    assert {file.name for file in tmp_path.iterdir()} <= {"t.jsonl", "t.jsonl.1"}
    found = graphs(path)
    assert found == [f"g{number}" for number in range(count - len(found), count)]
    assert len(found) == count or sum(file.stat().st_size for file in tmp_path.iterdir()) > LIMIT / 3


def test_a_rotated_file_is_read_alone_if_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write(path, 200)
    assert graphs(path) == graphs(Path(f"{path}.1")) + graphs(path)[len(graphs(Path(f"{path}.1"))) :]


def test_an_event_longer_than_the_limit_is_written(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.add_sink("file", JsonLinesSink(str(tmp_path / "t.jsonl"), 10))
    for name in ("g0", "g1"):
        timeline.append(Capture(graph=name))
    assert graphs(tmp_path / "t.jsonl") == ["g0", "g1"]


def test_processes_that_share_a_file_lose_no_more_than_rotation_does(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    limit = 400_000
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=write, args=(path, 300, limit, f"p{index}-")) for index in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    reader = TimelineReader(path)
    found = [event.graph for _, event in reader]
    assert reader.torn == 0
    assert len(found) == len(set(found))
    # A process that was about to write when another one rotated may add a line each to the file that was renamed.
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= limit + 3 * 2000
    for index in range(3):
        own = [int(name.split("-")[1]) for name in found if name.startswith(f"p{index}-")]
        assert own == sorted(own)


def test_the_environment_and_the_option_set_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "20K")
    assert parse(None, {}).timeline_max_bytes == 20 * 1024
    assert parse(None, {"timeline_max_bytes": 7}).timeline_max_bytes == 7
    write(tmp_path / "t.jsonl", 200, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.jsonl", "t.jsonl.1"]
    timeline = Timeline()
    attach(timeline, str(tmp_path / "more.jsonl"), 10**9)
    for number in range(200):
        timeline.append(Capture(graph=f"g{number}"))
    assert not (tmp_path / "more.jsonl.1").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("", None), ("0", None), ("65536", 65536), ("64k", 65536), (" 2 MB ", 2**21), ("1GiB", 2**30)]
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["much", "-1", "1T", "1.5M", "\uff19"])
def test_what_is_no_size_is_one_sentence(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    with pytest.raises(OptionError, match="takes a number of bytes such as 64M"):
        parse(None, {})


WRITER = """
import sys
from omnicomp.timeline import Capture, JsonLinesSink, Timeline
timeline = Timeline()
timeline.add_sink("file", JsonLinesSink(sys.argv[1]))
number = 0
while True:
    timeline.append(Capture(graph=f"g{number}", function="f" * 5000))
    number += 1
    print(number, flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_process_loses_at_most_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = 0
    while told < 300:
        told = int(process.stdout.readline())
    time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    told = max([told, *(int(line) for line in process.stdout.read().split("\n")[:-1] if line)])
    process.wait()
    process.stdout.close()
    reader = TimelineReader(path)
    found = [event.graph for _, event in reader]
    assert found == [f"g{number}" for number in range(len(found))]
    assert len(found) >= told
    assert reader.torn <= 1


def test_lines_torn_anywhere_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.jsonl"
    write(path, 5, None)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0][:30] + b"\n", lines[1], lines[2][:-9] + b"\n", b"\0" * 40 + b"\n", *lines[3:]]))
    reader = TimelineReader(path)
    assert [event.graph for _, event in reader] == ["g1", "g3", "g4"]
    assert reader.torn == 3
    assert "3 lines are incomplete" in caplog.text
    assert [event.graph for _, event in reader] == ["g1", "g3", "g4"]
    assert reader.torn == 3


def test_every_line_is_whole_for_whoever_reads_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    sink = JsonLinesSink(str(path))
    sink.write({"text": "x" * 100_000})
    assert json.loads(path.read_bytes())["text"] == "x" * 100_000
    sink.close()
