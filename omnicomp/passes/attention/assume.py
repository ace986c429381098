"""Padding masks that are inputs: assumed to be full where that makes the attention faster, and checked at each call."""

from typing import Any

from torch.fx import Node

from omnicomp._torch.autograd.attention import hint_of
from omnicomp.passes.assumptions import Assumption, assumption, worth
from omnicomp.passes.attention.build import Builder
from omnicomp.passes.attention.form import Form
from omnicomp.passes.attention.masking import Masking
from omnicomp.passes.attention.masks import Mask, padding_reads, without_padding
from omnicomp.passes.attention.site import Site
from omnicomp.passes.attention.terms import flat
from omnicomp.passes.base import PassContext
from omnicomp.timeline import Reason

__all__ = ["assume_full"]


def assume_full(
    site: Site, form: Form, masking: Masking, builder: Builder, context: PassContext, sites: int = 1
) -> Masking | Reason:
    """What the mask is if nothing is padded, once that is assumed.

    Args:
        site: the attention.
        form: its form.
        masking: what its mask hides.
        builder: inserts the condition that is to be checked; the caller takes the nodes back.
        context: where the assumption is recorded; it must allow to speculate.
        sites: how many attentions of the graph may share the mask.

    Returns:
        What is then hidden, or why nothing was assumed.
    """
    mask = masking.mask
    if mask is None or context.root is None:
        return _reason("there is no mask", "a padding mask")
    groups = form.groups(site)
    named: dict[str, Any] = dict(zip(("batch", "heads", "query", "key"), map(flat, groups), strict=True))
    conditions = padding_reads(mask)
    if not conditions:
        return _reason("no part of the mask depends on batch and key alone", "a padding mask", mask)
    rest = without_padding(mask, **named)
    if masking.biases or not (rest.is_full or rest.is_causal):
        return _reason("without padding the mask would still have to be made", "full, or causal", mask)
    assumed: list[Assumption] = []
    for condition in conditions:
        try:
            made = builder.term(condition.term, (groups[0], (), (), groups[3]), site.fake().device)
        except (RuntimeError, ValueError, TypeError) as error:
            return _reason(f"the condition can't be made: {str(error).splitlines()[0]}", "cheap operators", mask)
        assert isinstance(made, Node)
        found = assumption(context.root, made, sentence="nothing is padded", saves=f"attention mask ({mask.name})")
        if isinstance(found, Reason):
            return found
        assumed.append(found)
    refused = worth(
        site.fake().device.type,
        flops=_flops(site, groups) * sites,
        sites=sites,
        causal=rest.is_causal and not rest.is_full,
        checked_bytes=sum(a.bytes for a in assumed),
    )
    if refused is not None:
        return refused
    for found in assumed:
        context.assume(found)
    return Masking(mask=rest, keep=rest.term, biases=(), finite=masking.finite, assumed=True)


def _flops(site: Site, groups: Any) -> int:
    """4 * batch * heads * queries * keys * features, for the sizes seen at compile time."""
    total = 4
    for axis in flat((*(a for group in groups for a in group), *site.features)):
        total *= hint_of(axis.size)
    return total


def _reason(sentence: str, needed: str, mask: Mask | None = None) -> Reason:
    return Reason(
        code="not_checkable",
        sentence=sentence,
        by="attention_fusion",
        observed=mask.name if mask is not None else "",
        needed=needed,
        lever="pass no mask where nothing is padded",
    )
