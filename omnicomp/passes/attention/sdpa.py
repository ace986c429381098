"""An attention as one call of `scaled_dot_product_attention`, with a dense mask where the scores have one.

What eager gives for rows in which no key is left is kept: all keys at one finite minimum share the row equally; with
-inf for every key the row is NaN. The kernels disagree about such rows, with eager and with each other, so the
queries of such rows are replaced: by zero, so that only the mask decides, or by NaN.
"""

import dataclasses
import math
from collections.abc import Hashable
from typing import Any, Final

import torch

from omnicomp._torch.autograd.attention import hint_of, known_equal
from omnicomp.passes.attention.build import Builder, value_of
from omnicomp.passes.attention.candidates import is_shifted, normalized_later, written_out
from omnicomp.passes.attention.form import SWALLOWS, Form, greatest_added, is_finite, least_added, number
from omnicomp.passes.attention.masking import hides, mask_key
from omnicomp.passes.attention.reader import Reader
from omnicomp.passes.attention.site import Add, Emptied, Fill, Floor, MatchEnded, Operand, Scale, Site, Step, axes_in
from omnicomp.passes.attention.terms import Apply, Axis, Number, Term, flat

# Two cores of a CPU, 4096 keys of 128: with one query, unfused was twice as fast as fused with a copy of the keys.
_FEW_QUERIES: Final = 8
_MANY_ELEMENTS: Final = 1 << 18
_PAD: Final[Any] = torch.ops.aten.constant_pad_nd.default
# Float16 has steps of 16 from here on.
_SWALLOWS_IN_HALF: Final = -16384.0
# Double precision holds a score beside any number above.
_SWALLOWS_IN_DOUBLE: Final = -1e17
# Single precision holds no logarithm of a number of keys beside any number below.
_SWALLOWS_COUNT: Final = -(2.0**29)
# Swallows any score in any precision.
_SWALLOWS_ALL: Final = -1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to call the fused attention.

    Attributes:
        grouped: heads that share keys and values stay grouped (`enable_gqa`), instead of being expanded.
        is_causal: the mask is the causal one and need not be made.
        unmasked: the mask hides nothing and need not be made.
        rows_nonempty: every query is known to have a key.
        keys_nonempty: every key is known to be attended by a query.
        padded: pad the features of queries and keys, or of values, to one size.
        filled: read the keys up to the last one that a query sees.
        row_gradients: rows in which no key is left pass gradients on wherever eager's do.
        guarded: guard the mask of a call, too: rows without a key are those of torch's decomposition.
    """

    grouped: bool = False
    is_causal: bool = False
    unmasked: bool = False
    rows_nonempty: bool = False
    keys_nonempty: bool = False
    padded: bool = False
    filled: bool = False
    row_gradients: bool = False
    guarded: bool = False


@dataclasses.dataclass(frozen=True)
class GuardedMask:
    """A mask, and the rows whose queries must be replaced.

    Attributes:
        mask: what is added to the scores.
        swallowed: rows in which a huge number swallows every score, or None.
        undefined: rows that are NaN with all that is made of them, or None: -inf was added for every key.
        empty: rows whose output alone is NaN, or None: keys were filled, which cuts the gradient there.
        shared: by how many keys the gradient of a row's output is divided, or None: 1 unless a huge number was added
            to every score of the row.
        passing: those of the swallowed rows that pass gradients on in eager, or None.
    """

    mask: Any
    swallowed: Any = None
    undefined: Any = None
    empty: Any = None
    shared: Any = None
    passing: Any = None


Shared = dict[Any, GuardedMask]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Queries, keys, values (4-D) and the mask, ready for a fused kernel.

    `passing` are the rows that a kernel passes no gradients on from, and the queries that eager passes them to.
    """

    query: Any
    key: Any
    value: Any
    mask: Any
    width: Any
    empty: Any = None
    shared: Any = None
    passing: tuple[Any, Any] | None = None


