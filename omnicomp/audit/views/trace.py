"""The report as a trace for Perfetto and chrome://tracing: compilations, stages, passes and attempts as slices.

The form is that of the Trace Event Format, "JSON Object Format": complete events (`X`) with `ts` and `dur` in
microseconds, moments (`i`), and metadata (`M`) that name processes and threads. A lane of `slices.lanes` is a thread;
the time line knows in which order things were compiled, not which of Python's threads did it.
"""

import json
import math
from collections.abc import Iterator
from typing import Any, Final

from omnicomp.audit.model import Report
from omnicomp.audit.views.rows import summary
from omnicomp.audit.views.slices import Lane, Moment, Slice, lanes, moments
from omnicomp.safety.escapes import one_line

Process = tuple[int, int]
"""Rank and process id."""

_MOMENTS: Final = 0
_MADE_UP: Final = 1_000_000_000
# Names of Perfetto's reserved palette; both viewers know them.
_COLOURS: Final = {"inductor": "good", "override": "rail_response", "eager": "bad"}


def to_trace(audit: Report) -> str:
    """The trace as JSON text, to be opened in https://ui.perfetto.dev; times begin with the first event."""
    rows = lanes(audit)
    happened = moments(audit)
    numbers = _numbers({(lane.rank, lane.pid) for lane in rows} | {(moment.rank, moment.pid) for moment in happened})
    starts = [each.start for lane in rows for each in lane.slices] + [moment.time for moment in happened]
    zero = min(starts, default=0.0)
    events = [*_metadata(rows, numbers)]
    for lane in rows:
        for each in lane.slices:
            events += _slice(each, numbers[lane.rank, lane.pid], lane.number, zero)
    events += [_moment(moment, numbers[moment.rank, moment.pid], zero) for moment in happened]
    data = {
        "displayTimeUnit": "ms",
        "otherData": {"summary": one_line(summary(audit)), "time_zero_s": zero, **audit.environment.versions},
        "traceEvents": events,
    }
    return json.dumps(_written(data), ensure_ascii=True, indent=1, allow_nan=False) + "\n"


def _written(value: Any) -> Any:
    """The same without numbers that JSON does not know, which a report has where something could not be measured."""
    if isinstance(value, dict):
        return {key: _written(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_written(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(processes: set[Process]) -> dict[Process, int]:
    """A process id for each: its own, or another one where two machines gave the same, or it is not known."""
    pids = [pid for _, pid in processes]
    return {
        (rank, pid): pid if pid > 0 and pids.count(pid) == 1 else _MADE_UP + order
        for order, (rank, pid) in enumerate(sorted(processes))
    }


def _metadata(rows: tuple[Lane, ...], numbers: dict[Process, int]) -> Iterator[dict[str, Any]]:
    for order, ((rank, pid), number) in enumerate(numbers.items()):
        yield _meta("process_name", number, _MOMENTS, name=f"omnicomp rank {rank}, process {pid or 'unknown'}")
        yield _meta("process_sort_index", number, _MOMENTS, sort_index=order)
        yield _meta("thread_name", number, _MOMENTS, name="events")
        # Below the others: moments of the same time are stacked, hundreds of them.
        yield _meta("thread_sort_index", number, _MOMENTS, sort_index=len(rows) + 1)
    for lane in rows:
        number = numbers[lane.rank, lane.pid]
        yield _meta("thread_name", number, lane.number, name=f"compiling {lane.number}")
        yield _meta("thread_sort_index", number, lane.number, sort_index=lane.number)


def _meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def _slice(found: Slice, pid: int, tid: int, zero: float) -> Iterator[dict[str, Any]]:
    """The slice and those inside it, the outer one first."""
    args: dict[str, Any] = {"graph": found.graph}
    args |= {"subgraph": found.subgraph} if found.subgraph else {}
    args |= {"place": "in order; only its length was measured"} if found.inferred else {}
    args |= found.detail
    start = _microseconds(found.start - zero)
    event: dict[str, Any] = {
        "name": one_line(found.name),
        "cat": found.kind,
        "ph": "X",
        "ts": start,
        # The difference of the rounded ends, so that a slice never sticks out of the one around it.
        "dur": round(_microseconds(found.end - zero) - start, 3),
        "pid": pid,
        "tid": tid,
        "args": args,
    }
    colour = "terrible" if not found.ok else _COLOURS.get(found.lowering, "")
    yield {**event, "cname": colour} if colour else event
    for each in found.inside:
        yield from _slice(each, pid, tid, zero)


def _moment(found: Moment, pid: int, zero: float) -> dict[str, Any]:
    return {
        "name": one_line(found.name),
        "cat": found.kind,
        "ph": "i",
        "s": "t",
        "ts": _microseconds(found.time - zero),
        "pid": pid,
        "tid": _MOMENTS,
        "args": {"graph": found.graph, "subgraph": found.subgraph, **found.detail},
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
