"""The views of `omnicomp audit` beside the formats."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from made_timelines import large_timeline
from processes import python

from omnicomp.audit import audit
from omnicomp.audit.views import VIEWS
from omnicomp.timeline import JsonLinesSink, Timeline

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def timeline(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    recorder = Timeline()
    recorder.add_sink("file", JsonLinesSink(str(path)))
    for event in large_timeline(24, graphs=1):
        recorder.append(event)
    recorder.clear()
    return path


def test_the_tree(omnicomp: Command, timeline: Path) -> None:
    code, out, err = omnicomp("audit", timeline, "--tree")
    assert (code, err) == (0, "")
    assert "of FLOPs" in out
    assert omnicomp("audit", timeline, "--format", "tree")[1] == out
    by_time = omnicomp("audit", timeline, "--by", "time")[1]
    assert "of time" in by_time


def test_each_view_is_a_format(omnicomp: Command, timeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, view in VIEWS.items():
        assert omnicomp("audit", timeline, "--format", name, "--no-source") == (0, view(audit(timeline)), "")
    monkeypatch.setitem(VIEWS, "ids", lambda report: " ".join(graph.id for graph in report.graphs))
    assert omnicomp("audit", timeline, "--format", "ids") == (0, "g0", "")


def test_why(omnicomp: Command, timeline: Path, tmp_path: Path) -> None:
    code, out, err = omnicomp("audit", timeline, "--why", "layers.1.router")
    assert (code, err) == (0, "")
    assert "use torch.where with three arguments" in out
    code, printed, _ = omnicomp("audit", timeline, "--why", "layers.1.router", "-o", tmp_path / "why.txt")
    assert (code, printed) == (0, "")
    assert (tmp_path / "why.txt").read_text() == out


def test_the_trace(omnicomp: Command, timeline: Path, tmp_path: Path) -> None:
    code, out, err = omnicomp("audit", timeline, "--trace", tmp_path / "trace.json")
    assert (code, out, err) == (0, "", "")
    written = json.loads((tmp_path / "trace.json").read_text())
    assert {"X", "M", "i"} == {event["ph"] for event in written["traceEvents"]}
    assert json.loads(omnicomp("audit", timeline, "--format", "trace")[1])["traceEvents"] == written["traceEvents"]
    out = omnicomp("audit", timeline, "--trace", tmp_path / "again.json", "--tree")[1]
    assert out.startswith("omni: 1 graph")
    assert (tmp_path / "again.json").exists()


def test_a_report_gives_the_same_views_as_its_timeline(omnicomp: Command, timeline: Path, tmp_path: Path) -> None:
    omnicomp("audit", timeline, "-o", tmp_path / "r.json")
    for words in (["--tree"], ["--why", "aten.nonzero"], ["--format", "trace"], ["--format", "html"]):
        assert omnicomp("audit", tmp_path / "r.json", *words)[1] == omnicomp("audit", timeline, *words)[1], words


def test_lines_of_source_can_be_left_out(omnicomp: Command, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("x = 1  # a secret plan\n" * 40)
    recorder = Timeline()
    recorder.add_sink("file", JsonLinesSink(str(tmp_path / "t.jsonl")))
    for event in large_timeline(8, graphs=1):
        recorder.append(event)
    recorder.clear()
    text = (tmp_path / "t.jsonl").read_text().replace("model.py", str(file))
    (tmp_path / "t.jsonl").write_text(text)
    assert "a secret plan" in omnicomp("audit", tmp_path / "t.jsonl", "--format", "html")[1]
    assert "a secret plan" not in omnicomp("audit", tmp_path / "t.jsonl", "--format", "html", "--no-source")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["t.jsonl", "--by", "tim"],
            'it takes flops, time, operators or bytes; did you mean "time"?',
        ),
        (["t.jsonl", "--why", "layrs.1"], "nothing called 'layrs.1'; did you mean"),
        (["t.jsonl", "--why", "layers.1", "--tree"], "--why is a view of its own"),
        (["t.jsonl", "--trace", "t.jsonl/x.json"], "can't be written"),
        ([".", "--tree"], "is a folder"),
        ([".", "--why", "layers.1"], "is a folder"),
        ([".", "--trace", "x.json"], "is a folder"),
    ],
)
def test_bad_input_is_one_sentence(
    omnicomp: Command, timeline: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(timeline.parent)
    code, out, err = omnicomp("audit", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["--tree"], ["--why", "aten.nonzero"], []])
def test_a_terminal_gets_colours(timeline: Path, words: list[str]) -> None:
    command = [sys.executable, "-c", "from omnicomp.cli import main; main()", "audit", str(timeline), *words]
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    seen = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the terminal is gone: nobody writes to it any more
            break
        if not piece:
            break
        seen += piece
    os.close(leader)
    assert process.wait(60) == 0
    assert b"\x1b[" in seen
    assert b"aten.nonzero.default" in seen


def test_a_terminal_without_unicode_is_no_error(timeline: Path) -> None:
    done = python("-m", "omnicomp", "audit", timeline, "--tree", environment={"PYTHONIOENCODING": "ascii"}, check=True)
    assert "layers" in done.stdout
