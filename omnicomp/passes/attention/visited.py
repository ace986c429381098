"""Calls of FlexAttention whose blocks come from outside of the graph: what they visit, looked at when they are called.

A block mask that is an input says nothing of the function that it was made from. The check makes both as one dense
mask, which is of a class only if every key that the function shows is visited, once, and no full block hides one.
"""

import operator
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp._torch.autograd.attention import hint_of
from omnicomp.analysis.nodes import fake_value
from omnicomp.passes.assumptions import mask_assumption, worth
from omnicomp.passes.attention.build import Builder
from omnicomp.passes.attention.form import Form
from omnicomp.passes.attention.masking import Masking, mask_key
from omnicomp.passes.attention.masks import under
from omnicomp.passes.attention.session import Session
from omnicomp.passes.attention.site import MatchEnded, Site, Visited
from omnicomp.passes.attention.terms import flat
from omnicomp.passes.mask_classes import GENERAL, MaskClass
from omnicomp.timeline import Reason

_ACCEPTED: Final = frozenset(("full", "causal"))
# On an H200, eight layers that became causal saved a quarter of what a dense mask would cost.
_SAVED: Final = 4


def settle_visited(site: Site, form: Form, masking: Masking, visited: Visited, session: Session) -> Masking:
    """What is known of the mask of a call, once the class of what it visits is assumed.

    Args:
        site: the call.
        form: its form.
        masking: what is proved of its function of indices.
        visited: the blocks.
        session: whose context may allow to speculate.

    Raises:
        MatchEnded: the mask is not known to be of a class; the call stays what it is.
    """
    key = (mask_key(site, form), visited)
    session.read_last = key
    if key not in session.maskings:
        session.maskings[key] = _settled(site, form, masking, visited, session, key) or masking
    if (found := session.maskings[key]).known is None:
        raise _ended(site, f"the blocks that it visits are not known to be those of its mask ({masking.name})")
    return found


def _settled(site: Site, form: Form, masking: Masking, visited: Visited, session: Session, key: Any) -> Masking | None:
    context = session.context
    if not context.speculate or context.root is None or masking.biases:
        return None
    groups = form.groups(site)
    with session.attempt(site) as attempt:  # whatever is inserted is taken back
        try:
            seen = _seen(attempt.builder, groups, masking, visited, site.fake().device)
        except (RuntimeError, ValueError, TypeError):
            return None
        question = mask_assumption(
            context.root, seen, (), accepts=_ACCEPTED, saves=f"FlexAttention's blocks ({masking.name})"
        )
    if isinstance(question, Reason):
        return None
    sites, pairs = session.flex_calls, 1
    for axis in flat((*(axis for group in groups for axis in group), *site.features)):
        pairs *= hint_of(axis.size)
    flops = 4 * pairs * sites // _SAVED
    device = site.fake().device.type
    if worth(device, flops=flops, causal=True, checked_bytes=question.bytes, sites=sites) is not None:
        return None
    is_new = all(item.key != question.key for item in context.assumptions)
    guess = MaskClass(kind="full" if masking.is_full else "causal") if masking.is_full or masking.is_causal else GENERAL
    found = context.settle(question, guess)
    if not found.is_known:
        return None
    if is_new:
        session.asked[key] = question
    named = zip(("batch", "heads", "query", "key"), map(flat, groups), strict=True)
    rest = under(None, found, **dict(named))
    return Masking(mask=rest, keep=rest.term, known=found)


def _seen(builder: Builder, groups: Any, masking: Masking, visited: Visited, device: torch.device) -> Node:
    """The mask as (batch, heads, queries, keys), all false where a call does more or less than its function says."""
    call = builder.call
    queries, keys = builder.size(groups[2]), builder.size(groups[3])
    mask = call(torch.ones, (1, 1, queries, keys), {"dtype": torch.bool, "device": device})
    if masking.keep is not None:
        mask = call(torch.logical_and, (mask, builder.term(masking.keep, groups, device)))
    rows, columns = visited.sizes
    last = _ceil_div(builder, keys, columns)
    places = [
        call(operator.floordiv, (call(torch.arange, (size,), {"device": device}), block))
        for size, block in ((queries, rows), (keys, columns))
    ]

    def of_elements(blocks: Any) -> Any:
        for dim, place in zip((2, 3), places, strict=True):
            blocks = call(torch.index_select, (blocks, dim, place))
        return blocks

    count = _listed(builder, visited.partial, last, device)
    wrong = None
    if visited.full is not None:
        full = _listed(builder, visited.full, last, device)
        count = call(operator.add, (count, full))
        shown = of_elements(call(operator.gt, (full, 0)))
        wrong = call(torch.any, (call(operator.gt, (shown, mask)),))
    missed = call(torch.any, (call(operator.gt, (mask, of_elements(call(operator.gt, (count, 0))))),))
    twice = call(torch.any, (call(operator.gt, (count, 1)),))
    for other in (missed, twice):
        wrong = other if wrong is None else call(torch.logical_or, (wrong, other))
    return call(operator.gt, (mask, wrong))


def _listed(builder: Builder, blocks: tuple[Node, Node], last: Any, device: torch.device) -> Any:
    """How many times each block is in the list of its row: (batch, heads, rows, columns)."""
    call, (numbers, indices) = builder.call, blocks
    width = fake_value(indices).shape[-1]
    if not isinstance(width, int):
        width = call(torch.Tensor.size, (indices, 3))
    place = call(torch.arange, (width,), {"device": device})
    valid = call(operator.lt, (place, call(torch.unsqueeze, (numbers, -1))))
    column = call(torch.arange, (last,), {"device": device})
    equal = call(torch.eq, (call(torch.unsqueeze, (indices, -1)), column))
    found = call(torch.logical_and, (equal, call(torch.unsqueeze, (valid, -1))))
    return call(torch.sum, (found, 3))


def _ceil_div(builder: Builder, size: Any, by: int) -> Any:
    if isinstance(size, int):
        return -(-size // by)
    return builder.call(operator.floordiv, (builder.call(operator.add, (size, by - 1)), by))


def _ended(site: Site, sentence: str) -> MatchEnded:
    return MatchEnded(site.output, sentence, needed="blocks that are made in the graph, or found to be the mask's")
