"""The events of the timeline: frozen dataclasses with a documented JSON form.

The JSON form of an event is one object on one line: `{"schema": 1, "type": "<class name in snake case>", "time":
seconds since the epoch, "seq": number within the process, "pid": …, "rank": …, "thread": …}` and then the fields of
the class. `docs/timeline.md` lists them. A reader ignores unknown fields and unknown types of the same schema.

Ids: a Dynamo graph is `g0`, `g1`, … in the order of capture; what autograd makes of it is a *part*
(`g0.forward`, `g0.backward`, `g0.inference`); a subgraph of it is `g0.forward.0`; an override call inside a
subgraph is `g0.forward.0/softmax_topk`. Where a graph was compiled on an assumption, the variant that needs none is
`g0:general`.
"""

import dataclasses
import math
import re
from typing import Any, ClassVar, Final

from omnicomp import records
from omnicomp.timeline.reasons import Reason

__all__ = [
    "EVENT_TYPES",
    "SCHEMA_VERSION",
    "STAGES",
    "Agreement",
    "Artefacts",
    "Attempt",
    "Background",
    "Boundary",
    "Cache",
    "Calibration",
    "Candidate",
    "Capture",
    "Certified",
    "CudaGraph",
    "Event",
    "Memory",
    "NearMiss",
    "NodePlacement",
    "Option",
    "Outcome",
    "PassRun",
    "Placement",
    "Process",
    "Ran",
    "Retreat",
    "Rewrite",
    "Speculation",
    "Stage",
    "Subgraph",
    "Timing",
    "Verification",
    "Weights",
]

SCHEMA_VERSION: Final = 1


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Event:
    """Base of all events.

    Attributes:
        graph: id of the Dynamo graph, for example `g0`.
        time: seconds since the epoch; set by the recorder.
        seq: position in the process' timeline; set by the recorder.
    """

    type: ClassVar[str] = "event"

    graph: str
    time: float = 0.0
    seq: int = -1

    def __init_subclass__(cls) -> None:
        """Name the type after the class: `NearMiss` is `near_miss`."""
        cls.type = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    # Written once for all events: what `dataclass` writes for each is most of the time of importing this module.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def to_dict(self) -> dict[str, Any]:
        """The JSON form without the fields that only the recorder knows (`pid`, `rank`, `thread`)."""
        body = {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"schema": SCHEMA_VERSION, "type": self.type, **body}


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Capture(Event):
    """Dynamo handed over a graph.

    Attributes:
        compile_id: Dynamo's compile id, for example `0/1` (frame 0, first recompile), or empty.
        function: qualified name of the compiled frame and `file:line`, or empty.
        nodes: operators in the graph, submodules of higher-order operators included.
        device: the device that the passes and lowerings are chosen for.
        training: whether any input requires grad while grad mode is on.
        dynamic: whether any input has a symbolic size.
        mode: torch.compile's mode.
        variant: `general` for the variant that needs no assumption of a graph that has one that does; empty otherwise.
        options: what the user passed, as given.
        versions: `{"torch": …, "omnicomp": …, "python": …}`, and what else of the device's software has one.
        effective: the value of every option as it took effect, as text.
        origins: who gave each of them its value: `options`, `mode …`, `environment …` or `default`.
        module: the path that all of its module paths begin with, or empty.
        fingerprint: what the graph consists of, as `omnicomp.analysis.hashes.stable_identity` tells it.
        device_name: name of the device for a person, or empty.
        platform: operating system and machine type, for example `Linux x86_64`.
        pid: the process.
        rank: the process' rank in a distributed job, else 0.
        run: names the process, also where its id comes back; empty if an earlier version wrote it, which does not
            record how graphs and processes end.
    """

    compile_id: str = ""
    function: str = ""
    nodes: int = 0
    device: str = ""
    training: bool = False
    dynamic: bool = False
    mode: str = "default"
    variant: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    versions: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    effective: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    origins: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    module: str = ""
    fingerprint: str = ""
    device_name: str = ""
    platform: str = ""
    pid: int = 0
    rank: int = 0
    run: str = ""


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Process(Event):
    """A process began to write to a file, or ended in order; one that is killed does not record its end.

    Only files hold it, and it belongs to no graph.

    Attributes:
        state: `began`, again at the beginning of each file that it writes to; or `ended`.
        run: names the process, as `Capture.run` does.
        pid: its id.
        rank: its rank in a distributed job, else 0.
    """

    graph: str = ""
    state: str
    run: str
    pid: int = 0
    rank: int = 0


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Outcome(Event):
    """The compilation of a graph is over, or the first call of one of its subgraphs raised.

    Attributes:
        state: `built`: there is a function, which is called next. `saved`: there is one, which torch may only store.
            `restored`: it was stored. `taken_back`: Dynamo abandoned the graph. `raised`: an error ended it.
        part: `forward`, `backward` or `inference` where it is about a call; else empty.
        subgraph: its id, likewise.
        error: type of the exception, or empty.
    """

    state: str
    part: str = ""
    subgraph: str = ""
    error: str = ""


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Background(Event):
    """A graph is built by another process while the program runs it eager; see the option `background`.

    Attributes:
        state: `started`; `eager`: so many calls ran eager so far, recorded after 1, 2, 4, 8, … of them; `swapped`: the
            compiled graph runs from this call on; `failed`: there is none, and the graph stays eager; `foreground`:
            it is built by the program after all, which waits; `improving`: a better build is looked for; `improved`:
            that one runs from this call on; `kept`: there is none; `earlier`: until it is built, calls of some sizes go
            to an earlier graph of the function, which is for these.
        calls: how many calls ran eager.
        seconds: since the start.
        reason: why it failed, or is not built behind the program.
    """

    state: str
    calls: int = 0
    seconds: float = 0.0
    reason: Reason | None = None


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Option(Event):
    """An option whose effective value is not the requested one."""

    key: str
    requested: str
    effective: str
    reason: Reason


