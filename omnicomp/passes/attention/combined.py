"""Weights of two attentions that are combined before they meet the values, as in differential attention.

`(a - factor * b) @ v` is `a @ v - factor * (b @ v)`, and each of these products may be an attention. It is written so
before the graph is traced, and as it was again if neither became one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from omnicomp._torch.autograd.attention import known_equal, known_shape
from omnicomp.analysis.nodes import insert_call
from omnicomp.passes.attention.nodes import is_shape_only, kind, mutates
from omnicomp.passes.attention.trial import Old, Trial, between

_PRODUCTS: Final = ("matmul", "bmm", "einsum")
_SIGNS: Final[dict[str, Callable[..., Any]]] = {"add": torch.add, "sub": torch.sub}
_CASTS: Final = ("to", "type", "type_as", "float", "half", "bfloat16", "contiguous", "dropout")
_VIEWS: Final = ("view", "reshape", "unflatten", "getitem", "select", "unbind")
_FARTHEST: Final = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Term:
    """One of the weights that are combined: where they come from, and what they are multiplied by."""

    weights: Node
    factor: Any = None


def distribute(graph: Graph) -> list[Trial]:
    """Write each product of values with weights that are combined as one product for each of the weights."""
    return [made for node in list(graph.nodes) if (made := _distributed(node)) is not None]


def _distributed(product: Node) -> Trial | None:
    operands = product.all_input_nodes
    if kind(product) not in _PRODUCTS or product.kwargs or len(operands) != 2:
        return None
    combined, values = operands if kind(operands[0]) in _SIGNS or kind(product) != "einsum" else operands[::-1]
    if kind(combined) not in _SIGNS or combined.kwargs.keys() - {"alpha"}:
        return None
    if len(combined.args) != 2 or not _used_by(combined, product):
        return None
    first, second = (_term(each, combined) for each in combined.args)
    if first is None or second is None or not known_shape(_fake(first.weights), _fake(second.weights)):
        return None
    if (alpha := combined.kwargs.get("alpha", 1)) != 1:
        if not isinstance(second.factor, int | float | None) or not isinstance(alpha, int | float):
            return None
        second = _Term(weights=second.weights, factor=alpha if second.factor is None else alpha * second.factor)
    if len({_fake(n).dtype for n in (first.weights, second.weights, combined, values, product)}) != 1:
        return None
    if not known_shape(_fake(combined), _fake(first.weights)):
        return None
    # The dimensions of an einsum may be in any order.
    numbers = all(not isinstance(each.factor, Node) or not _fake(each.factor).dim() for each in (first, second))
    if not (numbers if kind(product) == "einsum" else _fake(values).dim() == _fake(combined).dim()):
        return None
    gone = [n for n in combined.args if isinstance(n, Node) and n not in (first.weights, second.weights)]
    gone = sorted({*gone, combined, product})
    if any(map(mutates, between(gone[0], product))):
        return None
    with (
        torch.set_grad_enabled(_fake(product).requires_grad),
        torch.autocast(_fake(product).device.type, enabled=False),
    ):
        return _written(product, combined, values, first, second, gone)


def _written(product: Node, combined: Node, values: Node, first: _Term, second: _Term, gone: list[Node]) -> Trial:
    new: list[Node] = []

    def call(target: Any, *args: Any) -> Node:
        new.append(insert_call(product, target, args, None))
        return new[-1]

    joined = None if kind(product) == "einsum" else _joined(first.weights, second.weights)
    if joined is not None:
        stacked, dim, places = joined
        products = (call(torch.matmul, stacked, call(torch.unsqueeze, values, dim)),)
        outputs = [call(torch.select, products[0], dim, place) for place in places]
    else:
        arguments = [
            map_arg(product.args, lambda node, of=each.weights: of if node is combined else node)
            for each in (first, second)
        ]
        target = product.target if kind(product) == "einsum" else torch.matmul
        products = tuple(call(target, *each) for each in arguments)
        outputs = list(products)
    scaled = [
        output if term.factor is None else call(torch.mul, output, term.factor)
        for output, term in zip(outputs, (first, second), strict=True)
    ]
    result = call(_SIGNS[kind(combined)], *scaled)
    old = tuple(map(Old.of, gone))
    product.replace_all_uses_with(result)
    for node in reversed(gone):
        node.graph.erase_node(node)
    return Trial(products=products, new=tuple(new), old=old)


def _term(value: Any, user: Node) -> _Term | None:
    """Weights that come from a softmax of scores, maybe multiplied by a factor that is the same for all keys."""
    if not isinstance(value, Node) or not isinstance(value.meta.get("example_value"), torch.Tensor):
        return None
    if _is_attention(value):
        return _Term(weights=value)
    if kind(value) != "mul" or value.kwargs or len(value.args) != 2 or not _used_by(value, user):
        return None
    for weights, factor in (value.args, value.args[::-1]):
        if isinstance(weights, Node) and _is_attention(weights) and known_shape(_fake(weights), _fake(value)):
            if isinstance(factor, int | float):
                return _Term(weights=weights, factor=factor)
            fake = factor.meta.get("example_value") if isinstance(factor, Node) else None
            if isinstance(fake, torch.Tensor) and (fake.dim() == 0 or known_equal(fake.shape[-1], 1)):
                return _Term(weights=weights, factor=factor)
    return None


def _is_attention(node: Node) -> bool:
    """Whether a node is a softmax over its last dimension of something that a product made, behind casts and views."""
    for _ in range(_FARTHEST):
        if kind(node) in ("softmax", "_softmax"):
            return _comes_from_product(node)
        if kind(node) not in (*_CASTS, *_VIEWS) or not node.args or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return False


def _comes_from_product(softmax: Node) -> bool:
    seen, queue = {softmax}, [softmax]
    for node in queue:
        if kind(node) in ("matmul", "bmm", "einsum", "baddbmm"):
            return True
        if len(queue) > _FARTHEST:
            return False
        new = [each for each in node.all_input_nodes if each not in seen]
        seen.update(new)
        queue.extend(new)
    return False


def _joined(first: Node, second: Node) -> tuple[Node, int, tuple[int, int]] | None:
    """The tensor that two weights are parts of along a dimension of batches or heads; that dimension; their places."""
    places = [_place(node) for node in (first, second)]
    one, other = places
    if one is None or other is None or one[0] is not other[0] or one[1] != other[1] or one[2] == other[2]:
        return None
    return one[0], one[1], (one[2], other[2])


def _place(node: Node) -> tuple[Node, int, int] | None:
    parent: Any = node.args[0] if node.args else None
    if not isinstance(parent, Node):
        return None
    if kind(node) == "getitem" and isinstance(node.args[1], int) and kind(parent) == "unbind":
        of, *given = parent.args
        return _checked(of, given[0] if given else parent.kwargs.get("dim", 0), node.args[1])
    if kind(node) == "getitem" and isinstance(node.args[1], tuple):
        index = node.args[1]
        whole = [n for n, each in enumerate(index) if each == slice(None, None, None)]
        numbers = [n for n, each in enumerate(index) if type(each) is int]
        if len(numbers) == 1 and len(whole) == len(index) - 1:
            return _checked(parent, numbers[0], index[numbers[0]])
    if kind(node) == "select" and len(node.args) == 3:
        return _checked(parent, node.args[1], node.args[2])
    return None


def _checked(parent: Any, dim: Any, place: Any) -> tuple[Node, int, int] | None:
    fake = parent.meta.get("example_value") if isinstance(parent, Node) else None
    if not isinstance(fake, torch.Tensor) or type(dim) is not int or type(place) is not int:
        return None
    dim = dim % fake.dim()
    # Of more than two parts, all would be multiplied with the values.
    whole = dim < fake.dim() - 2 and place >= 0 and known_equal(fake.shape[dim], 2)
    return (parent, dim, place) if whole else None


def _used_by(node: Node, user: Node) -> bool:
    return all(each is user or is_shape_only(each) for each in node.users) and len(node.users) == 1


def _fake(node: Node) -> Any:
    return node.meta.get("example_value")
