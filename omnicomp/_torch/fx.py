"""FX internals: the boxed calling convention, in which a graph's inputs can be freed while it runs."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule
from torch.fx.graph import _BoxedCodeGen

__all__ = ["boxed", "copy_module", "run_on_fakes"]


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

    Metadata is copied one level deep: passes may set keys of a node without touching the original's. What Dynamo says
    about the inputs outside of the metadata comes along, as AOTAutograd reads from it which inputs are static.
    """
    graph = torch.fx.Graph(tracer_cls=module.graph._tracer_cls)
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        copy = graph.node_copy(node, values.__getitem__)
        copy.name = node.name
        copy.meta = dict(node.meta)
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source
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
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(module, name):
            setattr(result, name, getattr(module, name))
    result.train(module.training)
    return result


def run_on_fakes(module: GraphModule, inputs: Sequence[Any]) -> Any:
    """Run a Dynamo graph on fake tensors: nothing is computed, but every operator says what it would return.

    Args:
        module: the graph; constants that it fetches may be real tensors.
        inputs: fake values of its placeholders.

    Raises:
        Exception: whatever an operator raises on the fake values.
    """
    mode = detect_fake_mode(list(inputs))
    if mode is None:
        return torch.fx.Interpreter(module).run(*inputs)
    environment = mode.shape_env
    quiet = environment.suppress_guards() if environment is not None else contextlib.nullcontext()
    with mode, quiet, torch.no_grad(), mock.patch.object(mode, "allow_non_fake_inputs", True):
        return torch.fx.Interpreter(module).run(*inputs)
