"""Recognition of hand-written attention around a softmax: what is multiplied, scaled, masked and repeated.

`match` reads the chain `queries x keys -> arithmetic -> softmax -> dropout -> x values` backward and forward from the
softmax and returns a `Site`, or raises `MatchEnded` at the first node that it does not understand. Nothing is edited.
"""

import math
from typing import Any

import torch
from torch.fx import Node

from omnicomp._torch.attention import is_static, known_equal, known_shape
from omnicomp.graphs import fake_value, op_name
from omnicomp.passes._attention_nodes import (
    POINTWISE,
    PRODUCTS,
    argument,
    constant,
    is_cast,
    is_shape_only,
    is_transpose,
    kind,
    mutates,
    tensor,
)
from omnicomp.passes._attention_site import Factor, MaskStep, MatchEnded, Repeat, Site

__all__ = ["is_candidate", "leads_to_product", "match"]

_Step = float | Factor | MaskStep


def is_candidate(node: Node) -> bool:
    """Whether a node is a softmax over the last dimension of something that a batched product was made into."""
    if kind(node) != "softmax" or not node.args or not isinstance(node.args[0], Node):
        return False
    fake, dim = tensor(node), argument(node, "dim", 1)
    return fake is not None and dim in (-1, fake.dim() - 1) and leads_to_product(node.args[0])