def finish(site: Site, form: Form, fused: Any, made: Parts, builder: Builder) -> Any:
    """Cut padding off, and apply what was done to the weights of whole rows."""
    if site.repaired:
        fused = _without_nan(form, fused, made.value, builder)
    if made.passing is not None:
        fused = _with_row_gradients(site, form, fused, made, *made.passing, builder)
    if made.width is not None:
        fused = builder.call(torch.narrow, (fused, 3, 0, made.width))
    if made.shared is not None:
        fused = _divided_gradient(fused, made.shared, builder)
    if made.empty is not None:
        fused = builder.call(torch.masked_fill, (fused, made.empty, site.undefined))
    device = value_of(fused).device
    groups = (*form.groups(site)[:3], site.value_features)
    for step in site.weights:
        if not _of_rows(site, step):
            continue
        if isinstance(step, Scale):
            factor = builder.term(step.term, groups, device)
            fused = builder.call(torch.div if step.divide else torch.mul, (fused, factor))
        elif isinstance(step, Fill):
            condition = builder.term(step.condition, groups, device)
            fused = builder.call(torch.masked_fill, (fused, condition, 0.0))
        elif isinstance(step, Emptied):
            condition = builder.term(step.condition, form.groups(site), device)
            condition = builder.call(torch.all, (condition,), {"dim": -1, "keepdim": True})
            fused = builder.call(torch.masked_fill, (fused, condition, 0.0))
    if value_of(fused).dtype != site.dtype:
        fused = builder.call(torch.Tensor.to, (fused, site.dtype))
    return fused


def parts(site: Site, form: Form, variant: Variant, builder: Builder, reader: Reader, shared: Shared) -> Parts:
    """Make the operands and the mask.

    Masks that were made for other sites of the graph are taken from `shared`; new ones are added to it.

    Raises:
        MatchEnded, ValueError: they can't be made.
    """
    batch, heads, queries, keys = form.groups(site)
    kept = tuple(axis for axis in heads if axis not in form.shared) if variant.grouped else heads
    query = fit(site.query, site, builder, (batch, heads, queries, site.features))
    key = fit(site.key, site, builder, (batch, kept, keys, site.features))
    value = fit(site.value, site, builder, (batch, kept, keys, site.value_features))
    for factor in form.factors:
        made = builder.factor(factor.term, (batch, heads, queries, ()), value_of(query).device)
        query = builder.call(torch.div if factor.divide else torch.mul, (query, made))
    query = _cast(query, site, builder)
    value = _with_weights(site, form, value, kept, builder)
    mask = empty = count = passing = None
    masked = not variant.is_causal and not variant.unmasked
    if masked and site.call is not None and site.call.mask is not None and not variant.guarded:
        mask = _called_mask(site, form, site.call.mask, builder, reader, shared)
    elif masked and form.mask:
        key = _without_hidden(site, form, variant, key, kept, builder, shared)
        made = _shared_mask(site, form, variant, builder, reader, shared)
        mask, count = made.mask, made.shared
        if made.passing is not None:
            passing = (made.passing, query)
        if made.swallowed is not None:
            query = builder.call(torch.masked_fill, (query, made.swallowed, 0.0))
        if made.undefined is not None:
            query = builder.call(torch.masked_fill, (query, made.undefined, float("nan")))
        empty = made.empty
    width = None
    if variant.padded:
        query, key, value, width = _pad(query, key, value, builder)
    return Parts(
        query=_contiguous(query, builder),
        key=_contiguous(key, builder),
        value=_contiguous(value, builder),
        mask=mask,
        width=width,
        empty=empty,
        shared=count,
        passing=passing,
    )


def _with_row_gradients(
    site: Site, form: Form, fused: Any, made: Parts, rows: Any, query: Any, builder: Builder
) -> Any:
    """The output as it is, with the gradients that rows of equal weights pass on to queries and keys in eager.

    Each of the n keys weighs 1 / n there, so that the gradient g of a row's output is one of g . (v - mean(v)) / n for
    each score, and the same as that of q @ C with C = k.T @ (v - mean(v)) / n, times the scale.
    """
    call = builder.call
    value = call(torch.detach, (made.value,))
    value = call(torch.sub, (value, call(torch.mean, (value,), {"dim": 2, "keepdim": True})))
    value = call(torch.div, (value, builder.size(flat(site.keys))))
    key, width = made.key, value_of(query).shape[-1]
    if not known_equal(value_of(key).shape[-1], width):
        key = call(torch.narrow, (key, 3, 0, width))  # without the zeros that pad it
    linear = call(torch.matmul, (call(torch.transpose, (key, 2, 3)), value))
    if not known_equal(value_of(linear).shape[1], value_of(query).shape[1]):
        linear = for_each_head(linear, form, builder)
    term = call(torch.mul, (call(torch.matmul, (query, linear)), form.scale))
    term = call(torch.sub, (term, call(torch.detach, (term,))))
    return call(torch.add, (fused, call(torch.where, (rows, term, 0.0))))


