"""From events to the report: a pure function, which keeps none of the events that it has counted.

What repeats is counted: samples of memory and time become one figure for each subgraph. Lists that would grow through a
long run, and of many graphs, are bounded by `_MOST` and what follows it, and `left_out` counts the events beyond that.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from omnicomp.audit.identity import natural, with_identities
from omnicomp.audit.model import (
    GraphAudit,
    MemoryUse,
    Merge,
    PartAudit,
    ProcessAudit,
    Report,
    Setting,
    Shares,
    SubgraphAudit,
    TimeUse,
)
from omnicomp.timeline import (
    Artefacts,
    Attempt,
    Background,
    Boundary,
    Cache,
    Calibration,
    Candidate,
    Capture,
    Certified,
    CudaGraph,
    Event,
    Memory,
    NearMiss,
    NodePlacement,
    Option,
    Outcome,
    PassRun,
    Placement,
    Process,
    Ran,
    Retreat,
    Rewrite,
    Speculation,
    Stage,
    Subgraph,
    Timing,
    Verification,
    Weights,
)
from omnicomp.timeline.reasons import text_of

_COUNTS: Final = {"nodes": "nodes", "flops": "flops_hint", "bytes": "bytes_hint"}
_PART_ORDER: Final = {"forward": 0, "inference": 1, "backward": 2}
_MOST: Final = 64
_MOST_EQUAL: Final = 4
_MOST_OF_PASSES: Final = 20_000
_MOST_GRAPHS: Final = 10_000
# Of all graphs together: subgraphs and parts, and events in lists.
_MOST_ROWS: Final = 200_000
_MOST_EVENTS: Final = 300_000
_LISTS: Final[dict[type[Event], str]] = {
    Option: "ineffective",
    PassRun: "passes",
    Rewrite: "rewrites",
    Certified: "certificates",
    NearMiss: "near_misses",
    Speculation: "speculations",
    Calibration: "calibrations",
    Weights: "weights",
    Cache: "caches",
    Stage: "stages",
    Candidate: "candidates",
}
_OF_PASSES: Final = ("passes", "rewrites", "certificates", "near_misses", "caches", "boundaries")
_PLANNED: Final = tuple(
    sorted({f.name for f in dataclasses.fields(Subgraph)} & {f.name for f in dataclasses.fields(SubgraphAudit)})
)
_CAPTURED: Final = tuple(
    sorted({f.name for f in dataclasses.fields(Capture)} & {f.name for f in dataclasses.fields(GraphAudit)})
)


def fold(
    events: Iterable[Event], *, skipped: int = 0, states: Mapping[str, str] | None = None, whole: bool = False
) -> Report:
    """Make the report model from events in the order in which they were recorded, one at a time.

    Args:
        events: of one process, or of several whose graphs have different ids.
        skipped: lines of the file that were torn.
        states: what is known of processes otherwise, by their names: `running` or `ended`.
        whole: whether they are all that a file has, so that a process without an end has none.
    """
    states = states or {}
    graphs: dict[str, _Graph] = {}
    processes: dict[str, ProcessAudit] = {}
    artefacts: list[Artefacts] = []
    count = left_out = rows = 0
    room = _Room()
    for event in events:
        if isinstance(event, Process):
            _begin_or_end(event, processes)
            continue
        count += 1
        if isinstance(event, Artefacts):
            artefacts[_MOST - 1 :] = [event]
            continue
        if isinstance(event, Capture) and event.run and (whole or event.run in states):
            processes.setdefault(event.run, ProcessAudit(run=event.run, pid=event.pid, rank=event.rank))
        graph = graphs.get(event.graph)
        if graph is None:
            if len(graphs) >= _MOST_GRAPHS or rows >= _MOST_ROWS:
                left_out += isinstance(event, Capture)
                continue
            graph = graphs[event.graph] = _Graph(event.graph, room)
        elif rows >= _MOST_ROWS and graph.is_new(event):
            graph.bounded.count("subgraphs")
            continue
        before = graph.size
        graph.add(event)
        rows += graph.size - before
    frozen = with_identities([graph.freeze() for graph in graphs.values()])
    ends = tuple(_with_last(process, graphs.values(), states) for process in processes.values())
    report = Report(graphs=frozen, events=count, skipped=skipped, left_out=left_out, processes=ends)
    return with_shares(dataclasses.replace(report, artefacts=tuple(artefacts)))


def _begin_or_end(event: Process, processes: dict[str, ProcessAudit]) -> None:
    known = processes.get(event.run) or ProcessAudit(run=event.run, pid=event.pid, rank=event.rank, began=event.time)
    ended = event.state == "ended"
    processes[event.run] = dataclasses.replace(
        known, state="ended" if ended else "unfinished", ended=event.time if ended else 0.0
    )


def _with_last(process: ProcessAudit, graphs: Iterable["_Graph"], states: Mapping[str, str]) -> ProcessAudit:
    state = process.state if process.state == "ended" else states.get(process.run, process.state)
    if state != "unfinished":
        return dataclasses.replace(process, state=state)
    own = [graph.last for graph in graphs if graph.capture.run == process.run and graph.last is not None]
    last = max(own, key=lambda event: (event.time, event.seq), default=None)
    return dataclasses.replace(process, last="" if last is None else _words(last))


def _words(event: Event) -> str:
    """The event in a few words: `pass_run attention_fusion of g0`."""
    what = [getattr(event, name, "") for name in ("name", "stage", "lowering")]
    id = getattr(event, "subgraph", "") or event.graph
    return " ".join((event.type, *(str(each) for each in what if each), f"of {id}"))


class _Room:
    """How many events the lists of a whole report may still take."""

    def __init__(self) -> None:
        self.left = _MOST_EVENTS


class _Bounded:
    """Lists of events by name, each of bounded length."""

    def __init__(self, room: _Room) -> None:
        self.room = room
        self.lists: dict[str, list[Any]] = {}
        self.left_out: dict[str, int] = {}

    def add(self, name: str, event: Event) -> None:
        found = self.lists.setdefault(name, [])
        if self.room.left and len(found) < (_MOST_OF_PASSES if name in _OF_PASSES else _MOST):
            self.room.left -= 1
            found.append(event)
        else:
            self.count(name)

    def drop(self, name: str, is_old: Callable[[Any], bool]) -> None:
        """Take events out of a list that a later one says as well."""
        kept = [event for event in self.lists.get(name, ()) if not is_old(event)]
        self.room.left += len(self.lists.get(name, ())) - len(kept)
        self.lists[name] = kept

    def count(self, name: str) -> None:
        self.left_out[name] = self.left_out.get(name, 0) + 1

    def of(self, name: str) -> tuple[Any, ...]:
        return tuple(self.lists.get(name, ()))


class _Row:
    """A subgraph while its events come in; `expected` follows the retreats, so that each run is judged by its time."""

    def __init__(self, id: str, graph: str, part: str, room: _Room) -> None:
        self.fields: dict[str, Any] = {"id": id, "graph": graph, "part": part}
        self.planned = ""
        self.expected = ""
        self.difference = ""
        self.superseded = False
        self.bounded = _Bounded(room)
        self.last: Ran | None = None
        self.timing: TimeUse | None = None
        self.samples = 0
        self.first_sample: Memory | None = None
        self.last_sample: Memory | None = None
        self.highest: Memory | None = None
        self.verified: dict[tuple[str, ...], Verification] = {}

    def plan(self, event: Subgraph) -> None:
        self.fields.update({name: getattr(event, name) for name in _PLANNED}, part=event.part)
        self.planned = self.expected = event.lowering
        self.superseded = False

    def retreat(self, event: Retreat) -> None:
        self.bounded.add("retreats", event)
        self.planned = self.planned or event.source_lowering
        self.expected = event.target_lowering

    def run(self, event: Ran) -> None:
        runs = self.bounded.lists.get("runs", ())
        same = self.last is not None and (event.lowering, event.evidence) == (self.last.lowering, self.last.evidence)
        if same and len(runs) >= _MOST_EQUAL:
            self.bounded.count("runs")
        else:
            self.bounded.add("runs", event)
        self.last = event
        self.superseded = False
        # Without a plan there is nothing to differ from: the row says that no plan was recorded.
        if self.expected and event.lowering != self.expected and not self.difference:
            self.difference = f"planned for {self.expected} and ran on {event.lowering}"

    def time(self, event: Timing) -> None:
        # The events of one executable count up; one that takes its place (a retreat, another process) starts anew.
        self.timing = TimeUse(**{field.name: getattr(event, field.name) for field in dataclasses.fields(TimeUse)})

    def sample(self, event: Memory) -> None:
        if self.samples == 0:
            self.first_sample = event
        self.samples += 1
        self.last_sample = event
        if self.highest is None or event.peak_bytes > self.highest.peak_bytes:
            self.highest = event

    def memory(self) -> MemoryUse | None:
        first, last, highest = self.first_sample, self.last_sample, self.highest
        if first is None or last is None or highest is None:
            return None
        return MemoryUse(
            device=first.device,
            calls=self.samples,
            before_bytes=first.before_bytes,
            after_bytes=last.after_bytes,
            peak_bytes=highest.peak_bytes,
            peak_call=highest.call,
        )

    def verify(self, event: Verification) -> None:
        outcome = (event.name, event.state, event.direction, event.detail)
        if outcome not in self.verified:
            self.verified[outcome] = event
            self.bounded.add("verifications", event)
        if len(self.verified) > _MOST:
            del self.verified[outcome]

    def freeze(self, rows: dict[str, "_Row"]) -> SubgraphAudit:
        id = self.fields["id"]
        parent = id.rsplit("/", 1)[0] if "/" in id else ""
        last = self.last
        return SubgraphAudit(
            **self.fields,
            parent=parent if parent in rows else "",
            planned=self.planned,
            expected=self.expected,
            ran=last.lowering if last else None,
            difference=self.difference,
            superseded=self.superseded,
            evidence=last.evidence if last else "",
            kernels=dict(last.kernels) if last else {},
            attempts=self.bounded.of("attempts"),
            retreats=self.bounded.of("retreats"),
            runs=self.bounded.of("runs"),
            timing=self.timing,
            memory=self.memory(),
            verifications=self.bounded.of("verifications"),
            recordings=self.bounded.of("recordings"),
            left_out=self.bounded.left_out,
        )


class _Graph:
    """A Dynamo graph while its events come in."""

    def __init__(self, id: str, room: _Room) -> None:
        self.id = id
        self.capture = Capture(graph=id)
        self.bounded = _Bounded(room)
        self.placements: dict[str, Placement] = {}
        self.rows: dict[str, _Row] = {}
        # An attempt may come before what it is an attempt at is known.
        self.attempts: dict[str, list[Attempt]] = {}
        self.retreats: list[Retreat] = []
        self.outcome: Outcome | None = None
        self.background: Background | None = None
        self.last: Event | None = None

    @property
    def size(self) -> int:
        """How many subgraphs and parts it has."""
        return len(self.rows) + len(self.placements) + len(self.attempts)

    def is_new(self, event: Event) -> bool:
        """Whether an event is of a subgraph or a part that is not known yet."""
        if isinstance(event, Placement):
            return event.part not in self.placements
        id = getattr(event, "subgraph", "")
        return bool(id) and id not in self.rows

    def add(self, event: Event) -> None:
        self.last = event
        name = _LISTS.get(type(event))
        if isinstance(event, Outcome):
            if not event.subgraph:
                self.outcome = event
                if event.state == "taken_back":
                    # Dynamo hands over the same code once more, or leaves it to eager.
                    self.bounded.drop("rewrites", lambda known: True)
                    self.bounded.drop("near_misses", lambda known: known.kind != "graph_break")
            elif event.subgraph in self.rows:
                self.rows[event.subgraph].fields["raised"] = True
        elif isinstance(event, Background):
            self.background = event
        elif name is not None:
            if isinstance(event, Speculation) and event.state == "ran":
                self.bounded.drop(name, lambda known: (known.state, known.variant) == ("ran", event.variant))
            self.bounded.add(name, event)
        elif isinstance(event, Capture):
            self.capture = event
        elif isinstance(event, Placement):
            self.placements[event.part] = event
            # Where a part is placed again, the boundaries of the last placement hold.
            for boundary in self.bounded.lists.pop("boundaries", ()):
                if boundary.part != event.part:
                    self.bounded.add("boundaries", boundary)
        elif isinstance(event, Boundary):
            self.bounded.add("boundaries", event)
        elif isinstance(event, Subgraph):
            self._row(event.subgraph, event.part).plan(event)
        elif isinstance(event, Attempt):
            self._attempt(event)
        elif isinstance(event, Retreat):
            self._retreat(event)
        elif isinstance(event, Ran):
            self._row(event.subgraph, event.part).run(event)
        elif isinstance(event, (Timing, Memory, Verification, CudaGraph)):
            self._observed(event)

    def _attempt(self, event: Attempt) -> None:
        row = self.rows.get(event.subgraph)
        if row is not None:
            row.bounded.add("attempts", event)
            return
        if len(self.attempts) < _MOST_OF_PASSES or event.subgraph in self.attempts:
            waiting = self.attempts.setdefault(event.subgraph, [])
            if len(waiting) < _MOST:
                waiting.append(event)
                return
        self.bounded.count("attempts")

    def _observed(self, event: Timing | Memory | Verification | CudaGraph) -> None:
        row = self.rows.get(event.subgraph)
        if row is None:
            if isinstance(event, Verification):
                self.bounded.add("verifications", event)
            else:
                self.bounded.count(event.type)
        elif isinstance(event, Timing):
            row.time(event)
        elif isinstance(event, Memory):
            row.sample(event)
        elif isinstance(event, CudaGraph):
            row.bounded.add("recordings", event)
        else:
            row.verify(event)

    def _retreat(self, event: Retreat) -> None:
        recut = event.subgraph == f"{self.id}.{event.part}" or event.source_lowering == event.target_lowering
        if recut or event.source_lowering == "passes" or event.target_lowering == "graph break":
            # The graph goes on without its passes, or a part is cut anew: its subgraphs are planned after this. A graph
            # that Dynamo takes back never runs: its pieces are graphs of their own.
            self.bounded.add("retreats", event)
            return
        if event.subgraph == self.id:
            for row in self.rows.values():
                row.superseded = True
        self._row(event.subgraph, event.part).retreat(event)

    def _row(self, id: str, part: str) -> _Row:
        row = self.rows.get(id)
        if row is None:
            row = self.rows[id] = _Row(id, self.id, part, self.bounded.room)
            for attempt in self.attempts.pop(id, ()):
                row.bounded.add("attempts", attempt)
            if "/" not in id:
                # A graph that retreated as a whole was never placed: of its work only the operators are known.
                # An override call is part of a subgraph, whose numbers include it.
                nodes = self.capture.nodes if id == self.id else 0
                row.fields.update(nodes=nodes, flops="", flops_hint=-1, bytes="", bytes_hint=-1)
        return row

    def freeze(self) -> GraphAudit:
        rows = sorted((row.freeze(self.rows) for row in self.rows.values()), key=lambda row: natural(row.id))
        by_part: dict[str, list[SubgraphAudit]] = {name: [] for name in self.placements}
        for row in rows:
            by_part.setdefault(row.part, []).append(row)
        boundaries = self.bounded.of("boundaries")
        parts: list[PartAudit] = []
        for name in sorted(by_part, key=lambda part: (_PART_ORDER.get(part, 3), part)):
            placement = self.placements.get(name) or Placement(graph=self.id, part=name, nodes={})
            crossing = tuple(boundary for boundary in boundaries if boundary.part == name)
            parts.append(
                PartAudit(
                    name=name,
                    placement=dict(placement.nodes),
                    declined=placement.declined,
                    note=placement.note,
                    subgraphs=tuple(by_part[name]),
                    boundaries=crossing,
                    merges=_merges(by_part[name], crossing, placement.declined),
                )
            )
        fields: dict[str, Any] = {name: getattr(self.capture, name) for name in _CAPTURED}
        fields.update({name: self.bounded.of(name) for name in _LISTS.values()})
        return GraphAudit(
            **fields,
            id=self.id,
            settings=_settings(self.capture, self.bounded.of("ineffective")),
            parts=tuple(parts),
            attempts=tuple(attempt for waiting in self.attempts.values() for attempt in waiting),
            retreats=self.bounded.of("retreats"),
            verifications=self.bounded.of("verifications"),
            outcome=self.outcome,
            background=self.background,
            last="" if self.last is None else _words(self.last),
            left_out=self.bounded.left_out,
        )


def _settings(capture: Capture, ineffective: tuple[Option, ...]) -> tuple[Setting, ...]:
    """Every option: those that were passed, then those that something else changed, then the rest."""
    changed = {event.key: event for event in ineffective}
    asked = {str(key).replace("-", "_"): text_of(value) for key, value in capture.options.items()}
    keys = dict.fromkeys((*asked, *changed, *capture.effective))
    found: list[Setting] = []
    for key in keys:
        event = changed.get(key)
        found.append(
            Setting(
                key=key,
                requested=asked.get(key, event.requested if event else ""),
                effective=event.effective if event else capture.effective.get(key, ""),
                origin=capture.origins.get(key, "options" if key in asked else ""),
                changed_by=event.reason.by or "omnicomp" if event else "",
                reason=event.reason if event else None,
            )
        )
    return tuple(found)


def _merges(
    rows: Sequence[SubgraphAudit], boundaries: Sequence[Boundary], declined: Sequence[NodePlacement]
) -> tuple[Merge, ...]:
    """Which refused nodes separate two subgraphs of one lowering."""
    whole = [row for row in rows if not row.parent and not row.superseded]
    chains = {node.node: node.chain for node in declined}
    crossing: dict[tuple[str, str], Boundary] = {(b.source, b.target): b for b in boundaries}
    found: list[Merge] = []
    for left, between, right in zip(whole, whole[1:], whole[2:], strict=False):
        lowering = left.planned
        if lowering != right.planned or lowering in ("eager", between.planned) or not between.refused:
            continue
        pairs = ((left.id, between.id), (between.id, right.id), (left.id, right.id))
        crossed = [crossing[pair] for pair in pairs if pair in crossing]
        unknown = any(boundary.bytes_hint < 0 for boundary in crossed)
        found.append(
            Merge(
                left=left.id,
                between=between.id,
                right=right.id,
                lowering=lowering,
                nodes=between.refused,
                tensors=sum(boundary.tensors for boundary in crossed),
                bytes_hint=-1 if unknown else sum(boundary.bytes_hint for boundary in crossed),
                reasons=tuple(reason for node in between.refused for reason in chains.get(node, ())),
            )
        )
    return tuple(found)


def with_shares(audit: Report) -> Report:
    """Add to each row its share of the work; a parent's leaves out its override calls."""
    rows = [row for row in audit.subgraphs if not row.superseded]
    known = {basis: _shares_of_counts(rows, field) for basis, field in _COUNTS.items()}
    known["seconds"] = _parts({row.id: row.timing.seconds for row in rows if row.timing is not None})
    # A row of unknown cost would vanish from shares of FLOPs, and often it is the one that fell back.
    basis = next((name for name in ("flops", "nodes") if known[name]), None)
    if basis is None:
        return audit

    def with_share(row: SubgraphAudit) -> SubgraphAudit:
        shares = Shares(**{name: values.get(row.id) for name, values in known.items()})
        return dataclasses.replace(row, share=known[basis].get(row.id), shares=shares)

    graphs = tuple(
        dataclasses.replace(
            graph,
            parts=tuple(
                dataclasses.replace(part, subgraphs=tuple(with_share(row) for row in part.subgraphs))
                for part in graph.parts
            ),
        )
        for graph in audit.graphs
    )
    return dataclasses.replace(audit, graphs=graphs, share_basis=basis)


def _shares_of_counts(rows: list[SubgraphAudit], field: str) -> dict[str, float]:
    if field != "nodes" and any(getattr(row, field) < 0 for row in rows if not row.parent):
        return {}
    own: dict[str, float] = {row.id: max(getattr(row, field), 0) for row in rows}
    work = dict(own)
    for row in rows:
        if row.parent in own:
            own[row.parent] = max(own[row.parent] - work[row.id], 0)
    return _parts(own)


def _parts(work: dict[str, float]) -> dict[str, float]:
    total = sum(work.values())
    return {id: value / total for id, value in work.items()} if total > 0 else {}
