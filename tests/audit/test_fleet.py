"""Folders of timelines: processes and ranks side by side."""

import html.parser
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import peaks_of_memory

from omnicomp.audit import build
from omnicomp.audit.fleet import Fleet, facts_of, fleet, ranges_of, stragglers
from omnicomp.audit.fleet import Process as FleetProcess
from omnicomp.errors import TimelineError
from omnicomp.timeline import (
    Capture,
    Event,
    JsonLinesSink,
    Outcome,
    Process,
    Ran,
    Reason,
    Retreat,
    Subgraph,
    Timeline,
)

HOSTILE = "<script>alert(1)</script>\x1b[2J"
Make = Callable[..., list[Event]]


def events(lowering: str = "inductor", *, graphs: int = 1, module: str = "layers.0") -> list[Event]:
    found: list[Event] = []
    for number in range(graphs):
        graph = f"g{number}"
        found += [
            Capture(graph=graph, function=f"f{number}", device="cpu", nodes=2, module=module, options={"a": 1}),
            Subgraph(
                graph=graph,
                part="inference",
                subgraph=f"{graph}.inference.0",
                lowering="inductor",
                nodes=2,
                ops={"aten.mm.default": 2},
                module=module,
            ),
        ]
        if lowering == "eager":
            reason = Reason(code="call_failed", sentence="it raised")
            found.append(
                Retreat(
                    graph=graph,
                    part="inference",
                    subgraph=f"{graph}.inference.0",
                    source_lowering="inductor",
                    target_lowering="eager",
                    reason=reason,
                )
            )
        found.append(Ran(graph=graph, part="inference", subgraph=f"{graph}.inference.0", lowering=lowering))
    return found


def write(path: Path, found: list[Event], *, rank: int = 0, pid: int = 7, monkeypatch: Any = None) -> None:
    """A timeline file as a process of that rank and id would write it."""
    records: list[dict[str, Any]] = []

    class Kept:
        def write(self, record: dict[str, Any]) -> None:
            records.append({**record, "rank": rank, "pid": pid})

        def close(self) -> None:
            return

    timeline = Timeline()
    timeline.add_sink("kept", Kept())
    for event in found:
        timeline.append(event)
    path.parent.mkdir(parents=True, exist_ok=True)
    sink = JsonLinesSink(str(path))
    for record in records:
        sink.write(record)
    sink.close()


def test_a_rank_that_compiled_much_longer_is_named() -> None:
    alike = [_compiled_for(12.0, rank) for rank in range(3)]
    assert stragglers(alike) == []
    late = _compiled_for(41.0, 3)
    assert stragglers([*alike, late]) == [late]
    told = Fleet(folder="runs", processes=(*alike, late), groups=()).summary()
    assert "1 straggler in compiling: rank 3 41 s, the median 12 s" in told


def _compiled_for(seconds: float, rank: int) -> FleetProcess:
    rest: dict[str, Any] = {"group": 0, "shares": {}, "caches": {}, "started": 0.0}
    counts = {"graphs": 1, "subgraphs": 1, "fallbacks": 0, "retreats": 0, "mismatches": 0}
    return FleetProcess(path=f"{rank}.jsonl", rank=rank, pid=rank, seconds=seconds, **counts, **rest)


def test_equal_reports_are_one_group(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path / "runs" / f"{rank}.jsonl", events(), rank=rank, pid=100 + rank)
    found = fleet(tmp_path)
    assert found.summary() == "omni: 4 processes, 4 ranks: all reports are equal"
    (group,) = found.groups
    assert (group.processes, group.ranks, group.differences) == (4, (0, 1, 2, 3), 0)
    assert [(p.rank, p.pid, p.path, p.group) for p in found.processes] == [
        (rank, 100 + rank, f"runs/{rank}.jsonl", 0) for rank in range(4)
    ]


def test_what_a_rank_did_otherwise_is_shown(tmp_path: Path) -> None:
    for rank in range(5):
        write(tmp_path / f"{rank}.jsonl", events("eager" if rank == 2 else "inductor"), rank=rank)
    found = fleet(tmp_path)
    assert found.summary() == "omni: 5 processes, 5 ranks: 2 different reports, 4 of them equal"
    first, other = found.groups
    assert (first.ranks, other.ranks) == ((0, 1, 3, 4), (2,))
    assert len(other.added) == 2
    assert any("ran on eager" in fact for fact in other.added)
    assert any("inductor retreated to eager: call_failed" in fact for fact in other.added)
    assert [fact.split(": ", 1)[1] for fact in other.missing] == ["planned for inductor, ran on inductor"]
    odd = found.processes[2]
    assert (odd.rank, odd.retreats, odd.shares) == (2, 1, {"eager": 1.0})
    text = found.to_text()
    assert "Report B against A" in text
    assert "0-1, 3-4" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_rank_that_captured_more_is_shown(tmp_path: Path) -> None:
    write(tmp_path / "0.jsonl", events(graphs=2), rank=0)
    write(tmp_path / "1.jsonl", events(graphs=3), rank=1)
    _, other = fleet(tmp_path).groups
    assert any("was captured" in fact for fact in (*other.added, *other.missing))


def test_numbers_times_paths_and_ranks_make_no_difference() -> None:
    one = build(events(graphs=2))
    moved = [
        Capture(graph="g9", function="f9", device="cpu"),
        *(event for event in events(graphs=2)),
    ]
    assert facts_of(one) == facts_of(build(events(graphs=2)))
    assert facts_of(one) < facts_of(build(moved))


