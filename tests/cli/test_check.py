"""`omnicomp check`: exit status, formats, baselines, folders, acknowledgements, and one sentence for bad input."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from omnicomp.audit import audit, load
from omnicomp.timeline import (
    Capture,
    JsonLinesSink,
    NodePlacement,
    Placement,
    Process,
    Ran,
    Reason,
    Subgraph,
    Timeline,
)

Command = Callable[..., tuple[int, str, str]]


def write(path: Path, *ops: str) -> Path:
    """A timeline in which some operators run eager, and have half of the FLOPs."""
    recorder = Timeline()
    recorder.add_sink("file", JsonLinesSink(str(path)))
    where: dict[str, Any] = {"graph": "g0", "part": "inference"}
    nodes = tuple(
        NodePlacement(
            node=f"node_{op}",
            op=f"aten.{op}.default",
            lowering="eager",
            source=str(path.parent / f"model.py:{index + 3}"),
            module=f"layers.{index}",
            chain=(Reason(code="unsupported_op", by="toy", sentence=f"no {op}", lever="write an override"),),
        )
        for index, op in enumerate(ops)
    )
    recorder.append(Capture(graph="g0", function="Model.forward (model.py:1)", fingerprint="aa-bb"))
    recorder.append(Placement(**where, nodes={"toy": 1, "eager": len(ops)}, declined=nodes))
    recorder.append(Subgraph(**where, subgraph="g0.inference.0", lowering="toy", nodes=1, flops_hint=100))
    if ops:
        names = {"ops": {node.op: 1 for node in nodes}, "refused": tuple(node.node for node in nodes)}
        eager = Subgraph(**where, subgraph="g0.inference.1", lowering="eager", nodes=len(ops), flops_hint=100, **names)
        recorder.append(eager)
        recorder.append(Ran(**where, subgraph="g0.inference.1", lowering="eager"))
    recorder.append(Ran(**where, subgraph="g0.inference.0", lowering="toy"))
    return path


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return write(tmp_path / "t.jsonl", "topk", "sort")


def test_over_the_budget_names_operators_lines_and_levers(omnicomp: Command, report: Path, tmp_path: Path) -> None:
    code, out, err = omnicomp("check", report)
    assert (code, err) == (1, "")
    assert out == (
        "omni: over the fallback budget: 2 operators run eager (at most 0)\n"
        f"  - aten.topk.default at {tmp_path}/model.py:3 in layers.0: toy: no topk. To change this: write an override\n"
        f"  - aten.sort.default at {tmp_path}/model.py:4 in layers.1: toy: no sort. To change this: write an override\n"
    )


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--max-nodes", 2], 0),
        (["--max-nodes", 1], 1),
        (["--max-flops-share", 0.5], 0),
        (["--max-flops-share", 0.49], 1),
        (["--max-nodes", 2, "--max-flops-share", 0.1], 1),
        (["--allow", "aten.topk", "--allow", "layers.1"], 0),
        (["--allow", "aten.topk"], 1),
        (["--allow", "aten.topk", "--max-nodes", 1], 0),
    ],
)
def test_the_status_is_that_of_the_budget(omnicomp: Command, report: Path, words: list[Any], status: int) -> None:
    assert omnicomp("check", report, *words)[0] == status


def test_a_report_a_timeline_and_a_folder_are_judged_alike(omnicomp: Command, report: Path, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(audit(report).to_json())
    expected = json.loads(omnicomp("check", report, "--format", "json")[1])
    for path in (tmp_path / "report.json", tmp_path):
        code, out, _ = omnicomp("check", path, "--format", "json")
        found = json.loads(out)
        assert code == 1
        assert found["verdicts"][0]["fallen"] == expected["verdicts"][0]["fallen"]


def test_each_process_of_a_folder_is_judged_by_itself(omnicomp: Command, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    for rank in range(3):
        write(folder / f"{rank}.jsonl", "topk")
    code, out, _ = omnicomp("check", folder, "--max-nodes", 1)
    assert code == 0
    assert out.startswith(f"{folder / '0.jsonl'} and 2 more: omni: within")  # those that say the same are told of once
    write(folder / "3.jsonl", "topk", "sort")
    code, out, _ = omnicomp("check", folder, "--max-nodes", 1)
    assert code == 1
    assert [line.partition(": ")[0] for line in out.splitlines() if "omni: over" in line] == [str(folder / "3.jsonl")]


def test_with_a_baseline_only_what_is_new_counts(omnicomp: Command, report: Path, tmp_path: Path) -> None:
    old = write(tmp_path / "old.jsonl", "topk")
    code, out, _ = omnicomp("check", report, "--baseline", old)
    assert code == 1
    assert "1 new operator runs eager (at most 0), 1 known" in out
    assert "aten.sort.default" in out
    assert omnicomp("check", report, "--baseline", report)[0] == 0
    assert omnicomp("check", old, "--baseline", tmp_path)[0] == 0


def test_formats(omnicomp: Command, report: Path, tmp_path: Path) -> None:
    out = {name: omnicomp("check", report, "--format", name)[1] for name in ("markdown", "github", "junit", "json")}
    assert out["markdown"].startswith("**omnicomp: over the fallback budget:**")
    assert "::error file=model.py,line=3,title=aten.topk.default runs eager::" in out["github"]
    assert ElementTree.fromstring(out["junit"]).get("failures") == "2"
    assert json.loads(out["json"])["over"] is True
    for name, format in (("r.md", "markdown"), ("r.xml", "junit"), ("r.json", "json"), ("r", "text")):
        code, printed, _ = omnicomp("check", report, "-o", tmp_path / name)
        assert (code, printed) == (1, "")
        assert (tmp_path / name).read_text() == omnicomp("check", report, "--format", format)[1]


def test_paths_are_relative_to_the_workspace_of_github(
    omnicomp: Command, report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path.parent))
    out = omnicomp("check", report, "--format", "github")[1]
    assert f"::error file={tmp_path.name}/model.py,line=3," in out


def test_what_the_project_acknowledges_does_not_count_until_it_expires(
    omnicomp: Command, report: Path, tmp_path: Path
) -> None:
    def acknowledge(expires: datetime.date) -> None:
        entry = f'selector = "aten.*"\nreason = "next driver"\nexpires = {expires}\n'
        (tmp_path / "pyproject.toml").write_text(f"[[tool.omnicomp.acknowledge]]\n{entry}")

    acknowledge(datetime.date.today())
    code, out, _ = omnicomp("check", report)
    assert code == 0
    assert f"(the project acknowledges it: next driver (until {datetime.date.today()}))" in out
    acknowledge(datetime.date(2020, 1, 1))
    code, out, _ = omnicomp("check", report)
    assert code == 1
    assert "note: " in out
    assert "acknowledgement 1 (aten.*) expired on 2020-01-01, and what it was about counts again" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.json"], "can't be read"),
        (["bad.json"], "bad.json"),
        (["t.jsonl", "--baseline", "none.json"], "can't be read"),
        (["t.jsonl", "--max-nodes", -1], "--max-nodes can't be -1; it takes a number of operators, for example 0"),
        (["t.jsonl", "--max-nodes", "x"], "--max-nodes can't be 'x'; it takes a number of operators, for example 0"),
        (["t.jsonl", "--max-flops-share", "30%"], "can't be '30%'; it takes a part from 0 to 1, for example 0.3"),
        (["t.jsonl", "--max-flops-share", 2], "from 0 to 1"),
        (["t.jsonl", "--format", "markdow"], 'did you mean "markdown"'),
        (["empty"], "has no timelines"),
        (["t.jsonl", "-o", "t.jsonl/x"], "can't be written"),
    ],
)
def test_bad_input_is_one_sentence_and_the_status_2(
    omnicomp: Command, report: Path, tmp_path: Path, words: list[Any], message: str
) -> None:
    (tmp_path / "bad.json").write_text('{"graphs": 3, "schema": 2}')
    (tmp_path / "empty").mkdir()
    code, out, err = omnicomp("check", *words)
    assert (code, out) == (2, "")
    assert err.startswith("omnicomp: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_project_file_that_is_no_toml_is_bad_input(omnicomp: Command, report: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[[tool.")
    code, out, err = omnicomp("check", report)
    assert (code, out) == (2, "")
    assert "is no TOML" in err


def test_nothing_fell_back(omnicomp: Command, tmp_path: Path) -> None:
    assert omnicomp("check", write(tmp_path / "good.jsonl")) == (
        0,
        "omni: within the fallback budget: 0 operators run eager (at most 0)\n",
        "",
    )


def test_a_run_that_compiled_nothing_does_not_pass(omnicomp: Command, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    events = (Process(state=state, run="12-ab", pid=12) for state in ("began", "ended"))
    path.write_text("".join(f"{json.dumps(event.to_dict())}\n" for event in events))
    code, out, err = omnicomp("check", path)
    assert (code, out) == (3, "omni: within the fallback budget: no graph was compiled\n")
    assert "nothing was compiled with omni" in err
    assert omnicomp("check", path, "--allow-unfinished")[0] == 0
    # One of several processes that compiles nothing is no alarm.
    write(tmp_path / "good.jsonl")
    assert omnicomp("check", tmp_path)[0] == 0


def test_a_run_that_has_no_end_has_a_status_of_its_own(omnicomp: Command, tmp_path: Path) -> None:
    began = Process(state="began", run="12-ab", pid=12).to_dict()
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(began)}\n")
    code, out, _ = omnicomp("check", path)
    assert code == 3
    assert "unfinished: process 12 did not record its end" in out
    assert omnicomp("check", path, "--allow-unfinished")[0] == 0
    data = json.loads(omnicomp("check", path, "--format", "json")[1])
    assert (data["unfinished"], data["over"], data["verdicts"][0]["failed"]) == (True, False, True)
    assert 'testcase name="unfinished"' in omnicomp("check", path, "--format", "junit")[1]
    (tmp_path / "report.json").write_text(load(path).to_json())
    assert omnicomp("check", tmp_path / "report.json")[0] == 3
