"""Where a command writes: never over what it reads, whole or not at all; and what it does without standard output."""

import io
import os
import sys
from pathlib import Path

import pytest

from omnicomp.cli import output
from omnicomp.cli.audit import run_audit
from omnicomp.cli.check import run_check
from omnicomp.cli.diff import run_diff
from omnicomp.errors import OmnicompError
from omnicomp.timeline import Attempt, Capture, Event, JsonLinesSink, Placement, Ran, Subgraph


class Full(io.TextIOWrapper):
    """Standard output on a full disk, or one that nobody reads."""

    def __init__(self, error: OSError) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")
        self.error = error

    def flush(self) -> None:
        raise self.error

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def timeline(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "t.jsonl"
    events: list[Event] = [
        Capture(graph="g0", nodes=1),
        Placement(graph="g0", part="inference", nodes={"eager": 1}),
        Subgraph(graph="g0", part="inference", subgraph="g0.inference.0", lowering="eager", nodes=1, ops={"aten.x": 1}),
        Attempt(graph="g0", part="inference", subgraph="g0.inference.0", lowering="eager", ok=True, selected=True),
        Ran(graph="g0", part="inference", subgraph="g0.inference.0", lowering="eager", evidence="x"),
    ]
    sink = JsonLinesSink(str(path))
    for event in events:
        sink.write({**event.to_dict(), "pid": 1, "rank": 0, "thread": "T"})
    sink.close()
    return path


ERRORS = [None, OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe")]


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_a_verdict_holds_without_standard_output(
    timeline: Path, error: OSError | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None if error is None else Full(error))
    found = run_check(timeline, max_nodes=0)
    monkeypatch.undo()
    assert found == 1
    assert capsys.readouterr().err.count("\n") == (0 if isinstance(error, BrokenPipeError) else 1)


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_what_can_not_be_told_is_no_verdict(
    timeline: Path, error: OSError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None if error is None else Full(error))
    for command in (lambda: run_diff(timeline, timeline), lambda: output.emit("a view")):
        if isinstance(error, BrokenPipeError):
            assert command() == 0
            continue
        with pytest.raises(OmnicompError, match="standard output can't be written"):
            command()


@pytest.mark.parametrize("through", ["itself", "link", "folder", "rotated"])
def test_no_output_takes_the_place_of_what_is_read(timeline: Path, tmp_path: Path, through: str) -> None:
    before = timeline.read_bytes()
    target, source = timeline, timeline
    if through == "link":
        target = tmp_path / "link"
        target.symlink_to(timeline)
    if through == "folder":
        source = timeline.parent
    if through == "rotated":
        target = Path(f"{timeline}.1")
        target.write_bytes(before)
    calls = [
        lambda: run_audit(source, format="json", output=target),
        lambda: run_check(source, output=target),
        lambda: run_check(timeline, baseline=source, output=target),
    ]
    if through != "folder":
        calls += [lambda: run_diff(source, source, output=target), lambda: run_audit(source, trace=target)]
    for call in calls:
        with pytest.raises(OmnicompError, match="is what is read"):
            call()
    assert timeline.read_bytes() == before


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("before")
    real.chmod(0o640)
    link.symlink_to(real)
    output.write(link, "after \ud800")
    assert (link.is_symlink(), real.read_text(), real.stat().st_mode & 0o777) == (True, "after \\ud800", 0o640)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OmnicompError, match="No space left"):
        output.write(real, "lost")
    assert real.read_text() == "after \\ud800"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.txt", "real.txt"]
    output.write(Path(os.devnull), "into nothing")


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000, "no/folder"])
def test_a_path_that_is_none_is_one_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(OmnicompError, match="can't be written"):
        output.write(tmp_path / name, "text")
