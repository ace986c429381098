"""Small graphs, their arguments and constants as data: what the passes keep in files, and make again.

Functions are kept by name, tensors by their shape or, where a graph holds them, by their values.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.fx import unset_fake_temporarily
from omnicomp._torch.inductor.graph_text import dump_constant, load_constant
from omnicomp._torch.targets import find_target, name_target
from omnicomp.analysis.nodes import evaluate, fake_value

Plain = Any  # JSON types


class UnkeptError(Exception):
    """Why something is not kept."""


def dump_graph(module: GraphModule, *, described: Collection[str] | None = None) -> Plain:
    """A small graph as data.

    Args:
        module: the graph.
        described: the kinds of nodes whose fake values are kept; None for all.

    Raises:
        UnkeptError: something in it can't be data.
    """
    nodes: list[Plain] = []
    for node in module.graph.nodes:
        value = fake_value(node) if described is None or node.op in described else None
        call = [dump_target(node, {}), dump_argument(node.args), dump_argument(node.kwargs)]
        nodes.append([node.name, node.op, *call, dump_value(value)])
    held = {name: dump_held(name, value) for name, value in attributes_of(module).items()}
    return {"name": type(module).__name__, "nodes": nodes, "held": held}


def load_graph(data: Plain, like: Any) -> GraphModule:
    """The inverse of `dump_graph`; tensors without values are fake like `like`."""
    graph = torch.fx.Graph()
    nodes: dict[str, Node] = {}
    for name, op, target, args, kwargs, value in data["nodes"]:
        called = find_target(target) if op == "call_function" else target
        node = graph.create_node(op, called, load_argument(args, nodes), load_argument(kwargs, nodes), name=name)
        nodes[name] = node
        node.name = name
        if value is not None:
            node.meta["example_value"] = load_value(value, like)
    held = {name: load_held(value, like) for name, value in data["held"].items()}
    return GraphModule(held, graph, data["name"])


def attributes_of(module: GraphModule) -> dict[str, Any]:
    """The tensors and graphs that a module holds."""
    found = {**module._modules, **module._buffers, **module._parameters}
    return {**found, **{name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}}


def dump_held(name: str, value: Any) -> Plain:
    """A constant or graph that a graph holds."""
    return {"nodes_of": dump_graph(value)} if isinstance(value, GraphModule) else dump_constant(name, value)


def load_held(data: Plain, like: Any) -> Any:
    """The inverse of `dump_held`."""
    if "nodes_of" in data:
        return load_graph(data["nodes_of"], like)
    with unset_fake_temporarily():
        return load_constant(data)


def dump_target(node: Node, known: Mapping[Any, str]) -> Any:
    """The target of a node: a name, that of a node with the same, or where it is found."""
    if node.op != "call_function":
        return str(node.target)
    if node.target in known:
        return {"of": known[node.target]}
    names = name_target(node.target)
    if names is None:
        raise UnkeptError(f"{node.target} can't be named")
    return list(names)


def dump_argument(value: Any) -> Plain:
    """What a node is called with."""
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        return {"tuple": [dump_argument(item) for item in value]}
    if isinstance(value, list):
        return [dump_argument(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[key, dump_argument(item)] for key, item in value.items()]}
    if isinstance(value, slice):
        return {"slice": [dump_argument(item) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if value is Ellipsis:
        return {"ellipsis": True}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise UnkeptError(f"an argument is a {type(value).__name__}")


def load_argument(value: Plain, nodes: Mapping[str, Node]) -> Any:
    """The inverse of `dump_argument`."""
    if isinstance(value, list):
        return [load_argument(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "node":
        return nodes[held]
    if kind == "tuple":
        return tuple(load_argument(item, nodes) for item in held)
    if kind == "dict":
        return {key: load_argument(item, nodes) for key, item in held}
    if kind == "slice":
        return slice(*(load_argument(item, nodes) for item in held))
    return {"float": float, "device": torch.device, "torch": functools.partial(getattr, torch)}.get(
        kind, lambda _: Ellipsis
    )(held)


def dump_value(value: Any) -> Plain:
    """A fake value that no operator of torch says, as it is made again."""
    if isinstance(value, torch.Tensor):
        sizes = [list(value.shape), list(value.stride())]
        if any(type(size) is not int for size in (*sizes[0], *sizes[1])):
            raise UnkeptError("a value of no operator has symbolic sizes")
        return {"tensor": [*sizes, str(value.dtype).removeprefix("torch."), str(value.device), value.requires_grad]}
    if isinstance(value, tuple | list):
        return [dump_value(item) for item in value]
    if value is None or isinstance(value, GraphModule):
        return None
    raise UnkeptError(f"a value of no operator is a {type(value).__name__}")


def load_value(data: Plain, like: Any) -> Any:
    """The inverse of `dump_value`."""
    if data is None:
        return None
    if isinstance(data, list):
        return tuple(load_value(item, like) for item in data)
    shape, stride, dtype, device, grad = data["tensor"]
    return evaluate(
        functools.partial(torch.empty_strided, dtype=getattr(torch, dtype), device=device, requires_grad=grad),
        (shape, stride),
        {},
        like=like,
    )
