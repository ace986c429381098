"""The input of `Engine.compile`: one subgraph of ATen operators, with the known values of its inputs."""

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from omnicomp._torch.dynamo.late_compile import is_fake, is_subclass
from omnicomp._torch.fx import copy_module
from omnicomp._torch.parameters import static_dynamo_input
from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings import LoweringContext
from omnicomp.lowerings.engines.clustering import Clustering


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
        threads: how many threads of the CPU it may use: torch's number, or the run option.
        options: the engine's clustering with the user's options, the engine's own among them.
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
        """The nodes whose values it returns, in order; a node may occur twice, and None is a result None."""
        result = next(iter(reversed(self.module.graph.nodes)))
        return [value if isinstance(value, Node) else None for value in result.args[0]]

    @property
    def values(self) -> list[torch.Tensor | None]:
        """Fake tensors of the outputs: shapes, dtypes and strides that a call has to return."""
        return [None if node is None else fake_value(node) for node in self.outputs]


class Results:
    """What a subgraph returns, in terms of the values that are computed: each of them once."""

    def __init__(self, subgraph: Subgraph) -> None:
        given = _returned(subgraph.module)
        self.nodes = list(dict.fromkeys(value for value in given if isinstance(value, Node)))
        position = {node: index for index, node in enumerate(self.nodes)}
        self._slots = [position[value] if isinstance(value, Node) else None for value in given]
        self._literals = [None if isinstance(value, Node) else value for value in given]

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """The results in the order that is expected, of those of `nodes`; numbers and None stand for themselves."""
        return [
            literal if slot is None else values[slot] for slot, literal in zip(self._slots, self._literals, strict=True)
        ]


def with_constants(subgraph: Subgraph) -> GraphModule:
    """A copy of a subgraph's graph for an importer.

    Its placeholders are those that are called with and read, its constants are contiguous tensors in attributes, and it
    returns the nodes of `Results`, each once.
    """
    module = copy_module(subgraph.module)
    graph = module.graph
    distinct = list(dict.fromkeys(value for value in _returned(module) if isinstance(value, Node)))
    next(iter(reversed(graph.nodes))).args = (tuple(distinct),)
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        if index in subgraph.constants:
            name = f"_omnicomp_constant_{index}"
            setattr(module, name, subgraph.constants[index].contiguous())
            with graph.inserting_before(node):
                fixed = graph.create_node("get_attr", name)
            fixed.meta.update(node.meta)
            node.replace_all_uses_with(fixed)
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.erase_node(node)
    for node in graph.find_nodes(op="get_attr"):
        owner, _, name = str(node.target).rpartition(".")
        holder = module.get_submodule(owner)
        setattr(holder, name, getattr(holder, name).detach().contiguous())
    module.recompile()
    return module


def _returned(module: GraphModule) -> list[Any]:
    return list(next(iter(reversed(module.graph.nodes))).args[0])


Weights = Mapping[int, Callable[[], torch.Tensor | None]]
"""The weights of a call by position among a graph's inputs; each a function that returns None once it is gone."""


def weights_of(gm: GraphModule, inputs: Sequence[Any]) -> Weights:
    """Those inputs of a Dynamo graph that are parameters and buffers of the model, as weak references.

    Args:
        gm: the graph.
        inputs: what Dynamo passed to the backend; those that are fake have no value that could be built in.
    """
    found: dict[int, Callable[[], torch.Tensor | None]] = {}
    for index, (node, value) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        real = isinstance(value, torch.Tensor) and not is_fake(value) and not is_subclass(value)
        if real and static_dynamo_input(node):
            found[index] = weakref.ref(value)
    return found


def informed(context: LoweringContext, part: GraphModule, weights: Weights, count: int) -> LoweringContext:
    """The context of a part with the weights that engines may build in.

    Args:
        context: of a part that was traced without decompositions.
        part: its graph.
        weights: of the Dynamo graph.
        count: number of inputs of the Dynamo graph. Autograd may have left some out or put others in; then nothing is
            known of the part's weights, and they are inputs.
    """
    context = dataclasses.replace(context, undecomposed=True)
    placeholders = part.graph.find_nodes(op="placeholder")
    if context.part != "inference" or len(placeholders) != count:
        return context
    named: dict[str, Callable[[], torch.Tensor | None]] = {}
    for index, reference in weights.items():
        value, fake = reference(), fake_value(placeholders[index])
        if value is None or not _alike(value, fake):
            return context  # the positions do not mean what they meant
        named[str(placeholders[index].target)] = reference
    return dataclasses.replace(context, weights=named)


def _alike(value: torch.Tensor, fake: Any) -> bool:
    return (
        isinstance(fake, torch.Tensor)
        and value.dtype == fake.dtype
        and value.device == fake.device
        and [*value.shape, *value.stride()] == [*map(str_or_int, fake.shape), *map(str_or_int, fake.stride())]
    )


def str_or_int(size: Any) -> Any:
    """A size as a number where it is one, else as text, so that no comparison adds a guard."""
    return size if type(size) is int else str(size)
