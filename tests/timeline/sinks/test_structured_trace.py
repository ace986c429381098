"""torch's structured trace: what tlparse makes of it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python

import omnicomp
from omnicomp._torch import structured as trace
from omnicomp.timeline import Memory, Timeline
from omnicomp.timeline.sinks import structured_trace

TLPARSE = shutil.which("tlparse", path=str(Path(sys.executable).parent)) or shutil.which("tlparse")

PROGRAM = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("<script>alert(1)<", torch.nn.Linear(4, 4))
    def forward(self, x):
        return getattr(self, "<script>alert(1)<")(x).topk(2).values.sum()
model = torch.compile(Model(), backend="omni", options={"lowerings": ["eager"]})
model(torch.ones(3, 4)).backward()
torch.compile(lambda x: x.sin(), backend="omni", options={"lowerings": ["eager"]})(torch.ones(2))
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What tlparse made of the trace of a process with two compilations."""
    if TLPARSE is None:
        pytest.skip("tlparse is not installed")
    folder = tmp_path_factory.mktemp("trace")
    python("-c", PROGRAM, environment={"TORCH_TRACE": str(folder / "log")}, check=True)
    (log,) = (folder / "log").iterdir()
    command = [TLPARSE, str(log), "-o", str(folder / "out"), "--no-browser", "--strict", "--strict-compile-id"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out"


def artefacts(pages: Path, compile_id: str, kind: str) -> list[Path]:
    found = (pages / compile_id).glob(f"omnicomp_{kind}_*")
    return sorted(found, key=lambda path: int(path.stem.rsplit("_", 1)[1]))


def test_each_compile_id_has_a_page_with_its_decisions(pages: Path) -> None:
    first = artefacts(pages, "-_0_0_0", "audit")[-1].read_text()
    assert first.startswith(
        "omni: 1 graph, 2 subgraphs: eager 100.0 % of FLOPs; nothing that ran differs from the plan"
    )
    assert "g0.forward.0" in first
    assert "g0.backward.0" in first
    assert "aten.topk.default" in first
    second = artefacts(pages, "-_1_0_0", "audit")[-1].read_text()
    assert "g1.inference.0" in second
    assert "g0" not in second


def test_the_index_links_the_pages(pages: Path) -> None:
    index = (pages / "index.html").read_text()
    links = re.findall(r'<a href="([^"]*omnicomp[^"]*)"', index)
    names = {Path(link).name.rsplit("_", 1)[0] for link in links}
    assert {name for name in names if "_graph_" not in name} == {"omnicomp_audit", "omnicomp_events"}
    assert {"omnicomp_graph_g0_00_dynamo", "omnicomp_graph_g0_02_placement_forward"} <= names
    assert all((pages / link).is_file() for link in links)


def test_every_event_goes_out_once_and_in_order(pages: Path) -> None:
    events = [event for path in artefacts(pages, "-_0_0_0", "events") for event in json.loads(path.read_text())]
    kinds = [event["type"] for event in events]
    assert [event["seq"] for event in events] == sorted({event["seq"] for event in events})
    assert kinds[0] == "capture"
    assert kinds.count("ran") == kinds.count("placement") == 2
    assert {event["graph"] for event in events} == {"g0"}
    assert {"pid", "rank"} <= set(events[0])


def test_the_stages_are_in_tlparses_time_line(pages: Path) -> None:
    names = {event.get("name") for event in json.loads((pages / "chromium_events.json").read_text())}
    assert {"omnicomp.compile", "omnicomp.pass", "omnicomp.part", "omnicomp.build"} <= names


def test_no_name_of_the_model_is_markup_in_a_page_of_html(pages: Path) -> None:
    for path in pages.rglob("*.html"):
        assert "<script>alert(1)" not in path.read_text(), path


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """What is written in this process, in place of torch's trace."""
    seen: list[tuple[str, Any, Any]] = []
    monkeypatch.setattr(trace, "tracing", lambda: True)
    monkeypatch.setattr(trace, "artifact", lambda name, encoding, payload, place: seen.append((name, payload, place)))
    return seen


def test_nothing_is_attached_where_nobody_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "tracing", lambda: False)
    timeline = Timeline()
    structured_trace.attach(timeline, lambda events: omnicomp.audit(events).to_text())
    assert not timeline._sinks


def test_a_retreat_at_run_time_is_written_at_once(written: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(lambda x: x.sin(), backend="omni", options={"lowerings": ["eager"]})
    compiled(torch.ones(2))
    place = written[0][2]
    assert str(place.compile_id) == "0/0"
    written.clear()
    (graph,) = omnicomp.audit().graphs
    retreat = omnicomp.timeline.Retreat(
        graph=graph.id,
        part="inference",
        subgraph=f"{graph.id}.inference.0",
        source_lowering="inductor",
        target_lowering="eager",
        reason=omnicomp.timeline.Reason(code="call_failed", sentence="it raised"),
    )
    omnicomp.timeline.current().append(retreat)
    ((name, payload, where),) = written
    assert (name, where) == ("omnicomp_retreat", place)
    assert json.loads(payload)["reason"]["code"] == "call_failed"


def test_samples_are_no_decisions(written: list[Any]) -> None:
    timeline = Timeline()
    structured_trace.attach(timeline, lambda events: omnicomp.audit(events).to_text())
    timeline.append(Memory(graph="g0", part="forward", subgraph="g0.forward.0", device="cpu", call=0))
    structured_trace.flush()
    assert written == []


def test_what_can_not_be_written_costs_no_results(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def full(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(trace, "tracing", lambda: True)
    monkeypatch.setattr(trace, "artifact", full)
    x = torch.ones(2)
    assert torch.compile(lambda x: x + 1, backend="omni", options={"lowerings": ["eager"]})(x).equal(x + 1)
    assert "could not be recorded" in caplog.text
