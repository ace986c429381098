"""Masks that are inputs: what they are by their values, which is checked at each call, where that makes it faster."""

import dataclasses
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value
from omnicomp.passes.assumptions import Added, Assumption, mask_assumption, worth
from omnicomp.passes.attention.build import Builder, value_of
from omnicomp.passes.attention.flexible import SPARSE_PAIRS, count, skips_blocks
from omnicomp.passes.attention.form import LEAST_IN_HALF, SWALLOWS, Form
from omnicomp.passes.attention.masking import Masking, added_term, hides, known_masking, mask_key, with_class
from omnicomp.passes.attention.masks import Mask, sees_first_key, under
from omnicomp.passes.attention.sdpa import axes_of_step
from omnicomp.passes.attention.session import Session
from omnicomp.passes.attention.site import Add, Fill, Floor, Site, axes_in
from omnicomp.passes.attention.terms import Apply, Axis, Term, flat
from omnicomp.passes.mask_classes import GENERAL, MaskClass
from omnicomp.timeline import Reason

_FULL: Final = MaskClass(kind="full")
_Groups = tuple[tuple[Axis, ...], ...]


def settle_mask(site: Site, form: Form, masking: Masking, session: Session) -> Masking:
    """What is known of a mask once the class of what depends on data is assumed.

    Args:
        site: the attention.
        form: its form.
        masking: what is proved of its mask.
        session: whose context allows to speculate.
    """
    context = session.context
    wish = _Wish.of(site, form, masking, session)
    if wish is None or context.root is None:
        return masking
    with session.attempt(site) as attempt:  # whatever is inserted is taken back
        question = wish.question(attempt.builder, context.root)
    if isinstance(question, Reason) or wish.refused(question, session.softmaxes) is not None:
        return masking
    is_new = all(item.key != question.key for item in context.assumptions)
    found = context.settle(question, wish.guess)
    if is_new and found.kind != "general":
        session.asked[mask_key(site, form)] = question
    if found.is_known:
        return known_masking(site, form, masking, found)
    return dataclasses.replace(masking, nonempty=found.kind != "general", runs=found.kind == "runs")


def settle_plain(
    masking: Masking, groups: _Groups, node: Node, session: Session, *, flops: int, causal: bool
) -> Masking:
    """The same for a mask that is given to a function of torch's, which does without it or takes `is_causal` instead.

    Args:
        masking: what is proved of the mask.
        groups: the axes of batch, heads, queries and keys that it was read with; queries may be none.
        node: the call of the function.
        session: whose context allows to speculate.
        flops: operations of the attention.
        causal: whether it may take `is_causal` in the end.
    """
    context = session.context
    biases = [step for step in masking.biases if isinstance(step, Add) and hides(step, session.reader)]
    rest = under(masking.mask, _FULL, **_named(groups))
    if len(biases) != len(masking.biases) or not (rest.is_full or rest.is_causal) or context.root is None:
        return masking
    conditions = [conjunct.term for conjunct in masking.mask.conjuncts if conjunct.data] if masking.mask else []
    if not (conditions or biases):
        return masking
    wish = _Wish(
        device=fake_value(node)[0].device,
        guarded=0,
        groups=groups,
        keep=_all_of(conditions),
        added=[added_term(step) for step in biases],
        accepts=frozenset(("full", "causal") if groups[2] else ("full",)),
        is_causal=causal,
        name=masking.name,
        flops=flops,
    )
    with session.trial(node) as builder:
        question = wish.question(builder, context.root)
    if isinstance(question, Reason) or wish.refused(question, session.softmaxes) is not None:
        return masking
    found = context.settle(question, _FULL if not groups[2] else GENERAL)
    return with_class(masking, groups, found) if found.is_known else masking


