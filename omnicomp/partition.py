"""Cutting a post-autograd graph into subgraphs, and the straight-line code that calls them in order."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.fx import boxed
from omnicomp._torch.symbols import free_symbols
from omnicomp.graphs import fake_value

__all__ = ["Piece", "extract", "gather_getitems", "stitch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """One subgraph.

    Attributes:
        module: its graph; it returns a tuple.
        inputs: the nodes of the part that it reads, in the order of its placeholders.
        outputs: the nodes of the part that are read outside of it, in the order of its results.
    """

    module: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    @property
    def fake_inputs(self) -> list[Any]:
        """Fake tensors and symbolic sizes of the inputs."""
        return [fake_value(node) for node in self.inputs]


def gather_getitems(module: GraphModule) -> None:
    """Move each `getitem` right behind the operator whose result it takes apart, so that no cut falls between them."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is not operator.getitem:
            position = node
            for user in list(node.users):
                if user.target is operator.getitem and user.args[0] is node:
                    position.append(user)
                    position = user


def extract(module: GraphModule, nodes: Sequence[Node]) -> Piece:
    """Copy neighbouring nodes of a graph into a graph of their own.

    Symbols that occur in its shapes become inputs where the part has them as inputs: a size such as `2*s0` of an
    input tensor does not give `s0` back.
    """
    members = set(nodes)
    inputs = _inputs(module, nodes, members)
    outputs = tuple(node for node in nodes if any(user not in members for user in node.users))
    graph = Graph()
    values: dict[Node, Node] = {}
    for node in inputs:
        values[node] = graph.placeholder(node.name)
        values[node].meta = dict(node.meta)
        values[node].meta["val"] = fake_value(node)
    constants: dict[str, Any] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in values:
                constants[str(source.target)] = _attribute(module, str(source.target))
                values[source] = graph.node_copy(source, values.__getitem__)
        values[node] = graph.node_copy(node, values.__getitem__)
    result = graph.output(tuple(values[node] for node in outputs))
    # Every output is read by code that was built for the strides that were predicted.
    result.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    return Piece(module=GraphModule(constants, graph), inputs=inputs, outputs=outputs)


def _inputs(module: GraphModule, nodes: Sequence[Node], members: set[Node]) -> tuple[Node, ...]:
    read: dict[Node, None] = {}
    symbols: set[sympy.Symbol] = set()
    for node in nodes:
        symbols |= _symbols(fake_value(node))
        for source in node.all_input_nodes:
            if source not in members and source.op != "get_attr":
                read[source] = None
                symbols |= _symbols(fake_value(source))
    sizes = {
        fake_value(node).node.expr: node
        for node in module.graph.find_nodes(op="placeholder")
        if isinstance(fake_value(node), torch.SymInt)
    }
    needed = [sizes[symbol] for symbol in sorted(symbols, key=str) if symbol in sizes]
    return tuple(dict.fromkeys([*needed, *read]))


def _symbols(value: Any) -> set[sympy.Symbol]:
    leaves = tree_leaves(value)
    found: set[sympy.Symbol] = set()
    for leaf in leaves:
        if isinstance(leaf, (torch.Tensor, torch.SymInt)):
            found |= free_symbols(leaf)
    return found


def _attribute(module: GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def stitch(
    module: GraphModule, pieces: Sequence[Piece], calls: Sequence[Callable[[list[Any]], Sequence[Any]]]
) -> Callable[[list[Any]], Sequence[Any]]:
    """Generate the code that calls the pieces in order.

    Args:
        module: the part that the pieces were cut from.
        pieces: in program order.
        calls: what to call for each piece, with the list of its inputs.

    Returns:
        A function of the list of the part's inputs, which it clears; it returns the part's outputs.
    """
    graph = Graph()
    values: dict[Node, Node] = {
        node: graph.placeholder(node.name) for node in module.graph.find_nodes(op="placeholder")
    }
    output = next(iter(reversed(module.graph.nodes)))
    constants: dict[str, Any] = {}
    for index, (piece, call) in enumerate(zip(pieces, calls, strict=True)):
        named = _named(call, f"subgraph_{index}")
        result = graph.call_function(named, ([values[node] for node in piece.inputs],))
        for position, node in enumerate(piece.outputs):
            values[node] = graph.call_function(operator.getitem, (result, position))
    for node in output.all_input_nodes:
        if node.op == "get_attr" and node not in values:
            constants[str(node.target)] = _attribute(module, str(node.target))
            values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(torch.fx.map_arg(output.args[0], values.__getitem__))
    return boxed(GraphModule(constants, graph))


def _named(call: Callable[[list[Any]], Sequence[Any]], name: str) -> Callable[[list[Any]], Sequence[Any]]:
    """A function with a name of its own: the generated code refers to what it calls by name."""

    def run(inputs: list[Any]) -> Sequence[Any]:
        return call(inputs)

    run.__name__ = run.__qualname__ = name
    run.__module__ = __name__
    return run
