"""The data of a report: what the events of a timeline add up to, as frozen dataclasses.

It answers the few questions that every view asks, and knows no view: `omnicomp.audit.report` adds these.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from omnicomp.timeline import (
    Artefacts,
    Attempt,
    Background,
    Boundary,
    Cache,
    Calibration,
    Candidate,
    Certified,
    CudaGraph,
    NearMiss,
    NodePlacement,
    Option,
    Outcome,
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
from omnicomp.timeline.files import Unread
from omnicomp.timeline.levels import ModuleLevels, levels_of, tag_of
from omnicomp.timeline.reasons import RECOMPILE_LIMIT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """Part of the whole audit's work that one row does, override calls inside it not counted.

    Attributes:
        nodes: of the operators; None if the row does not count, or nothing is known.
        flops: of the floating-point operations, likewise; None if those of any row are unknown.
        bytes: of the bytes of inputs and outputs, likewise.
        seconds: of the measured time of calls; None where calls were not timed. Override calls are not timed apart.
    """

    nodes: float | None = None
    flops: float | None = None
    bytes: float | None = None
    seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeUse:
    """What the calls of a subgraph took, where they were timed.

    Attributes:
        device: type of the device, which was waited for before and after each call.
        calls: how many calls it is made of; up to half of those made last may be missing.
        seconds: wall time of them together.
        fastest: wall time of the fastest.
        host_seconds: of the fastest, the time until it returned, before the device was waited for.
        kernels: how many kernels, copies and fills a profiled call ran; 0 if none was profiled.
        kernel_seconds: what these took together.
        copy_rate: bytes a second of copies within the device; 0 if it was not measured.
        product_rate: floating-point operations a second of matrix products, likewise.
        product_dtype: of these products.
    """

    device: str
    calls: int
    seconds: float
    fastest: float
    host_seconds: float = 0.0
    kernels: int = 0
    kernel_seconds: float = 0.0
    copy_rate: float = 0.0
    product_rate: float = 0.0
    product_dtype: str = ""

    @property
    def mean(self) -> float:
        """Wall time of a call on average, the first one included."""
        return self.seconds / self.calls if self.calls else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Memory of the device around the calls of a subgraph, where it was sampled; -1 where the device does not tell.

    Attributes:
        device: type of the device.
        calls: number of samples, one a call.
        before_bytes: what tensors held before the first call.
        after_bytes: what they held after the last.
        peak_bytes: the most that they held during any.
        peak_call: the call in which that was, from 0.
    """

    device: str
    calls: int
    before_bytes: int = -1
    after_bytes: int = -1
    peak_bytes: int = -1
    peak_call: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merge:
    """Two neighbouring subgraphs on one lowering that would be one, could what is between them move there.

    Attributes:
        left: id of the first.
        between: id of the subgraph between them.
        right: id of the last.
        lowering: the lowering of both.
        nodes: the nodes of the subgraph between them that the lowering, or one before it, refused; up to eight.
        tensors: number of tensors that cross the boundaries among the three.
        bytes_hint: their bytes for the sizes seen at compile time; -1 if unknown.
        reasons: why those nodes were refused, in their order.
    """

    left: str
    between: str
    right: str
    lowering: str
    nodes: tuple[str, ...] = ()
    tensors: int = 0
    bytes_hint: int = 0
    reasons: tuple[Reason, ...] = ()

    @property
    def sentence(self) -> str:
        """The advice in one sentence."""
        what = f"{self.nodes[0]}" if len(self.nodes) == 1 else f"all of {', '.join(self.nodes)}"
        return f"if {what} could run on {self.lowering}, {self.left} and {self.right} would be one subgraph"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """An option: what was asked for, and what took effect.

    Attributes:
        key: the option.
        requested: what the user passed in `options`, as text; empty if nothing.
        effective: what took effect, as text; empty if that was not recorded.
        origin: who gave it its value first: `options`, `mode …`, `environment …`, `default`; empty if not recorded.
        changed_by: who changed it after that, for example `dynamo`; empty if nobody did.
        reason: why.
    """

    key: str
    requested: str = ""
    effective: str = ""
    origin: str = ""
    changed_by: str = ""
    reason: Reason | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """Where it ran.

    Attributes:
        versions: of torch, omnicomp, Python and what else is known; several are joined by a comma.
        devices: name of each device type that a graph was compiled for; empty where it has none.
        platforms: operating system and machine type, for example `Linux x86_64`.
        processes: number of processes that captured graphs.
        ranks: their ranks, in order.
    """

    versions: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    devices: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    platforms: tuple[str, ...] = ()
    processes: int = 0
    ranks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sites:
    """Attention sites: which a pass fused, which are calls that stay as they are, and which it left alone."""

    fused: tuple[Rewrite, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    called: tuple[Rewrite, ...] = ()

    @property
    def total(self) -> int:
        """All sites together."""
        return len(self.fused) + len(self.near_misses) + len(self.called)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessAudit:
    """One process that wrote to the timeline, as far as it recorded that.

    Attributes:
        run: its name in the timeline; no other process has it.
        pid: its id; 0 if unknown.
        rank: its rank in a distributed job, else 0.
        state: `ended`: in order; `running`: it is the one that made the report; `unfinished`: its end is not recorded,
            as it was killed, or runs still.
        began: when it began to write, in seconds since the epoch; 0 if unknown.
        ended: when it ended, likewise.
        last: the last that it recorded, in words; empty if nothing.
    """

    run: str
    pid: int = 0
    rank: int = 0
    state: str = "unfinished"
    began: float = 0.0
    ended: float = 0.0
    last: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unfinished:
    """Something that began and of which no end is known, so that the report may lack the worst.

    Attributes:
        what: `process`: its end is not recorded; `graph`: it was captured, and its compilation has no end; `part`: it
            was built, and never called.
        id: of the process, the graph or the part.
        sentence: the same in a sentence.
        place: the compiled function, or empty.
        last: the last that was recorded of it, in words, or empty.
    """

    what: str
    id: str
    sentence: str
    place: str = ""
    last: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fallback:
    """Something that is on eager although the policy had an earlier lowering.

    Attributes:
        graph: id of the Dynamo graph.
        part: `forward`, `backward`, `inference`, or empty for a whole graph.
        subgraph: id of the subgraph, or empty for a node that was placed on eager.
        node: name of the node, or of a function that Dynamo compiles no more; empty for a subgraph.
        op: the operator, or the operators of the subgraph, the most frequent first.
        source: `file:line`, or empty.
        module: module path, or empty.
        ran: whether it was seen to run on eager; None for a node, whose subgraph says so.
        reasons: why, one for each lowering that was asked before; empty if none was recorded.
    """

    graph: str
    part: str
    subgraph: str = ""
    node: str = ""
    op: str = ""
    source: str = ""
    module: str = ""
    ran: bool | None = None
    reasons: tuple[Reason, ...] = ()


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
        repeats: regions that are built once, by where they are, and how often each is called.
        left_whole: why a graph with repeated regions, or large enough for some, is built as a whole.
        shares: its part of the operators, FLOPs, bytes and time of the whole audit.
        timing: what its calls took; None if they were not timed.
        memory: memory around its calls; None if it was not sampled.
        verifications: what comparing an override with its reference gave, each outcome once.
        recordings: whether its calls are recorded as CUDA graphs, for each combination of its sizes.
        raised: whether its first call raised, as the user's operators may.
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
    repeats: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    left_whole: Reason | None = None
    shares: Shares = dataclasses.field(default_factory=Shares)
    timing: TimeUse | None = None
    memory: MemoryUse | None = None
    verifications: tuple[Verification, ...] = ()
    recordings: tuple[CudaGraph, ...] = ()
    raised: bool = False
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
        certificates: what was found of the changes that passes made, where that was asked for.
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
        run: name of the process in the timeline; empty if an earlier version recorded the graph.
        outcome: how its compilation ended; None if that is not recorded.
        background: what was last recorded of its build in the background; None if it has none.
        last: the last that was recorded of it, in words.
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
    certificates: tuple[Certified, ...] = ()
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
    run: str = ""
    outcome: Outcome | None = None
    background: Background | None = None
    last: str = ""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What ran where, and why, for all graphs of a timeline.

    Attributes:
        graphs: the Dynamo graphs, in the order of capture.
        events: number of events that it was made from.
        share_basis: what `share` counts: `flops`, `nodes` where FLOPs are unknown or all zero, or `none`.
        skipped: lines of timeline files that were torn, and left out.
        left_out: graphs that the report has no room for; the later ones.
        processes: those that recorded when they began, in that order.
        unread: lines of timeline files that nothing was read from, by cause; those of `skipped` are among them.
        artefacts: the files of artefacts that were written and read.
    """

    graphs: tuple[GraphAudit, ...] = ()
    events: int = 0
    share_basis: str = "none"
    skipped: int = 0
    left_out: int = 0
    processes: tuple[ProcessAudit, ...] = ()
    unread: tuple[Unread, ...] = ()
    artefacts: tuple[Artefacts, ...] = ()

    @property
    def unfinished(self) -> tuple[Unfinished, ...]:
        """Processes without an end, graphs that were captured and never built, and parts that were never called.

        What may well stay so is not among them: a backward that no one asked for, the variant that was not needed, a
        graph that Dynamo took back, that an error of the program ended, or that was compiled to be saved.
        """
        return (*_graphs_and_parts(self), *_processes(self))

    @property
    def gaps(self) -> str:
        """What the report does not have, as one sentence; empty if it has everything."""
        counts = {"later graph": self.left_out, "torn line": 0 if self.unread else self.skipped}
        events = sum(sum(graph.left_out.values()) for graph in self.graphs)
        counts["event"] = events + sum(sum(row.left_out.values()) for row in self.subgraphs)
        told = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count]
        told += map(str, self.unread)
        return f"left out of this report: {', '.join(told)}" if told else ""

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
            fused=tuple(r for g in counted for r in g.rewrites if r.kind == "attention" and not r.kept),
            called=tuple(r for g in counted for r in g.rewrites if r.kind == "attention" and r.kept),
            near_misses=tuple(m for g in counted for m in g.near_misses if m.kind == "attention"),
        )

    @property
    def backend_timeline(self) -> tuple[ModuleLevels, ...]:
        """Compile, kernel_override and eager for each subgraph that was tried, under the tag of its module."""
        found: list[ModuleLevels] = []
        for graph in self.graphs:
            tried: dict[str, list[Attempt]] = {}
            for attempt in (*graph.attempts, *(each for row in graph.subgraphs for each in row.attempts)):
                tried.setdefault(attempt.subgraph, []).append(attempt)
            found += [levels_of(id, tag_of(graph.options), each) for id, each in tried.items()]
        return tuple(found)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Everything that ran or is placed on eager though the policy had an earlier lowering."""
        return tuple(fallback for graph in self.graphs for fallback in _fallbacks(graph))


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
    for miss in graph.near_misses:
        if miss.reason.code == RECOMPILE_LIMIT:
            named = {"node": miss.node, "op": miss.node, "source": miss.source}
            yield Fallback(graph=graph.id, part="", reasons=(miss.reason,), ran=True, **named)


def _processes(report: Report) -> Iterator[Unfinished]:
    for process in report.processes:
        if process.state == "unfinished":
            name = f"process {process.pid}" if process.pid else "a process"
            rank = f" (rank {process.rank})" if process.rank else ""
            sentence = f"{name}{rank} did not record its end: it was killed, or still runs"
            yield Unfinished(what="process", id=process.run, sentence=sentence, last=process.last)


def _graphs_and_parts(report: Report) -> Iterator[Unfinished]:
    states = {process.run: process.state for process in report.processes}
    reached = (graph for graph in report.graphs if any(row.ran is not None or row.raised for row in _due(graph)))
    called = set(map(_family, reached))
    for graph in report.graphs:
        about = {"place": graph.function, "last": graph.last}
        if not graph.run or graph.run not in states:
            continue  # an earlier version recorded no ends
        if graph.outcome is None:
            if states[graph.run] != "running":
                yield Unfinished(
                    what="graph", id=graph.id, sentence=f"{graph.id} was captured and never built", **about
                )
        elif graph.outcome.state == "built" and _family(graph) not in called:
            for part in dict.fromkeys(row.part for row in _due(graph)):
                id = f"{graph.id}.{part}" if part else graph.id
                yield Unfinished(what="part", id=id, sentence=f"{id} was built and never called", **about)


def _family(graph: GraphAudit) -> str:
    """What the variants of a graph have in common; one of them is enough."""
    return graph.id.replace(f":{graph.variant}", "") if graph.variant else graph.id


def _due(graph: GraphAudit) -> Iterator[SubgraphAudit]:
    """The rows that a call of the graph reaches: a backward waits for the program to ask for it."""
    return (row for row in graph.subgraphs if row.part != "backward" and not row.superseded)
