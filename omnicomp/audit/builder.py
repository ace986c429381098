"""From events to the report model: a pure function."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, Final

from omnicomp.audit.model import Audit, GraphAudit, PartAudit, SubgraphAudit
from omnicomp.timeline import (
    Attempt,
    Cache,
    Calibration,
    Capture,
    Event,
    NearMiss,
    Option,
    PassRun,
    Placement,
    Ran,
    Retreat,
    Rewrite,
    Speculation,
    Subgraph,
    Weights,
)

__all__ = ["build"]

_PART_ORDER: Final = {"forward": 0, "inference": 1, "backward": 2}


def build(events: Iterable[Event]) -> Audit:
    """Make the report model from the events of one process, in the order in which they were recorded."""
    graphs: dict[str, _Graph] = {}
    count = 0
    for event in events:
        count += 1
        graphs.setdefault(event.graph, _Graph(event.graph)).add(event)
    return _with_shares(Audit(graphs=tuple(graph.freeze() for graph in graphs.values()), events=count))


class _Row:
    """A subgraph while its events come in; `expected` follows the retreats, so that each run is judged at its time."""

    def __init__(self, id: str, graph: str, part: str) -> None:
        self.fields: dict[str, Any] = {"id": id, "graph": graph, "part": part}
        self.planned = ""
        self.expected = ""
        self.difference = ""
        self.superseded = False
        self.attempts: list[Attempt] = []
        self.retreats: list[Retreat] = []
        self.runs: list[Ran] = []

    def plan(self, event: Subgraph) -> None:
        names = {field.name for field in dataclasses.fields(Subgraph)} & {
            f.name for f in dataclasses.fields(SubgraphAudit)
        }
        self.fields.update({name: getattr(event, name) for name in names}, part=event.part)
        self.planned = self.expected = event.lowering
        self.superseded = False

    def retreat(self, event: Retreat) -> None:
        self.retreats.append(event)
        self.planned = self.planned or event.source_lowering
        self.expected = event.target_lowering

    def run(self, event: Ran) -> None:
        self.runs.append(event)
        self.superseded = False
        # Without a plan there is nothing to differ from: the row says that no plan was recorded.
        if self.expected and event.lowering != self.expected and not self.difference:
            self.difference = f"planned for {self.expected} and ran on {event.lowering}"

    def freeze(self, rows: dict[str, "_Row"]) -> SubgraphAudit:
        id = self.fields["id"]
        parent = id.rsplit("/", 1)[0] if "/" in id else ""
        last = self.runs[-1] if self.runs else None
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
            attempts=tuple(self.attempts),
            retreats=tuple(self.retreats),
            runs=tuple(self.runs),
        )


class _Graph:
    """A Dynamo graph while its events come in."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.capture = Capture(graph=id)
        self.ineffective: list[Option] = []
        self.passes: list[PassRun] = []
        self.rewrites: list[Rewrite] = []
        self.near_misses: list[NearMiss] = []
        self.speculations: list[Speculation] = []
        self.calibrations: list[Calibration] = []
        self.weights: list[Weights] = []
        self.placements: dict[str, Placement] = {}
        self.rows: dict[str, _Row] = {}
        self.attempts: list[Attempt] = []
        self.retreats: list[Retreat] = []
        self.caches: list[Cache] = []

    def add(self, event: Event) -> None:
        if isinstance(event, Capture):
            self.capture = event
        elif isinstance(event, Option):
            self.ineffective.append(event)
        elif isinstance(event, PassRun):
            self.passes.append(event)
        elif isinstance(event, Rewrite):
            self.rewrites.append(event)
        elif isinstance(event, NearMiss):
            self.near_misses.append(event)
        elif isinstance(event, Speculation):
            self.speculations.append(event)
        elif isinstance(event, Calibration):
            self.calibrations.append(event)
        elif isinstance(event, Weights):
            self.weights.append(event)
        elif isinstance(event, Placement):
            self.placements[event.part] = event
        elif isinstance(event, Subgraph):
            self._row(event.subgraph, event.part).plan(event)
        elif isinstance(event, Attempt):
            self.attempts.append(event)
        elif isinstance(event, Retreat):
            self._retreat(event)
        elif isinstance(event, Ran):
            self._row(event.subgraph, event.part).run(event)
        elif isinstance(event, Cache):
            self.caches.append(event)

    def _retreat(self, event: Retreat) -> None:
        recut = event.subgraph == f"{self.id}.{event.part}" or event.source_lowering == event.target_lowering
        if recut or event.source_lowering == "passes" or event.target_lowering == "graph break":
            # The graph goes on without its passes, or a part is cut anew: its subgraphs are planned after this. A graph
            # that Dynamo takes back never runs: its pieces are graphs of their own.
            self.retreats.append(event)
            return
        if event.subgraph == self.id:
            for row in self.rows.values():
                row.superseded = True
        self._row(event.subgraph, event.part).retreat(event)

    def _row(self, id: str, part: str) -> _Row:
        row = self.rows.get(id)
        if row is None:
            row = self.rows[id] = _Row(id, self.id, part)
            if "/" not in id:
                # A graph that retreated as a whole was never placed: of its work only the operators are known.
                # An override call is part of a subgraph, whose numbers include it.
                nodes = self.capture.nodes if id == self.id else 0
                row.fields.update(nodes=nodes, flops="", flops_hint=-1, bytes="", bytes_hint=-1)
        return row

    def freeze(self) -> GraphAudit:
        for attempt in self.attempts:
            if attempt.subgraph in self.rows:
                self.rows[attempt.subgraph].attempts.append(attempt)
        rows = sorted((row.freeze(self.rows) for row in self.rows.values()), key=lambda row: _natural(row.id))
        names = sorted({*self.placements, *(row.part for row in rows)}, key=lambda p: (_PART_ORDER.get(p, 3), p))
        parts: list[PartAudit] = []
        for name in names:
            placement = self.placements.get(name)
            parts.append(
                PartAudit(
                    name=name,
                    placement=dict(placement.nodes) if placement else {},
                    declined=placement.declined if placement else (),
                    note=placement.note if placement else "",
                    subgraphs=tuple(row for row in rows if row.part == name),
                )
            )
        capture = self.capture
        return GraphAudit(
            id=self.id,
            compile_id=capture.compile_id,
            function=capture.function,
            nodes=capture.nodes,
            device=capture.device,
            mode=capture.mode,
            variant=capture.variant,
            training=capture.training,
            dynamic=capture.dynamic,
            options=dict(capture.options),
            versions=dict(capture.versions),
            ineffective=tuple(self.ineffective),
            passes=tuple(self.passes),
            rewrites=tuple(self.rewrites),
            near_misses=tuple(self.near_misses),
            speculations=tuple(self.speculations),
            calibrations=tuple(self.calibrations),
            weights=tuple(self.weights),
            parts=tuple(parts),
            attempts=tuple(a for a in self.attempts if a.subgraph not in self.rows),
            retreats=tuple(self.retreats),
            caches=tuple(self.caches),
        )


def _natural(id: str) -> list[tuple[int, str]]:
    """Sort key that puts `g0.forward.10` after `g0.forward.9`."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", id)]


def _with_shares(audit: Audit) -> Audit:
    """Give every row that counts its share of the work; a parent's share leaves out its override calls."""
    rows = [row for row in audit.subgraphs if not row.superseded]
    # A row of unknown cost would vanish from shares of FLOPs, and often it is the one that fell back.
    known = all(row.flops_hint >= 0 for row in rows if not row.parent)
    for basis in ("flops", "nodes") if known else ("nodes",):
        own = _own_work(rows, basis)
        total = sum(own.values())
        if total > 0:
            break
    else:
        return audit
    shares = {id: work / total for id, work in own.items()}

    def with_share(row: SubgraphAudit) -> SubgraphAudit:
        return dataclasses.replace(row, share=shares.get(row.id))

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


def _own_work(rows: list[SubgraphAudit], basis: str) -> dict[str, int]:
    work = {row.id: max(row.flops_hint if basis == "flops" else row.nodes, 0) for row in rows}
    own = dict(work)
    for row in rows:
        if row.parent in own:
            own[row.parent] = max(own[row.parent] - work[row.id], 0)
    return own
