"""The three broken set-ups: the audit of each names its cause, in the words that the walk-through shows."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import python

ROOT = Path(__file__).parents[2]
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def omnicomp(tmp_path: Path) -> Command:
    """The command line in a process of its own: exit status and output."""

    def call(*words: str) -> tuple[int, str]:
        done = python("-m", "omnicomp", *words, folder=tmp_path, environment={"COLUMNS": "120"})
        assert "Traceback" not in done.stderr
        return done.returncode, " ".join(done.stdout.split())

    return call


def run(omnicomp: Command, name: str, *arguments: str, lowerings: str = "eager", timeline: str = "run.jsonl") -> None:
    program = ROOT / "examples" / "audit" / f"{name}.py"
    code, _ = omnicomp("run", "--timeline", timeline, "--option", f"lowerings={lowerings}", str(program), *arguments)
    assert code == 0


def line_of(name: str, text: str) -> int:
    lines = (ROOT / "examples" / "audit" / f"{name}.py").read_text().splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if text in line]
    return found


def test_a_data_dependent_operator_in_the_middle(omnicomp: Command) -> None:
    run(omnicomp, "data_dependent")
    line = line_of("data_dependent", "return tokens[important]")
    code, out = omnicomp("audit", "run.jsonl", "--tree")
    assert code == 0
    assert f"graph break: aten.nonzero.default data_dependent.py:{line}" in out
    code, out = omnicomp("audit", "run.jsonl", "--why", "aten.nonzero")
    assert code == 0
    assert f"> {line} | return tokens[important]" in out
    assert "[graph_break]" in out
    assert "capture_dynamic_output_shape_ops" in out


def test_a_kernel_whose_checker_refuses_a_stride(omnicomp: Command) -> None:
    run(omnicomp, "refused_stride", lowerings="override,eager")
    line = line_of("refused_stride", "return torch.cumsum(by_channel, -1)")
    code, out = omnicomp("audit", "run.jsonl", "--why", "aten.cumsum")
    assert code == 0
    assert "row_cumsum refused it: row_cumsum reads rows whose elements lie side by side [override_refused]" in out
    assert "observed stride 16 in dimension -1 of a tensor with strides (128, 1, 16)" in out
    assert "needed stride 1 in dimension -1" in out
    assert f"> {line} | return torch.cumsum(by_channel, -1)" in out
    assert "to change call .contiguous() on the input of cumsum" in out


def test_a_pass_that_stopped_matching(omnicomp: Command) -> None:
    run(omnicomp, "stopped_matching", "--before", timeline="before.jsonl")
    run(omnicomp, "stopped_matching", timeline="after.jsonl")
    code, out = omnicomp("diff", "before.jsonl", "after.jsonl")
    assert code == 1
    assert "pass stopped" in out
    code, out = omnicomp("audit", "after.jsonl", "--why", "attention_fusion")
    assert code == 0
    assert "weights is also used by mean, and a fused kernel does not make it [match_ended]" in out
    line = line_of("stopped_matching", "return torch.softmax(q @ k")
    assert f"> {line} | return torch.softmax" in out


def test_the_walk_through_shows_what_is_printed(omnicomp: Command) -> None:
    """Each line of the sentences that the page quotes is one that the programs' audits print."""
    page = " ".join((ROOT / "docs" / "audit.md").read_text(encoding="utf-8").split())
    run(omnicomp, "data_dependent", timeline="1.jsonl")
    run(omnicomp, "refused_stride", lowerings="override,eager", timeline="2.jsonl")
    run(omnicomp, "stopped_matching", timeline="3.jsonl")
    for timeline, question in (
        ("1.jsonl", "aten.nonzero"),
        ("2.jsonl", "aten.cumsum"),
        ("3.jsonl", "attention_fusion"),
    ):
        _, out = omnicomp("audit", timeline, "--why", question)
        sentences = re.findall(r"1\. (.+?\[\w+\])", out)
        assert sentences
        assert all(sentence in page for sentence in sentences), sentences