def leads_to_product(node: Any) -> bool:
    """Whether a value comes, through pointwise operations and views, from a product of two batched tensors."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        item = stack.pop()
        if not isinstance(item, Node) or item in seen:
            continue
        seen.add(item)
        if kind(item) in PRODUCTS:
            batched = [i for i in item.all_input_nodes if (fake := tensor(i)) is not None and fake.dim() >= 3]
            if len(batched) >= 2 or (batched and kind(item) == "matmul" and item.args[0] is item.args[1]):
                return True
        elif kind(item) in POINTWISE:
            stack.extend(item.all_input_nodes)
    return False


def match(softmax: Node) -> Site:
    """Read the attention around a softmax that `is_candidate`.

    Raises:
        MatchEnded: at the first node that is not understood.
    """
    forward, output, dropout = _read_weights(softmax)
    backward, steps = _read_scores(softmax)
    scores = backward[-1]
    fake = _fake(output)
    left, right = _operands(scores)
    _, value = _operands(output)
    site = Site(
        softmax=softmax,
        scores=scores,
        output=output,
        query=left,
        key=right,
        value=value,
        dtype=fake.dtype,
        scale=math.prod(step for step in steps if isinstance(step, float)),
        factors=[step for step in steps if isinstance(step, Factor)],
        masks=[step for step in reversed(steps) if isinstance(step, MaskStep)],
        dropout=dropout,
        chain=[output, *reversed(forward), softmax, *backward],
    )
    if kind(scores) == "baddbmm":
        _read_baddbmm(site)
    _check_shapes(site)
    _peel(site)
    _check_dtypes(site)
    return site


def _read_weights(softmax: Node) -> tuple[list[Node], Node, float]:
    """Follow the attention weights from the softmax to the product with the values."""
    passed: list[Node] = []
    dropout = 0.0
    node = softmax
    while True:
        user = _only_user(node)
        name = kind(user)
        if name in ("matmul", "bmm"):
            if _operands(user)[0] is not node or _operands(user)[1] is node:
                raise _ended(user, "the attention weights are the right operand of the product", "weights @ values")
            return passed, user, dropout
        if name == "dropout":
            probability = _dropout(user)
            if dropout and probability:
                raise _ended(user, "there are two dropouts after the softmax", "one dropout")
            dropout = max(dropout, probability)
        elif not (name == "contiguous" or is_cast(user)) or user.args[0] is not node:
            raise _ended(
                user, "the attention weights are changed before the product with the values", "casts and dropout"
            )
        passed.append(user)
        node = user


def _read_scores(softmax: Node) -> tuple[list[Node], list[_Step]]:
    """Follow the scores backward from the softmax to the product of queries and keys."""
    passed: list[Node] = []
    steps: list[_Step] = []
    node, user = softmax.args[0], softmax
    assert isinstance(node, Node)
    while True:
        for step in (*_in_place_steps(node, user), node):
            passed.append(step)
            if step is node and kind(step) in ("matmul", "bmm", "baddbmm"):
                return passed, steps
            previous = node if step is not node else _subject(step)
            read = _read_step(step, previous)
            if isinstance(read, MaskStep) and any(s != 1.0 for s in steps if not isinstance(s, MaskStep)):
                raise _ended(step, "the scores are scaled after a mask was added", "scale before mask")
            steps.append(read)
            if step is node:
                node, user = previous, step


def _in_place_steps(node: Node, user: Node) -> list[Node]:
    """The in-place operations on `node` before `user` whose results are not used by name, last first."""
    others = [u for u in node.users if u is not user and not is_shape_only(u)]
    for other in others:
        # `scores.add_(mask)` as a statement: the next operation reads `scores` again.
        unnamed = mutates(other) and not other.users and bool(other.args) and other.args[0] is node and other < user
        if not unnamed:
            raise _also_used(node, other)
    return sorted(others, reverse=True)


def _subject(step: Node) -> Node:
    """The operand of a step that carries the scores."""
    arguments = step.args[1:] if kind(step) == "where" else step.args[:2]
    nodes = [a for a in arguments if tensor(a) is not None]
    carrying = [n for n in nodes if leads_to_product(n)]
    if not carrying or kind(step) not in POINTWISE:
        raise _ended(step, "the scores do not come from a product through scaling and masking", "scale, mask, cast")
    assert isinstance(carrying[0], Node)
    return carrying[0]


def _read_step(step: Node, scores: Node) -> _Step:
    """The factor or the mask that one step applies to `scores`; 1 if it changes no value."""
    before, after = _fake(scores), _fake(step)
    if not known_shape(before, after):
        raise _ended(step, "the scores change their shape", "the shape of the product", f"{list(after.shape)}")
    name = kind(step)
    first = step.args[0] is scores
    if mutates(step) and not first:
        raise _ended(step, "the scores are written into another tensor", "scores on the left of an in-place operation")
    if name == "contiguous" or (is_cast(step) and torch.promote_types(before.dtype, after.dtype) == after.dtype):
        return 1.0
    if name == "dropout" and not _dropout(step):
        return 1.0
    if name == "masked_fill" and first and len(step.args) == 3:
        return _fill(step, step.args[1], step.args[2], negative=False, dtype=before.dtype)
    if name == "where" and len(step.args) == 3 and step.args[1] is not step.args[2]:
        kept = step.args[1] is scores
        return _fill(step, step.args[0], step.args[2 if kept else 1], negative=kept, dtype=before.dtype)
    other = step.args[1 if first else 0] if len(step.args) == 2 and not step.kwargs else scores
    if name in ("mul", "div") and other is not scores and (first or name == "mul"):
        return _factor(step, other, before.dtype, divide=name == "div")
    fake = tensor(other)
    if name in ("add", "sub") and other is not scores and (first or name == "add") and fake is not None:
        return _addend(step, other, fake, before, negative=name == "sub")
    raise _ended(step, "the match does not understand this operation on the scores", "scale, mask, cast")


def _addend(step: Node, other: Any, fake: torch.Tensor, scores: torch.Tensor, *, negative: bool) -> MaskStep:
    if not 1 <= fake.dim() <= scores.dim():
        raise _ended(step, "the mask has no dimension of its own", "a tensor with a keys dimension", f"{fake.dim()}-D")
    if mutates(step) and torch.promote_types(fake.dtype, scores.dtype) != scores.dtype:
        needed = f"a mask of {scores.dtype}"
        raise _ended(step, "a wider mask is added in place, which rounds it in eager", needed, str(fake.dtype))
    return MaskStep(other, negative)


def _fill(step: Node, condition: Any, value: Any, *, negative: bool, dtype: torch.dtype) -> MaskStep:
    """A fill is an addition of the most negative number where that absorbs any score; other values are not."""
    number, fake = constant(value), tensor(condition)
    if fake is None or fake.dtype != torch.bool or number is None or step.kwargs:
        raise _ended(step, "the fill is not of a known number by a bool mask", "a number and a bool mask")
    if number == -math.inf:
        raise MatchEnded(
            step,
            "a row in which every key is filled with -inf is NaN in eager and zero in a fused kernel, and it can't "
            "be proved that there is no such row",
            observed="fill=-inf",
            needed="a finite fill that absorbs every score",
            lever="fill with torch.finfo(scores.dtype).min instead of -inf",
            code="not_equal",
        )
    if dtype not in (torch.float32, torch.float64, torch.bfloat16) or number > torch.finfo(dtype).min:
        raise MatchEnded(
            step,
            "the filled value does not absorb every score, therefore adding it is not the same as filling",
            observed=f"fill={number:g}, dtype={dtype}",
            needed=f"fill={torch.finfo(torch.float32).min:g} in float32 or bfloat16",
            lever="fill with torch.finfo(scores.dtype).min",
            code="not_equal",
        )
    return MaskStep(condition, negative, number)


def _factor(step: Node, other: Any, dtype: torch.dtype, *, divide: bool) -> float | Factor:
    number = constant(other)
    if number is not None:
        if not math.isfinite(number) or number == 0:
            raise _ended(step, "the scale is not a finite number other than zero", "a finite scale", str(number))
        return 1.0 / number if divide else number
    fake = fake_value(other)
    if isinstance(fake, torch.SymInt | torch.SymFloat):
        return Factor(other, divide)
    alike = isinstance(fake, torch.Tensor) and all(known_equal(size, 1) for size in fake.shape[-2:])
    if not alike or _fake(step).dtype != dtype or fake.dtype != dtype:
        needed = f"a number, or a tensor of {dtype} with one value for each head"
        raise _ended(step, "the scale differs between queries or keys, or is of another dtype", needed)
    return Factor(other, divide)


def _read_baddbmm(site: Site) -> None:
    node = site.scores
    beta, alpha = constant(node.kwargs.get("beta", 1)), constant(node.kwargs.get("alpha", 1))
    if not alpha or beta not in (0, 1) or (beta and (site.scale != 1.0 or site.factors)):
        raise _ended(node, "the factors of baddbmm are not understood", "beta 0 or 1 and a number alpha")
    site.scale *= alpha
    bias, fake = node.args[0], tensor(node.args[0])
    if beta and fake is None:
        raise _ended(node, "the bias of baddbmm has no fake value", "a tensor")
    if beta and fake is not None:
        site.masks.insert(0, _addend(node, bias, fake, _fake(node), negative=False))


def _check_shapes(site: Site) -> None:
    """The product must be batched over the same batch and heads on both sides, or share one key head."""
    query, key, value = _fake(site.query), _fake(site.key), _fake(site.value)
    for node, product in ((site.scores, (query, key)), (site.output, (_fake(site.softmax), value))):
        left, right = product
        if left.dim() not in (3, 4) or left.dim() != right.dim():
            seen = f"{left.dim()}-D x {right.dim()}-D"
            raise _ended(node, "the product is not of two tensors with batch and heads", "3-D or 4-D operands", seen)
        heads = left.dim() - 3
        single = left.dim() == 4 and known_equal(right.shape[1], 1)
        equal = all(
            known_equal(left.shape[i], right.shape[i]) for i in range(left.dim() - 2) if i != heads or not heads
        )
        if not equal or not (single or known_equal(left.shape[heads], right.shape[heads])):
            seen = f"{list(left.shape)} x {list(right.shape)}"
            raise _ended(node, "the product broadcasts over the batch or the heads", "equal batch and heads", seen)
    if not known_shape(_fake(site.scores), _fake(site.softmax)):
        raise _ended(site.softmax, "the scores change their shape before the softmax", "the shape of the product")


def _peel(site: Site) -> None:
    """Go behind transposes, factors, casts and repeated heads, to what the fused kernel takes directly."""
    site.query = _peel_operand(site, site.query)
    key = _peel_operand(site, site.key)
    if is_transpose(key):
        site.read.append(key)
        assert isinstance(key.args[0], Node)
        key, site.key_is_transposed = _peel_operand(site, key.args[0]), False
    site.key = key
    heads = _fake(site.query).shape[1]
    site.key_repeat = _single_head(site.key, heads) or (None if site.key_is_transposed else _repeat(site.key))
    site.value_repeat = _single_head(site.value, heads) or _repeat(site.value)


def _peel_operand(site: Site, node: Node) -> Node:
    while node.args and isinstance(inner := node.args[0], Node) and not mutates(node):
        before, after = tensor(inner), _fake(node)
        if before is None or not known_shape(before, after):
            break
        number = constant(node.args[1]) if kind(node) in ("mul", "div") and len(node.args) == 2 else None
        # A cast up before the product changes nothing that the fused kernel, which accumulates in float32, would not.
        widened = is_cast(node) and before.dtype == site.dtype and after.dtype == torch.float32
        if number and math.isfinite(number) and before.dtype == after.dtype and not node.kwargs:
            site.scale *= 1.0 / number if kind(node) == "div" else number
        elif not widened:
            break
        site.read.append(node)
        node = inner
    return node


def _single_head(node: Node, heads: Any) -> Repeat | None:
    """Read the broadcast of a single head by the product itself."""
    fake = _fake(node)
    if fake.dim() != 4 or not is_static(heads) or heads == 1 or not known_equal(fake.shape[1], 1):
        return None
    return Repeat(node, heads)


def _repeat(node: Node) -> Repeat | None:
    """Read `repeat_interleave` over heads, also in its usual spelling by a new dimension, expand and reshape."""
    after = tensor(node)
    if after is None or after.dim() != 4 or not node.args:
        return None
    source: Any = node.args[0]
    if kind(node) == "repeat_interleave":
        copies = argument(node, "repeats", 1)
        if argument(node, "dim", 2) not in (1, -3) or not isinstance(copies, int):
            return None
        return Repeat(source, copies, (node,))
    if kind(node) not in ("reshape", "view", "flatten") or kind(source) != "expand" or not source.args:
        return None
    wide, new = tensor(source), source.args[0]
    if wide is None or wide.dim() != 5 or not _adds_dimension_2(new):
        return None
    heads, copies = new.args[0], wide.shape[2]
    narrow = tensor(heads)
    if narrow is None or narrow.dim() != 4 or not is_static(copies):
        return None
    kept = all(map(known_equal, (*wide.shape[:2], *wide.shape[3:]), narrow.shape))
    merged = (narrow.shape[0], narrow.shape[1] * copies, *narrow.shape[2:])
    return Repeat(heads, copies, (new, source, node)) if kept and all(map(known_equal, after.shape, merged)) else None


def _adds_dimension_2(node: Any) -> bool:
    if kind(node) == "unsqueeze":
        return argument(node, "dim", 1) in (2, -3)
    if kind(node) != "getitem" or not isinstance(node.args[1], tuple):
        return False
    index = [item for item in node.args[1] if item is not Ellipsis]
    whole = [None if item is None else item == slice(None) for item in index]
    return whole[:3] == [True, True, None] and all(whole[3:]) and Ellipsis not in node.args[1][:3]


def _check_dtypes(site: Site) -> None:
    product = _fake(site.scores).dtype
    operands = [_fake(n).dtype for n in (site.query, site.key, site.value)]
    # Under autocast the product is narrower than what it is made of; a product wider than the output is another case.
    allowed = all(dtype in (site.dtype, product) or product == site.dtype for dtype in operands)
    if not site.dtype.is_floating_point or not allowed or (product != site.dtype and operands != [site.dtype] * 3):
        raise _ended(
            site.output,
            "queries, keys and values are multiplied in other dtypes",
            f"all in {site.dtype}",
            f"{', '.join(map(str, operands))}",
        )


def _operands(node: Node) -> tuple[Node, Node]:
    arguments = node.args[1:] if kind(node) == "baddbmm" else node.args
    if len(arguments) != 2 or not all(tensor(a) is not None for a in arguments) or "out" in node.kwargs:
        raise _ended(node, "the operands of the product are not two tensors with fake values", "two tensors")
    left, right = arguments
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    return left, right


def _dropout(node: Node) -> float:
    """The probability of a dropout if it is active, else 0."""
    probability, training = argument(node, "p", 1, 0.5), argument(node, "training", 2, True)
    if training is False or probability == 0:
        return 0.0
    if training is not True or not isinstance(probability, int | float) or not 0 < probability < 1:
        raise _ended(node, "the dropout's probability is not a known number", "a number between 0 and 1")
    return float(probability)


def _only_user(node: Node) -> Node:
    users = [u for u in node.users if not is_shape_only(u)]
    if len(users) != 1:
        other = next((u for u in users if kind(u) not in PRODUCTS), users[-1] if users else node)
        raise _also_used(node, other)
    return users[0]


def _fake(node: Node) -> torch.Tensor:
    fake = tensor(node)
    if fake is None:
        raise _ended(node, "the node has no fake tensor", "an example_value")
    return fake


def _also_used(node: Node, other: Node) -> MatchEnded:
    returned = other.op == "output"
    use = "returned" if returned else f"also used by {other.name}"
    return MatchEnded(
        node,
        f"{node.name} is {use}, and a fused kernel does not make it",
        observed=f"{len(node.users)} users",
        needed="one user, the next step of the attention",
        lever="do not return the attention weights (output_attentions=False)" if returned else "do not use it twice",
    )


def _ended(node: Node, sentence: str, needed: str, observed: str = "") -> MatchEnded:
    return MatchEnded(
        node,
        sentence,
        observed=observed or op_name(node),
        needed=needed,
        lever="write softmax(q @ k.transpose(-2, -1) * scale + mask) @ v, or call scaled_dot_product_attention",
    )