STAGES: Final[dict[str, str]] = {
    "dynamo": "Dynamo traced the frame, up to the call of the backend",
    "autograd": "autograd, decompositions, the partitioner and lookups in caches; without the lowering inside",
    "lowering": "a part was placed, cut and built",
}


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Stage(Event):
    """A stage of a compilation is over; recorded at its end.

    The passes have events of their own, with their times.

    Attributes:
        stage: a key of `STAGES`.
        seconds: wall time.
        part: `forward`, `backward` or `inference` where the stage is that of a part; else empty.
    """

    stage: str
    seconds: float
    part: str = ""


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PassRun(Event):
    """A pass ran, or was skipped.

    Attributes:
        name: name of the pass.
        applied: whether it ran (`False`: switched off, or it does not apply to this graph and device).
        modified: whether it changed the graph; checked by the manager, not only reported.
        rewrites: how many places it rewrote.
        seconds: wall time.
        node_diff: operators that it added (positive) and removed (negative), by name.
        note: one sentence, or empty.
    """

    name: str
    applied: bool = True
    modified: bool = False
    rewrites: int = 0
    seconds: float = 0.0
    node_diff: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    note: str = ""


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Rewrite(Event):
    """A pass rewrote one place, or found that it is as it should be.

    Attributes:
        name: name of the pass.
        kind: what was rewritten: `attention` or `dtype`, or what a pass of another package calls it.
        node: the FX node at which the rewrite is anchored.
        source: `file:line` of that node.
        module: module path of that node, for example `layers.3.attn`.
        target: what it became, for example `scaled_dot_product_attention`.
        detail: one sentence with the parameters that were read.
        kept: whether the place stays what the program calls, because nothing better was found for it.
        timed: milliseconds of the candidates, where the target is what was measured to be the fastest.
        verdict: of its certificate; empty if none was asked for.
    """

    name: str
    kind: str
    node: str
    source: str = ""
    module: str = ""
    target: str = ""
    detail: str = ""
    kept: bool = False
    timed: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    verdict: str = ""


