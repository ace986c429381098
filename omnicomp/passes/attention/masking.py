"""The mask of an attention: which steps hide keys, which are a bias, and the proved properties of the former."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Final

import torch

from omnicomp import records
from omnicomp.passes.attention.form import SWALLOWS, Form, number
from omnicomp.passes.attention.masks import Mask, read_mask, under
from omnicomp.passes.attention.piecewise import additive
from omnicomp.passes.attention.reader import Reader
from omnicomp.passes.attention.site import Add, Fill, Site, Step
from omnicomp.passes.attention.structure import term_key
from omnicomp.passes.attention.terms import Apply, Axis, Number, Term, flat
from omnicomp.passes.mask_classes import STILL_SEEN, MaskClass

_ROLES: Final = ("batch", "heads", "query", "key")


@records.dataclass(frozen=True, kw_only=True)
class Masking:
    """What the steps of a mask do."""

    mask: Mask | None = None  # what is known of the keys that every query attends; None if no step hides any
    keep: Term | None = None  # the same as a term over the site's axes; None if no step hides any
    biases: tuple[Step, ...] = ()  # the steps that hide nothing, as far as is known
    # Whether a row with no key left is an average in eager; otherwise it is NaN, or it is not known.
    finite: bool = True
    # The class that what depends on data is assumed to be of, if it says all of it; then that is left out.
    known: MaskClass | None = None
    nonempty: bool = False  # whether every query is assumed to see a key, with all that is added
    # Whether what each query sees is assumed to be a run of few keys, and all that is added only to hide others.
    runs: bool = False

    @property
    def name(self) -> str:
        """For people: what is hidden, and whether there is a bias."""
        names = [self.mask.name] if self.mask is not None else []
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
    for step in steps:
        hidden = _hidden(step, reader, named)
        if hidden is None:
            biases.append(step)
        else:
            keep.append(hidden[0])
            values.append(hidden[1])
    if not keep:
        return Masking(biases=tuple(biases))
    total = keep[0]
    for other in keep[1:]:
        total = Apply(dtype=torch.bool, op="and", args=(total, other))
    # Two additions of a finite minimum can give -inf; fills do not add up.
    added = sum(isinstance(step, Add) for step in steps) - len(biases)
    finite = all(value != -float("inf") for value in values) and added <= 1
    return Masking(mask=read_mask(total, **named), keep=total, biases=tuple(biases), finite=finite)


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


def _hidden(step: Step, reader: Reader, named: dict[str, tuple[Axis, ...]]) -> tuple[Term, float] | None:
    """Where a step leaves the scores as they are, and what it puts elsewhere; None if it does anything else."""
    if isinstance(step, Fill):
        value = number(step.value)
        if value is None:
            return None
        condition = reader.expand(step.condition)
        return Apply(dtype=torch.bool, op="not", args=(condition,)), value
    if not isinstance(step, Add) or not step.term.dtype.is_floating_point:
        return None
    pieces = additive(reader.expand(added_term(step)), **named)
    if pieces is None or any(value != 0 and value > SWALLOWS for value in pieces.values):
        return None
    others = [value for value in pieces.values if value != 0]
    return pieces.keep(), min(others, default=0.0)
