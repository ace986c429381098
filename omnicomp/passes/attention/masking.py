"""The mask of an attention: which steps hide keys, which are a bias, and the proved properties of the former."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Final

import torch

from omnicomp.passes.attention.form import BEYOND_LIFT, SWALLOWS, Form, is_finite, number
from omnicomp.passes.attention.masks import Mask, read_mask, under
from omnicomp.passes.attention.piecewise import additive
from omnicomp.passes.attention.reader import Reader
from omnicomp.passes.attention.site import Add, Fill, Site, Step
from omnicomp.passes.attention.structure import build, term_key
from omnicomp.passes.attention.terms import Apply, Axis, Number, Read, Term, flat
from omnicomp.passes.mask_classes import STILL_SEEN, MaskClass

_ROLES: Final = ("batch", "heads", "query", "key")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masking:
    """What the steps of a mask do."""

    mask: Mask | None = None  # what is known of the keys that every query attends; None if no step hides any
    keep: Term | None = None  # the same as a term over the site's axes; None if no step hides any
    biases: tuple[Step, ...] = ()  # the steps that hide nothing, as far as is known
    # Whether a row with no key left is an average in eager; otherwise it is NaN, or it is not known.
    finite: bool = True
    # The class that what depends on data is assumed to be of, if it says all of it; then that is left out.
    known: MaskClass | None = None
    rows_nonempty: bool = False  # proven: every query sees a key, with all that is added
    nonempty: bool = False  # the same, assumed
    # Whether what each query sees is assumed to be a run of few keys, and all that is added only to hide others.
    runs: bool = False

    @property
    def name(self) -> str:
        """For people: what is hidden, and whether there is a bias."""
        names = [] if self.mask is None or (self.mask.is_full and self.biases) else [self.mask.name]
        return " and ".join([*names, *(["bias"] if self.biases else [])])

    @property
    def is_full(self) -> bool:
        """Proven: every query attends every key."""
        return self.mask is None or self.mask.is_full

    @property
    def is_causal(self) -> bool:
        """Proven: a query attends the keys up to its own index, and there is no bias."""
        return self.mask is not None and self.mask.is_causal and not self.biases


def mask_key(site: Site, form: Form) -> Hashable:
    """Equal for sites whose masks are the same function of batch, head, query and key."""
    named: dict[str, tuple[Axis, ...]] = dict(zip(_ROLES, map(flat, form.groups(site)), strict=True))
    sizes = tuple(tuple(str(axis.size) for axis in axes) for axes in named.values())
    steps = tuple(
        (
            type(step).__name__,
            *(term_key(v, **named) if isinstance(v, Term) else v for v in vars(step).values()),
        )
        for step in form.mask
    )
    return steps, sizes


def read_masking(site: Site, form: Form, reader: Reader) -> Masking:
    """Read the steps of a mask."""
    return read_steps(form.mask, form.groups(site), reader)


def read_steps(steps: Sequence[Step], groups: Sequence[tuple[Axis, ...]], reader: Reader) -> Masking:
    """Read steps over the axes of batch, heads, queries and keys."""
    named: dict[str, tuple[Axis, ...]] = dict(zip(_ROLES, map(flat, groups), strict=True))
    keep: list[Term] = []
    biases: list[Step] = []
    values: list[float] = []
    added = 0
    for step in steps:
        kept, rest = _taken_apart(step, reader, named)
        biases.extend(rest)
        keep.extend(condition for condition, _ in kept)
        values.extend(value for _, value in kept)
        added += len(kept) if isinstance(step, Add) else 0
    sure = all(isinstance(step, Add) and not hides(step, reader) for step in biases)
    if not keep:
        return Masking(biases=tuple(biases), rows_nonempty=sure)
    total = keep[0]
    for other in keep[1:]:
        total = Apply(dtype=torch.bool, op="and", args=(total, other))
    # Two additions of a finite minimum can give -inf; fills do not add up.
    finite = all(value != -float("inf") for value in values) and added <= 1
    mask = read_mask(total, **named)
    return Masking(
        mask=mask, keep=total, biases=tuple(biases), finite=finite, rows_nonempty=sure and mask.rows_nonempty
    )


def own_masking(site: Site, form: Form, shared: Masking, reader: Reader) -> Masking:
    """What is shared by all sites with the same mask, in terms of this site's axes."""
    own = read_masking(site, form, reader)
    if shared.known is None:
        return dataclasses.replace(own, nonempty=shared.nonempty, runs=shared.runs)
    return known_masking(site, form, own, shared.known)


