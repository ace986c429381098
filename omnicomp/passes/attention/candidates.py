"""Candidates for an attention: normalizations over keys, in any spelling, between two products."""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule

from omnicomp._torch.autograd.attention import known_equal, known_shape
from omnicomp.passes.attention.nodes import is_normalizing
from omnicomp.passes.attention.reader import Reader, axes_of
from omnicomp.passes.attention.site import MatchEnded
from omnicomp.passes.attention.terms import Read, flat, leaves
from omnicomp.passes.attention.trace import Op, Trace, Value
from omnicomp.passes.attention.views import VIEWS, NotAView, broadcast, followed

PRODUCTS: Final = ("bmm", "mm")
_COPIES: Final = ("clone", "_to_copy", "alias", "detach")
_SUMS: Final = ("sum", "linalg_vector_norm")
_SOFTMAX: Final = ("_softmax", "_safe_softmax")
_MOVED: Final = (*VIEWS, "_to_copy", "clone")
_CLOSING: Final = ("mul", "masked_fill", "where")
_AROUND: Final = ("clone", "expand", "_to_copy", "copy")
PASSED: Final = frozenset(
    "add sub rsub mul div neg lerp where masked_fill clamp clamp_min maximum minimum tanh exp scaled_add _to_copy copy "
    "cat stack dropout sigmoid relu pow sqrt index_put slice_scatter constant_pad_nd gather index amax max sum abs "
    "logsumexp overwritten as_strided new_zeros nan_to_num roll flip tril triu".split()
) | frozenset(VIEWS)
_FUNCTION: Final = "autograd_function_apply"
_MOVED_BY_VALUE: Final = (
    "the scores or the weights are chosen or moved by their values, which no fused kernel does",
    "leave the choice out, or hide keys by a mask that does not depend on the scores",
)
_NORMALIZED: Final = (
    "the scores or the weights are normalized by their mean and variance, which no fused kernel does",
    "leave the normalization out, or normalize queries and keys, or the output, instead",
)
# Operators between scores and weights that are not read: what they do to an attention, and what to do instead.
UNREAD: Final[Mapping[str, tuple[str, str]]] = {
    "register_hook": (
        "a hook changes the gradient of the scores or the weights, which a fused kernel does not make",
        "leave the hook out, or register it on the queries, the keys or the output",
    ),
    _FUNCTION: (
        "an autograd.Function with a backward of its own is between the product with the keys and that with the values",
        "call the operators of its forward without the Function, and let autograd derive the backward",
    ),
    **dict.fromkeys("topk sort kthvalue cumsum scatter scatter_add scatter_reduce".split(), _MOVED_BY_VALUE),
    **dict.fromkeys("native_layer_norm native_group_norm native_batch_norm".split(), _NORMALIZED),
}


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
        if _is_normalized_later(op):
            yield (
                op,
                MatchEnded(
                    op.node,
                    "the product of the exponentials with the values is not divided by their sums as they are",
                    needed="(e @ v) / e.sum(-1, keepdim=True), or a softmax and then the product with the values",
                    lever="mask the scores, and not their exponentials, and write torch.softmax(scores, -1) @ v",
                ),
            )
        elif (unknown := _unknown_between(op)) is not None:
            sentence, lever = UNREAD[unknown.name]
            needed = "scale, mask, bias and other arithmetic of elements"
            yield op, MatchEnded(unknown.node, sentence, needed=needed, lever=lever)
        elif op.name in _SOFTMAX and op.outputs[0].fake.dim() and (mixing := _mixing(op)) is not None:
            yield (
                op,
                MatchEnded(
                    mixing.node,
                    "the scores or the weights are mixed between heads by a matrix, which no fused kernel does",
                    needed="heads that are apart from the product with the keys to that with the values",
                    lever="leave the mixing of heads out, or mix the outputs of the heads instead",
                ),
            )
        elif op.name in _SOFTMAX and op.outputs[0].fake.dim() and (sum_of := _multiplied_out(op)) is not None:
            yield (
                op,
                MatchEnded(
                    sum_of.node,
                    "all pairs are multiplied and summed where a product would do",
                    needed="products of queries and keys, and of weights and values",
                    lever="write q @ k.transpose(-2, -1) for (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1), and "
                    "weights @ v for (weights.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)",
                ),
            )


