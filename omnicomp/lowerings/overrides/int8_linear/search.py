"""Where a Dynamo graph multiplies by a weight of int8: the weight is cast, and it or the product is scaled."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from omnicomp.analysis.nodes import fake_value, insert_call
from omnicomp.lowerings.overrides.search import Ended, Found
from omnicomp.lowerings.overrides.spellings import Linear, is_cast, kind, linear


def search(module: GraphModule) -> Iterator[Found | Ended]:
    """The linear layers of a graph whose weight is int8 with a scale for each row."""
    for node in module.graph.nodes:
        found = _scaled_product(node) or _scaled_weight(node)
        if found is not None:
            yield found


def _scaled_product(node: Node) -> Found | None:
    """`F.linear(x, weight.to(x.dtype)) * scale`."""
    for layer, scale in _factors(node):
        inner = linear(layer)
        if inner is None or inner.bias is not None or inner.transposed:
            continue
        weight = _cast_from_int8(inner.source)
        n = fake_value(inner.source).shape[0]
        if weight is not None and _shape(scale) in ((n,), (1, n)):
            return _found(node, inner, weight, scale, (inner.source, *inner.steps), None)
    return None


def _scaled_weight(node: Node) -> Found | None:
    """`F.linear(x, weight.to(x.dtype) * scale[:, None], bias)`."""
    inner = linear(node)
    if inner is None or inner.transposed:
        return None
    for left, scale in _factors(inner.source):
        weight = _cast_from_int8(left)
        if weight is not None and _shape(scale) == (fake_value(left).shape[0], 1):
            steps = (left, inner.source, *(step for step in inner.steps if step is not node))
            return _found(node, inner, weight, scale, steps, inner.bias)
    return None


def _factors(node: Any) -> list[tuple[Any, Any]]:
    if kind(node) != "mul" or len(node.args) != 2 or not all(isinstance(arg, Node) for arg in node.args):
        return []
    return [(node.args[0], node.args[1]), (node.args[1], node.args[0])]


def _cast_from_int8(node: Any) -> Node | None:
    if not isinstance(node, Node) or not is_cast(node):
        return None
    base = node.args[0]
    return base if fake_value(base).dtype == torch.int8 else None  # type: ignore[return-value]


def _shape(node: Any) -> tuple[Any, ...]:
    value = fake_value(node)
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _found(
    output: Node, layer: Linear, weight: Node, scale: Node, steps: tuple[Node, ...], bias: Node | None
) -> Found | None:
    x = layer.x
    dtypes = {fake_value(node).dtype for node in (x, scale, layer.node, output)}
    if len(dtypes) != 1:  # autocast, or a scale of another dtype
        return None

    def write() -> Node:
        flat = scale if fake_value(scale).dim() == 1 else insert_call(output, torch.flatten, (scale,))
        call = insert_call(output, torch.ops.omnicomp.int8_linear.default, (x, weight, flat))
        return call if bias is None else insert_call(output, torch.add, (call, bias))

    # The cast weight may be read elsewhere: it is then made for that.
    own = tuple(dict.fromkeys(step for step in steps if step is not output and {output, *steps}.issuperset(step.users)))
    return Found(output=output, steps=own, arguments={"x": x, "weight": weight, "scale": scale}, write=write)
