"""The report model: what the events of a timeline add up to, as frozen dataclasses.

The model holds facts and the few questions that every view asks of them; `omnicomp.audit.fold` makes it, and one
module for each view (`summary`, `text`, `html`, `jsonform`) shows it.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, ConsoleOptions, RenderResult

from omnicomp.audit.facts import Environment, Fallback, MemoryUse, Merge, Setting, Shares, Sites, TimeUse
from omnicomp.timeline import (
    Attempt,
    Boundary,
    Cache,
    Calibration,
    Candidate,
    NearMiss,
    NodePlacement,
    Option,
    PassRun,
    Ran,
    Reason,
    Retreat,
    Rewrite,
    Speculation,
    Stage,
    Verification,
    Weights,
)

if TYPE_CHECKING:
    from omnicomp.audit.views.why import Why

__all__ = ["AUDIT_SCHEMA", "SHARE_BASES", "Audit", "GraphAudit", "PartAudit", "SubgraphAudit"]

AUDIT_SCHEMA: Final = 2
SHARE_BASES: Final = ("flops", "nodes", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubgraphAudit:
    """One subgraph, one override call inside a subgraph, or a graph that retreated as a whole.

    Attributes:
        id: for example `g0.forward.0`, `g0.forward.0/softmax_topk`, or `g0`.
        graph: id of its Dynamo graph.
        part: `forward`, `backward`, `inference`, or empty for a whole graph.
        parent: id of the subgraph that an override call belongs to, or empty. Nodes, FLOPs and bytes of a parent
            include those of its override calls.
        planned: the lowering that placement chose; empty if no plan was recorded.
        expected: `planned`, or the target of the last retreat that was recorded.
        ran: the lowering that the executable attested when it last was called first; None if it never was called.
        difference: how the first call that did not run as expected at that moment differs, or empty.
        superseded: whether its whole graph retreated after it was planned, and it was not called since.
        evidence: what was executed.
        kernels: external kernels that the executable calls, with the number of call sites.
        nodes: number of operators.
        ops: count of each operator.
        flops: floating-point operations of one call, as a SymPy expression.
        flops_hint: the same for the sizes seen at compile time; -1 if unknown.
        bytes: bytes of inputs and outputs, as a SymPy expression.
        bytes_hint: the same for the sizes seen at compile time; -1 if unknown.
        inputs: number of inputs.
        outputs: number of outputs.
        modules: module paths that its nodes come from.
        sources: `file:line` that its nodes come from.
        attempts: every try to build it, in order.
        retreats: every move to another lowering, in order.
        runs: every first call, in order.
        share: its part of the work of the whole audit, override calls inside it not counted; None if superseded.
        identity: what it is in every run of the program: module path, part and content; see `omnicomp.audit.identity`.
        module: the path that all of its module paths begin with, or empty.
        fingerprint: what it consists of: operators with dtypes, a hyphen, the same with the class of their sizes.
        refused: names of up to eight of its nodes that an earlier lowering of the policy refused.
        shares: its part of the operators, FLOPs, bytes and time of the whole audit.
        timing: what its calls took; None if they were not timed.
        memory: memory around its calls; None if it was not sampled.
        verifications: what comparing an override with its reference gave, each outcome once.
        left_out: events that the report has no room for, by the name of the field that they would be in.
    """

    id: str
    graph: str
    part: str
    parent: str = ""
    planned: str = ""
    expected: str = ""
    ran: str | None = None
    difference: str = ""
    superseded: bool = False
    evidence: str = ""
    kernels: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    nodes: int = 0
    ops: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    flops: str = "0"
    flops_hint: int = 0
    bytes: str = "0"
    bytes_hint: int = 0
    inputs: int = 0
    outputs: int = 0
    modules: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    retreats: tuple[Retreat, ...] = ()
    runs: tuple[Ran, ...] = ()
    share: float | None = None
    identity: str = ""
    module: str = ""
    fingerprint: str = ""
    refused: tuple[str, ...] = ()
    shares: Shares = dataclasses.field(default_factory=Shares)
    timing: TimeUse | None = None
    memory: MemoryUse | None = None
    verifications: tuple[Verification, ...] = ()
    left_out: dict[str, int] = dataclasses.field(default_factory=dict[str, int])

    @property
    def mismatch(self) -> bool:
        """Whether a call ran on another lowering than planned, without a retreat that says why: an error."""
        return bool(self.difference)

    @property
    def lowering(self) -> str:
        """Where it is as far as anyone knows: what ran, else what is expected to run."""
        return self.ran if self.ran is not None else self.expected

    @property
    def seconds(self) -> float:
        """Wall time of all builds."""
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def artefact(self) -> str:
        """What the last successful build made, or empty."""
        return next((a.artefact for a in reversed(self.attempts) if a.ok and a.artefact), "")

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why it is not where it might be: reasons of failed attempts and of retreats, each once."""
        found = [a.reason for a in self.attempts if a.reason is not None] + [r.reason for r in self.retreats]
        return tuple(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartAudit:
    """What autograd made of a graph: `forward`, `backward` or `inference`.

    Attributes:
        name: `forward`, `backward`, `inference`, or empty for rows of the whole graph.
        placement: number of operators by lowering.
        declined: nodes that an earlier lowering of the policy refused, with the chain of reasons.
        note: one sentence about the nodes that no rule singled out, or empty.
        subgraphs: its rows, in the order of their ids.
        boundaries: what goes from one of its subgraphs to another, if it was cut.
        merges: which nodes keep two neighbouring subgraphs on one lowering apart.
    """

    name: str
    placement: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    declined: tuple[NodePlacement, ...] = ()
    note: str = ""
    subgraphs: tuple[SubgraphAudit, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    merges: tuple[Merge, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphAudit:
    """One Dynamo graph.

    Attributes:
        id: for example `g0`.
        compile_id: Dynamo's compile id, or empty.
        function: qualified name of the compiled frame and `file:line`, or empty.
        nodes: operators that Dynamo captured.
        device: the device that it was compiled for.
        mode: torch.compile's mode.
        variant: `general` for the variant without assumptions of a graph that was compiled on some; empty otherwise.
        training: whether any input requires grad.
        dynamic: whether any input has a symbolic size.
        options: what the user passed.
        versions: of torch and omnicomp.
        ineffective: options whose effective value is not the requested one.
        passes: passes that ran or were skipped, in order.
        rewrites: places that passes rewrote.
        near_misses: candidates that passes left alone.
        speculations: what was assumed of its inputs, and what became of it.
        calibrations: what was measured of its error where the option dtype_error bounds it.
        weights: the low-precision copies of parameters that it reads, if it was called and reads any.
        parts: what autograd made of it.
        attempts: tries to build the graph as a whole, or ids that no subgraph has.
        retreats: from the passes, and of parts that were cut anew; a subgraph's own retreats are in its row.
        caches: verdicts of the compile caches.
        identity: what it is in every run of the program; see `omnicomp.audit.identity`.
        module: the path that all of its module paths begin with, or empty.
        fingerprint: what it consists of, as a subgraph's, before autograd.
        settings: every option: what was asked for and what took effect, those that were passed first.
        stages: what the stages of its compilation took, the passes left out.
        candidates: the ways of compiling it that were measured, where the lowerings are chosen so.
        verifications: of overrides that no row is about.
        time: when it was captured, in seconds since the epoch.
        device_name: name of the device for a person, or empty.
        platform: operating system and machine type, or empty.
        pid: the process; 0 if unknown.
        rank: its rank in a distributed job, else 0.
        left_out: events that the report has no room for, by the name of the field that they would be in.
    """

    id: str
    compile_id: str = ""
    function: str = ""
    nodes: int = 0
    device: str = ""
    mode: str = "default"
    variant: str = ""
    training: bool = False
    dynamic: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    versions: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    ineffective: tuple[Option, ...] = ()
    passes: tuple[PassRun, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    speculations: tuple[Speculation, ...] = ()
    calibrations: tuple[Calibration, ...] = ()
    weights: tuple[Weights, ...] = ()
    parts: tuple[PartAudit, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    retreats: tuple[Retreat, ...] = ()
    caches: tuple[Cache, ...] = ()
    identity: str = ""
    module: str = ""
    fingerprint: str = ""
    settings: tuple[Setting, ...] = ()
    stages: tuple[Stage, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    verifications: tuple[Verification, ...] = ()
    time: float = 0.0
    device_name: str = ""
    platform: str = ""
    pid: int = 0
    rank: int = 0
    left_out: dict[str, int] = dataclasses.field(default_factory=dict[str, int])

    @property
    def subgraphs(self) -> Iterator[SubgraphAudit]:
        """The rows of all parts."""
        return (row for part in self.parts for row in part.subgraphs)

    @property
    def lowerings(self) -> tuple[str, ...]:
        """The lowerings of the policy, in order; eager is always the last resort."""
        asked = self.options.get("lowerings", ("override", "inductor", "eager"))
        names = tuple(str(name) for name in asked) if isinstance(asked, (list, tuple)) else (str(asked),)
        return names if "eager" in names else (*names, "eager")

    @property
    def compile_seconds(self) -> dict[str, float]:
        """Wall time of its compilation by stage, in the order of the stages; `passes` is the sum of its passes."""
        total: dict[str, float] = {}
        for stage in self.stages:
            total[stage.stage] = total.get(stage.stage, 0.0) + stage.seconds
        if self.passes:
            total["passes"] = sum(run.seconds for run in self.passes)
        order = ("dynamo", "passes", "autograd", "lowering")
        return {name: total[name] for name in sorted(total, key=lambda n: order.index(n) if n in order else len(order))}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Audit:
    """What ran where, and why, for all graphs of a timeline.

    Attributes:
        graphs: the Dynamo graphs, in the order of capture.
        events: number of events that it was made from.
        share_basis: what `share` counts: `flops`, `nodes` where FLOPs are unknown or all zero, or `none`.
        skipped: lines of timeline files that were torn, and left out.
    """

    graphs: tuple[GraphAudit, ...] = ()
    events: int = 0
    share_basis: str = "none"
    skipped: int = 0

    @property
    def subgraphs(self) -> tuple[SubgraphAudit, ...]:
        """The rows of all graphs."""
        return tuple(row for graph in self.graphs for row in graph.subgraphs)

    @property
    def mismatches(self) -> tuple[SubgraphAudit, ...]:
        """Rows that ran on another lowering than planned, without a retreat that says why."""
        return tuple(row for row in self.subgraphs if row.mismatch)

    @property
    def retreats(self) -> tuple[Retreat, ...]:
        """Every recorded move from one lowering to another."""
        parts = [retreat for graph in self.graphs for retreat in graph.retreats]
        return (*parts, *(retreat for row in self.subgraphs for retreat in row.retreats))

    @property
    def shares(self) -> dict[str, float]:
        """Share of the work by lowering; the values add up to 1, or the mapping is empty."""
        total: dict[str, float] = {}
        for row in self.subgraphs:
            if row.share is not None:
                total[row.lowering] = total.get(row.lowering, 0.0) + row.share
        return total

    @property
    def shares_by(self) -> dict[str, dict[str, float]]:
        """Share of the work by lowering, counted in `nodes`, `flops`, `bytes` and `seconds`, as far as it is known."""
        bases = [field.name for field in dataclasses.fields(Shares)]
        total: dict[str, dict[str, float]] = {name: {} for name in bases}
        for row in self.subgraphs:
            for name in bases:
                share = getattr(row.shares, name)
                if share is not None:
                    total[name][row.lowering] = total[name].get(row.lowering, 0.0) + share
        return total

    @property
    def environment(self) -> Environment:
        """Versions, devices and processes."""
        versions: dict[str, dict[str, None]] = {}
        devices: dict[str, dict[str, None]] = {}
        for graph in self.graphs:
            for name, version in graph.versions.items():
                versions.setdefault(name, {})[version] = None
            if graph.device:
                devices.setdefault(graph.device, {}).update({graph.device_name: None} if graph.device_name else {})
        return Environment(
            versions={name: ", ".join(found) for name, found in versions.items()},
            devices={name: ", ".join(found) for name, found in devices.items()},
            platforms=tuple(dict.fromkeys(graph.platform for graph in self.graphs if graph.platform)),
            processes=len({(graph.rank, graph.pid) for graph in self.graphs}),
            ranks=tuple(sorted({graph.rank for graph in self.graphs})),
        )

    @property
    def sites(self) -> Sites:
        """The attention sites of all graphs; those that two variants of a graph share are counted once."""
        passed = {graph.id for graph in self.graphs if graph.passes}
        counted = [g for g in self.graphs if not g.variant or g.id.replace(f":{g.variant}", "") not in passed]
        return Sites(
            fused=tuple(r for g in counted for r in g.rewrites if r.kind == "attention"),
            near_misses=tuple(m for g in counted for m in g.near_misses if m.kind == "attention"),
        )

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Everything that ran or is placed on eager though the policy had an earlier lowering."""
        return tuple(fallback for graph in self.graphs for fallback in _fallbacks(graph))

    def summary(self) -> str:
        """One line: shares, attention, retreats, and whether what ran is what was planned."""
        from omnicomp.audit.views.summary import summary

        return summary(self)

    def to_text(self) -> str:
        """Plain text, 120 columns wide."""
        from omnicomp.audit.views.text import to_text

        return to_text(self)

    def to_json(self) -> str:
        """The JSON form that `docs/audit.md` describes."""
        from omnicomp.audit.views.jsonform import to_json

        return to_json(self)

    def why(self, name: str) -> "Why":
        """The whole chain of reasons about a module, operator, node, line, pass or option.

        Raises:
            ReportError: the report has nothing of that name.
        """
        from omnicomp.audit.views.why import why

        return why(self, name)

    def to_html(self) -> str:
        """One HTML file that needs nothing else."""
        from omnicomp.audit.views.html import to_html

        return to_html(self)

    def stable(self) -> dict[str, Any]:
        """The JSON form without what differs between two runs of one program: times, artefacts, cache verdicts."""
        from omnicomp.audit.views.jsonform import stable

        return stable(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from omnicomp.audit.views.text import renderables

        yield from renderables(self)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return self.summary()


def _fallbacks(graph: GraphAudit) -> Iterator[Fallback]:
    if graph.lowerings[0] == "eager":
        return
    for part in graph.parts:
        nodes = [node for node in part.declined if node.lowering == "eager"]
        for node in nodes:
            yield Fallback(
                graph=graph.id,
                part=part.name,
                node=node.node,
                op=node.op,
                source=node.source,
                module=node.module,
                reasons=node.chain,
            )
        for row in part.subgraphs:
            if row.lowering != "eager" or row.superseded:
                continue
            # The nodes above are the reason for a subgraph that was planned on eager; it adds nothing to them.
            if row.planned == "eager" and nodes and not row.retreats:
                continue
            yield Fallback(
                graph=graph.id,
                part=part.name,
                subgraph=row.id,
                op=", ".join(sorted(row.ops, key=lambda op: (-row.ops[op], op))),
                source=row.sources[0] if row.sources else "",
                module=row.modules[0] if row.modules else "",
                ran=row.ran == "eager",
                reasons=row.reasons,
            )
