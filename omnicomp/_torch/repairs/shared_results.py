"""Where a region that a program marks gives back one memory twice, or memory of what it takes, to a training step.

The partitioner lets a region's forward also return what its backward reads: its operands, views of them, and results
that it returns already. Inductor takes each result of a call for memory of its own, and AOTAutograd gives what was
saved to the backward to overwrite. With `exp(x @ w)` in a `nested_compile_region`, `region(x, w) + 1` is computed in
place, and the backward reads it for the exponential.
"""

import operator
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from omnicomp._torch.autograd.mutations import root
from omnicomp._torch.fx import fake_value
from omnicomp._torch.repairs.needed import Needed

NEEDED: Final = Needed(first="2.11")
_INVOKE: Final = torch.ops.higher_order.invoke_subgraph


def take_apart(joint: GraphModule) -> None:
    """Read each result of a call that is memory of something else from that, in a graph whose regions are split."""
    if not NEEDED.here:
        return
    bodies: dict[GraphModule, list[Node]] = {}
    for call in joint.graph.find_nodes(op="call_function", target=_INVOKE):
        body = getattr(joint, str(call.args[0].target), None)
        if isinstance(body, GraphModule):
            bodies.setdefault(body, []).append(call)
    for body, calls in bodies.items():
        _copy_second_views(body)
        output = body.graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        own = [_owner(results, index) in (None, index) for index in range(len(results))]
        for call in calls:
            _read_elsewhere(call, body, results)
            call.meta["val"] = tuple(value if mine else None for value, mine in zip(call.meta["val"], own, strict=True))
        output.args = (tuple(value if mine else None for value, mine in zip(results, own, strict=True)),)
        body.recompile()
    if bodies:
        joint.graph.lint()
        joint.recompile()


def _owner(results: list[Any], index: int) -> int | None:
    """The result whose memory another one is, -1 for that of an operand; None for what is no tensor."""
    result = results[index]
    if not isinstance(result, Node) or not isinstance(fake_value(result), torch.Tensor):
        return None
    base = root(result)
    return -1 if base.op == "placeholder" else results.index(base if base in results else result)


def _copy_second_views(body: GraphModule) -> None:
    """Give views of one tensor that is not returned itself memory of their own, but for the first."""
    output = body.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    first = {result: result for result in results if isinstance(result, Node)}
    copies: dict[Node, Node] = {}
    for result in list(first):
        base = root(result)
        if base.op != "placeholder" and first.setdefault(base, result) is not result and base not in results:
            with body.graph.inserting_after(result):
                copies[result] = body.graph.call_function(torch.ops.aten.squeeze_copy.dims, (result, []))
            copies[result].meta = {**result.meta, "val": torch.ops.aten.clone.default(fake_value(result))}
    if copies:
        output.args = map_arg(output.args, lambda node: copies.get(node, node))
        body.recompile()


def _read_elsewhere(call: Node, body: GraphModule, results: list[Any]) -> None:
    known: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    last = call

    def put(node: Node) -> Node:
        nonlocal last
        with call.graph.inserting_after(last):
            last = call.graph.node_copy(node, value_of)
        return last

    def value_of(node: Node) -> Any:
        if node not in known:
            inputs = [value_of(each) for each in node.all_input_nodes]
            made = known[node] = put(node)
            args, kwargs = map_arg((made.args, made.kwargs), fake_value)
            made.meta["val"] = node.target(*args, **kwargs) if inputs else fake_value(node)  # type: ignore[operator]
        return known[node]

    for user in sorted(call.users, key=lambda each: each.args[1]):  # type: ignore[arg-type, return-value]
        index: Any = user.args[1]
        owner = _owner(results, index)
        if owner in (None, index):
            continue
        if owner != -1 and results[owner] not in known:
            with call.graph.inserting_after(last):
                last = known[results[owner]] = call.graph.call_function(operator.getitem, (call, owner))
            last.meta = {**call.meta, "val": call.meta["val"][owner]}
        user.replace_all_uses_with(value_of(results[index]))
        call.graph.erase_node(user)