@dataclasses.dataclass(kw_only=True)
class _Wish:
    """What would help a site to be known of its mask."""

    device: torch.device  # that the attention runs on
    groups: _Groups  # the axes of batch, heads, queries and keys
    keep: Term | None  # the conditions on data, all of which a key has to meet; None for none
    added: list[Term]  # what is added to the scores and may hide keys
    accepts: frozenset[str]  # kinds of classes that something is done about
    is_causal: bool  # whether the best of them leaves a causal mask, rather than none
    guarded: int  # elements of the mask that has to be looked through for rows without a key
    name: str  # of the mask as it is
    flops: int  # operations of the attention

    @classmethod
    def of(cls, site: Site, form: Form, masking: Masking, session: Session) -> "_Wish | None":
        """The wish for a site, or None if its mask depends on no data, or nothing could be done about it."""
        if any(not isinstance(step, Fill | Add | Floor) for step in form.mask):
            return None
        # No score that is seen reaches such a bound, and what is hidden stays so.
        floors = sum(isinstance(step, Floor) for step in form.mask)
        mask, reader, device = masking.mask, session.reader, site.fake().device.type
        biases = [step for step in masking.biases if isinstance(step, Add) and hides(step, reader)]
        added = [added_term(step) for step in biases]
        conditions = [conjunct for conjunct in mask.conjuncts if conjunct.data] if mask is not None else []
        if not (conditions or added) or any(not term.dtype.is_floating_point for term in added):
            return None
        groups = form.groups(site)
        axes = {axis for term in (*(c.term for c in conditions), *added) for axis in axes_in(term)}
        queries, keys = set(flat(site.queries)), set(flat(site.keys))
        rest = under(mask, _FULL, **_named(groups))
        # Blocks of documents are skipped as they are.
        left = device == "cuda" and any(conjunct.kind == "document" for conjunct in conditions)
        strong = set[str]()
        if (rest.is_full or rest.is_causal) and len(biases) + floors == len(masking.biases) and not left:
            strong.add("full")
            if axes & queries and axes & keys:
                strong.add("causal")
                sparse = skips_blocks(site) and rest.is_full and not site.dropout and not floors
                if sparse and count(queries | keys) >= SPARSE_PAIRS:
                    strong |= {"band", "prefix", "runs"}
        weak = set[str]()
        guarded = 0
        # A kernel that is called by the program is called as it is.
        free = site.sinks or site.call is not None or floors
        if not free and not masking.rows_nonempty:
            weak = _weak(rest, groups)
            if site.dtype is torch.float16 and len(biases) != len(masking.biases):
                weak = set()  # several biases may together be as low as what swallows scores
            shown = {axis for step in form.mask for axis in axes_of_step(step)}
            guarded = count(shown) if weak and shown & keys else 0
        if not (strong or weak):
            return None
        return cls(
            device=site.fake().device,
            groups=groups,
            keep=_all_of([conjunct.term for conjunct in conditions]),
            added=added,
            accepts=frozenset(strong | weak),
            is_causal="causal" in strong or ("full" in strong and rest.is_causal and not rest.is_full),
            guarded=guarded,
            name=masking.name,
            flops=4 * count(flat((*(axis for group in groups for axis in group), *site.features))),
        )

    @property
    def guess(self) -> MaskClass:
        """The class where there are no values to look at yet: padding mostly is full."""
        return _FULL if "full" in self.accepts and "causal" not in self.accepts else GENERAL

    def question(self, builder: Builder, root: Any) -> Assumption | Reason:
        """The assumption, of no class yet, or why it can't be checked."""
        try:
            keep = None if self.keep is None else self._made(self.keep, builder)
            added = [Added(node=self._made(term, builder), hides=_hides_at(term)) for term in self.added]
        except (RuntimeError, ValueError, TypeError) as error:
            return _reason(f"the mask can't be made: {str(error).splitlines()[0]}", self.name)
        if any(fake_value(item.node).requires_grad for item in added):
            return _reason("gradients flow to the mask", self.name)
        saves = f"attention mask ({self.name})"
        return mask_assumption(root, keep, added, accepts=self.accepts, saves=saves)

    def _made(self, term: Term, builder: Builder) -> Node:
        made = builder.term(term, self.groups, self.device)
        if value_of(made).dim() == 0:
            made = builder.call(torch.Tensor.reshape, (made, (1, 1, 1, 1)))
        assert isinstance(made, Node)
        return made

    def refused(self, question: Assumption, sites: int) -> Reason | None:
        """Why a check does not pay; None if it does."""
        strong = not self.accepts.isdisjoint(("full", "causal"))
        return worth(
            self.device.type,
            flops=self.flops * sites if strong else 0,
            sites=sites,
            causal=self.is_causal,
            checked_bytes=question.bytes,
            input_bytes=question.input_bytes,
            guarded=self.guarded,
        )


def _all_of(conditions: list[Term]) -> Term | None:
    keep: Term | None = None
    for term in conditions:
        keep = term if keep is None else Apply(dtype=torch.bool, op="and", args=(keep, term))
    return keep


def _weak(rest: Mask, groups: _Groups) -> set[str]:
    """Which classes of the data leave no row empty, beside the conditions on indices."""
    if rest.is_full:
        return {"rows"}
    return {"first"} if sees_first_key(rest, **_named(groups)) else set()


def _named(groups: _Groups) -> dict[str, tuple[Axis, ...]]:
    return dict(zip(("batch", "heads", "query", "key"), map(flat, groups), strict=True))


def _hides_at(term: Term) -> float:
    return LEAST_IN_HALF if term.dtype is torch.float16 else SWALLOWS


def _reason(sentence: str, name: str) -> Reason:
    return Reason(
        code="not_checkable",
        sentence=sentence,
        by="attention_fusion",
        observed=name,
        needed="cheap operators on the model's inputs",
        lever="pass no mask where nothing is hidden",
    )
