"""Hand-written attention becomes `scaled_dot_product_attention`, where that really runs a fused kernel.

The plain forms are read: queries times keys, scaled, masked, softmax over keys, inactive (or fusable) dropout, times
values, with heads repeated or broadcast. Everything else that looks like attention is left alone and reported.

Rows of an added float mask in which no key is left may differ, where eager's result has no meaning: if the whole row
is -inf, it is NaN in eager and may be zero afterwards; if it is the most negative number, the row is the
same average over all keys, but in training its gradient stays out of queries and keys.
"""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from omnicomp._torch.attention import concrete, fused_kernel, is_static, known_equal, known_shape, without_guards
from omnicomp._torch.inductor import fallback_random
from omnicomp.graphs import evaluate, fake_value, insert_call, op_name, source_line
from omnicomp.passes._attention_match import is_candidate, match
from omnicomp.passes._attention_nodes import PURE, kind, mutates, tensor
from omnicomp.passes._attention_site import MatchEnded, Site
from omnicomp.passes.base import PassContext, PassResult
from omnicomp.timeline import Reason

__all__ = ["AttentionFusion"]

_Call = Callable[..., Any]
# A mask below this swallows, when it is added, scores of any usual size; in float16 only its most negative number does.
_SWALLOWS: Final = -1e8
_DERIVATIVES: Final = frozenset(("_grad_increment_nesting", "_jvp_increment_nesting"))
_TRANSPOSES: Final = ("transpose", "permute", "swapaxes")
_LAYOUT_ENDS: Final = ("reshape", "flatten", "contiguous")
_VIEWS: Final = (*_TRANSPOSES, *_LAYOUT_ENDS, "view", "getitem", "unsqueeze", "squeeze", "unflatten", "expand")


class AttentionFusion:
    """Fuses the plain forms of hand-written attention to `scaled_dot_product_attention`."""

    name = "attention_fusion"

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph has a softmax."""
        return any(kind(node) == "softmax" for node in module.graph.nodes)

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Rewrite every site that is understood and profitable; report the others."""
        modified = False
        differentiated = _differentiated(module)
        for node in [n for n in module.graph.nodes if is_candidate(n)]:
            try:
                if node in differentiated:
                    raise _inside_derivative(node)
                self._fuse(node, context)
                modified = True
            except MatchEnded as end:
                context.near_miss(self.name, "attention", node, self._reason(end))
        return PassResult(module, modified)

    def _fuse(self, softmax: Node, context: PassContext) -> None:
        site = match(softmax)
        _check_nothing_changes_between(site)
        with _as_at(site):
            grouped, kernel = _choose(site, context)
            fused = _insert(site, grouped)
        _replace(site, fused)
        context.rewrite(
            self.name,
            "attention",
            fused,
            target="scaled_dot_product_attention",
            detail=_describe(site, kernel, grouped=grouped),
        )

    def _reason(self, end: MatchEnded) -> Reason:
        return Reason(
            code=end.code,
            sentence=str(end),
            by=self.name,
            observed=end.observed,
            needed=end.needed,
            node=f"{end.node.name} ({op_name(end.node)})",
            source=source_line(end.node),
            lever=end.lever,
        )


def _differentiated(module: GraphModule) -> set[Node]:
    """The nodes within the transforms of torch.func that take derivatives: their gradients are part of the graph."""
    entered: list[str] = []
    found: set[Node] = set()
    for node in module.graph.nodes:
        name = op_name(node).rpartition(".")[2] if node.op == "call_function" else ""
        if name.endswith("_increment_nesting"):
            entered.append(name)
        elif entered and name.endswith("_decrement_nesting"):
            entered.pop()
        if not _DERIVATIVES.isdisjoint(entered):
            found.add(node)
    return found


def _inside_derivative(softmax: Node) -> MatchEnded:
    return MatchEnded(
        softmax,
        "the graph takes a derivative of the attention, and a fused kernel has no second one, none in forward mode, "
        "and gradients of another layout",
        observed="inside torch.func.grad, vjp, jvp or another transform made of them",
        needed="outside of them",
        lever="call backward on the compiled function's result instead",
        code="not_equal",
    )


