import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import golden
import pytest
from made_timelines import large_timeline

from omnicomp.audit import Audit, build
from omnicomp.audit.views.jsonform import from_json
from omnicomp.audit.views.slices import Slice, lanes
from omnicomp.audit.views.trace import to_trace
from omnicomp.timeline import Attempt, Candidate, Capture, Event, PassRun, Ran, Stage, Subgraph


def compiled(graph: str, start: float, *, pid: int = 7) -> list[Event]:
    where = {"graph": graph, "part": "forward"}
    ids = [f"{graph}.forward.{number}" for number in range(3)]
    return [
        Capture(graph=graph, time=start + 1, function="f", pid=pid),
        Stage(graph=graph, time=start + 1, stage="dynamo", seconds=1.0),
        PassRun(graph=graph, time=start + 2, name="a_pass", seconds=0.5),
        *(Subgraph(**where, time=start + 3, subgraph=id, lowering="inductor", nodes=1) for id in ids),
        # As omnicomp records them: together, after all of them are built.
        *(
            Attempt(**where, time=start + 9, subgraph=id, lowering="inductor", ok=True, selected=True, seconds=2.0)
            for id in ids
        ),
        Stage(**where, time=start + 9.5, stage="lowering", seconds=7.0),
        Stage(graph=graph, time=start + 10, stage="autograd", seconds=1.0),
        Ran(**where, time=start + 11, subgraph=ids[0], lowering="inductor", evidence="c.py"),
    ]


def well_formed(text: str) -> list[dict[str, Any]]:
    """The trace's events, held against the Trace Event Format."""
    data = json.loads(text)
    assert set(data) == {"displayTimeUnit", "otherData", "traceEvents"}
    for event in data["traceEvents"]:
        assert event["ph"] in ("X", "i", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] == "t"
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
    nested(data["traceEvents"])
    return data["traceEvents"]


def nested(events: list[dict[str, Any]]) -> None:
    """Slices of a thread lie beside or inside one another; a viewer draws others wrongly, or drops them."""
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for slices in threads.values():
        open_ends: list[float] = []
        for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"] + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3, event
            open_ends.append(end)


def every(slices: tuple[Slice, ...]) -> Iterator[Slice]:
    for each in slices:
        yield each
        yield from every(each.inside)


def test_golden() -> None:
    golden.check("audit/compiled.trace.json", to_trace(build(compiled("g0", 100.0))))


@pytest.mark.parametrize("found", [build(large_timeline(200)), build(compiled("g0", 5.0) + compiled("g1", 50.0))])
def test_it_is_well_formed(found: Audit) -> None:
    names = {event["name"] for event in well_formed(to_trace(found))}
    assert {"process_name", "thread_name"} <= names
    assert any(name.startswith("inductor builds g0.forward.0") for name in names)


def test_stages_passes_and_attempts_lie_inside_one_another() -> None:
    (lane,) = lanes(build(compiled("g0", 100.0)))
    (whole,) = lane.slices
    assert (whole.start, whole.end) == (100.0, 110.0)
    assert [(s.name, s.start, s.end) for s in whole.inside] == [
        ("dynamo", 100.0, 101.0),
        ("a_pass", 101.5, 102.0),
        # Its own second, and the seven of the lowering inside it.
        ("autograd", 102.0, 110.0),
    ]
    (lowering,) = whole.inside[2].inside
    assert [(s.subgraph, s.start, s.end) for s in lowering.inside] == [
        ("g0.forward.0", 103.0, 105.0),
        ("g0.forward.1", 105.0, 107.0),
        ("g0.forward.2", 107.0, 109.0),
    ]
    assert all(s.inferred for s in lowering.inside)


def test_a_backward_is_a_compilation_of_its_own() -> None:
    later = Stage(graph="g0", part="backward", time=120.0, stage="lowering", seconds=3.0)
    (lane,) = lanes(build([*compiled("g0", 100.0), later]))
    assert [(s.name, s.start) for s in lane.slices] == [("g0 f", 100.0), ("g0 lowering backward", 117.0)]


def test_compilations_at_the_same_time_are_threads_of_their_own() -> None:
    found = build([*compiled("g0", 100.0), *compiled("g1", 104.0), *compiled("g2", 104.0, pid=8)])
    assert [(lane.pid, lane.number, len(lane.slices)) for lane in lanes(found)] == [(7, 1, 1), (7, 2, 1), (8, 1, 1)]
    well_formed(to_trace(found))


def test_ranks_whose_machines_gave_them_one_process_id_stay_apart() -> None:
    events = [*compiled("g0", 100.0), *compiled("g1", 104.0)]
    events = [dataclasses.replace(e, rank=1) if isinstance(e, Capture) and e.graph == "g1" else e for e in events]
    trace = well_formed(to_trace(build(events)))
    names = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert sorted(names.values()) == ["omnicomp rank 0, process 7", "omnicomp rank 1, process 7"]


def test_a_process_that_is_not_known_has_a_number() -> None:
    trace = well_formed(to_trace(build(compiled("g0", 100.0, pid=0))))
    assert all(event["pid"] > 0 for event in trace)


def test_a_slice_never_reaches_beyond_the_one_around_it() -> None:
    late = Attempt(
        graph="g0", part="forward", subgraph="g0.forward.0", lowering="eager", ok=True, time=109.2, seconds=50.0
    )
    found = build([*compiled("g0", 100.0)[:-3], late, *compiled("g0", 100.0)[-3:]])
    for lane in lanes(found):
        for outer in every(lane.slices):
            assert all(outer.start <= inner.start <= inner.end <= outer.end for inner in outer.inside)
    well_formed(to_trace(found))


def test_a_report_read_from_json_gives_the_same_trace() -> None:
    found = build(large_timeline(40, graphs=2))
    assert to_trace(from_json(found.to_json(), "r.json")) == to_trace(found)


def test_numbers_that_json_does_not_know_are_none_of_it() -> None:
    strange = [
        Capture(graph="g0"),
        PassRun(graph="g0", name="endless", seconds=math.inf, time=10.0),
        PassRun(graph="g0", name="never", seconds=0.1, time=math.inf),
        PassRun(graph="g0", name="fine", seconds=0.1, time=10.0),
        Candidate(graph="g0", candidate="c", seconds=math.nan, time=10.0),
    ]
    text = to_trace(build(strange))
    assert "NaN" not in text
    assert "Infinity" not in text
    assert {e["name"] for e in json.loads(text)["traceEvents"] if e["ph"] == "X"} == {"fine", "g0"}


def test_without_times_there_is_nothing_to_draw(events: list[Event]) -> None:
    assert well_formed(to_trace(build(events))) == []
    assert well_formed(to_trace(build([]))) == []
