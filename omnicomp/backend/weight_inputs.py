"""Parameters that are cast once: their copies become inputs of the compiled graph."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from omnicomp._torch.fx import copy_module, forget_tensors
from omnicomp._torch.inductor import compile_fx
from omnicomp.backend.capture import CapturedGraph
from omnicomp.backend.saved import State, state_of
from omnicomp.errors import Once
from omnicomp.options.dtype_policy import parse_dtype_policy
from omnicomp.timeline import Weights, current

if TYPE_CHECKING:
    from omnicomp.passes.dtypes.weights import Lifted
    from omnicomp.weights.cast_copies import Form


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightInputs:
    """A graph that takes parameters as they were cast once."""

    module: GraphModule
    inputs: Sequence[Any]
    lifted: "Lifted | None"
    graph: str

    def followed(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph as a function of the inputs of the graph with the casts."""
        return compiled if self.lifted is None else _Following(compiled, _Copied.of(self.lifted), self.graph).__call__


def lift_weights(module: GraphModule, inputs: Sequence[Any], graph: CapturedGraph) -> WeightInputs:
    """Take the casts of parameters out of a graph, where the policy and the graph allow that."""
    unchanged = WeightInputs(module=module, inputs=inputs, lifted=None, graph=graph.id)
    policy = parse_dtype_policy(graph.policy.dtype_policy)
    once = policy.changes and policy.weights == "once"
    if graph.training or not once or compile_fx.freezing(graph.policy.inductor):
        return unchanged
    from omnicomp.passes.dtypes.weights import lift_casts

    # Dynamo reads the inputs of its graph again after the backend.
    narrow = copy_module(module)
    lifted = lift_casts(narrow, inputs, layouts="inductor" in graph.policy.lowerings)
    if lifted is None:
        forget_tensors(narrow)
        return unchanged
    if graph.policy.certifies and not _certified(module, narrow, lifted, graph):
        return unchanged
    return WeightInputs(module=narrow, inputs=lifted.inputs, lifted=lifted, graph=graph.id)


def _certified(module: GraphModule, narrow: GraphModule, lifted: "Lifted", graph: CapturedGraph) -> bool:
    """Whether a graph that takes copies computes what it did with the casts."""
    from omnicomp.builder.certificates import certify_weights, refuted

    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    taken = [node.name for node in narrow.graph.find_nodes(op="placeholder")]
    forms = {
        taken[lifted.order.index(len(names) + place)]: (names[source], form)
        for place, (source, form) in enumerate(zip(lifted.sources, lifted.forms, strict=True))
    }
    found = certify_weights(module, narrow, forms, graph.id, graph.policy)
    for event in found:
        current().append(event)
    return not refuted(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Copied:
    """Which copies a graph is called with; see `Lifted`."""

    sources: tuple[int, ...]
    forms: "tuple[Form, ...]"
    devices: tuple[torch.device, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, lifted: "Lifted") -> "_Copied":
        return cls(**{field.name: getattr(lifted, field.name) for field in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SavedFollowing(State):
    target: State
    copied: _Copied

    def restore(self, id: str) -> Callable[..., Any]:
        return _Following(self.target.restore(id), self.copied, id).__call__


class _Following:
    """Calls a compiled graph with the copies as additional inputs."""

    def __init__(self, target: Callable[..., Any], copied: _Copied, graph: str) -> None:
        from omnicomp._torch import parameters
        from omnicomp.weights.cast_copies import Copies

        self._target, self._copied, self._graph = target, copied, graph
        self._wanted, self._order = parameters.picker(copied.sources), parameters.picker(copied.order)
        self._copies = Copies(copied.forms, copied.devices)
        self._once = Once(self._record)

    def saved_state(self) -> State:
        """What it is restored from: copies are made of the parameters of the process that loads it."""
        return _SavedFollowing(target=state_of(self._target), copied=self._copied)

    def __call__(self, *args: Any) -> Any:
        result = self._target(*self._order(args + self._copies(self._wanted(args))))
        self._once()
        return result

    def _record(self) -> None:
        from omnicomp import weights

        made, shared = self._copies.bytes()
        current().append(
            Weights(graph=self._graph, copies=self._copies.count(), bytes=made, shared=shared, total=weights.bytes())
        )
