"""Inductor as an engine: weights built in and packed, `tanh` as arithmetic that vectorises, optionally a C++ wrapper.

It is an engine as it builds weights in. Inductor's own freezing never looks at them again; here they are followed
(`omnicomp.weights.baked`), and a changed weight is never passed by. docs/benchmarks.md has what each setting gives.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from omnicomp._torch.inductor.compile_fx import has_inductor
from omnicomp._torch.inductor.frozen import compile_frozen, inductor_settings
from omnicomp.analysis.nodes import op_name
from omnicomp.analysis.random_state import draws_at_random
from omnicomp.lowerings.base import LoweringContext, Support
from omnicomp.lowerings.engines.base import Engine, EngineExecutable, Session
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.subgraph import Subgraph


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenSettings(Clustering):
    """Options of clustering, and of Inductor.

    Attributes:
        cpp_wrapper: whether the code that calls the kernels is C++, too; it saves some microseconds a kernel, and
            takes longer to compile.
        decompose_tanh: whether `tanh` is computed from `exp`, which vectorises; its error is some 1e-7 more. None
            leaves that to the rule: where there is a `tanh`.
    """

    cpp_wrapper: bool = False
    decompose_tanh: bool | None = None


class FrozenInductor(Engine):
    """Takes what Inductor takes in inference, in graphs without random numbers and without writes to inputs."""

    name = "frozen"
    clustering = FrozenSettings(dynamic="refused")
    contiguous = False
    native = False

    def missing(self) -> str:
        """Inductor comes with torch."""
        return "" if has_inductor("cpu") else "Inductor has no code generator for the CPU"

    def version(self) -> str:
        """It is torch's; Inductor's own settings count."""
        return str(torch.__version__)

    def state(self) -> str:
        """Inductor's settings."""
        return repr(inductor_settings())

    def supports(self, node: Node, context: LoweringContext) -> Support:
        """Everything that has an effect on its results alone."""
        clustering = self.clustering_for(context)
        if context.part != "inference":
            return self._refused(node, "weights change in training", context.part, "inference")
        if context.device.type not in clustering.devices:
            return self._refused(node, "it is not for this device", context.device.type, ", ".join(clustering.devices))
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return self._refused(node, "the operator writes to an input")
        if draws_at_random(node):
            return self._refused(node, "the operator draws random numbers")
        if op_name(node).startswith("higher_order.") or not isinstance(node.target, torch._ops.OpOverload):
            return None if op_name(node) == "operator.getitem" else self._refused(node, "it is no plain operator")
        return self._tensors(node, clustering.dtypes, context)

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        """Hand the graph to `compile_fx`, with the weights as attributes."""
        settings = self.settings_for(subgraph)
        return _Frozen(compile_frozen(subgraph.module, subgraph.constants, settings), len(subgraph.constants), settings)

    def settings_for(self, subgraph: Subgraph) -> dict[str, Any]:
        """Inductor's settings for a subgraph."""
        options = subgraph.options
        assert isinstance(options, FrozenSettings)
        tanh = options.decompose_tanh
        if tanh is None:
            tanh = any(uses_tanh(node) for node in subgraph.module.graph.nodes)
        found: dict[str, Any] = {"cpp.use_decompose_tanh": True} if tanh else {}
        return {**found, "cpp_wrapper": True} if options.cpp_wrapper else found


def uses_tanh(node: Node) -> bool:
    """Whether Inductor's code for a node computes `tanh`: by name, or `gelu` in its approximation by it."""
    parts = op_name(node).split(".")
    return "tanh" in parts or ("gelu" in parts and node.kwargs.get("approximate") == "tanh")


class _Frozen(EngineExecutable):
    def __init__(self, call: Session, constants: int, settings: Mapping[str, Any]) -> None:
        self._call, self._constants, self._settings = call, constants, dict(settings)

    def session(self) -> Session:
        """Inductor's code keeps nothing between calls."""
        return self._call

    @property
    def description(self) -> str:
        """With which settings."""
        return ", ".join(["Inductor, frozen", *self._settings])