def _check_nothing_changes_between(site: Site) -> None:
    """The fused call reads everything at the place of the last product: nothing may be changed in between."""
    chain = set(site.chain)
    repeats = [node for repeat in (site.key_repeat, site.value_repeat) if repeat for node in repeat.read]
    node = min(*site.chain, *site.read, *repeats)
    while node is not site.output:
        if node not in chain and mutates(node):
            raise MatchEnded(
                node,
                "an operation in place, or a change of autocast or grad mode, lies within the attention",
                observed=op_name(node),
                needed="no side effect between the queries' product and the values' product",
                lever="move it before or after the attention",
            )
        node = node.next


@contextlib.contextmanager
def _as_at(site: Site) -> Generator[None]:
    """The modes of the site: its grad mode, and no autocast, because every dtype is made explicit."""
    fake = _fake(site.output)
    # Where grad mode is off nothing requires grad; where nothing requires grad the mode does not matter.
    with torch.set_grad_enabled(fake.requires_grad), torch.autocast(fake.device.type, enabled=False):
        with without_guards(fake):
            yield


def _choose(site: Site, context: PassContext) -> tuple[bool, str]:
    """Try the forms of the fused call, best first, on stand-ins.

    Returns:
        Whether heads stay grouped, and the kernel that torch took.

    Raises:
        MatchEnded: no form takes a fused kernel.
    """
    if site.dropout and fallback_random(context.policy.inductor):
        raise MatchEnded(
            site.output,
            "a fused kernel draws other random numbers than eager, and fallback_random asks for eager's",
            observed=f"dropout={site.dropout:g}",
            needed="no active dropout",
            lever="set the attention's dropout to 0, or fallback_random to False",
            code="not_equal",
        )
    _check_masks(site)
    errors: list[str] = []
    for grouped in (True, False) if _is_grouped(site) else (False,):
        try:
            if kernel := fused_kernel(
                functools.partial(_build, site, grouped, lambda n: concrete(fake_value(n)), _call)
            ):
                return grouped, kernel
        except (RuntimeError, ValueError, TypeError) as error:
            errors.append(str(error).splitlines()[0])
    raise _not_profitable(site, context, errors)


def _not_profitable(site: Site, context: PassContext, errors: list[str]) -> MatchEnded:
    query, value = _fake(site.query), _fake(site.value)
    observed, lever = f"{site.dtype}, shapes {list(query.shape)} and {list(value.shape)}", "use a dtype or head size"
    lever += " that torch's fused attention takes on this device"
    masked = next((s.node for s in site.masks if _fake(s.node).requires_grad), None)
    if masked is not None:
        observed, lever = f"the mask {masked.name} requires grad", "make the added mask a constant, or run without grad"
    elif site.dropout:
        observed, lever = f"dropout={site.dropout:g}", "set the attention's dropout to 0"
    elif not known_equal(query.shape[-1], value.shape[-1]):
        observed, lever = f"head sizes {query.shape[-1]} and {value.shape[-1]}", "give queries and values one head size"
    elif errors:
        observed = errors[0]
    kernels = ", ".join(context.device.capabilities().attention_kernels) or "none"
    return MatchEnded(
        site.output,
        "torch would take its unfused path for this attention, which is not faster than the code as written",
        observed=observed,
        needed=f"a fused kernel of the device ({kernels})",
        lever=lever,
        code="not_profitable",
    )


