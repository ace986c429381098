"""Small parts of the report model: what one line of a view shows of a graph or subgraph."""

import dataclasses

from omnicomp.timeline import NearMiss, Reason, Rewrite

__all__ = ["Environment", "Fallback", "MemoryUse", "Merge", "Setting", "Shares", "Sites", "TimeUse"]


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
    """

    device: str
    calls: int
    seconds: float
    fastest: float

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
    """Attention sites: how many a pass fused, and which candidates it left alone."""

    fused: tuple[Rewrite, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()

    @property
    def total(self) -> int:
        """Fused sites and near misses together."""
        return len(self.fused) + len(self.near_misses)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fallback:
    """Something that is on eager although the policy had an earlier lowering.

    Attributes:
        graph: id of the Dynamo graph.
        part: `forward`, `backward`, `inference`, or empty for a whole graph.
        subgraph: id of the subgraph, or empty for a node that was placed on eager.
        node: name of the node, or empty for a subgraph.
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
