"""The contract of a lowering: it supports a node or says why not, and builds subgraphs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch.fx import GraphModule, Node

from omnicomp import records
from omnicomp._torch.inductor.cache_lookups import Lookup
from omnicomp._torch.inductor.recordable import Recordable
from omnicomp.analysis.provenance import Places
from omnicomp.devices import Device
from omnicomp.options.policy import Policy
from omnicomp.timeline import NodePlacement, Reason, Timeline
from omnicomp.timeline.recorder import Where

Support = Reason | None
"""The answer to "do you take this node?": None is yes, a `Reason` is no."""


@records.dataclass(frozen=True, kw_only=True)
class KeyParts:
    """The components of a graph's cache keys that are known before a lookup.

    Attributes:
        identity: equal for earlier versions of the graph: the function and the modules that it is made of.
        parts: omnicomp's components of the key: by name, a text to show and a hash.
    """

    identity: str = ""
    parts: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict[str, tuple[str, str]])


@records.dataclass(frozen=True, kw_only=True)
class LateMatch:
    """A match of an override of a module or a search that stands behind other lowerings in the order.

    Attributes:
        override: its name.
        node: the node of the Dynamo graph by which it is known: the first of a block, the output of what was found.
        nodes: all that it would take.
        declined: why it can't be put in; None if it can.
    """

    override: str
    node: str
    nodes: frozenset[str]
    declined: NodePlacement | None = None


@records.dataclass(frozen=True, kw_only=True)
class GraphRecord:
    """The record of a Dynamo graph: identity, provenance and cache key.

    Attributes:
        id: of the graph.
        digest: hash of everything of omnicomp that changes generated code.
        modules: its module paths, for subgraphs that are a whole part.
        sources: its `file:line`, for the same.
        places: provenance of its nodes behind the passes.
        sizes: what its symbolic sizes were at compile time, by name.
        declined: its blocks that an override matched but was not put into.
        late: matches of overrides that enter only if the lowerings before them refuse something.
        given_up: of those that entered for that reason, by the override's name, what refused it.
        key: the components of its cache keys that are known before a lookup.
    """

    id: str
    digest: str = ""
    modules: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    places: Places = dataclasses.field(default_factory=Places)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    declined: tuple[NodePlacement, ...] = ()
    late: tuple[LateMatch, ...] = ()
    given_up: Mapping[str, tuple[Reason, ...]] = dataclasses.field(default_factory=dict[str, tuple[Reason, ...]])
    key: KeyParts = dataclasses.field(default_factory=KeyParts)


@records.dataclass(frozen=True, kw_only=True)
class LoweringContext:
    """The context of a part that a lowering gets.

    Attributes:
        graph: the record of the Dynamo graph.
        part: `forward`, `backward` or `inference`.
        device: the device that the graph runs on.
        policy: the user's options.
        timeline: where builds are recorded (by the builder, not by the lowering).
        inductor_kwargs: what `compile_fx` passes to its inner compile: static inputs, CUDA graphs, the graph's number.
        weights: the tensors of the call that is being compiled for which are weights of the model, by the name of their
            placeholder in an inference graph; each a function that returns None once the tensor is gone.
        undecomposed: whether the part was traced without Inductor's decompositions, for an engine.
    """

    graph: GraphRecord
    part: str
    device: Device
    policy: Policy
    timeline: Timeline
    inductor_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    weights: Mapping[str, Callable[[], torch.Tensor | None]] = dataclasses.field(
        default_factory=dict[str, Callable[[], torch.Tensor | None]]
    )
    undecomposed: bool = False

    @property
    def graph_id(self) -> str:
        """Id of the Dynamo graph."""
        return self.graph.id

    @property
    def records(self) -> bool:
        """Whether compiled graphs may be recorded by the option `cudagraphs`."""
        return self.policy.records and self.device.type == "cuda"

    @property
    def part_id(self) -> str:
        """Id of the part, for example `g0.forward`."""
        return f"{self.graph_id}.{self.part}"

    def where(self, subgraph: str) -> Where:
        """The ids of graph, part and subgraph, as events have them."""
        return {"graph": self.graph_id, "part": self.part, "subgraph": subgraph}


@dataclasses.dataclass(kw_only=True)
class Executable:
    """A built subgraph.

    Attributes:
        lowering: name of the lowering that built it.
        call: takes the list of inputs (boxed: it may clear the list) and returns the sequence of outputs.
        artefact: for example the path of a generated module; empty if there is none.
        attest: returns a description of what `call` executes, and the external kernels that it calls.
        workspace_bytes: memory that it keeps between calls.
        generated: path of the Python module whose code a call enters first, if a compiler generated one.
        overwritten: names of inputs that a call may write to once it is through with them.
        lookups: what the compile cache was asked for it, and answered.
        compiled: the compiler's own object, if it has one; what the caches keep.
        recordable: what of it can be recorded as CUDA graphs, where the option `cudagraphs` asks for that.
        install: puts a first call, and what to ask for later ones, into the compiler's own object; None if calls don't
            go through it.
    """

    lowering: str
    call: Callable[[list[Any]], Sequence[Any]]
    artefact: str = ""
    attest: Callable[[], tuple[str, dict[str, int]]] = lambda: ("", {})
    workspace_bytes: int = 0
    overwritten: frozenset[str] = frozenset()
    generated: str = ""
    lookups: tuple[Lookup, ...] = ()
    compiled: Any = None
    recordable: Recordable | None = None
    install: Callable[[Callable[[list[Any]], Any], Callable[[], Callable[..., Any]]], None] | None = None


@runtime_checkable
class Lowering(Protocol):
    """A way to run a subgraph."""

    name: str

    def supports(self, node: Node, context: LoweringContext) -> Support:
        """Whether the lowering supports this node of a post-autograd graph: None for yes, or the reason why not."""
        ...

    def lower(self, module: GraphModule, inputs: Sequence[Any], context: LoweringContext) -> Executable:
        """Build a subgraph.

        Args:
            module: the subgraph; it returns a tuple. The lowering owns it and may change it.
            inputs: fake tensors and symbolic sizes, one a placeholder.
            context: where it comes from.

        Raises:
            Exception: anything. The builder finds the nodes that are to blame and cuts them out of Inductor's subgraph;
                from another lowering it becomes a LoweringError.
        """
        ...


_OWN: Final = ("override", "device", "inductor", "eager")


def names_in_order(names: tuple[str, ...], served: tuple[str, ...]) -> tuple[str, ...]:
    """The lowerings of a policy that a device has, in the policy's order, with eager at the end if it is not in it.

    Args:
        names: the policy's lowerings.
        served: the device's; a compiler of its own stands before Inductor, unless the policy has a place for it.
            Engines say themselves which devices they serve.
    """
    if "device" not in names:
        names = tuple(each for name in names for each in (("device", name) if name == "inductor" else (name,)))
    chosen = tuple(name for name in names if name in served or name not in _OWN)
    return chosen if "eager" in chosen else (*chosen, "eager")


class WholeLowering(Lowering, Protocol):
    """A lowering that builds whole parts, too: its own object is what autograd calls, and what its cache keeps.

    Operators of overrides inside a subgraph stay there, and are called by the code that it generates.
    """

    title: str
    """Its name for people."""

    def lower_whole(
        self, module: GraphModule, inputs: Sequence[Any], context: LoweringContext, record: str, fallback: bytes
    ) -> Executable:
        """Build a whole part.

        Args:
            module: the part. The lowering owns it and may change it.
            inputs: fake tensors and symbolic sizes, one a placeholder.
            context: where it comes from.
            record: the decisions that made it, which travel in the artefact.
            fallback: what it takes to run the part another way, which travels in the artefact.

        Returns:
            An executable whose `compiled` is to be called, and through whose `install` the call is surrounded.

        Raises:
            Exception: anything; the builder finds the nodes that are to blame.
        """
        ...