@records.dataclass(frozen=True, kw_only=True)
class Certified(Event):
    """A change that a pass made to a graph was checked by what knows nothing of the pass.

    Attributes:
        name: name of the pass.
        node: the FX node that stands for the change.
        source: `file:line` of that node.
        module: module path of that node.
        verdict: `proved`, `proved_for_sizes`, `tested`, `assumed` or `refuted`.
        sentence: why, in one sentence.
        methods: how both graphs were compared.
        assumptions: what the verdict rests on.
        differences: where reals agree and floating-point numbers do not.
        probability: base-2 logarithm of the probability that graphs that differ are accepted; 0 if there is no bound.
        nodes: names of the nodes that the pass put there.
        key: of the certificate and of both graphs, in the cache.
        kept: whether it was found there, or came with the artefact of a part, and nothing was checked.
        seconds: wall time.
        reproducer: path of a script of torch alone, for a pass of Inductor's that was refuted.
    """

    name: str
    node: str
    source: str = ""
    module: str = ""
    verdict: str = ""
    sentence: str = ""
    methods: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    probability: float = 0.0
    nodes: tuple[str, ...] = ()
    key: str = ""
    kept: bool = False
    seconds: float = 0.0
    reproducer: str = ""


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NearMiss(Event):
    """A candidate for a rewrite that a pass left alone; `reason.node` is where the match ended."""

    name: str
    kind: str
    node: str
    reason: Reason
    source: str = ""
    module: str = ""


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Speculation(Event):
    """Something was assumed of a graph's inputs, and what became of it.

    Attributes:
        state: `assumed`: a variant is right only where it holds, and every call checks. `held`, `failed`: what the
            first call saw in which all, or not all, held. `compiled`: the variant was. `stopped`: nothing is checked
            any more, and the general variant runs. `captured`: a call could neither check nor compile. `slower`: the
            check takes torch's operators, as its kernel failed. `ran`: a variant ran in 8, 16, 32, … calls.
        variant: `assumed`, `assumed2` and so on, or `general`: the one that is meant, or that runs.
        sentence: what was assumed.
        inputs: placeholders that the check reads; only where the state is `assumed`.
        saves: what the assumption saves, likewise.
        source: `file:line` of what was assumed something of, likewise.
        reason: why nothing is checked, or not by the kernel.
        calls: in how many calls the variant ran so far; only where the state is `ran`.
    """

    state: str
    variant: str
    sentence: str = ""
    inputs: tuple[str, ...] = ()
    saves: str = ""
    source: str = ""
    reason: Reason | None = None
    calls: int = 0


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Calibration(Event):
    """The error of a graph's outputs was bounded by the option `dtype_error`; errors are relative, of the worst output.

    Attributes:
        state: `measured` on real inputs; `known`: found before, in this process or an earlier one; `refused`: it could
            not be measured, and everything stays wide.
        bound: the option.
        lowered: operators that the dtype policy lowers without a bound.
        kept: how many of them stay wide; a `near_miss` each.
        before: the error with all of them lowered; -1 if unknown or infinite.
        after: the error with `kept` of them wide; -1 if unknown.
        wide: the error with none lowered; -1 if it was not needed.
        runs: of the graph, that it took; 0 if known.
        seconds: wall time.
        key: of what was found, in the cache.
        note: why it could not be read from the cache or kept, or empty.
        reason: why it was refused.
    """

    state: str
    bound: float
    lowered: int = 0
    kept: int = 0
    before: float = -1.0
    after: float = -1.0
    wide: float = -1.0
    runs: int = 0
    seconds: float = 0.0
    key: str = ""
    note: str = ""
    reason: Reason | None = None


