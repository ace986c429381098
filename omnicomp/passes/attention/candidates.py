"""Candidates for an attention: normalizations over keys, in any spelling, between two products."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.fx import Graph

from omnicomp._torch.autograd.attention import known_equal
from omnicomp.passes.attention.site import MatchEnded
from omnicomp.passes.attention.trace import Op, Trace, Value
from omnicomp.passes.attention.views import VIEWS

__all__ = [
    "PASSED",
    "PRODUCTS",
    "behind_views",
    "candidates",
    "comes_from_product",
    "exponential",
    "normalized_dim",
    "product_below",
    "unread",
    "written_out",
]

PRODUCTS: Final = ("bmm", "mm")
_SOFTMAX: Final = ("_softmax", "_safe_softmax")
PASSED: Final = frozenset(
    "add sub rsub mul div neg where masked_fill clamp clamp_min maximum minimum tanh exp scaled_add _to_copy copy cat "
    "dropout sigmoid relu pow sqrt index_put slice_scatter constant_pad_nd gather index amax max sum nan_to_num abs "
    "logsumexp overwritten as_strided new_zeros nan_to_num roll flip".split()
) | frozenset(VIEWS)


def candidates(trace: Trace, graph: Graph) -> Iterator[tuple[Op, Op]]:
    """The normalizations over keys that a graph makes, each with the product that uses its weights.

    A candidate comes from a product through arithmetic and views, and leads to another product likewise.
    """
    for op in trace.ops:
        if op.node.graph is not graph or not op.outputs:
            continue
        exponent = exponential(op)
        if op.name not in _SOFTMAX and exponent is None:
            continue
        scores = next(op.inputs) if exponent is None else exponent
        if comes_from_product(scores) and (used := product_below(op.outputs[0])) is not None:
            yield op, used


def unread(trace: Trace, graph: Graph) -> Iterator[tuple[Op, MatchEnded]]:
    """Attentions of a form that no kernel has, which are no candidates, and why: each at its softmax or `exp`."""
    for op in trace.ops:
        if op.node.graph is not graph or not op.outputs:
            continue
        if op.name == "exp" and _is_normalized_later(op):
            yield (
                op,
                MatchEnded(
                    op.node,
                    "the weights are normalized after their product with the values, not before it",
                    needed="a softmax, and then the product with the values",
                    lever="write torch.softmax(scores, -1) @ v, which is (e @ v) / e.sum(-1, keepdim=True)",
                ),
            )
        elif op.name in _SOFTMAX and (mixing := _mixing(op)) is not None:
            yield (
                op,
                MatchEnded(
                    mixing.node,
                    "the scores or the weights are mixed between heads by a matrix, which no fused kernel does",
                    needed="heads that are apart from the product with the keys to that with the values",
                    lever="leave the mixing of heads out, or mix the outputs of the heads instead",
                ),
            )


def _is_normalized_later(op: Op) -> bool:
    """Whether an exponential of scores goes both to a product with values and to a sum, and is not divided before."""
    if exponential(op) is not None or not comes_from_product(op.args[0]):
        return False
    found, queue = set[str](), [op.outputs[0]]
    for value in queue:
        for user in value.users:
            if user.name in (*VIEWS, "_to_copy", "clone") and user.outputs[0] not in queue:
                queue.extend(user.outputs)
            elif user.name in PRODUCTS and not any(_is_parameter(v) for v in user.inputs):
                found.add("product")
            elif user.name == "sum":
                found.add("sum")
    return found == {"product", "sum"}


def _mixing(softmax: Op) -> Op | None:
    """The product with a parameter between a product of scores and the softmax, or between that and the values."""
    size, scores = softmax.outputs[0].fake.shape[normalized_dim(softmax)], next(softmax.inputs)
    before = None if comes_from_product(scores) else _nearest(scores, size, up=True)
    if before is not None and not any(map(comes_from_product, before.inputs)):
        return None
    if before is None and not comes_from_product(scores):
        return None
    if product_below(softmax.outputs[0]) is not None:
        return before
    after = _nearest(softmax.outputs[0], size, up=False)
    return None if after is None or product_below(after.outputs[0]) is None else before or after


def _nearest(value: Value, size: Any, *, up: bool) -> Op | None:
    """The first product with a parameter through arithmetic and views, whose features are not what is normalized."""
    seen, queue = {value}, [value]
    for item in queue:
        for op in ([item.op] if item.op is not None else []) if up else item.users:
            if op.name in PRODUCTS:
                features = (op.outputs[0] if up else op.args[0]).fake.shape[-1]
                return None if known_equal(features, size) or len(seen) > 200 else op
            if op.name in PASSED:
                new = [v for v in (op.inputs if up else op.outputs) if v not in seen]
                seen.update(new)
                queue.extend(new)
    return None


def exponential(op: Op) -> Value | None:
    """What a softmax that is written out normalizes: `x` of `exp(x) / sum(exp(x))` or of `exp(log_softmax(x))`."""
    if op.name == "exp":
        inner = behind_views(op.args[0])
        if inner.op is not None and inner.op.name == "_log_softmax":
            return inner.op.args[0]
        return _shifted_by_its_sum(inner)
    if op.name != "div" or len(op.args) != 2 or not all(isinstance(a, Value) for a in op.args):
        return None
    above, below = (behind_views(a, ("clone", "expand", "_to_copy", "copy")) for a in op.args)
    if above.op is None or below.op is None or above.op.name != "exp" or below.op.name != "sum":
        return None
    summed = behind_views(below.op.args[0], ("clone", "_to_copy"))
    dims: Any = below.op.argument("dim")
    if summed is not above or not isinstance(dims, list | tuple) or len(dims) != 1:
        return None
    return above.op.args[0] if below.op.argument("keepdim", False) else None


def _shifted_by_its_sum(value: Value) -> Value | None:
    """`x` of `x - logsumexp(x)`."""
    if value.op is None or value.op.name != "sub" or not all(isinstance(a, Value) for a in value.op.args):
        return None
    left, right = value.op.args
    right = behind_views(right, ("clone", "expand", "_to_copy", "unsqueeze"))
    if right.op is None or right.op.name != "logsumexp" or right.op.args[0] is not left:
        return None
    dims = right.op.argument("dim")
    return left if isinstance(dims, list | tuple) and len(dims) == 1 else None


def behind_views(value: Value, names: Sequence[str] = ("clone", "_to_copy", "alias", "detach")) -> Value:
    """What a value is a view or a copy of, by operators of the given names."""
    while value.op is not None and value.op.name in names:
        value = next(value.op.inputs)
    return value


def comes_from_product(value: Value) -> bool:
    """Whether a value comes from a product of two tensors that were computed."""
    seen, stack = {value}, [value]
    while stack and len(seen) < 500:
        op = stack.pop().op
        if op is None:
            continue
        if op.name in PRODUCTS:
            if not any(_is_parameter(operand) for operand in op.inputs):
                return True
        elif op.name in PASSED:
            new = [v for v in op.inputs if v not in seen]
            seen.update(new)
            stack.extend(new)
    return False


def _is_parameter(value: Value) -> bool:
    value = behind_views(value, ("t", "transpose", "view", "expand", "permute", "alias", "detach", "_to_copy"))
    fake: Any = [node.meta.get("example_value") for node in value.holders[:1] if node.op in ("placeholder", "get_attr")]
    return bool(fake) and isinstance(fake[0], torch.nn.Parameter)


def product_below(value: Value) -> Op | None:
    """The first product that reads a value through arithmetic and views."""
    seen, queue = {value}, [value]
    for item in queue:
        if len(seen) > 200:
            return None
        for op in item.users:
            if op.name in PRODUCTS:
                return None if any(_is_parameter(v) for v in op.inputs) else op
            if op.name in PASSED:
                new = [v for v in op.outputs if v not in seen]
                seen.update(new)
                queue.extend(new)
    return None


def normalized_dim(op: Op) -> int:
    """The dimension that a candidate sums to one, as it is written."""
    if op.name == "exp":
        inner = behind_views(op.args[0]).op
        if inner is not None and inner.name == "sub":
            inner = behind_views(inner.args[1], ("clone", "expand", "_to_copy", "unsqueeze")).op
        dim = inner.argument("dim") if inner is not None else -1
        return int(dim[0] if isinstance(dim, list | tuple) else dim)
    if op.name == "div":
        below = behind_views(op.args[1], ("clone", "expand", "_to_copy", "copy")).op
        return int(below.argument("dim")[0]) if below is not None else -1
    return int(op.argument("dim"))


def written_out(softmax: Op) -> list[Op]:
    """The operators of a softmax that is written out; none for one that is not."""
    start = exponential(softmax)
    found: list[Op] = []
    stack = [softmax] if start is not None else []
    while stack:
        op = stack.pop()
        if op not in found:
            found.append(op)
            stack.extend(value.op for value in op.inputs if value is not start and value.op is not None)
    return found