def _without_nan(form: Form, fused: Any, value: Any, builder: Builder) -> Any:
    """The output of weights that are zero where they were NaN, which beside values that are no numbers make NaN."""
    call = builder.call
    nothing = call(torch.amax, (call(torch.mul, (call(torch.detach, (value,)), 0.0)),), {"dim": 2, "keepdim": True})
    if not known_equal(value_of(nothing).shape[1], value_of(fused).shape[1]):
        nothing = for_each_head(nothing, form, builder)
    return call(torch.where, (call(torch.isnan, (fused,)), nothing, fused))


def for_each_head(item: Any, form: Form, builder: Builder) -> Any:
    """What there is for each head of the keys, for each head of the queries."""
    copies = math.prod(hint_of(axis.size) for axis in form.shared)
    return builder.call(torch.repeat_interleave, (item, copies), {"dim": 1})


def _called_mask(site: Site, form: Form, mask: Operand, builder: Builder, reader: Reader, shared: Shared) -> Any:
    """The mask of a call, in the dimensions of the new one; made once for all calls with an equal one."""
    key = ("called", _meaning(site, form, reader), value_of(mask.node).dtype)
    if key not in shared:
        made = builder.place(mask.node, mask.at, form.groups(site))
        if known_equal(value_of(made).shape[-1], 1):
            made = builder.call(torch.Tensor.expand, (made, -1, -1, -1, builder.size(flat(site.keys))))
        elif site.fake().device.type != "cpu":
            made = _contiguous(made, builder)
        shared[key] = made
    return shared[key]


def _meaning(site: Site, form: Form, reader: Reader) -> Hashable:
    """Equal for calls whose masks are computed alike, each for itself."""

    def expanded(step: Step) -> Step:
        if isinstance(step, Fill):
            return Fill(reader.expand(step.condition), step.value)
        return Add(reader.expand(step.term), step.negative) if isinstance(step, Add) else step

    return mask_key(site, dataclasses.replace(form, mask=list(map(expanded, form.mask))))


def _without_hidden(
    site: Site, form: Form, variant: Variant, key: Any, kept: tuple[Axis, ...], builder: Builder, shared: Shared
) -> Any:
    """Keys with zeros where every query's score is filled: what they hold meets no mask that is added, as in eager."""
    conditions = [step.condition for step in form.mask if isinstance(step, Fill)]
    if not conditions or variant.keys_nonempty:
        return key
    _check_copy(site, form, key)
    name = ("hidden", mask_key(site, form), variant.grouped)
    if name not in shared:
        shared[name] = _hidden_keys(site, form, conditions, kept, value_of(key).device, builder)
    return builder.call(torch.masked_fill, (key, shared[name], 0.0))


def _check_copy(site: Site, form: Form, key: Any) -> None:
    """Few queries read each key once, and a copy of the keys takes as long as the attention.

    Raises:
        MatchEnded: this would be such a copy.
    """
    queries, elements = 1, 1
    for axis in flat(site.queries):
        queries *= hint_of(axis.size)
    for size in value_of(key).shape:
        elements *= hint_of(size)
    if queries > _FEW_QUERIES or elements < _MANY_ELEMENTS or form.shared:
        return
    raise MatchEnded(
        site.output,
        "a fused kernel needs a copy of the keys without what no query sees, which costs more than it saves",
        observed=f"{queries} queries, keys of {list(value_of(key).shape)}, scores that are filled",
        needed="more queries, or a mask that is added",
        lever="add the mask to the scores instead of filling them: scores + mask",
        code="not_profitable",
    )


def _hidden_keys(
    site: Site, form: Form, conditions: list[Term], kept: tuple[Axis, ...], device: torch.device, builder: Builder
) -> Any:
    """Which keys no query sees, as (batch, heads of the keys, keys, 1)."""
    batch = form.groups(site)[0]
    others = (*(axis for axis in form.shared if axis not in kept), *site.queries)
    if any(axes_in(condition) & set(flat(others)) for condition in conditions):
        groups = (batch, kept, others, site.keys)
    else:
        groups = (batch, kept, (), site.keys)
    hidden: Any = None
    for condition in conditions:
        made = _four(builder.term(condition, groups, device), builder)
        hidden = made if hidden is None else builder.call(torch.logical_or, (hidden, made))
    if not known_equal(value_of(hidden).shape[2], 1):
        hidden = builder.call(torch.all, (hidden,), {"dim": 2, "keepdim": True})
    return builder.call(torch.transpose, (hidden, 2, 3))


