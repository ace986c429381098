"""The graph after each stage: as files, in torch's log, and in its structured trace."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import omnicomp
from omnicomp.lowerings.overrides.registry import unregister
from omnicomp.timeline import graph_dump

PROGRAM = """
import torch
f = torch.compile(lambda x: torch.softmax(x, -1), backend="omni", options={"lowerings": ["eager"]})
f(torch.ones(2, 3))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "graphs"  # beside the folder of the caches
    graph_dump.write_to(folder)
    yield folder
    graph_dump.write_to(None)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 8, -1) @ v


def compile_attention() -> None:
    q, k, v = (torch.randn(1, 2, 16, 64, requires_grad=True) for _ in range(3))
    torch.compile(attention, backend="omni", options={"lowerings": ["eager"]})(q, k, v).sum().backward()


def test_each_stage_is_a_file_and_a_difference_from_the_one_before(folder: Path) -> None:
    compile_attention()
    (graph,) = folder.iterdir()
    assert sorted(path.name for path in graph.iterdir()) == [
        "00_dynamo.py",
        "01_attention_fusion.diff",
        "01_attention_fusion.py",
        "02_autograd_forward.py",
        "03_placement_forward.diff",
        "03_placement_forward.py",
        "04_autograd_backward.py",
        "05_placement_backward.diff",
        "05_placement_backward.py",
    ]
    changed = (graph / "01_attention_fusion.diff").read_text().splitlines()
    assert changed[:2] == ["--- 00_dynamo.py", "+++ 01_attention_fusion.py"]
    assert any(line.startswith("-") and "torch.softmax" in line for line in changed)
    assert any(line.startswith("+") and "scaled_dot_product_attention" in line for line in changed)
    assert (graph / "03_placement_forward.py").read_text().startswith("# 0: eager: ")


def test_each_piece_of_a_cut_part_is_a_stage(folder: Path) -> None:
    @omnicomp.override(op=torch.ops.aten.cumsum.default, name="dumped_cumsum")
    def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        return torch.cumsum(x, dim, dtype=dtype)

    try:
        options = {"lowerings": ["override", "eager"], "verify": "off"}
        torch.compile(lambda x: x.sin().cumsum(-1).exp(), backend="omni", options=options)(torch.ones(4, 8))
    finally:
        unregister("dumped_cumsum")
    names = sorted(path.stem for path in folder.rglob("*piece*.py"))
    assert names == ["03_piece_0_eager_inference", "04_piece_1_override_inference", "05_piece_2_eager_inference"]


def test_a_logger_that_inherits_its_level_prints_no_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        compile_attention()
    assert not [record for record in caplog.records if record.name == "omnicomp_graphs"]
    with caplog.at_level(logging.INFO, "omnicomp_graphs"):
        torch.compiler.reset()
        compile_attention()
    lines = [record.getMessage() for record in caplog.records if record.name == "omnicomp_graphs"]
    assert [line.splitlines()[0].split()[-1] for line in lines] == [
        "dynamo",
        "attention_fusion",
        "autograd_forward",
        "placement_forward",
        "autograd_backward",
        "placement_backward",
    ]


def test_off_no_graph_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise AssertionError("a graph was printed")

    monkeypatch.setattr(graph_dump, "_readable", refuse)
    compile_attention()


def test_torch_logs_and_the_structured_trace_have_the_graphs(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_LOGS": "omnicomp_graphs", "TORCH_TRACE": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment
    )
    assert "g0 after dynamo" in result.stderr
    assert "g0 after placement_inference" in result.stderr
    (trace,) = tmp_path.glob("*.log")
    records = [line.partition("] ")[2] for line in trace.read_text().splitlines() if "artifact" in line]
    names = [json.loads(record)["artifact"]["name"] for record in records if record.startswith("{")]
    assert [name for name in names if name.startswith("omnicomp_graph_")] == [
        "omnicomp_graph_g0_00_dynamo",
        "omnicomp_graph_g0_01_autograd_inference",
        "omnicomp_graph_g0_02_placement_inference",
    ]
