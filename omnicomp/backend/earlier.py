"""Graphs for fixed sizes whose calls come to a later graph: Dynamo asks its newest one first, and that fits any size.

While the later one is built in the background, its calls of those sizes go on to the earlier one.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule

from omnicomp import records
from omnicomp._torch.dynamo import control_flow, shipping, specialised
from omnicomp._torch.fx import fake_value
from omnicomp.backend.capture import CapturedGraph


@records.dataclass(frozen=True, eq=False)
class Earlier:
    """A graph that was traced for fixed sizes, as seen from one that computes the same at these."""

    sizes: Mapping[int, int]  # by position among the inputs of the later graph
    call: "weakref.ref[Callable[..., Any]]"

    def taking(self, args: Sequence[Any]) -> Callable[..., Any] | None:
        """A function of a call's inputs that runs the earlier graph; None if it is not for their sizes."""
        call = self.call()
        if call is None or any(args[i] != size for i, size in self.sizes.items()):
            return None
        return lambda *args: call(*(each for i, each in enumerate(args) if i not in self.sizes))


@records.dataclass(frozen=True, eq=False)
class _Fixed:
    """A graph of fixed sizes as Dynamo passed it."""

    module: GraphModule
    frame: str  # Dynamo's number of the function
    scene: tuple[Any, ...]  # what was in force
    call: "weakref.ref[Callable[..., Any]]"


_fixed: Final[weakref.WeakKeyDictionary[Callable[..., Any], _Fixed]] = weakref.WeakKeyDictionary()


def earlier_of(
    module: GraphModule, graph: CapturedGraph, static: Sequence[bool], call: Callable[..., Any]
) -> tuple[Earlier, ...]:
    """The graphs that calls of a new one may go on to; called while Dynamo compiles it.

    Args:
        module: the graph, which stays as it is.
        graph: what it belongs to.
        static: which inputs are weights.
        call: runs it; an object that lives as long as the graph.
    """
    values = list(map(fake_value, module.graph.find_nodes(op="placeholder")))
    tensors = [isinstance(value, torch.Tensor) for value in values]
    weights = tuple(each for each, kept in zip(static, tensors, strict=True) if kept)
    force = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), shipping.global_state())
    scene = (graph.record.digest, graph.device.type, graph.training, weights, force)
    frame = control_flow.compile_id().partition("/")[0]
    if all(tensors):
        _fixed[call] = _Fixed(module, frame, scene, weakref.ref(call))
        return ()
    found = [each for each in list(_fixed.values()) if each.frame == frame and each.scene == scene]
    sizes = [specialised.sizes_of(module, each.module) for each in found]
    return tuple(Earlier(at, each.call) for at, each in zip(sizes, found, strict=True) if at is not None)


def forget() -> None:
    """Leave graphs from before a reset of the compiler to themselves, which may still be alive."""
    _fixed.clear()