def _divided_gradient(fused: Any, count: Any, builder: Builder) -> Any:
    """The output as it is, with its gradient divided by a number for each row.

    The kernel's backward computes weights as exp(score - logsumexp). Where a huge number swallowed every score, it has
    swallowed the logarithm of their number as well, and these weights are 1 instead of 1 / number. All gradients are
    linear in weights and output gradient.
    """
    call = builder.call
    fixed = call(torch.detach, (fused,))
    divided = call(torch.add, (fixed, call(torch.div, (call(torch.sub, (fused, fixed)), count))))
    return call(torch.where, (call(torch.eq, (count, 1)), fused, divided))


def _shared_mask(
    site: Site, form: Form, variant: Variant, builder: Builder, reader: Reader, shared: Shared
) -> "GuardedMask":
    if not variant.rows_nonempty:
        check_empty_rows(site, form, reader)
    called = None if site.call is None else site.call.mask
    meaning = mask_key(site, form) if called is None else _meaning(site, form, reader)
    key = (meaning, site.dtype, site.fake().requires_grad, variant.rows_nonempty, str(site.undefined))
    key = (*key, bool(site.sinks))
    if key not in shared:
        mask = (
            _dense_mask(site, form, builder)
            if called is None
            else _called_mask(site, form, called, builder, reader, shared)
        )
        made = GuardedMask(mask)
        if not variant.rows_nonempty:
            made = _guarded(site, form, mask, builder, reader, variant.row_gradients)
        shared[key] = made
    return shared[key]


def fit(operand: Operand, site: Site, builder: Builder, groups: tuple[tuple[Axis, ...], ...]) -> Any:
    """An operand as (batch, heads, rows, features) in the dtype of the attention."""
    return _cast(builder.place(operand.node, operand.at, groups, wide=(0, 1)), site, builder)


def _cast(item: Any, site: Site, builder: Builder) -> Any:
    return item if value_of(item).dtype == site.dtype else builder.call(torch.Tensor.to, (item, site.dtype))


def _contiguous(item: Any, builder: Builder) -> Any:
    """The fused kernels read features one after the other."""
    fake = value_of(item)
    if known_equal(fake.stride(-1), 1) or known_equal(fake.shape[-1], 1):
        return item
    return builder.call(torch.Tensor.contiguous, (item,))


def _pad(query: Any, key: Any, value: Any, builder: Builder) -> tuple[Any, Any, Any, Any]:
    """Zeros change neither the products of queries and keys nor the other features of the values."""
    narrow, wide = value_of(query).shape[-1], value_of(value).shape[-1]
    if not isinstance(narrow, int) or not isinstance(wide, int):
        raise ValueError("symbolic head sizes that differ")
    if narrow < wide:
        query, key = (builder.call(_PAD, (item, [0, wide - narrow], 0.0)) for item in (query, key))
        return query, key, value, None
    return query, key, builder.call(_PAD, (value, [0, narrow - wide], 0.0)), wide


def _of_rows(site: Site, step: Step | Emptied) -> bool:
    return not axes_of_step(step) & set(flat(site.keys))


def axes_of_step(step: Step | Emptied) -> set[Axis]:
    """The axes that what a step does depends on."""
    term = step.condition if isinstance(step, Fill) else step.term if isinstance(step, Scale | Add) else None
    return axes_in(term) if term is not None else set()


def _with_weights(site: Site, form: Form, value: Any, kept: tuple[Axis, ...], builder: Builder) -> Any:
    """Factors on the weights that differ between keys scale the values instead."""
    batch, _, _, keys = form.groups(site)
    for step in site.weights:
        if _of_rows(site, step):
            continue
        if axes_of_step(step) & {*flat(site.queries), *form.shared}:
            raise MatchEnded(
                site.output,
                "the attention weights are changed between the softmax and the values, for each query and key",
                needed="a factor for each query, or for each key",
                lever="hide keys before the softmax instead, scores.masked_fill(~mask, float('-inf')), or give the "
                "scores a bias",
            )
        groups = (batch, kept, keys, ())
        if isinstance(step, Fill):
            condition = builder.term(step.condition, groups, value_of(value).device)
            value = builder.call(torch.masked_fill, (value, condition, 0.0))
        elif isinstance(step, Scale):
            factor = builder.term(step.term, groups, value_of(value).device)
            value = builder.call(torch.div if step.divide else torch.mul, (value, factor))
    return _cast(value, site, builder)