@dataclasses.dataclass(frozen=True)
class Late:
    """A softmax whose sum divides the product with the values, `(e @ v) / e.sum(-1, keepdim=True)`."""

    product: Op  # the product of exponentials and values
    total: Op  # the sum of the exponentials; the product itself where a column of ones among the values makes it
    division: Op  # the one by the other, or times its reciprocal
    above: Value  # what is divided
    divisor: Value  # what `division` reads of the sum, or of its reciprocal
    added: Any  # what is added to the sum: a `Value`, a number, or its `Bound`; None for nothing


def normalized_later(op: Op) -> Late | None:
    """The late softmax whose exponentials an operator makes, or None."""
    if _exponent(op) is None or _own_sum(op) is not None:
        return None
    products = reached(op.outputs[0], PRODUCTS, (*VIEWS, "_to_copy", "clone", "dropout"))
    totals = reached(op.outputs[0], ("sum",), ("_to_copy", "clone"))
    if not totals and len(products) == 1 and behind_views(products[0].args[0], _MOVED) is op.outputs[0]:
        totals = products
    if len(products) != 1 or len(totals) != 1:
        return None
    if totals is not products and len(totals[0].argument("dim") or ()) != 1:
        return None
    for division in reached(products[0].outputs[0], ("div", "mul"), _MOVED):
        if (fraction := _fraction(division)) is not None:
            above, divisor, below = fraction
            if behind_views(above, _MOVED) is not products[0].outputs[0]:
                continue
            for value, more in _totals(below):
                if value is totals[0].outputs[0]:
                    return Late(products[0], totals[0], division, above, divisor, more)
    return None


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a sum is at least, in the place of what is added to it: `e.sum(-1).clamp(min=1e-6)`."""

    least: Any


def _totals(value: Value) -> Iterator[tuple[Value, Any]]:
    """What a divisor may be: a value behind views and nothing, or each operand of a sum of two and the other one."""
    value, moved = behind_views(value, (*_AROUND, *_MOVED)), (*_AROUND, *_MOVED)
    yield value, None
    op = value.op
    if op is not None and op.name == "add" and len(op.args) == 2 and not op.kwargs:
        for own, other in (op.args, op.args[::-1]):
            if isinstance(own, Value):
                yield behind_views(own, moved), other
    elif op is not None and op.name in ("clamp", "clamp_min") and op.argument("max", None) is None:
        yield behind_views(op.args[0], moved), Bound(op.argument("min"))


def _fraction(op: Op) -> tuple[Value, Value, Value] | None:
    """What is divided by what in `a / b`, `a * b.reciprocal()`, `a * (1 / b)` or `a * b ** -1`.

    Returns:
        `a`, the other operand, and `b`; None for other operators.
    """
    if op.name not in ("div", "mul") or len(op.args) != 2 or op.kwargs:
        return None
    above, divisor = op.args
    if not isinstance(above, Value) or not isinstance(divisor, Value):
        return None
    if op.name == "div":
        return above, divisor, divisor
    for other, inverse in ((above, divisor), (divisor, above)):
        made = behind_views(inverse, (*_AROUND, *_MOVED)).op
        if made is not None and made.name == "mul" and made.args[1] == 1:
            made = behind_views(made.args[0]).op
        if made is not None and (made.name == "reciprocal" or (made.name == "pow" and made.args[1] == -1)):
            return other, inverse, made.args[0]
    return None


def reached(value: Value, names: Sequence[str], through: Sequence[str]) -> list[Op]:
    """The operators of the given names that read a value, directly or through others."""
    found: list[Op] = []
    queue = [value]
    for item in queue:
        for user in item.users:
            if user.name in names and user not in found:
                found.append(user)
            elif user.name in through and len(queue) < 200:
                queue.extend(each for each in user.outputs if each not in queue)
    return found


def _is_normalized_later(op: Op) -> bool:
    """Whether an exponential of scores goes both to a product with values and to a sum, and is no softmax for us."""
    exponent = _exponent(op)
    if exponent is None or exponential(op) is not None or not comes_from_product(exponent):
        return False
    through = (*VIEWS, "_to_copy", "clone", "mul", "where", "masked_fill", "dropout")
    products = reached(op.outputs[0], PRODUCTS, (*through, "div"))
    computed = [product for product in products if not any(map(_is_parameter, product.inputs))]
    if not computed or any(reached(each.outputs[0], _SUMS, through) for each in _twins(op)):
        # What divides the weights by their own sums is the candidate, and not its exponentials.
        users = [*op.outputs[0].users]
        users += [user for each in users if each.name in _CLOSING for value in each.outputs for user in value.users]
        return bool(computed) and not any(map(exponential, users))
    # The sum may be a product with ones, or a column of the product, that of ones beside the values.
    moved = (*_MOVED, "add", "clamp", "clamp_min", "maximum", "where", "masked_fill")
    made = {product.outputs[0] for product in computed}
    fractions = (_fraction(each) for value in made for each in reached(value, ("div", "mul"), moved))
    return any(f is not None and {behind_views(f[0], moved), behind_views(f[2], moved)} <= made for f in fractions)


def _unknown_between(op: Op) -> Op | None:
    """The operator nearest to a softmax that is not read, between a product of scores and one with the values."""
    through = PASSED | UNREAD.keys()
    if op.name == _FUNCTION:
        inside = getattr(op.node.graph.owning_module, str(getattr(op.node.args[0], "target", "")), None)
        if not isinstance(inside, GraphModule) or not any(map(is_normalizing, inside.graph.nodes)):
            return None
        scored = any(comes_from_product(value, through) for value in op.inputs)
        return op if scored and any(product_below(value, through) for value in op.outputs) else None
    exponent = exponential(op)
    if op.name not in _SOFTMAX and exponent is None:
        return None
    scores = next(op.inputs) if exponent is None else exponent
    if not comes_from_product(scores, through) or product_below(op.outputs[0], through) is None:
        return None
    if not comes_from_product(scores):
        return _nearest(scores, UNREAD, up=True)
    return None if product_below(op.outputs[0]) is not None else _nearest(op.outputs[0], UNREAD, up=False)


def _multiplied_out(softmax: Op) -> Op | None:
    """The sum of products of all pairs, in the place of the product of scores or of that with the values."""
    scores = next(softmax.inputs)
    before, after = _sum_of_pairs(scores, up=True), _sum_of_pairs(softmax.outputs[0], up=False)
    whole = (before or comes_from_product(scores)) and (after or product_below(softmax.outputs[0]))
    return (before or after) if whole else None


def _sum_of_pairs(value: Value, *, up: bool) -> Op | None:
    """The first sum over a product of elements in which both operands are repeated, through arithmetic and views."""
    seen, queue = {value}, [value]
    for item in queue:
        for op in ([item.op] if item.op is not None else []) if up else item.users:
            if op.name == "sum" and _repeats_both(behind_views(op.args[0], _AROUND).op):
                return op
            if op.name in PASSED and len(seen) < 200:
                new = [v for v in (op.inputs if up else op.outputs) if v not in seen]
                seen.update(new)
                queue.extend(new)
    return None


def _repeats_both(op: Op | None) -> bool:
    if op is None or op.name != "mul" or not all(isinstance(each, Value) for each in op.args):
        return False
    shape = op.outputs[0].fake.shape
    shapes = [each.fake.shape for each in op.args]
    return all(
        len(own) == len(shape)
        and any(known_equal(one, 1) and not known_equal(all_, 1) for one, all_ in zip(own, shape, strict=True))
        for own in shapes
    )


def _mixing(softmax: Op) -> Op | None:
    """The product with a parameter between a product of scores and the softmax, or between that and the values."""
    scores, weights = next(softmax.inputs), softmax.outputs[0]
    before = None if comes_from_product(scores) else _nearest(scores, (*PRODUCTS, "convolution"), up=True)
    if before is not None and not (_is_apart(scores, before, softmax) and any(map(comes_from_product, before.inputs))):
        return None
    if before is None and not comes_from_product(scores):
        return None
    if product_below(weights) is not None:
        return before
    after = _nearest(weights, (*PRODUCTS, "convolution"), up=False)
    if after is None or not _is_apart(after.args[0], after, softmax):
        return None
    return None if product_below(after.outputs[0]) is None else before or after


def _is_apart(value: Value, product: Op, softmax: Op) -> bool:
    """Whether what is normalized is none of the features that a product makes or reads.

    `value` is the input of the softmax, which comes from the product; or that of the product, from the softmax.
    """
    if product.name not in PRODUCTS:
        return True
    at, dim = axes_of(value), normalized_dim(softmax)
    end = product if value is next(softmax.inputs) else softmax
    reader = Reader()
    for read in leaves(reader.expand(reader.read(value, at))):
        if isinstance(read, Read) and read.value in end.outputs:
            keys, features = (at[dim], read.at[-1]) if end is product else (read.at[dim], at[-1])
            return not set(keys.flat()) & set(features.flat())
    return False


def _nearest(value: Value, names: Collection[str], *, up: bool) -> Op | None:
    """The first operator of the given names, through arithmetic and views."""
    seen, queue = {value}, [value]
    for item in queue:
        for op in ([item.op] if item.op is not None else []) if up else item.users:
            if op.name in names:
                return op if len(seen) <= 200 else None
            if op.name in PASSED:
                new = [v for v in (op.inputs if up else op.outputs) if v not in seen]
                seen.update(new)
                queue.extend(new)
    return None


def _twins(exp: Op) -> list[Op]:
    """The exponentials of the same scores, maybe less something, that a program takes more than once."""
    value = next(exp.inputs)
    if value.op is not None and value.op.name == "sub" and isinstance(value.op.args[0], Value):
        value = value.op.args[0]
    return [exp, *(other for other in reached(value, (exp.name,), ("sub",)) if other is not exp)]


def exponential(op: Op) -> Value | None:
    """What a softmax that is written out normalizes: `x` of `exp(x) / sum(exp(x))` or of `exp(log_softmax(x))`."""
    exponent = _exponent(op)
    if exponent is not None:
        own = _own_sum(op)
        return exponent if own is None and normalized_later(op) is not None else own
    quotient = _quotient(op)
    return None if quotient is None else _exponent(quotient[0])


def added(softmax: Op) -> tuple[Op, Any] | None:
    """The sum of a softmax that is written out, and what is added to it: a `Value`, a number, or its `Bound`.

    None where nothing is added.
    """
    late, quotient = normalized_later(softmax) if _exponent(softmax) is not None else None, _quotient(softmax)
    found = (late.total, late.added) if late is not None else quotient and quotient[1:]
    return found if found and found[1] is not None else None


def shift(softmax: Op) -> tuple[Value, Value] | None:
    """The scores and what is subtracted from them before their exponentials are taken; None if nothing is."""
    exponent = exponential(softmax)
    made = None if exponent is None else behind_views(exponent).op
    if made is None or made.name != "sub" or not all(isinstance(each, Value) for each in made.args):
        return None
    return made.args[0], behind_views(made.args[1], (*_COPIES, "expand", "unsqueeze"))


def base(softmax: Op) -> float:
    """The base of the exponentials of a candidate, e for a softmax that is not written out."""
    quotient = _quotient(softmax)
    op = softmax if quotient is None else quotient[0]
    if op.name == "pow":
        return float(op.args[0])
    return 2.0 if op.name == "exp2" else math.e


def closing(softmax: Op) -> Op | None:
    """What sets exponentials to zero before they are summed, as in `(e * mask) / (e * mask).sum()`; None if nothing."""
    fraction = _fraction(softmax)
    op = None if fraction is None else behind_views(fraction[0], _AROUND).op
    return op if op is not None and _closed(op) is not None else None


def _closed(op: Op) -> Op | None:
    """The exponentials of `e * mask`, `e.masked_fill(mask, 0)` and `where(mask, e, 0)`, which may be zeros instead."""
    if op.name not in _CLOSING:
        return None
    for value in op.args:
        made = value.op if isinstance(value, Value) else None
        if made is not None and _exponent(made) is not None:
            return made if known_shape(made.outputs[0].fake, op.outputs[0].fake) else None
    return None


def _exponent(op: Op) -> Value | None:
    """`x` of `exp(x)`, `exp2(x)` and of a number to the power of `x`."""
    if op.name in ("exp", "exp2"):
        return op.args[0]
    number = op.args[0] if op.name == "pow" and len(op.args) == 2 else None
    known = isinstance(number, int | float) and math.isfinite(number) and number > 1
    return op.args[1] if known and isinstance(op.args[1], Value) else None


def _quotient(op: Op) -> tuple[Op, Op, Any] | None:
    """The exponentials, the sum, and what is added to it, of `e / sum` or of `e * sum.reciprocal()`."""
    fraction = _fraction(op)
    if fraction is None:
        return None
    above = behind_views(fraction[0], _AROUND).op
    if above is None:
        return None
    exp = above if _exponent(above) is not None else _closed(above)
    if exp is None:
        return None
    for value, more in _totals(fraction[2]):
        total = value.op
        if total is None or total.name != "sum" or behind_views(total.args[0], ("clone", "_to_copy")).op is not above:
            continue
        return (exp, total, more) if _of_own_rows(op, fraction[1], total) else None
    return None


def _of_own_rows(op: Op, value: Value, total: Op) -> bool:
    """Whether each element of the result of `op` meets the sum of its own row."""
    dims: Any = total.argument("dim")
    if not isinstance(dims, list | tuple) or len(dims) != 1:
        return False
    at = axes_of(op.outputs[0])
    try:
        _, where = followed(value, broadcast(value, at), total)
    except NotAView:
        return False
    dim = int(dims[0]) % total.args[0].fake.dim()
    if total.argument("keepdim", False):
        where = (*where[:dim], *where[dim + 1 :])
    rows = (*at[:dim], *at[dim + 1 :])
    return len(rows) == len(where) and all(
        (flat(one.axes), one.start) == (flat(other.axes), other.start) for one, other in zip(rows, where, strict=True)
    )


def _own_sum(exp: Op) -> Value | None:
    """`x` of `exp(log_softmax(x))` and of `exp(x - logsumexp(x))`."""
    if exp.name != "exp":
        return None
    inner = behind_views(exp.args[0])
    if inner.op is not None and inner.op.name == "_log_softmax":
        return inner.op.args[0]
    return _shifted_by_its_sum(inner)


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


def behind_views(value: Value, names: Sequence[str] = _COPIES) -> Value:
    """What a value is a view or a copy of, by operators of the given names."""
    while value.op is not None and value.op.name in names:
        value = next(value.op.inputs)
    return value


def comes_from_product(value: Value, through: Collection[str] = PASSED) -> bool:
    """Whether a value comes from a product of two tensors that were computed."""
    seen, stack = {value}, [value]
    while stack and len(seen) < 500:
        op = stack.pop().op
        if op is None:
            continue
        if op.name in PRODUCTS:
            if not any(_is_parameter(operand) for operand in op.inputs):
                return True
        elif op.name in through:
            new = [v for v in op.inputs if v not in seen]
            seen.update(new)
            stack.extend(new)
    return False


def _is_parameter(value: Value) -> bool:
    value = behind_views(value, ("t", "transpose", "view", "expand", "permute", "alias", "detach", "_to_copy"))
    fake: Any = [node.meta.get("example_value") for node in value.holders[:1] if node.op in ("placeholder", "get_attr")]
    return bool(fake) and isinstance(fake[0], torch.nn.Parameter)


def product_below(value: Value, through: Collection[str] = PASSED) -> Op | None:
    """The first product that reads a value through arithmetic and views."""
    seen, queue = {value}, [value]
    for item in queue:
        if len(seen) > 200:
            return None
        for op in item.users:
            if op.name in PRODUCTS:
                return None if any(_is_parameter(v) for v in op.inputs) else op
            if op.name in through:
                new = [v for v in op.outputs if v not in seen]
                seen.update(new)
                queue.extend(new)
    return None


def normalized_dim(op: Op) -> int:
    """The dimension that a candidate sums to one, as it is written."""
    if _exponent(op) is not None:
        if (late := normalized_later(op)) is not None:
            return -1 if late.total is late.product else int(late.total.argument("dim")[0])
        inner = behind_views(next(op.inputs)).op
        if inner is not None and inner.name == "sub":
            inner = behind_views(inner.args[1], ("clone", "expand", "_to_copy", "unsqueeze")).op
        dim = inner.argument("dim") if inner is not None else -1
        return int(dim[0] if isinstance(dim, list | tuple) else dim)
    if (quotient := _quotient(op)) is not None:
        return int(quotient[1].argument("dim")[0])
    return int(op.argument("dim"))


def is_shifted(softmax: Op) -> bool:
    """Whether the greatest score of each row is subtracted before exponentials are taken, as torch's softmax does."""
    if exponential(softmax) is None:
        return True
    shifted = shift(softmax)
    if shifted is None:
        return False
    scores, top = behind_views(shifted[0]), shifted[1].op
    if top is None or top.name not in ("amax", "max") or behind_views(top.args[0]) is not scores:
        return False
    dims = top.argument("dim")
    dims = dims if isinstance(dims, list | tuple) else [dims]
    rank = scores.fake.dim()
    return [dim % rank for dim in dims if isinstance(dim, int)] == [normalized_dim(softmax) % rank]


def written_out(softmax: Op) -> list[Op]:
    """The operators of a softmax that is written out; none for one that is not."""
    start = exponential(softmax)
    more = added(softmax)
    ends = (start, more and more[1])
    found: list[Op] = []
    stack = [softmax] if start is not None else []
    while stack:
        op = stack.pop()
        if op not in found:
            found.append(op)
            masked = _closed(op)
            above = op.inputs if masked is None else masked.outputs
            stack.extend(value.op for value in above if value not in ends and value.op is not None)
    return found