def _call(target: _Call, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    return target(*args, **(kwargs or {}))


def _build(site: Site, grouped: bool, get: Callable[[Node], Any], call: _Call) -> Any:
    """The fused call: on stand-ins to see which kernel it takes, or as nodes of the graph."""
    repeats = (site.key_repeat, site.value_repeat)
    key, value = (get(r.heads if r and grouped else n) for n, r in zip((site.key, site.value), repeats, strict=True))
    if site.key_is_transposed:
        key = call(torch.transpose, (key, -2, -1))
    query = _fit(site, get(site.query), get, call, factors=True)
    key, value = _fit(site, key, get, call, heads=not grouped), _fit(site, value, get, call, heads=not grouped)
    mask = _build_mask(site, get, call)
    old = _fake(site.output)
    # In inference the CPU's kernel averages such rows as eager does; those of other devices give other values for them.
    averages = old.device.type == "cpu" and not old.requires_grad and site.dtype != torch.float16
    safe = mask is not None and not averages
    kwargs: dict[str, Any] = {"scale": site.scale}
    top = None
    if safe:
        # The kernels' backward divides by exp(max + log(sum)), where a huge negative max swallows the sum: with every
        # key of a row masked, gradients would be too large by the number of keys. A softmax does not see the shift.
        top = call(torch.amax, (call(torch.Tensor.detach, (mask,)),), {"dim": -1, "keepdim": True})
        mask = call(torch.sub, (mask, top))
    if mask is not None:
        kwargs["attn_mask"] = mask
    if site.dropout:
        kwargs["dropout_p"] = site.dropout
    if grouped:
        kwargs["enable_gqa"] = True
    fused = call(F.scaled_dot_product_attention, (query, key, value), kwargs)
    if safe:
        fused = _average_masked_rows(site, fused, value, mask, top, grouped, call)
    return call(torch.squeeze, (fused, 0)) if old.dim() == 3 else fused


def _average_masked_rows(site: Site, fused: Any, value: Any, mask: Any, top: Any, grouped: bool, call: _Call) -> Any:
    """Rows masked as a whole are an average over all keys, as in eager, where the mask swallows their scores."""
    same = call(torch.eq, (call(torch.amin, (mask,), {"dim": -1, "keepdim": True}), 0))
    masked = call(torch.logical_and, (call(torch.le, (top, max(_SWALLOWS, torch.finfo(site.dtype).min))), same))
    mean = call(torch.mean, (value,), {"dim": -2, "keepdim": True})
    if grouped and site.value_repeat:
        mean = call(torch.repeat_interleave, (mean, site.value_repeat.copies), {"dim": 1})
    return call(torch.where, (masked, mean, fused))


def _fit(
    site: Site, operand: Any, get: Callable[[Node], Any], call: _Call, *, factors: bool = False, heads: bool = False
) -> Any:
    """Give an operand the dtype, factors, layout, rank and heads with which the fused kernels take it."""
    if _value(operand).dtype != site.dtype:
        operand = call(torch.Tensor.to, (operand, site.dtype))
    for factor in site.factors if factors else ():
        operand = call(torch.div if factor.divide else torch.mul, (operand, get(factor.node)))
    if not known_equal(_value(operand).stride(-1), 1):
        operand = call(torch.Tensor.contiguous, (operand,))
    if _value(operand).dim() == 3:
        # As one batch of many heads: a mask of fewer dimensions broadcasts to that as it does to the scores.
        return call(torch.unsqueeze, (operand, 0))
    count = _fake(site.query).shape[1]
    if heads and is_static(count) and not known_equal(_value(operand).shape[1], count):
        operand = call(torch.Tensor.expand, (operand, -1, count, -1, -1))
    return operand


def _build_mask(site: Site, get: Callable[[Node], Any], call: _Call) -> Any:
    """One float mask: the steps that masked the scores, applied in their order to zero."""
    mask: Any = None
    for step in site.masks:
        made = get(step.node)
        if step.fill is not None:
            made = call(torch.logical_not, (made,)) if step.negative else made
            if mask is None:
                mask = call(torch.zeros_like, (made,), {"dtype": site.dtype})
            mask = call(torch.masked_fill, (mask, made, max(step.fill, torch.finfo(_value(mask).dtype).min)))
            continue
        if torch.promote_types(_value(made).dtype, site.dtype) == site.dtype != _value(made).dtype:
            made = call(torch.Tensor.to, (made, site.dtype))
        made = call(torch.neg, (made,)) if step.negative else made
        mask = made if mask is None else call(torch.add, (mask, made))
    if mask is None:
        return None
    if _value(mask).dtype != site.dtype:
        mask = _narrow(site, mask, call)
    while _value(mask).dim() != 2 and _value(mask).dim() < 4:
        mask = call(torch.unsqueeze, (mask, 0))
    return mask


def _narrow(site: Site, mask: Any, call: _Call) -> Any:
    """Keep the most negative float32 finite in bfloat16: autocast, or this pass, rounds the mask to that."""
    clamped = call(torch.clamp, (mask,), {"min": torch.finfo(site.dtype).min})
    # What was -inf stays -inf: together with finite minima it still says which keys to take.
    mask = call(torch.where, (call(torch.isneginf, (mask,)), mask, clamped))
    # Kernels of other devices than the CPU take only masks in their own dtype: cuDNN reads another one as garbage.
    return mask if _fake(site.output).device.type == "cpu" else call(torch.Tensor.to, (mask, site.dtype))


def _check_masks(site: Site) -> None:
    """A mask that is wider than the attention must fit its kernel without changing what is masked.

    Raises:
        MatchEnded: it does not.
    """
    for step in site.masks:
        dtype = _fake(step.node).dtype
        if step.fill is not None or torch.promote_types(dtype, site.dtype) == site.dtype:
            continue
        kept = _fake(site.output).device.type == "cpu" or _from_numbers(step.node)
        if (dtype, site.dtype) != (torch.float32, torch.bfloat16) or not kept:
            raise MatchEnded(
                step.node,
                "the mask holds numbers that the attention's dtype can't",
                observed=f"a mask of {dtype}",
                needed=f"a mask of {site.dtype}",
                lever="make the mask in the dtype of the queries",
                code="not_equal",
            )


def _from_numbers(node: Any) -> bool:
    """Whether a mask is made from numbers by `where`, so that another dtype holds it as well."""
    while kind(node) in (*_VIEWS, "to"):
        node = node.args[0]
    numbers = node.args[1:] if kind(node) == "where" else ()
    return bool(numbers) and all(
        isinstance(n, int | float) or (tensor(n) is not None and not _fake(n).dim()) for n in numbers
    )


def _is_grouped(site: Site) -> bool:
    key, value = site.key_repeat, site.value_repeat
    return key is not None and value is not None and key.copies == value.copies


def _insert(site: Site, grouped: bool) -> Node:
    """Insert the fused call before the product with the values, with a layout that nobody can tell from eager's."""
    before, old = site.output.prev, _fake(site.output)
    call = functools.partial(insert_call, site.output)
    try:
        fused = _build(site, grouped, lambda n: n, call)
        new = _fake(fused)
        if not known_shape(old, new) or old.dtype != new.dtype:
            raise ValueError(f"the fused call returns {list(new.shape)} {new.dtype}")
        if old.requires_grad and _changed_in_place(site.output):
            # The backward of the fused kernel reads its output.
            fused = call(torch.clone, (fused,), {"memory_format": torch.contiguous_format})
        elif not _same_layout(old, new):
            views = _hidden_layout(site.output, new)
            if views is None:
                fused = call(torch.Tensor.contiguous, (fused,))
            for view, value in (views or {}).items():
                view.meta["example_value"] = value
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        while site.output.prev is not before:
            site.output.graph.erase_node(site.output.prev)
        raise MatchEnded(
            site.output,
            "the fused call can't be evaluated on the fake values of the graph",
            observed=str(error).splitlines()[0],
            needed=f"{list(old.shape)} {old.dtype}",
            lever="report it with the graph",
        ) from error
    return fused


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
        elif not _same_layout(_fake(user), new):
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


def _replace(site: Site, fused: Node) -> None:
    """Let the users of the last product read the fused call, and erase what only they needed."""
    graph = site.output.graph
    repeats = [node for repeat in (site.key_repeat, site.value_repeat) if repeat for node in repeat.read]
    site.output.replace_all_uses_with(fused)
    stack = sorted({*site.chain, *site.read, *repeats})
    chain = set(site.chain)
    while stack:
        node = stack.pop()
        if node.users or node._erased or not (node in chain or (kind(node) in PURE and not mutates(node))):
            continue
        inputs = node.all_input_nodes
        graph.erase_node(node)
        stack.extend(n for n in inputs if n not in stack)


def _describe(site: Site, kernel: str, *, grouped: bool) -> str:
    query, key = _fake(site.query), site.key_repeat.heads if grouped and site.key_repeat else site.key
    mask = " + ".join(step.node.name for step in site.masks) or "none"
    heads = f"{query.shape[1]}/{_fake(key).shape[1]}" if query.dim() == 4 else f"{query.shape[0]}"
    dropout = f", dropout={site.dropout:g}" if site.dropout else ""
    scale = " * ".join([f"{site.scale:g}", *(f"{'1/' * f.divide}{f.node.name}" for f in site.factors)])
    return f"scale={scale}, mask={mask}, heads {heads}{dropout}, kernel={kernel}"


def _value(item: Any) -> torch.Tensor:
    """The fake tensor of a node, or a stand-in as it is."""
    return fake_value(item)


def _fake(node: Node) -> torch.Tensor:
    fake = tensor(node)
    assert fake is not None, f"{node.name} was read without a fake tensor"
    return fake