@records.dataclass(frozen=True, kw_only=True)
class NodePlacement:
    """One node that is not on the first lowering of the policy for a reason of its own.

    Attributes:
        node: name of the FX node after autograd.
        op: the operator, for example `aten.topk.default`.
        lowering: where it was placed.
        source: `file:line`.
        module: module path.
        chain: a reason for each lowering that was asked before.
    """

    node: str
    op: str
    lowering: str
    source: str = ""
    module: str = ""
    chain: tuple[Reason, ...] = ()


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Placement(Event):
    """Every node of a post-autograd graph was given a lowering.

    Attributes:
        part: `forward`, `backward` or `inference`.
        nodes: number of operators by lowering.
        declined: nodes that an earlier lowering of the policy refused.
        note: one sentence about the nodes that no rule singled out, or empty.
        collectives: in program order, as `operator group arguments dtype[elements]`.
    """

    part: str
    nodes: dict[str, int]
    declined: tuple[NodePlacement, ...] = ()
    note: str = ""
    collectives: tuple[str, ...] = ()


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Subgraph(Event):
    """A subgraph and the lowering that was planned for it.

    Attributes:
        part: `forward`, `backward` or `inference`.
        subgraph: its id, for example `g0.forward.0`; an override call inside it is `g0.forward.0/<name>`.
        lowering: the planned lowering.
        nodes: number of operators.
        ops: count of each operator.
        flops: floating-point operations of one call, as a SymPy expression in the graph's own symbols.
        flops_hint: the same for the sizes that were seen at compile time; -1 if unknown.
        bytes: bytes of inputs and outputs, of a table the rows that are looked up, as a SymPy expression.
        bytes_hint: the same for the sizes seen at compile time; -1 if unknown.
        inputs: number of inputs.
        outputs: number of outputs.
        modules: up to eight module paths that its nodes come from.
        sources: up to eight `file:line` that its nodes come from.
        module: the path that all of its module paths begin with; empty for a whole part, which has its graph's.
        fingerprint: what it consists of, as `omnicomp.analysis.hashes.stable_identity` tells it.
        refused: names of up to eight of its nodes that an earlier lowering of the policy refused.
        repeats: regions that are built once, by where they are, and how often each is called.
        left_whole: why a graph with repeated regions, or large enough for some, is built as a whole.
    """

    part: str
    subgraph: str
    lowering: str
    nodes: int
    ops: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    flops: str = "0"
    flops_hint: int = 0
    bytes: str = "0"
    bytes_hint: int = 0
    inputs: int = 0
    outputs: int = 0
    modules: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    module: str = ""
    fingerprint: str = ""
    refused: tuple[str, ...] = ()
    repeats: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    left_whole: Reason | None = None


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Boundary(Event):
    """Values that one subgraph of a part makes and another one reads.

    Attributes:
        part: `forward`, `backward` or `inference`.
        source: id of the subgraph that makes them.
        target: id of the subgraph that reads them.
        tensors: number of tensors.
        bytes: their bytes, as a SymPy expression in the graph's own symbols.
        bytes_hint: the same for the sizes seen at compile time; -1 if unknown.
        copies: operators that copy one of them as the last thing before the boundary, or the first behind it.
        casts: likewise, those that change its dtype.
    """

    part: str
    source: str
    target: str
    tensors: int
    bytes: str = "0"
    bytes_hint: int = 0
    copies: int = 0
    casts: int = 0


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Attempt(Event):
    """A lowering tried to build a subgraph, or was passed over.

    Attributes:
        part: `forward`, `backward` or `inference`; empty for an attempt on the whole Dynamo graph.
        subgraph: id of the subgraph, or of the graph.
        lowering: `inductor`, `override` or `eager`.
        ok: whether it could be, or was, built.
        selected: whether it is the one that will run.
        reason: why not, if it failed or was passed over.
        seconds: wall time of the build.
        artefact: what the build made, for example the path of Inductor's generated module.
    """

    part: str
    subgraph: str
    lowering: str
    ok: bool
    selected: bool = False
    reason: Reason | None = None
    skipped: str = ""
    seconds: float = 0.0
    artefact: str = ""


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Candidate(Event):
    """One way of compiling a graph that was looked at when the lowerings are chosen by measuring.

    Attributes:
        candidate: its name, such as `inductor`, `frozen` or `openvino`.
        subgraph: id of the subgraph that it was measured for; empty where it was the whole graph.
        lowerings: the order of lowerings that it stands for.
        selected: whether it was chosen.
        source: `measured` in this process, or `kept`: measured by an earlier one on this machine.
        clock: `wall`, or `cpu` for the time that the process used with one thread, which is read where the machine is
            busy with other work.
        seconds: median time of a call; 0 if it was not timed.
        fastest: time of the fastest call that was timed.
        spread: half width of the range that the ratio to the first candidate lies in, as a share of it.
        speed: time of the first candidate over its own, so that more than 1 is faster; 0 if it was not timed.
        rounds: how often it was timed, in turn with the best one so far.
        error: relative error of its results to a higher precision; -1 if it was not looked at.
        own: eager's.
        build_seconds: how long it took to build.
        reason: why it was not chosen; None if it was.
    """

    candidate: str
    subgraph: str = ""
    lowerings: tuple[str, ...] = ()
    selected: bool = False
    source: str = "measured"
    clock: str = ""
    seconds: float = 0.0
    fastest: float = 0.0
    spread: float = 0.0
    speed: float = 0.0
    rounds: int = 0
    error: float = -1.0
    own: float = -1.0
    build_seconds: float = 0.0
    reason: Reason | None = None


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Retreat(Event):
    """A subgraph, or a whole graph, moved from one lowering to another after a failure."""

    part: str
    subgraph: str
    source_lowering: str
    target_lowering: str
    reason: Reason


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Agreement(Event):
    """The ranks of a job compared their plans of a part with collectives, before its first call.

    Attributes:
        part: `forward`, `backward` or `inference`.
        state: `same`; `eager`: all ranks run the part eager, as they differ; `differs` or `missing`: an error was
            raised; `warned`: the option `ranks` goes on.
        ranks: whose plans are the same, or who differs or is missing.
        seconds: that this rank waited for others.
        reason: what differs, or who is missing.
    """

    part: str
    state: str
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0
    reason: Reason | None = None


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Ran(Event):
    """An executable was called for the first time, or again for the first time after a retreat.

    Attributes:
        part: `forward`, `backward` or `inference`.
        subgraph: id of the subgraph.
        lowering: what really ran, as the executable itself attests.
        evidence: what was executed: the generated module and key, the override function, or the FX graph's code.
        kernels: external kernels that the executable calls, with the number of call sites of each.
    """

    part: str
    subgraph: str
    lowering: str
    evidence: str = ""
    kernels: dict[str, int] = dataclasses.field(default_factory=dict[str, int])


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Verification(Event):
    """An override was compared with its reference on the arguments of a real call.

    Attributes:
        part: `forward`, `backward` or `inference`.
        subgraph: id of the call, for example `g0.forward.0/softmax_topk`.
        name: name of the override.
        state: `right`; `wrong`; `known`: found right before, in this process or an earlier one; `unknown`: the two
            could not be compared.
        direction: `forward`, or `backward` for the gradients.
        detail: the errors, or why they could not be compared.
        seconds: wall time of the comparison, the reference's runs included.
    """

    part: str
    subgraph: str
    name: str
    state: str
    direction: str = "forward"
    detail: str = ""
    seconds: float = 0.0


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cache(Event):
    """Verdict of a compile cache.

    Attributes:
        part: `forward`, `backward` or `inference`; empty for the cache of the whole graph.
        subgraph: id of the subgraph, in a part that was cut; else empty.
        cache: `fx_graph`, `aot_autograd`, `saved` for a saved function, `verdicts`, which holds what earlier
            processes found to fail, or `decisions`, which holds what the attention pass did to the graph.
        verdict: `hit`, `miss` or `bypass`.
        key: the cache's key, or empty.
        note: why it was bypassed or missed, or empty.
        changed: the parts of the key in which a miss differs from the last compilation.
        reason: why that can't be told, where a record of earlier compilations can't be used.
    """

    part: str
    cache: str
    verdict: str
    subgraph: str = ""
    key: str = ""
    note: str = ""
    changed: tuple[str, ...] = ()
    reason: Reason | None = None


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Artefacts(Event):
    """A file of artefacts was written or read; of the process, so `graph` is empty.

    Attributes:
        path: of the file.
        state: `saved`, `loaded`, or `missed`: it was made for something else, and nothing was taken from it.
        counts: how many artefacts of which kind it holds.
        bytes: its size.
        reason: why it was missed.
    """

    graph: str = ""
    path: str
    state: str
    counts: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    bytes: int = 0
    reason: Reason | None = None


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Weights(Event):
    """The first call of a graph that reads low-precision copies of parameters instead of casting them.

    Attributes:
        copies: how many it reads.
        bytes: memory of those that no other graph reads.
        shared: memory of those that other graphs read, too.
        total: memory of all such copies in the process at that moment.
    """

    copies: int
    bytes: int
    shared: int = 0
    total: int = 0


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Memory(Event):
    """Memory of the device around one call of a subgraph, by the option `memory`; -1 where the device does not tell.

    Attributes:
        part: `forward`, `backward` or `inference`.
        subgraph: its id.
        device: its type.
        call: which call of the subgraph it was, from 0.
        before_bytes: that tensors held before the call.
        after_bytes: that tensors held after it, its results included.
        peak_bytes: the most that they held during the call.
    """

    part: str
    subgraph: str
    device: str
    call: int
    before_bytes: int = -1
    after_bytes: int = -1
    peak_bytes: int = -1


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Timing(Event):
    """How long the calls of a subgraph took, up to one of them; recorded after 1, 2, 4, 8, … calls.

    The device is waited for before and after each call.

    Attributes:
        part: `forward`, `backward` or `inference`.
        subgraph: its id.
        device: type of the device.
        calls: how many calls it is made of: all so far.
        seconds: wall time of them together.
        fastest: wall time of the fastest.
        host_seconds: of the fastest, the time until it returned, before the device was waited for.
        kernels: how many kernels, copies and fills a profiled call ran on the device; 0 if none was profiled.
        kernel_seconds: what these took together.
        copy_rate: bytes a second of copies within the device, as `omnicomp doctor` measured them; 0 if it did not.
        product_rate: floating-point operations a second of matrix products, likewise.
        product_dtype: of these products.
    """

    part: str
    subgraph: str
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