def _dense_mask(site: Site, form: Form, builder: Builder) -> Any:
    """The mask as a tensor that broadcasts to the scores: the steps, applied in their order to zero."""
    groups, device = form.groups(site), site.fake().device
    mask: Any = None
    for step in form.mask:
        mask = _applied(step, mask, groups, device, site, builder)
    fake = value_of(mask)
    if fake.dtype != site.dtype:
        mask = _narrowed(mask, site, form, builder)
    keys = value_of(mask).shape[-1]
    if known_equal(keys, 1):
        # The kernels broadcast a mask over batch, heads and queries, but not over keys.
        shape = (-1, -1, -1, builder.size(flat(site.keys)))
        mask = builder.call(torch.Tensor.expand, (mask, *shape))
    elif site.fake().device.type != "cpu":
        # Learned tables come with the heads innermost, which the kernels do not take.
        mask = _contiguous(mask, builder)
    return mask


def _applied(step: Step, mask: Any, groups: Any, device: torch.device, site: Site, builder: Builder) -> Any:
    call = builder.call
    if isinstance(step, Fill):
        value = number(step.value)
        assert value is not None
        condition = _four(builder.term(step.condition, groups, device), builder)
        if mask is None:
            mask = call(torch.zeros_like, (condition,), {"dtype": site.dtype})
        if value != float("-inf"):
            value = max(value, torch.finfo(value_of(mask).dtype).min)
        return call(torch.where, (condition, value, mask))
    if isinstance(step, Add):
        made = _four(builder.term(step.term, groups, device), builder)
        fake = value_of(made)
        if torch.promote_types(fake.dtype, site.dtype) == site.dtype != fake.dtype:
            made = call(torch.Tensor.to, (made, site.dtype))
        if mask is None:
            return call(torch.neg, (made,)) if step.negative else made
        return call(torch.sub if step.negative else torch.add, (mask, made))
    if mask is None:
        return None
    if isinstance(step, Floor):
        return call(torch.clamp, (mask,), {"min": max(step.value, torch.finfo(value_of(mask).dtype).min)})
    assert isinstance(step, Scale)
    factor = number(step.term)
    made = factor if factor is not None else builder.factor(step.term, groups, device)
    return call(torch.div if step.divide else torch.mul, (mask, made))


def _four(item: Any, builder: Builder) -> Any:
    missing = 4 - value_of(item).dim()
    return builder.call(torch.Tensor.reshape, (item, (1,) * missing)) if missing == 4 else item


def _narrowed(mask: Any, site: Site, form: Form, builder: Builder) -> Any:
    """The mask in a dtype that the kernels take: the CPU's add a float32 mask, others read only one of their own."""
    call, cpu = builder.call, site.fake().device.type == "cpu"
    dtype = value_of(mask).dtype
    if dtype == torch.float32 and site.dtype == torch.bfloat16:
        # Keep the most negative float32 finite in bfloat16: autocast, or this pass, rounds the mask to that.
        clamped = call(torch.clamp, (mask,), {"min": torch.finfo(site.dtype).min})
        # What was -inf stays -inf: together with finite minima it still says which keys to take.
        mask = call(torch.where, (call(torch.isneginf, (mask,)), mask, clamped))
        if cpu:
            return mask
    if not cpu or dtype != torch.float32:
        if not all(_rounds(step) for step in form.mask):
            raise MatchEnded(
                site.softmax.node,
                "the mask holds numbers that the attention's dtype can't",
                observed=f"a mask of {dtype}",
                needed=f"a mask of {site.dtype}",
                lever="make the mask in the dtype of the queries",
                code="not_equal",
            )
        mask = call(torch.Tensor.to, (mask, site.dtype))
    return mask


def _rounds(step: Step) -> bool:
    """Whether another dtype holds what a step adds as well: it is made from numbers alone."""
    return not isinstance(step, Add) or _from_numbers(step.term)


def _from_numbers(term: Term) -> bool:
    if isinstance(term, Apply):
        return all(_from_numbers(a) for a in term.args if a.dtype.is_floating_point)
    return isinstance(term, Number)


