"""The scope of a report of this process: since the last reset, all of it, or one block of code."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import omnicomp
from omnicomp.audit import Audit, Recording, audit
from omnicomp.errors import OptionError, TimelineError
from omnicomp.timeline import Capture, Event, JsonLinesSink, Ran, Subgraph, Timeline


def write(path: Path, events: list[Event]) -> None:
    timeline = Timeline()
    timeline.add_sink("file", JsonLinesSink(str(path)))
    for event in events:
        timeline.append(event)
    timeline.clear()


def test_a_file_gives_the_audit_of_the_process(tmp_path: Path, events: list[Event]) -> None:
    write(tmp_path / "t.jsonl", events)
    found = audit(tmp_path / "t.jsonl")
    assert found.stable() == audit(events).stable()
    assert found.to_text() == audit(events).to_text()


def test_two_runs_in_one_file_do_not_mix(tmp_path: Path, events: list[Event]) -> None:
    write(tmp_path / "t.jsonl", events)
    write(tmp_path / "t.jsonl", events)
    found = audit(str(tmp_path / "t.jsonl"))
    assert [graph.id for graph in found.graphs] == ["g0", "g0@2"]
    assert [row.id for row in found.graphs[1].subgraphs][1] == "g0@2.forward.0/softmax_topk"
    assert sum(found.shares.values()) == pytest.approx(1)


def test_processes_that_share_a_file_do_not_mix(tmp_path: Path) -> None:
    def line(pid: int, event: Event) -> str:
        return json.dumps({**event.to_dict(), "pid": pid}) + "\n"

    def plan(lowering: str) -> Subgraph:
        return Subgraph(graph="g0", part="forward", subgraph="g0.forward.0", lowering=lowering, nodes=1)

    def ran(lowering: str) -> Ran:
        return Ran(graph="g0", part="forward", subgraph="g0.forward.0", lowering=lowering)

    lines = [
        line(1, Capture(graph="g0")),
        line(2, Capture(graph="g0")),
        line(1, plan("inductor")),
        line(2, plan("eager")),
        line(2, ran("eager")),
        line(1, ran("inductor")),
        line(3, ran("eager")),  # a forked child of the process that captured last
    ]
    (tmp_path / "t.jsonl").write_text("".join(lines))
    found = audit(tmp_path / "t.jsonl")
    assert {row.id: (row.ran, len(row.runs)) for row in found.subgraphs} == {
        "g0.forward.0": ("inductor", 1),
        "g0@2.forward.0": ("eager", 2),
    }
    assert not found.mismatches


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        '{"type": "capture"}',
        '{"schema": 1, "type": "ran", "graph": "g0"}',
        '{"schema": 1, "type": "capture", "graph": ["g0"]}',
        '{"schema": 1, "type": "capture", "graph": "g0", "nodes": "many"}',
        '{"schema": 1, "type": "placement", "graph": "g0", "part": "forward", "nodes": {"eager": "x"}}',
        '{"schema": 1, "type": "retreat", "graph": "g0", "part": "", "subgraph": "g0", "source_lowering": "a", '
        '"target_lowering": "b", "reason": "because"}',
        '{"schema": 99, "type": "capture", "graph": "g0"}',
    ],
)
def test_a_corrupt_file_is_one_sentence(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.jsonl").write_text(f"{line}\n")
    with pytest.raises(TimelineError, match=r"line 1 .*give a file that") as caught:
        audit(tmp_path / "t.jsonl")
    assert "\n" not in str(caught.value)


def stable(audit_: Audit) -> str:
    return json.dumps(audit_.stable())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("form", ["timeline", "report"])
@pytest.mark.parametrize("piece", [100, 2**20])
def test_a_pipe_is_read_from_its_beginning(tmp_path: Path, events: list[Event], form: str, piece: int) -> None:
    write(tmp_path / "t.jsonl", events)
    expected = audit(tmp_path / "t.jsonl")
    text = expected.to_json() if form == "report" else (tmp_path / "t.jsonl").read_text()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def fill() -> None:
        with pipe.open("wb", buffering=0) as stream:
            content = text.encode()
            for start in range(0, len(content), piece):
                stream.write(content[start : start + piece])

    thread = threading.Thread(target=fill)
    thread.start()
    found = audit(pipe)
    thread.join()
    assert found.graphs
    assert stable(found) == stable(expected)


def test_a_report_that_an_editor_gave_a_byte_order_mark_is_a_report(tmp_path: Path, events: list[Event]) -> None:
    (tmp_path / "r.json").write_text(audit(events).to_json(), encoding="utf-8-sig")
    assert stable(audit(tmp_path / "r.json")) == stable(audit(events))


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match="can't be read"):
        audit(tmp_path / "none.jsonl")


EAGER = {"lowerings": ["eager"]}


def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.compile(function, backend="omni", options=EAGER)


def graphs(run: Recording) -> list[str]:
    ops = {graph.id: [op for row in graph.subgraphs for op in row.ops] for graph in run.audit().graphs}
    return [op.split(".")[1] for each in ops.values() for op in each]


@pytest.mark.parametrize("reset", [torch.compiler.reset, torch._dynamo.reset])
def test_graphs_from_before_a_reset_are_in_no_new_report(reset: Callable[[], None]) -> None:
    w = torch.ones(3, requires_grad=True)
    loss = compiled(lambda x: (x.sin() * w).sum())(torch.randn(3))
    reset()
    assert omnicomp.audit().graphs == ()
    loss.backward()  # what an earlier graph does later is not in it, either
    compiled(lambda x: x.cos())(torch.randn(3))
    assert [list(row.ops) for row in omnicomp.audit().subgraphs] == [["aten.cos.default"]]
    assert len(omnicomp.audit(scope="process").graphs) == 2
    assert len(omnicomp.audit(scope="reset").graphs) == 1


def test_an_unknown_scope_is_one_sentence() -> None:
    with pytest.raises(OptionError, match="scope takes 'reset' or 'process', not 'proces'"):
        omnicomp.audit(scope="proces")


def test_a_block_has_what_was_captured_inside() -> None:
    compiled(lambda x: x.sin())(torch.ones(3))
    with omnicomp.record() as run:
        assert run.audit().graphs == ()
        compiled(lambda x: x.cos())(torch.ones(3))
    compiled(lambda x: x.tan())(torch.ones(3))
    assert graphs(run) == ["cos"]
    assert run.audit().unfinished == ()
    assert str(run).startswith(run.audit().summary()[:20])
    assert repr(run) == run.audit().summary()
    assert list(omnicomp.audit(run).graphs) == list(run.audit().graphs)


def test_a_graph_that_was_captured_before_and_runs_inside_is_in_it_as_a_whole() -> None:
    w = torch.ones(3, requires_grad=True)
    loss = compiled(lambda x: (x.sin() * w).sum())(torch.randn(3))
    compiled(lambda x: x.tan())(torch.ones(3))
    with omnicomp.record() as run:
        loss.backward()
    (graph,) = run.audit().graphs
    assert graph.function
    assert {row.part: row.ran for row in graph.subgraphs} == {"forward": "eager", "backward": "eager"}


def test_blocks_can_be_nested_and_entered_again() -> None:
    with omnicomp.record() as outer:
        compiled(lambda x: x.sin())(torch.ones(3))
        with omnicomp.record() as inner:
            compiled(lambda x: x.cos())(torch.ones(3))
        compiled(lambda x: x.tan())(torch.ones(3))
    with inner:
        compiled(lambda x: x.exp())(torch.ones(3))
    assert graphs(outer) == ["sin", "cos", "tan"]
    assert graphs(inner) == ["cos", "exp"]


def test_an_exception_inside_goes_on_and_leaves_the_recording() -> None:
    run = omnicomp.record()

    def fails() -> None:
        with run:
            compiled(lambda x: x.sin())(torch.ones(3))
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fails()
    compiled(lambda x: x.cos())(torch.ones(3))
    assert graphs(run) == ["sin"]


def test_a_reset_inside_of_a_block_takes_nothing_from_it() -> None:
    with omnicomp.record() as run:
        compiled(lambda x: x.sin())(torch.ones(3))
        torch.compiler.reset()
        compiled(lambda x: x.cos())(torch.ones(3))
        omnicomp.timeline.clear()
    assert graphs(run) == ["sin", "cos"]


def test_blocks_of_several_threads_have_what_is_theirs() -> None:
    together = threading.Barrier(2)
    runs: dict[str, Recording] = {}

    def work(name: str) -> None:
        with omnicomp.record() as run:
            together.wait()
            compiled(lambda x: getattr(torch, name)(x))(torch.ones(3))
            together.wait()
        runs[name] = run

    threads = [threading.Thread(target=work, args=(name,)) for name in ("sin", "cos")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: graphs(run) for name, run in runs.items()} == {"sin": ["sin"], "cos": ["cos"]}


def test_what_a_thread_without_a_block_does_is_in_the_one_that_is_open() -> None:
    with omnicomp.record() as run:
        thread = threading.Thread(target=lambda: compiled(lambda x: x.sin())(torch.ones(3)))
        thread.start()
        thread.join()
    assert graphs(run) == ["sin"]
