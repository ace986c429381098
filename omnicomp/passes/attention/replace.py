"""The fused attention in place of the old one: its memory layout is as in eager, and nothing is left over."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp._torch.autograd.attention import known_equal, known_shape
from omnicomp.analysis.nodes import evaluate, fake_value
from omnicomp.passes.attention.nodes import is_pure, is_shape_only, kind, mutates
from omnicomp.passes.attention.site import NO_MAXIMUM, MatchEnded, Site
from omnicomp.passes.attention.trace import Trace

_TRANSPOSES: Final = ("transpose", "permute", "swapaxes")
_LAYOUT_ENDS: Final = ("reshape", "flatten", "contiguous")
_LOG_SUM_EXP: Final = (
    "do without the log-sum-exp and what it is made of, or take it with the output from "
    "flex_attention(q, k, v, return_aux=AuxRequest(lse=True)) on CUDA; on a CPU no function of torch returns it"
)
_CASTS: Final = ("to", "float", "type_as", "clone", "detach")
_ARITHMETIC: Final = ("add", "sub", "mul", "div", "truediv", "neg", "clamp", "masked_fill", "masked_fill_", "where")
_VIEWS: Final = (*_TRANSPOSES, *_LAYOUT_ENDS, "view", "getitem", "unsqueeze", "squeeze", "unflatten", "expand")


def check_unused(site: Site) -> None:
    """What the fused kernel does not make must have no other use.

    Raises:
        MatchEnded: the scores or the weights are returned, or used once more.
    """
    unneeded: set[Node] = set()
    ends: list[MatchEnded] = []
    for node in sorted(site.chain - {site.output}):
        others = (u for u in node.users if u not in site.chain and not is_shape_only(u))
        users = [user for user in others if _is_needed(user, site, unneeded)]
        if not users:
            continue
        other = next(filter(_is_returned, users), users[0])
        returned = _is_returned(other)
        lever = _without(other, site)
        if returned:
            lever = (
                "do not return the attention scores or weights (output_attentions=False), nor save them in an "
                "autograd.Function"
            )
        sentence = f"{node.name} is {'returned' if returned else f'also used by {other.name}'}, "
        sentence += "and a fused kernel does not make it"
        if sums := next((each for each in (node, other) if kind(each) == "logsumexp"), None):
            sentence = f"the log-sum-exp {sums.name} is {'returned' if returned else 'used'} beside the output, "
            sentence += "and scaled_dot_product_attention does not make it"
            lever = _LOG_SUM_EXP
        ends.append(
            MatchEnded(
                node,
                sentence,
                observed=f"used by {', '.join(user.name for user in node.users)}",
                needed="one user, the next step of the attention",
                lever=lever,
            )
        )
    if ends:
        # Only all changes together help.
        ends[0].lever = "; and ".join(dict.fromkeys(end.lever for end in ends))
        raise ends[0]


def _without(other: Node, site: Site) -> str:
    """What to do about another user of the scores or weights."""
    while kind(other) in _VIEWS and len(other.users) == 1:
        (other,) = other.users
    name = kind(other)
    if name in ("amax", "max") and _leads_to(other, ("sub",), _VIEWS):
        return NO_MAXIMUM
    if name in ("logsumexp", "amax", "max", "log"):
        return _LOG_SUM_EXP
    if any(node not in site.chain for node in _leads_to(other, ("softmax",), (*_ARITHMETIC, *_VIEWS, *_CASTS))):
        return "make the scores of each attention by a product of its own, which its fused kernel does then"
    if name in ("topk", "sort", "kthvalue", "lt", "le", "gt", "ge"):
        return "hide keys by a mask that does not depend on the scores"
    if name in ("matmul", "bmm", "einsum", "mm", "baddbmm"):
        return (
            f"leave out the second product with the weights, {other.name}, such as that of relative positions of "
            "values, or add to the scores instead"
        )
    return f"let {other.name} do without it: a fused kernel makes the output alone"


def _leads_to(start: Node, names: tuple[str, ...], through: tuple[str, ...]) -> list[Node]:
    """The operators of the given names that a node reaches through others, or is."""
    found: list[Node] = []
    queue = [start]
    for node in queue:
        if kind(node) in names:
            found.append(node)
        elif node is start or kind(node) in through:
            queue.extend(user for user in node.users if user not in queue)
    return found


def _is_returned(node: Node) -> bool:
    """Whether a node is the graph's output, or leads to it by views and copies alone."""
    same = kind(node) in (*_VIEWS, "detach", "clone", "to", "float", "getattr")
    return node.op == "output" or (same and any(map(_is_returned, node.users)))


def _is_needed(start: Node, site: Site, unneeded: set[Node]) -> bool:
    """Whether something reads the elements of a node although the site's output is not made from them any more.

    Args:
        start: the node.
        site: the attention.
        unneeded: nodes of which that is known not to be so; extended.
    """
    stack, seen = [start], set[Node]()
    while stack:
        node = stack.pop()
        if node is site.output or node in unneeded or node in seen:
            continue
        seen.add(node)
        if node not in site.chain and not is_pure(node):
            return True
        stack.extend(user for user in node.users if not is_shape_only(user))
    unneeded |= seen
    return False