def check_empty_rows(site: Site, form: Form, reader: Reader) -> None:
    """Where a mask may hide every key of a row: that a softmax that is written out gives what torch's does.

    Raises:
        MatchEnded: it does not.
    """
    hiding = [step for step in form.mask if hides(step, reader)]
    if not hiding or not written_out(site.softmax):
        return
    if site.softmax.name == "exp" and normalized_later(site.softmax) is None:
        why = "exp(x - logsumexp(x)) sums to the number of keys"
    elif any(_finite_step(step, reader) for step in hiding) and not is_shifted(site.softmax):
        why = "exponentials of what is filled in are all zero, and so is their sum"
    else:
        return
    raise MatchEnded(
        site.softmax.node,
        f"where no key is left, {why}, which is so in no kernel's softmax",
        observed="a mask that may hide every key",
        needed="a mask that is known to leave one, or torch.softmax",
        lever="write torch.softmax(x, -1)",
        code="not_equal",
    )


def _guarded(site: Site, form: Form, mask: Any, builder: Builder, reader: Reader, row_gradients: bool) -> "GuardedMask":
    """The mask with which rows that no key is left in come out as in eager, whatever the kernel does there."""
    call = builder.call
    hiding = sum(hides(step, reader) for step in form.mask)
    # Two finite minima can add up to -inf, and one that is multiplied can overflow.
    added = sum(isinstance(step, Add) and hides(step, reader) for step in form.mask)
    grown = [s for n, s in enumerate(form.mask) if hides(s, reader) and any(map(_grows, form.mask[n:]))]
    undefined = added > 1 or any(isinstance(step, Add) for step in grown)
    undefined |= not all(_finite_step(s, reader) for s in form.mask if not isinstance(s, Fill))
    infinite = undefined or bool(grown) or not all(_finite_step(step, reader) for step in form.mask)
    old = site.fake()
    # In inference the CPU's kernel averages rows of one finite minimum as eager does.
    averages = old.device.type == "cpu" and not old.requires_grad and site.dtype != torch.float16
    # It adds, so that a fill must be so low that it swallows any score.
    averages &= all((number(step.value) or 0.0) < _SWALLOWS_ALL for step in form.mask if isinstance(step, Fill))
    filled = any(isinstance(step, Fill) for step in form.mask)
    if not infinite and ((averages and not filled) or not hiding):
        return GuardedMask(mask)
    if site.sinks and not infinite:
        return GuardedMask(mask)  # where no number is left but huge negative ones, the sink has all the weight
    top = call(torch.amax, (call(torch.Tensor.detach, (mask,)),), {"dim": -1, "keepdim": True})
    lowest = lowest_of(site, form, reader)
    empty = None
    if infinite:
        # A row whose mask holds NaN or inf, as after -inf was added to inf, has no weights in eager either.
        empty = call(torch.isneginf, (top,))
        if undefined:
            empty = call(torch.logical_not, (call(torch.isfinite, (top,)),))
        mask = call(torch.masked_fill, (mask, empty, 0.0))
        top = call(torch.masked_fill, (top, empty, 0.0))
    # A huge number swallows scores whatever its sign.
    beyond = call(torch.neg, (call(torch.abs, (top,)),)) if _lifts(form, reader) else top
    # What the program itself puts in the place of scores or of NaN stops the gradient there.
    replaced = not math.isnan(site.undefined) or any(isinstance(s, Fill) for s in (*form.mask, *site.weights))
    nan = {"undefined" if undefined and not replaced else "empty": empty}
    if site.sinks:
        return GuardedMask(mask, **nan)
    if averages:
        # What the queries of a row hold that is filled everywhere does not matter in eager either.
        return GuardedMask(mask, call(torch.le, (beyond, lowest)) if filled else None, **nan)
    if _passes_gradients(site, form, reader):
        if value_of(mask).requires_grad:
            return GuardedMask(mask, **nan)  # the backward of `attention_with_bias` normalizes the weights
        return GuardedMask(mask, shared=_sharing(mask, top, call(torch.le, (beyond, lowest)), builder), **nan)
    # The kernels' backward divides by exp(max + log(sum)), where a huge negative max swallows the sum: with every key
    # of a row masked, gradients would be too large by the number of keys. A softmax does not see the shift.
    swallowed = call(torch.le, (beyond, lowest))
    mask = call(torch.sub, (mask, top))
    passing = None
    if row_gradients and old.requires_grad and not site.dropout and _adds(site, form):
        least = call(torch.amin, (call(torch.Tensor.detach, (mask,)),), {"dim": -1, "keepdim": True})
        passing = call(torch.logical_and, (swallowed, call(torch.eq, (least, 0))))
    return GuardedMask(mask, swallowed, passing=passing, **nan)


