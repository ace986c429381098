"""`omnicomp diff`, also of two processes that really compile."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import python

from omnicomp.timeline import Capture, JsonLinesSink, NodePlacement, Placement, Ran, Reason, Stage, Subgraph, Timeline

Command = Callable[..., tuple[int, str, str]]

PROGRAM = """
import sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        return x + self.down(torch.topk(self.up(x).relu(), 2 * x.shape[-1]).values)

class Stack(nn.Module):
    def __init__(self, size, layers):
        super().__init__()
        self.layers = nn.ModuleList(Block(size) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return EDIT(x)

class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.block = nn.Conv1d(4, 4, 3), Block(6)

    def forward(self, x):
        return self.block(self.conv(x))

models = {"stack": Stack(8, 2), "again": Stack(8, 2), "other": Other()}
inputs = {"stack": torch.randn(4, 8), "again": torch.randn(4, 8), "other": torch.randn(2, 4, 8)}
options = {"lowerings": ["eager"], "max_builds": BUILDS}
for name in sys.argv[1:]:
    compiled = torch.compile(models[name], backend="omni", options=options)
    compiled(inputs[name]).sum().backward()
"""


def run(folder: Path, *order: str, seed: int, edit: str = "torch.sin", builds: int = 24, fresh: bool = False) -> Path:
    """The timeline of the program in a process of its own, from a file of another name each time."""
    program, timeline = folder / f"program{seed}.py", folder / f"run{seed}.jsonl"
    program.write_text("\n" * seed + PROGRAM.replace("EDIT", edit).replace("BUILDS", str(builds)))
    python(program, *order, environment={"OMNICOMP_TIMELINE": str(timeline)}, fresh=fresh, check=True)
    return timeline


def test_an_unchanged_program_gives_an_empty_diff_in_any_order_of_its_graphs(omnicomp: Command, tmp_path: Path) -> None:
    one = run(tmp_path, "stack", "other", "again", seed=1)
    other = run(tmp_path, "other", "again", "stack", seed=2, fresh=True)  # with other hashes
    code, out, err = omnicomp("diff", one, other, "--format", "json")
    assert (code, err) == (0, "")
    assert json.loads(out)["changes"] == []
    assert omnicomp("audit", one, "-o", tmp_path / "one.json")[0] == 0
    assert omnicomp("diff", tmp_path / "one.json", other, "--format", "summary")[:2] == (0, "omni: nothing differs\n")


def test_a_changed_program_is_seen(omnicomp: Command, tmp_path: Path) -> None:
    one = run(tmp_path, "stack", seed=1)
    other = run(tmp_path, "stack", seed=2, edit="torch.tan", builds=12)
    code, out, _ = omnicomp("diff", one, other, "--format", "json")
    changes = {change["kind"]: change for change in json.loads(out)["changes"]}
    assert code == 1
    assert "aten.tan.default" in changes["edited"]["sentence"]
    assert (changes["option"]["before"], changes["option"]["after"]) == ("24", "12")


@pytest.fixture
def timelines(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs; in the second one an operator fell back, and autograd took twice as long."""
    paths = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    reason = Reason(code="unsupported_op", by="inductor", sentence="Inductor has no lowering for it", lever="write one")
    node = NodePlacement(node="topk", op="aten.topk.default", lowering="eager", module="head", chain=(reason,))
    for path, declined, seconds in ((paths[0], (), 1.0), (paths[1], (node,), 2.0)):
        recorder = Timeline()
        recorder.add_sink("file", JsonLinesSink(str(path)))
        recorder.append(Capture(graph="g0", function="forward (m.py:1)"))
        recorder.append(Stage(graph="g0", stage="autograd", seconds=seconds))
        recorder.append(Placement(graph="g0", part="inference", nodes={"inductor": 2}, declined=declined))
        row = {"graph": "g0", "part": "inference", "subgraph": "g0.inference.0", "lowering": "inductor"}
        recorder.append(Subgraph(nodes=2, **row))  # type: ignore[arg-type]
        recorder.append(Ran(**row))  # type: ignore[arg-type]
        recorder.clear()
    return paths


def test_a_fallback_is_status_1(omnicomp: Command, timelines: tuple[Path, Path], tmp_path: Path) -> None:
    code, out, err = omnicomp("diff", *timelines)
    assert (code, err) == (1, "")
    assert "aten.topk.default runs eager now" in out
    assert "write one" in " ".join(out.replace("|", " ").split())
    assert omnicomp("diff", *timelines, "-o", tmp_path / "d.md")[:2] == (1, "")
    assert (tmp_path / "d.md").read_text().startswith("**omni: 1 difference: fell back 1**")


def test_times_count_beyond_the_threshold_only(omnicomp: Command, timelines: tuple[Path, Path]) -> None:
    slower = timelines[1].read_text().replace('"declined":[', '"declined":[],"was":[')
    timelines[1].write_text(slower)
    assert omnicomp("diff", *timelines)[0] == 0
    assert omnicomp("diff", *timelines, "--time-threshold", 150)[0] == 0
    code, out, _ = omnicomp("diff", *timelines, "--time-threshold", 50)
    assert code == 1
    assert "compile: autograd grew by 100 %, and 50 % are allowed" in " ".join(out.replace("|", " ").split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.jsonl", "none.jsonl"], "none.jsonl can't be read"),
        (["bad.jsonl", "a.jsonl"], "line 1 is no timeline event"),
        (["new.json", "a.jsonl"], "has schema 99 and this version reads up to 2; upgrade omnicomp"),
        (["half.json", "a.jsonl"], "half.json is no report"),
        (["a.jsonl", "."], "can't be read"),
        (
            ["a.jsonl", "b.jsonl", "--format", "jsn"],
            "can't be 'jsn'; it takes text, json, markdown or summary; did you mean \"json\"?",
        ),
        (["a.jsonl", "b.jsonl", "--time-threshold", "-1"], "takes a percentage that is not negative"),
        (["a.jsonl", "b.jsonl", "--time-threshold", "5%"], "can't be '5%'; it takes a percentage, for example 20"),
        (["a.jsonl", "b.jsonl", "-o", "a.jsonl/x"], "can't be written"),
    ],
)
def test_bad_input_is_status_2_and_one_sentence(
    omnicomp: Command,
    timelines: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text("hello\n")
    (tmp_path / "new.json").write_text('{"schema": 99, "graphs": []}')
    (tmp_path / "half.json").write_text('{\n  "schema": 2,\n  "summ')
    code, out, err = omnicomp("diff", *words)
    assert (code, out) == (2, "")
    assert err.startswith("omnicomp: error: ")
    assert message in err
    assert err.count("\n") == 1
