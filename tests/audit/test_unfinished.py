"""What has no end: a graph that was never built, a part that was never called, a process that was killed; no others."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from torch import Tensor

import omnicomp
from omnicomp.audit import Audit, build, load
from omnicomp.audit.gate import judge
from omnicomp.audit.source import of_this_process
from omnicomp.audit.views.jsonform import from_dict, to_dict
from omnicomp.timeline import Capture, Event, Outcome, Process, Ran, Subgraph, current

EAGER = {"lowerings": ["eager"]}
RUN = "12-ab"
BEGAN, ENDED = (Process(state=state, run=RUN, pid=12) for state in ("began", "ended"))
CAPTURE, BUILT = Capture(graph="g0", run=RUN, pid=12, function="f (m.py:3)"), Outcome(graph="g0", state="built")


def part(name: str, graph: str = "g0") -> Subgraph:
    return Subgraph(graph=graph, part=name, subgraph=f"{graph}.{name}.0", lowering="eager", nodes=1)


def ran(name: str, graph: str = "g0") -> Ran:
    return Ran(graph=graph, part=name, subgraph=f"{graph}.{name}.0", lowering="eager")


def raised(name: str) -> Outcome:
    return Outcome(graph="g0", part=name, subgraph=f"g0.{name}.0", state="raised")


OTHER_VARIANT = (
    Capture(graph="g0:general", variant="general", run=RUN, pid=12),
    part("inference", "g0:general"),
    Outcome(graph="g0:general", state="built"),
    ran("inference", "g0:general"),
)


def found(events: list[Event]) -> list[tuple[str, str]]:
    return [(each.what, each.id) for each in build(events, whole=True).unfinished]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], []),
        ([BEGAN], [("process", RUN)]),
        ([BEGAN, ENDED], []),
        ([BEGAN, CAPTURE], [("graph", "g0"), ("process", RUN)]),
        ([BEGAN, CAPTURE, ENDED], [("graph", "g0")]),
        ([CAPTURE], [("graph", "g0"), ("process", RUN)]),  # the first line is lost
        ([BEGAN, CAPTURE, part("inference"), ENDED], [("graph", "g0")]),
        ([BEGAN, CAPTURE, part("inference"), BUILT, ENDED], [("part", "g0.inference")]),
        ([BEGAN, CAPTURE, part("inference"), BUILT, ran("inference"), ENDED], []),
        ([BEGAN, CAPTURE, part("inference"), BUILT, raised("inference"), ENDED], []),
        ([BEGAN, CAPTURE, part("forward"), part("backward"), BUILT, ran("forward"), ENDED], []),
        ([BEGAN, CAPTURE, part("forward"), part("backward"), BUILT, ENDED], [("part", "g0.forward")]),
        ([BEGAN, CAPTURE, BUILT, ENDED], []),  # no operators
        ([BEGAN, CAPTURE, Outcome(graph="g0", state="taken_back"), ENDED], []),
        ([BEGAN, CAPTURE, Outcome(graph="g0", state="raised"), ENDED], []),
        ([BEGAN, CAPTURE, part("inference"), Outcome(graph="g0", state="saved"), ENDED], []),
        ([BEGAN, CAPTURE, part("inference"), Outcome(graph="g0", state="restored"), ENDED], []),
        ([BEGAN, CAPTURE, part("inference"), BUILT, *OTHER_VARIANT, ENDED], []),
        ([BEGAN, ENDED, Process(state="began", run="13-cd", pid=12)], [("process", "13-cd")]),
        ([BEGAN, Process(state="began", run="12-cd", pid=12), Process(state="ended", run="12-cd")], [("process", RUN)]),
        ([Capture(graph="g0"), part("inference")], []),  # of an earlier version, which records no ends
    ],
)
def test_what_has_no_end(events: list[Event], expected: list[tuple[str, str]]) -> None:
    assert found(events) == expected


def test_of_events_alone_no_process_is_expected_to_have_an_end() -> None:
    assert build([CAPTURE, part("inference")]).unfinished == ()


def killed() -> Audit:
    row = Subgraph(graph="g0", part="inference", subgraph="g0.inference.0", lowering="inductor", nodes=1)
    return build([BEGAN, CAPTURE, row, Capture(graph="g1", run=RUN, function="g (m.py:9)")])


def test_every_view_tells_it() -> None:
    audit = killed()
    assert "UNFINISHED: g0 was captured and never built, g1 was captured and never built, and 1 more" in audit.summary()
    assert "unfinished: g1 was captured and never built (g (m.py:9)); the last that was recorded: capture of g1" in (
        " ".join(audit.to_text().split())
    )
    page = audit.to_html()
    assert '<span class="pill bad">unfinished</span>' in page
    assert "process 12 did not record its end" in page
    data = to_dict(audit)
    assert [each["what"] for each in data["unfinished"]] == ["graph", "graph", "process"]
    again = from_dict(json.loads(json.dumps(data)))
    assert again.unfinished == audit.unfinished


def test_two_runs_differ_in_it() -> None:
    whole = build([BEGAN, CAPTURE, BUILT, part("inference"), ran("inference"), ENDED])
    cut = build([BEGAN, CAPTURE, BUILT, part("inference"), ran("inference")])
    kinds = {change.kind for change in omnicomp.audit.diff(whole, cut).changes}  # type: ignore[attr-defined]
    assert kinds == {"unfinished"}
    assert {c.kind for c in omnicomp.audit.diff(cut, whole).changes} == {"finished"}  # type: ignore[attr-defined]
    assert not omnicomp.audit.diff(cut, cut).changes  # type: ignore[attr-defined]


def test_the_gate_fails_and_may_let_it_pass() -> None:
    assert judge(killed()).failed
    assert not judge(killed()).over
    assert not judge(killed(), allow_unfinished=True).failed
    assert judge(build([]), baseline=[killed()]).notes[0].startswith("the baseline is unfinished")


def test_an_empty_file_and_a_torn_last_line_are_signs_of_it(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("")
    assert [each.what for each in load(path).unfinished] == ["process"]
    line = json.dumps(Capture(graph="g0", pid=7).to_dict())
    path.write_text(f"{line}\n{line[:30]}")
    assert [each.sentence[:9] for each in load(path).unfinished] == ["process 7"]
    path.write_text(f"{line[:30]}\n{line}\n")  # appended to by another process
    assert load(path).unfinished == ()


def _breaks(x: Tensor) -> Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


def _forward_alone(x: Tensor) -> Tensor:
    return (x * torch.ones(3, requires_grad=True)).sum()


def _of_sizes(x: Tensor) -> Tensor:
    return x[x > 0].sum() + 1


@pytest.mark.parametrize("function", [torch.sin, _breaks, _forward_alone, _of_sizes])
def test_a_program_that_ends_in_order_is_no_alarm(function: Callable[[Tensor], Tensor]) -> None:
    torch.compile(lambda x: function(x), backend="omni", options=EAGER)(torch.randn(3))
    assert omnicomp.audit().unfinished == ()
    assert of_this_process(current().events(), ended=True).unfinished == ()


def test_a_call_that_raises_is_no_alarm() -> None:
    compiled = torch.compile(lambda x, i: x.index_select(0, i) + 1, backend="omni", options=EAGER)
    with pytest.raises((IndexError, RuntimeError)):
        compiled(torch.randn(3), torch.tensor([100]))
    found = of_this_process(current().events(), ended=True)
    assert found.unfinished == ()
    assert found.subgraphs[0].raised


def test_a_compilation_that_raises_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICOMP_PLACE", "aten.sin:eager")
    options = {"fallback": {"max_nodes": 0, "on_excess": "error"}}
    with pytest.raises(omnicomp.FallbackError):
        torch.compile(lambda x: x.sin(), backend="omni", options=options)(torch.randn(3))
    assert [graph.outcome and graph.outcome.state for graph in omnicomp.audit().graphs] == ["raised"]
    assert of_this_process(current().events(), ended=True).unfinished == ()


def test_what_was_built_and_never_called_is_told() -> None:
    module = torch.fx.symbolic_trace(lambda x: x.sin())
    omnicomp.omni(module, [torch.randn(3)], options=EAGER)
    assert [each.what for each in omnicomp.audit().unfinished] == ["part"]


def test_a_graph_that_is_being_compiled_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    from omnicomp.backend import pipeline

    seen: list[Audit] = []
    run_passes = pipeline.run_passes

    def slow(*args: Any, **kwargs: Any) -> Any:
        thread = threading.Thread(target=lambda: seen.append(omnicomp.audit()))
        thread.start()
        thread.join()
        return run_passes(*args, **kwargs)

    monkeypatch.setattr(pipeline, "run_passes", slow)
    torch.compile(lambda x: x.sin(), backend="omni", options=EAGER)(torch.randn(3))
    assert [len(audit.graphs) for audit in seen] == [1]
    assert seen[0].unfinished == ()


def test_the_running_process_reads_its_own_file(tmp_path: Path) -> None:
    options = {**EAGER, "timeline": str(tmp_path / "t.jsonl")}
    torch.compile(lambda x: x.sin(), backend="omni", options=options)(torch.randn(3))
    assert load(tmp_path / "t.jsonl").unfinished == ()
    assert [process.state for process in load(tmp_path / "t.jsonl").processes] == ["running"]
    omnicomp.timeline.clear()
    assert [process.state for process in load(tmp_path / "t.jsonl").processes] == ["ended"]


def test_a_process_that_dies_while_it_compiles(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, torch\n"
        "import omnicomp\n"
        "def dies(x, dim, *, dtype=None): os._exit(9)\n"
        "@omnicomp.override(op=torch.ops.aten.cumsum.default, check=dies)\n"
        "def killer(x, dim, *, dtype=None): return x.cumsum(dim)\n"
        "def f(x):\n"
        "    x = x.sin() @ x\n"
        "    torch._dynamo.graph_break()\n"
        "    return x.cumsum(-1)\n"
        "options = {'lowerings': ['override', 'eager']}\n"
        "torch.compile(f, backend='omni', options=options)(torch.randn(8, 8))\n"
    )
    python(program, environment={"OMNICOMP_TIMELINE": str(tmp_path / "t.jsonl")})
    audit = load(tmp_path / "t.jsonl")
    assert audit.unfinished[0].id == "g1"
    assert [each.what for each in audit.unfinished] == ["graph", "process"]
    done = python("-m", "omnicomp", "check", tmp_path / "t.jsonl")
    assert done.returncode == 3
    assert "unfinished: g1 was captured and never built" in done.stdout
    assert python("-m", "omnicomp", "check", tmp_path / "t.jsonl", "--allow-unfinished").returncode == 0
