"""Events of a timeline file, in which several processes may have numbered their graphs from `g0`."""

import dataclasses
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from omnicomp.timeline import Capture, Event
from omnicomp.timeline.sinks import read_records

__all__ = ["read"]


def read(path: str | PathLike[str]) -> Iterator[Event]:
    """The events of a file; where a graph id comes back (a second run, or another process), it becomes `g0@2`.

    Raises:
        TimelineError: the file is missing, unreadable, or no timeline.
    """
    names: dict[tuple[str, str], str] = {}
    latest: dict[str, str] = {}
    taken: dict[str, int] = {}
    for record, event in read_records(Path(path)):
        pid = str(record.get("pid"))
        if isinstance(event, Capture):
            taken[event.graph] = taken.get(event.graph, 0) + 1
            count = taken[event.graph]
            latest[event.graph] = names[pid, event.graph] = event.graph if count == 1 else f"{event.graph}@{count}"
        # A forked child runs graphs that its parent captured.
        name = names.get((pid, event.graph)) or latest.get(event.graph, event.graph)
        yield _renamed(event, name) if name != event.graph else event


def _renamed(event: Event, name: str) -> Event:
    changes = {"graph": name}
    subgraph = getattr(event, "subgraph", None)
    if isinstance(subgraph, str) and subgraph.startswith(event.graph):
        changes["subgraph"] = name + subgraph[len(event.graph) :]
    return dataclasses.replace(event, **changes)
