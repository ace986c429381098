import json
import logging
import os
from pathlib import Path

import pytest

from omnicomp.errors import TimelineError
from omnicomp.timeline import Capture, JsonLinesSink, Placement, Timeline, attach, read_events
from omnicomp.timeline.files import read_records
from omnicomp.timeline.sinks.jsonl import ENVIRONMENT_VARIABLE, expand


def record(path: str, *graphs: str) -> Timeline:
    timeline = Timeline()
    timeline.add_sink(path, JsonLinesSink(path))
    for graph in graphs:
        timeline.append(Capture(graph=graph, function="naïve \ud800 \n"))
    return timeline


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "t.jsonl"
    timeline = Timeline()
    attach(timeline, str(path))
    timeline.append(Capture(graph="g0", function="naïve", pid=os.getpid()))
    timeline.append(Placement(graph="g0", part="forward", nodes={"eager": 1}))
    assert tuple(read_events(path)) == timeline.events()


def test_a_name_that_is_no_unicode_does_not_stop_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record(str(path), "g0", "g1")
    assert len(path.read_bytes().splitlines()) == 2
    assert [event.graph for event in read_events(path)] == ["g0", "g1"]


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record(str(path), "g0")
    record(str(path), "g1")
    assert [event.graph for event in read_events(path)] == ["g0", "g1"]


def test_the_path_tells_process_and_rank_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    record(str(tmp_path / "t-%p-%r.jsonl"), "g0")
    assert [path.name for path in tmp_path.iterdir()] == [f"t-{os.getpid()}-2.jsonl"]


def test_the_path_tells_hosts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert expand("runs/%h-%r.jsonl") == Path("runs/node7-0.jsonl")


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand("~/t.jsonl") == tmp_path / "t.jsonl"


def test_the_environment_names_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "t.jsonl"))
    timeline = Timeline()
    attach(timeline)
    attach(timeline)
    timeline.append(Capture(graph="g0"))
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 1


def test_no_path_is_no_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    timeline = Timeline()
    attach(timeline)
    assert not timeline._sinks


def test_an_unwritable_path_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "t.jsonl")
    with caplog.at_level(logging.WARNING, "omnicomp.timeline"):
        for _ in range(3):
            timeline = Timeline()
            attach(timeline, path)
            timeline.append(Capture(graph="g0"))
    assert len(caplog.records) == 1
    assert "can't be written" in caplog.text
    assert len(timeline) == 1


@pytest.mark.parametrize("name", ["~nobody-of-that-name/t.jsonl", "a\0b.jsonl", "a" * 5000, "\ud800.jsonl", "pipe"])
def test_a_path_that_is_none_costs_the_log_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = name if name.startswith("~") else str(tmp_path / name)
    for _ in range(2):
        timeline = Timeline()
        attach(timeline, path)
        timeline.append(Capture(graph="g0"))
    assert len(timeline) == 1
    assert ["can't be written" in record.message for record in caplog.records] == [True]


def test_a_full_disk_costs_the_log_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline()
    for graph in ("g0", "g1"):
        attach(timeline, "/dev/full")
        timeline.append(Capture(graph=graph))
    assert len(timeline) == 2
    assert ["No space left" in record.message for record in caplog.records] == [True]


def test_a_pipe_that_nobody_reads_from_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omnicomp.timeline.sinks.jsonl._PATIENCE", 0.01)
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        timeline = record(str(tmp_path / "pipe"), "g0")
        assert b'"g0"' in reader.read(10_000)
        timeline.append(Capture(graph="g1", function="x" * 2**20))
    assert "nobody reads from the pipe" in caplog.text


def test_the_file_is_for_this_user_alone(tmp_path: Path) -> None:
    record(str(tmp_path / "runs" / "t.jsonl"), "g0")
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "runs", tmp_path / "runs" / "t.jsonl")] == [
        0o700,
        0o600,
    ]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives a link to another user")
def test_a_link_that_another_user_put_there_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "t.jsonl").symlink_to(tmp_path / "precious")
    os.chown(tmp_path / "t.jsonl", 65534, 65534, follow_symlinks=False)
    attach(Timeline(), str(tmp_path / "t.jsonl"))
    assert "another user put it there" in caplog.text
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_torn_last_line_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.jsonl"
    record(str(path), "g0", "g1")
    path.write_bytes(path.read_bytes()[:-20])
    with caplog.at_level(logging.WARNING, "omnicomp.timeline"):
        assert [event.graph for event in read_events(path)] == ["g0"]
    assert "incomplete" in caplog.text


def test_a_line_is_begun_behind_one_that_a_killed_process_left(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record(str(path), "g0", "g1")
    path.write_bytes(path.read_bytes()[:-20])
    record(str(path), "g2")
    assert [event.graph for event in read_events(path)] == ["g0", "g2"]


@pytest.mark.parametrize("content", [b"\x89PNG\r\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"3\n", b"{}"])
def test_another_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TimelineError, match="line 1 is no timeline event") as caught:
        list(read_events(path))
    assert "\n" not in str(caught.value)


def test_a_newer_schema_says_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({**Capture(graph="g0").to_dict(), "schema": 2}) + "\n")
    with pytest.raises(TimelineError, match="upgrade omnicomp"):
        list(read_events(path))


@pytest.mark.parametrize("name", ["none.jsonl", "."])
def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(TimelineError, match="can't be read"):
        list(read_events(tmp_path / name))


def test_empty_lines_and_unknown_types_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('\n{"schema": 1, "type": "party", "graph": "g0"}\n')
    assert list(read_events(path)) == []


def test_records_tell_the_process(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record(str(path), "g0")
    ((data, event),) = read_records(path)
    assert data["pid"] == os.getpid()
    assert event.graph == "g0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("pattern", ["t-%p.jsonl", "t.jsonl"])
def test_a_forked_child_goes_on_recording(tmp_path: Path, pattern: str) -> None:
    timeline = record(str(tmp_path / pattern), "g0")
    child = os.fork()
    if child == 0:
        # The child must not return into pytest, whatever happens.
        try:
            timeline.append(Capture(graph="g1"))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    timeline.append(Capture(graph="g2"))
    pids = {event.graph: data["pid"] for path in sorted(tmp_path.iterdir()) for data, event in read_records(path)}
    assert pids == {"g0": os.getpid(), "g1": child, "g2": os.getpid()}
    assert len(list(tmp_path.iterdir())) == (2 if "%p" in pattern else 1)