def known_masking(site: Site, form: Form, masking: Masking, known: MaskClass) -> Masking:
    """What is hidden where what depends on data is a mask of a class that says all of it."""
    return with_class(masking, form.groups(site), known)


def with_class(masking: Masking, groups: Sequence[tuple[Axis, ...]], known: MaskClass) -> Masking:
    """The same over the axes of batch, heads, queries and keys."""
    rest = under(masking.mask, known, **dict(zip(_ROLES, map(flat, groups), strict=True)))
    return Masking(mask=rest, keep=rest.term, finite=masking.finite, known=known)


def added_term(step: Add) -> Term:
    """What a step adds to the scores."""
    return Apply(dtype=step.term.dtype, op="neg", args=(step.term,)) if step.negative else step.term


def seen_by_value(masking: Masking) -> Term:
    """Which keys a query sees, where all that is added is known only to hide keys."""
    total = masking.keep
    for step in masking.biases:
        assert isinstance(step, Add)
        term = added_term(step)
        seen = Apply(dtype=torch.bool, op="gt", args=(term, Number(dtype=term.dtype, value=STILL_SEEN)))
        total = seen if total is None else Apply(dtype=torch.bool, op="and", args=(total, seen))
    assert total is not None
    return total


def hides(step: Step, reader: Reader) -> bool:
    """Whether a step may add numbers that swallow scores; trained parameters do not."""
    return isinstance(step, Fill) or (isinstance(step, Add) and _may_hide(step.term, reader))


def _may_hide(term: Term, reader: Reader) -> bool:
    if isinstance(term, Number):
        return not isinstance(term.value, int | float) or abs(term.value) > 1e4
    if isinstance(term, Apply):
        return any(_may_hide(argument, reader) for argument in term.args)
    if isinstance(term, Read):
        inner = reader.define(term)
        return not is_finite(term, reader) if inner is None else _may_hide(inner, reader)
    return False


_Kept = list[tuple[Term, float]]
"""Where scores are left as they are, and what is put elsewhere; all of these hide keys."""


def _taken_apart(step: Step, reader: Reader, named: dict[str, tuple[Axis, ...]]) -> tuple[_Kept, list[Step]]:
    """What a step hides, and what else it does."""
    if isinstance(step, Fill):
        value = number(step.value)
        if value is None:
            return [], [step]
        condition = reader.expand(step.condition)
        return [(build("not", torch.bool, condition), value)], []
    if not isinstance(step, Add) or not step.term.dtype.is_floating_point:
        return [], [step]
    kept, rest = _of_sum(reader.expand(added_term(step)), named)
    if not kept:
        return [], [step]
    return kept, [] if rest is None else [Add(rest)]


def _of_sum(term: Term, named: dict[str, tuple[Axis, ...]]) -> tuple[_Kept, Term | None]:
    """What a term hides that is added to scores, and what else it adds; None for nothing."""
    pieces = additive(term, **named)
    if pieces is not None and all(value == 0 or value <= SWALLOWS for value in pieces.values):
        return [(pieces.keep(), min(pieces.values))], None
    if isinstance(term, Apply) and term.op == "add" and all(arg.dtype.is_floating_point for arg in term.args):
        (one, first), (two, second) = (_of_sum(argument, named) for argument in term.args)
        parts = [part for part in (first, second) if part is not None]
        if all(value == 0 or value <= BEYOND_LIFT for _, value in (*one, *two)):  # what nothing lifts that is added
            return [*one, *two], build("add", term.dtype, *parts) if len(parts) == 2 else next(iter(parts), None)
    if isinstance(term, Apply) and term.op == "where":
        condition, then, otherwise = term.args
        for seen, bias, hidden in (
            (condition, then, otherwise),
            (build("not", torch.bool, condition), otherwise, then),
        ):
            lowest = additive(hidden, **named)
            if lowest is not None and all(value <= SWALLOWS for value in lowest.values):
                kept, rest = _of_sum(bias, named)
                return [(seen, min(lowest.values)), *kept], rest
    return [], term