@records.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CudaGraph(Event):
    """Whether the calls of a subgraph are recorded as CUDA graphs, for one combination of its sizes.

    Attributes:
        part: `forward`, `backward` or `inference`.
        subgraph: its id.
        state: `recorded` or `plain`.
        sizes: the values of its symbolic sizes.
        plain_seconds: median time of a plain call on the stream; 0 if it was not measured.
        recorded_seconds: the same of a replay, with the copies that it needs.
        plain_host_seconds: median time until a plain call returned, whatever the device did.
        recorded_host_seconds: the same of a replay.
        bytes: memory of all recordings of the device at that moment.
        copied_bytes: what each replay copies, so that nothing that it returns is overwritten.
        reason: why it is not recorded.
    """

    part: str
    subgraph: str
    state: str
    sizes: tuple[int, ...] = ()
    plain_seconds: float = 0.0
    recorded_seconds: float = 0.0
    plain_host_seconds: float = 0.0
    recorded_host_seconds: float = 0.0
    bytes: int = 0
    copied_bytes: int = 0
    reason: Reason | None = None


EVENT_TYPES: Final[dict[str, type[Event]]] = {cls.type: cls for cls in Event.__subclasses__()}
"""The events of this module, by the name that they have in a file."""


def _plain(value: Any) -> Any:
    """Turn a field's value into JSON types."""
    if isinstance(value, Reason):
        return value.to_dict()
    if isinstance(value, NodePlacement):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
