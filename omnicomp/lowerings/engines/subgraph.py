"""What an engine is handed: one subgraph of ATen operators, with what is known about its inputs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.clustering import Clustering

__all__ = ["Subgraph", "with_plain_sizes"]


def with_plain_sizes(module: GraphModule) -> None:
    """Put numbers in the place of nodes that are known to be one, as all sizes are once those of a call are fixed.

    Args:
        module: a graph with fake values; it is changed, and its placeholders stay.
    """

    def plain(node: Node) -> Any:
        value = fake_value(node)
        return value if isinstance(value, (int, float)) else node

    for node in module.graph.nodes:
        node.args, node.kwargs = map_arg(node.args, plain), map_arg(node.kwargs, plain)
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and not node.users and isinstance(fake_value(node), (int, float)):
            module.graph.erase_node(node)
    module.recompile()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subgraph:
    """One subgraph for one class of shapes.

    Attributes:
        module: a functional graph of ATen operators, decomposed by the engine's own table alone, which returns a tuple;
            `meta["val"]` of its nodes are fake tensors. The engine may keep it, and may change it.
        constants: values of inputs that may be built into the executable, by position among the placeholders: the
            weights of the model, which the executable is not called with. They are not to be written to.
        device: the device that its tensors are on.
        dynamic: whether a size in it is symbolic.
        threads: how many threads of the CPU torch uses.
        options: the engine's clustering with the user's options, among them what is the engine's own.
    """

    module: GraphModule
    constants: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict[int, torch.Tensor])
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    dynamic: bool = False
    threads: int = 1
    options: Clustering = dataclasses.field(default_factory=Clustering)

    @property
    def placeholders(self) -> list[Node]:
        """All inputs, the constants among them."""
        return list(self.module.graph.find_nodes(op="placeholder"))

    @property
    def inputs(self) -> list[Node]:
        """The placeholders that the executable is called with, in the order of a call.

        Sizes are among them in a `dynamic` graph alone: in others they are numbers, and nothing reads them.
        """
        return [
            node
            for index, node in enumerate(self.placeholders)
            if index not in self.constants and (self.dynamic or isinstance(fake_value(node), torch.Tensor))
        ]

    @property
    def outputs(self) -> list[Node | None]:
        """The nodes whose values it returns, in order; the same node may be there twice, and None stands for None."""
        result = next(iter(reversed(self.module.graph.nodes)))
        return [value if isinstance(value, Node) else None for value in result.args[0]]

    @property
    def values(self) -> list[torch.Tensor | None]:
        """Fake tensors of the outputs: shapes, dtypes and strides that a call has to return."""
        return [None if node is None else fake_value(node) for node in self.outputs]
