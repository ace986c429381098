"""Writes to the inputs of a graph after autograd, and the outputs that Inductor would let share memory with them.

After autograd a graph is functional but for the `copy_`s at its end, which put new values into its inputs. Inductor
then computes some operators in place, in the input itself, and does not see that their results are outputs as well.
"""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves


def separate_outputs(graph: Graph) -> int:
    """Copy the outputs of a graph that Inductor would compute in place, in an input that the graph writes to.

    Such an output changes with the input: by the graph's next write in it, by the next call, and by a backward that
    takes what was saved for it as its own to overwrite, which then overwrites the user's tensor.

    The operators that this can happen to are those that take a written input, or the result of another such operator,
    and return something of the same shape and dtype. Pointwise ones are never computed in place for the sake of an
    input.

    Returns:
        How many outputs are copied now.
    """
    written = {target for node in graph.nodes for target in write_targets(node)}
    if not written:
        return 0
    in_place: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and not is_view(node) and not _is_pointwise(node):
            maker = node.args[0] if node.target is operator.getitem else node
            if isinstance(maker, Node) and any(
                root(source) in written | in_place and _same_layout(source, node) for source in maker.all_input_nodes
            ):
                in_place.add(node)
    output = graph.output_node()
    copies: dict[Node, Node] = {}
    for value in output.all_input_nodes:
        if root(value) not in in_place:
            continue
        copies[value] = _copied(graph, value)
    if copies:
        output.args = torch.fx.map_arg(output.args, lambda node: copies.get(node, node))
    return len(copies)


def _copied(graph: Graph, value: Node) -> Node:
    """A copy of a node's value; of a view, the same view of a copy of what it is a view of.

    AOTAutograd makes an output that is a view of an input anew, with the strides and the offset of the graph's output.
    """
    base = root(value)
    if base is not value:
        chain = [value]
        while chain[-1].all_input_nodes[0] is not base:
            chain.append(chain[-1].all_input_nodes[0])
        copies = {base: _copied(graph, base)}
        with graph.inserting_before(value.next):
            for node in reversed(chain):
                copies[node] = graph.node_copy(node, lambda each: copies.get(each, each))
        return copies[value]
    with graph.inserting_before(value.next):
        # A copy that Inductor makes. It takes a `clone` for nothing, and removes it.
        copy = graph.call_function(torch.ops.aten.squeeze_copy.dims, (value, []))
    copy.meta.update(value.meta, val=torch.ops.aten.clone.default(value.meta["val"]))
    return copy


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _same_layout(source: Node, node: Node) -> bool:
    """Whether two nodes have the same shape, dtype and device; symbolic sizes are compared as they are written."""
    first, second = source.meta.get("val"), node.meta.get("val")
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return (str(list(first.shape)), first.dtype, first.device) == (str(list(second.shape)), second.dtype, second.device)


def write_targets(node: Node) -> Iterable[Node]:
    """The placeholders that an operator writes to, through views or not."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for leaf in tree_leaves(value):
            if isinstance(leaf, Node):
                target = root(leaf)
                if target.op == "placeholder":
                    yield target


def is_view(node: Node) -> bool:
    """Whether an operator returns views of its first argument."""
    target = node.target
    if target is operator.getitem:
        return isinstance(node.args[0], Node) and is_view(node.args[0])
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    returns = target._schema.returns
    return bool(returns) and all(value.alias_info is not None for value in returns)


def root(node: Node) -> Node:
    """What a chain of views is a view of."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def positions_written(user: Node) -> Iterable[Any]:
    """Positions and names of the arguments that an operator writes to."""
    if isinstance(user.target, torch._ops.OpOverload):
        for position, argument in enumerate(user.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield position
                yield argument.name
