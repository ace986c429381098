"""Cutting a post-autograd graph into subgraphs, and the straight-line code that calls them in order."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from omnicomp import records
from omnicomp._torch.symbols import free_symbols
from omnicomp.analysis.nodes import fake_value

Call = Callable[[list[Any]], Sequence[Any]]


@records.dataclass(frozen=True, kw_only=True)
class Piece:
    """One subgraph."""

    module: GraphModule  # its graph; it returns a tuple
    inputs: tuple[Node, ...]  # the nodes of the part that it reads, in the order of its placeholders
    outputs: tuple[Node, ...]  # the nodes of the part that are read outside of it, in the order of its results

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
    if not symbols:  # the part may have many inputs, and many pieces
        return tuple(read)
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


@records.dataclass(frozen=True, kw_only=True)
class Stitching:
    """The straight-line code that calls the pieces of a part in order, before it is known what to call."""

    source: str  # text of a function `call` of the list of the part's inputs
    constants: dict[str, Any]  # what it refers to beside the pieces, by name

    def bind(self, calls: Sequence[Call], later: Sequence[Callable[[], Call]] | None = None) -> Call:
        """The function, with what to call for each piece.

        Args:
            calls: what to call for each piece, with the list of its inputs.
            later: asked for what to call instead once a call of that has returned.

        Returns:
            A function of the list of the part's inputs, which it clears; it returns the part's outputs.
        """
        namespace = dict(self.constants)
        for index, call in enumerate(calls):
            name = f"subgraph_{index}"
            namespace[name] = call if later is None else _until_first(namespace, name, call, later[index])
        exec(compile(self.source, "<omnicomp: a part that was cut>", "exec"), namespace)
        stitched: Any = namespace["call"]
        stitched._boxed_call = True
        return stitched


def stitching(module: GraphModule, pieces: Sequence[Piece]) -> Stitching:
    """Generate the code that calls the pieces in order.

    A value is in a variable until its last use, and in the list that a piece gets then, so that the piece frees it when
    it is through with it. Nothing is between the generated code and what it calls.
    """
    output = next(iter(reversed(module.graph.nodes)))
    last: dict[Node, int] = {node: index for index, piece in enumerate(pieces) for node in piece.inputs}
    last.update(dict.fromkeys(output.all_input_nodes, len(pieces)))
    names = {node: f"v{index}" for index, node in enumerate(module.graph.nodes)}
    placeholders = module.graph.find_nodes(op="placeholder")
    lines = [*_unpacked([names[node] for node in placeholders], "inputs"), "inputs.clear()"]
    lines += _deleted([names[node] for node in placeholders if node not in last])
    for index, piece in enumerate(pieces):
        lines.append(f"inputs = [{', '.join(names[node] for node in piece.inputs)}]")
        lines += _deleted([names[node] for node in piece.inputs if last[node] == index])
        lines += _unpacked([names[node] for node in piece.outputs], f"subgraph_{index}(inputs)")
        lines += _deleted([names[node] for node in piece.outputs if node not in last])
    constants = {
        names[node]: _attribute(module, str(node.target)) for node in output.all_input_nodes if node.op == "get_attr"
    }
    lines.append(f"return {_returned(output.args[0], names)}")
    body = "\n    ".join(lines)
    return Stitching(source=f"def call(inputs):\n    {body}\n", constants=constants)


def _until_first(namespace: dict[str, Any], name: str, first: Call, later: Callable[[], Call]) -> Call:
    """Call `first`, and put what `later` gives in its place: generated code looks its globals up by name."""

    def run(inputs: list[Any]) -> Sequence[Any]:
        outputs = first(inputs)
        namespace[name] = later()
        return outputs

    return run


def _unpacked(names: Sequence[str], value: str) -> list[str]:
    return [f"{', '.join(names)}, = {value}"] if names else [value]


def _deleted(names: Sequence[str]) -> list[str]:
    return [f"del {', '.join(dict.fromkeys(names))}"] if names else []


def _returned(value: Any, names: dict[Node, str]) -> str:
    """The source text of what a part returns: a tuple of nodes, numbers and None."""
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        items: list[str] = [_returned(item, names) for item in value]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    return repr(value)