def test_processes_that_share_a_file_are_told_apart(tmp_path: Path) -> None:
    for pid in (11, 12):
        write(tmp_path / "t.jsonl", events(), pid=pid)
    write(tmp_path / "t.jsonl", events("eager"), pid=13)
    found = fleet(tmp_path)
    assert [(p.pid, p.graphs, p.group) for p in found.processes] == [(11, 1, 0), (12, 1, 0), (13, 1, 1)]
    assert found.processes[0].shares == {"inductor": 1.0}


def test_a_rotated_file_is_no_process_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl.1", events())
    write(tmp_path / "t.jsonl", [Ran(graph="g0", part="inference", subgraph="g0.inference.0", lowering="inductor")])
    write(tmp_path / "alone.jsonl.1", events())
    found = fleet(tmp_path)
    assert [p.path for p in found.processes] == ["alone.jsonl.1", "t.jsonl"]
    assert len(found.groups) == 1


def test_torn_lines_and_other_files_are_counted_and_named(tmp_path: Path) -> None:
    write(tmp_path / "0.jsonl", events())
    data = (tmp_path / "0.jsonl").read_bytes()
    (tmp_path / "1.jsonl").write_bytes(data[:-30])
    (tmp_path / "bad.jsonl").write_bytes(b"\x89PNG\n")
    (tmp_path / "notes.txt").write_text("no timeline")
    found = fleet(tmp_path)
    assert (found.torn, found.failed) == (1, 1)
    assert found.unreadable[0][0] == "bad.jsonl"
    assert "1 torn line skipped; 1 file could not be read" in found.summary()
    for view in (found.to_text(), found.to_html(), found.to_json()):
        assert "bad.jsonl" in view
        assert "1 torn line skipped" in view


@pytest.mark.parametrize(
    ("content", "message"), [(None, "has no timelines"), (b"\x89PNG\n", "none of 1 file could be")]
)
def test_a_folder_without_timelines_is_one_sentence(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(TimelineError, match=message):
        fleet(tmp_path)
    with pytest.raises(TimelineError, match="is no folder"):
        fleet(tmp_path / "none")


class Page(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.data: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.data.append(data)


def test_hostile_names_are_shown_and_not_run(tmp_path: Path) -> None:
    write(tmp_path / "0.jsonl", events(module=HOSTILE))
    write(tmp_path / "1.jsonl", events("eager", module=HOSTILE))
    write(tmp_path / f"2{HOSTILE.replace('/', '')}.jsonl", events())
    found = fleet(tmp_path)
    page = Page(found.to_html())
    assert "script" not in page.tags
    assert any("<script>alert(1)</script>" in text for text in page.data)
    assert "\x1b" not in found.to_html() + found.to_text() + found.to_json()
    assert "http" not in found.to_html().replace("http-equiv", "")


def test_json_has_everything(tmp_path: Path) -> None:
    write(tmp_path / "0.jsonl", events())
    data = json.loads(fleet(tmp_path).to_json())
    assert data["schema"] == 1
    assert set(data) == {"schema", "summary", *Fleet.__dataclass_fields__}
    assert data["processes"][0]["path"] == "0.jsonl"


@pytest.mark.parametrize(("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5, 7, 8), "0-2, 5, 7-8")])
def test_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert ranges_of(numbers) == text


def test_memory_is_that_of_a_file_and_not_of_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "one" / "0.jsonl", events(graphs=150))
    content = (tmp_path / "one" / "0.jsonl").read_bytes()
    (tmp_path / "many").mkdir()
    for rank in range(16):
        (tmp_path / "many" / f"{rank}.jsonl").write_bytes(content)
    folders = [tmp_path / "one", tmp_path / "many"]
    one, many = peaks_of_memory("fleet", folders, setup="from omnicomp.audit.fleet import fleet")
    assert many < 1.3 * one


def test_beyond_the_most_kinds_groups_are_counted_and_not_compared(tmp_path: Path) -> None:
    for number in range(40):
        write(tmp_path / f"{number:02}.jsonl", events(module=f"model{number}"), rank=number)
    found = fleet(tmp_path)
    assert len(found.groups) == 40
    assert [group.differences == -1 for group in found.groups] == [False] * 32 + [True] * 8
    assert "not compared" in found.to_text()


def test_processes_that_were_killed_are_counted(tmp_path: Path) -> None:
    began, ended = (Process(state=state, run="12-ab", pid=12).to_dict() for state in ("began", "ended"))
    graph = Capture(graph="g0", run="12-ab", pid=12).to_dict()
    over = Outcome(graph="g0", state="built").to_dict()
    whole, killed = [began, graph, over, ended], [began, graph]
    for number, lines in enumerate([whole, whole, killed, [began], [*whole, "print"]]):
        text = "".join(line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in lines)
        (tmp_path / f"{number}.jsonl").write_text(text)
    found = fleet(tmp_path)
    assert [process.unfinished for process in found.processes] == [0, 0, 2, 1, 0]
    assert "2 UNFINISHED" in found.summary()
    assert "left out: 1 foreign line (4.jsonl, line 5, it is not JSON)" in found.summary()
    assert "+ the process did not record its end" in found.to_text()
    assert "unfinished 2" in " ".join(found.to_text().split())
    assert json.loads(found.to_json())["unread"][0]["kind"] == "foreign"
