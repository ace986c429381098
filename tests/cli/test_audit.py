import json
from collections.abc import Callable
from pathlib import Path

import pytest

from omnicomp.timeline import Capture, JsonLinesSink, Ran, Subgraph, Timeline

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def timeline(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    recorder = Timeline()
    recorder.add_sink("file", JsonLinesSink(str(path)))
    recorder.append(Capture(graph="g0"))
    recorder.append(
        Subgraph(graph="g0", part="inference", subgraph="g0.inference.0", lowering="inductor", nodes=2, flops_hint=5)
    )
    recorder.append(Ran(graph="g0", part="inference", subgraph="g0.inference.0", lowering="inductor"))
    return path


def test_summary(omnicomp: Command, timeline: Path) -> None:
    code, out, err = omnicomp("audit", timeline, "--format", "summary")
    assert (code, err) == (0, "")
    assert out == "omni: 1 graph, 1 subgraph: inductor 100.0 % of FLOPs; nothing that ran differs from the plan\n"


def test_text_is_the_default(omnicomp: Command, timeline: Path) -> None:
    assert "g0.inference.0" in omnicomp("audit", timeline)[1]


def test_output_decides_the_format(omnicomp: Command, timeline: Path, tmp_path: Path) -> None:
    code, out, _ = omnicomp("audit", timeline, "-o", tmp_path / "a.json")
    assert (code, out) == (0, "")
    assert json.loads((tmp_path / "a.json").read_text())["schema"] == 2
    omnicomp("audit", timeline, "--format", "html", "-o", tmp_path / "page")
    assert (tmp_path / "page").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.jsonl"], "none.jsonl can't be read"),
        (["bad.jsonl"], "line 1 is no timeline event"),
        (["t.jsonl", "--format", "pdf"], "--format can't be 'pdf'; it takes text, json"),
        (["t.jsonl", "-o", "t.jsonl/a.html"], "can't be written"),
    ],
)
def test_bad_input_is_one_sentence(
    omnicomp: Command,
    timeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text("hello\n")
    code, out, err = omnicomp("audit", *words)
    assert (code, out) == (2, "")
    assert err.startswith("omnicomp: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_an_empty_file_says_that_nothing_was_compiled(omnicomp: Command, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("")
    assert "nothing was compiled yet" in omnicomp("audit", tmp_path / "t.jsonl")[1]


def test_version(omnicomp: Command) -> None:
    code, out, _ = omnicomp("--version")
    assert code == 0
    assert out.startswith("omnicomp ")


def test_a_folder_is_one_report(omnicomp: Command, timeline: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_bytes(timeline.read_bytes())
    code, out, err = omnicomp("audit", tmp_path, "--format", "summary")
    assert (code, out, err) == (0, "omni: 2 processes, 1 rank: all reports are equal\n", "")
    assert "t.jsonl" in omnicomp("audit", tmp_path)[1]
    omnicomp("audit", tmp_path, "-o", tmp_path / "fleet.html")
    assert (tmp_path / "fleet.html").read_text().startswith("<!doctype html>")


def test_a_folder_without_timelines_is_one_sentence(omnicomp: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, out, err = omnicomp("audit", tmp_path / "empty")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "has no timelines" in err


def test_names_of_operators_do_not_move_the_cursor(omnicomp: Command, tmp_path: Path) -> None:
    recorder = Timeline()
    recorder.add_sink("file", JsonLinesSink(str(tmp_path / "t.jsonl")))
    recorder.append(Capture(graph="g0"))
    recorder.append(
        Subgraph(graph="g0", part="inference", subgraph="g0.inference.0", lowering="\x1b[2J\n", nodes=2, flops_hint=5)
    )
    for format in ("summary", "text", "html", "json"):
        out = omnicomp("audit", tmp_path / "t.jsonl", "--format", format)[1]
        assert "\x1b" not in out
        assert format != "summary" or out.count("\n") == 1