def _sharing(mask: Any, top: Any, swallowed: Any, builder: Builder) -> Any:
    """By how many keys a row of which the sum is swallowed is shared; 1 for other rows."""
    most = builder.call(torch.sum, (builder.call(torch.eq, (mask, top)),), {"dim": -1, "keepdim": True})
    return builder.call(torch.where, (swallowed, most, 1))


def beside_sink(site: Site, form: Form, made: Parts, builder: Builder, reader: Reader) -> Parts:
    """The parts of an attention with a sink, whose gradients are right where huge numbers swallow scores.

    The kernels' backward divides by exp(log(sum)), as above. Huge negative ones leave all weight to the sink.
    """
    if made.mask is None or not site.fake().requires_grad or not _lifts(form, reader):
        return made
    mask = builder.call(torch.Tensor.detach, (made.mask,))
    if value_of(mask).dtype == torch.bool:
        return made
    top = builder.call(torch.amax, (mask,), {"dim": -1, "keepdim": True})
    swallowed = builder.call(torch.ge, (top, -lowest_of(site, form, reader)))
    return dataclasses.replace(made, shared=_sharing(mask, top, swallowed, builder))


def _passes_gradients(site: Site, form: Form, reader: Reader) -> bool:
    """Whether rows in which no key is left pass gradients on to queries and keys, and the CPU's kernel does so too.

    Eager does where the mask is added; what is filled in stops them. The sum of a mask and a score has to be rounded to
    the mask alone, in the log-sum-exp too.
    """
    if site.fake().device.type != "cpu" or site.dtype == torch.float16:
        return False
    for step in form.mask:
        if isinstance(step, Floor) or (isinstance(step, Fill) and _finite_step(step, reader)):
            return False
        if isinstance(step, Add) and site.dtype != torch.float64:
            if _SWALLOWS_COUNT < least_added(step, reader) < 0:
                return False
    return True


def _adds(site: Site, form: Form) -> bool:
    """Whether a mask is only added, in a dtype in which its minimum swallows any score."""
    return site.dtype != torch.float16 and all(isinstance(step, Add | Scale) for step in form.mask)


def lowest_of(site: Site, form: Form, reader: Reader) -> float:
    """At which number a mask has swallowed all scores of a row, or taken their place.

    Raises:
        MatchEnded: one number may do either.
    """
    if site.dtype == torch.float16:
        return _SWALLOWS_IN_HALF
    if site.dtype != torch.float64 or not any(isinstance(s, Add) and hides(s, reader) for s in form.mask):
        return SWALLOWS
    for step in form.mask:
        value = number(step.value) if isinstance(step, Fill) else None
        if value is not None and value > _SWALLOWS_IN_DOUBLE:
            # Added, this number leaves the scores as they are; filled in, it leaves nothing of them.
            raise MatchEnded(
                site.softmax.node,
                "where no key is left, scores that are filled and scores that the same number is added to would differ",
                observed=f"fill={value:g} in {site.dtype}, beside a mask that is added",
                needed="torch.finfo(scores.dtype).min, or -inf",
                lever="fill with torch.finfo(scores.dtype).min",
                code="not_equal",
            )
    return _SWALLOWS_IN_DOUBLE


def _lifts(form: Form, reader: Reader) -> bool:
    """Whether a mask may hold numbers so great that they swallow scores."""
    return any(
        not (number(step.term) or 0) > 0
        if isinstance(step, Scale)
        else isinstance(step, Add) and greatest_added(step, reader) >= -_SWALLOWS_IN_HALF
        for step in form.mask
    )


def _grows(step: Step) -> bool:
    """Whether a step may multiply by more than one."""
    if not isinstance(step, Scale):
        return False
    factor = number(step.term)
    return factor is None or (abs(factor) < 1 if step.divide else abs(factor) > 1)


def _finite_step(step: Step, reader: Reader) -> bool:
    if isinstance(step, Fill):
        return number(step.value) != float("-inf")
    return not isinstance(step, Add) or is_finite(step.term, reader)