def with_layout(site: Site, fused: Node, call: Callable[..., Any]) -> Node:
    """Give the new output the strides of the old one, unless no user can see them.

    Raises:
        ValueError: the new output is of another shape or dtype.
    """
    old, new = site.fake(), fake_value(fused)
    if not known_shape(old, new) or old.dtype != new.dtype:
        raise ValueError(f"the fused call returns {list(new.shape)} {new.dtype}, not {list(old.shape)} {old.dtype}")
    if old.requires_grad and _changed_in_place(site.output):
        # The backward of the fused kernel reads its output.
        fused = call(torch.clone, (fused,), {"memory_format": torch.contiguous_format})
        new = fake_value(fused)
    if _same_layout(old, new):
        return fused
    views = _hidden_layout(site.output, new)
    if views is None:
        return _strided_like(old, fused, call)
    for view, value in views.items():
        view.meta["example_value"] = value
    return fused


def _strided_like(old: torch.Tensor, fused: Node, call: Callable[..., Any]) -> Node:
    """A copy with the strides of a dense tensor whose dimensions lie in memory in the order of those of `old`."""
    order = _memory_order(old)
    if order is None or order == list(range(old.dim())):
        return call(torch.Tensor.contiguous, (fused,))
    back = [order.index(dim) for dim in range(old.dim())]
    permuted = call(torch.Tensor.contiguous, (call(torch.permute, (fused, tuple(order))),))
    return call(torch.permute, (permuted, tuple(back)))


def _memory_order(fake: torch.Tensor) -> list[int] | None:
    """The dimensions from the widest stride to the narrowest, or None where symbolic strides do not tell."""
    strides = fake.stride()
    if not any(isinstance(stride, torch.SymInt) for stride in strides):
        return sorted(range(fake.dim()), key=lambda dim: (-strides[dim], dim))
    # Symbols have no order, but in a dense tensor each stride is that of the next dimension times its size.
    order: list[int] = []
    rest = sorted(range(fake.dim()), key=lambda dim: known_equal(fake.shape[dim], 1), reverse=True)
    expected: Any = 1
    while rest:
        found = next((d for d in rest if known_equal(strides[d], expected) or known_equal(fake.shape[d], 1)), None)
        if found is None:
            return None
        rest.remove(found)
        order.insert(0, found)
        expected = expected * fake.shape[found]
    return order


def _hidden_layout(node: Node, value: torch.Tensor) -> dict[Node, torch.Tensor] | None:
    """The new fake values of views of `node`, or None if another memory layout could be seen or break a user."""
    found: dict[Node, torch.Tensor] = {}
    for user in node.users:
        if kind(user) not in (*_TRANSPOSES, *_LAYOUT_ENDS) or user.args[0] is not node or mutates(user):
            return None
        new = _reevaluate(user, value)
        if kind(user) in _TRANSPOSES:
            below = _hidden_layout(user, new)
            if below is None:
                return None
            found |= {user: new, **below}
        elif not _same_layout(fake_value(user), new):
            return None
    return found


def _reevaluate(node: Node, value: torch.Tensor) -> torch.Tensor:
    target: Any = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target))
    return evaluate(target, (value, *node.args[1:]), dict(node.kwargs))


def _changed_in_place(node: Node) -> bool:
    """Whether the memory of `node` is written to later, maybe through a view."""
    return any(mutates(user) or (kind(user) in _VIEWS and _changed_in_place(user)) for user in node.users)


def _same_layout(left: torch.Tensor, right: torch.Tensor) -> bool:
    return all(
        known_equal(a, b) or known_equal(size, 1)
        for a, b, size in zip(left.stride(), right.stride(), left.shape, strict=True)
    )


def _skip_merged_heads(fused: Node, trace: Trace) -> None:
    """Let those who take batch and heads apart again read what they were merged from, without the copy of merging."""
    if kind(fused) != "reshape" or not isinstance(source := fused.args[0], Node) or _changed_in_place(fused):
        return
    for user in list(fused.users):
        if kind(user) not in ("reshape", "view", "unflatten") or not known_shape(fake_value(user), fake_value(source)):
            continue
        views = _hidden_layout(user, fake_value(source))
        if views is None:
            continue
        for view, value in views.items():
            view.meta["example_value"] = value
        user.replace_all_uses_with(source)
        trace.replace(user, source)
        trace.forget(user)
        user.graph.erase_node(user)


def replace(site: Site, fused: Node, trace: Trace) -> None:
    """Let the users of the output read `fused`, and erase what only the old attention needed."""
    site.output.replace_all_uses_with(fused)
    trace.replace(site.output, fused)
    _skip_merged_heads(fused, trace)
    # Changes in place of what is erased go with it, and then whatever they were computed from.
    stack = [site.output, *sorted(site.chain)]
    erased: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in erased or node.users or node.op in ("output", "placeholder"):
            continue
        if node in site.chain or node is site.output or is_pure(node):
            stack.extend(node.all_input_nodes)
            node.graph.erase_node(node)
            trace.forget(node)
            erased.add(node)
