"""FX internals: the boxed calling convention, in which a graph's inputs can be freed while it runs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.graph import _BoxedCodeGen

__all__ = ["boxed", "copy_module"]


def boxed(module: GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """The straight-line code of a graph as a function of the list of its inputs, which it clears.

    Args:
        module: a graph that returns a tuple; it is switched to the boxed convention.
    """
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    forward = module.forward

    def call(inputs: list[Any]) -> Sequence[Any]:
        return forward(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def copy_module(module: GraphModule) -> GraphModule:
    """Copy a graph and the graphs that its higher-order operators call; parameters and constants are shared.

    Metadata is copied one level deep: passes may set keys of a node without touching the original's.
    """
    graph = torch.fx.Graph(tracer_cls=module.graph._tracer_cls)
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        copy = graph.node_copy(node, values.__getitem__)
        copy.name = node.name
        copy.meta = dict(node.meta)
        values[node] = copy
    graph._codegen = module.graph._codegen
    root: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            value: Any = module
            for part in node.target.split("."):
                value = getattr(value, part)
            root[node.target] = copy_module(value) if isinstance(value, GraphModule) else value
    result = GraphModule(root, graph, module.__class__.__name__)
    result.meta = dict(module.meta)
    result.train(module.training)
    return result
