"""Which fused kernel an attention becomes: tried on its real shapes, strides and dtypes, best first."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp._torch.autograd.attention import KERNELS, SDPA, concrete, fused_kernel, hint_of, is_static, known_equal
from omnicomp._torch.distributed import is_spread, local_attention, placements_of, whole_on_ranks
from omnicomp._torch.symbols import may_guard_multiple
from omnicomp.analysis.nodes import fake_value
from omnicomp.passes.attention.assume import settle_mask
from omnicomp.passes.attention.build import UnknownSize
from omnicomp.passes.attention.differentiable import (
    ATTENTION_WITH_BIAS,
    ATTENTION_WITH_SINK,
    bias_pays,
    head_sizes_pay,
    sink_kernel,
)
from omnicomp.passes.attention.few_queries import FEW_QUERIES, fits
from omnicomp.passes.attention.filled import LAST_KEY, cut, is_prefix, keys_seen, may_be_filled, on_host
from omnicomp.passes.attention.flexible import flex_pays, insert
from omnicomp.passes.attention.form import Form, dense_form, open_form, positive_scale
from omnicomp.passes.attention.masking import Masking, hides, mask_key, read_masking
from omnicomp.passes.attention.pinned import PINNED_ATTENTION, TILE, avoids_cudnn, cudnn_is_wrong, prefers_cudnn
from omnicomp.passes.attention.sdpa import Parts, Variant, beside_sink, finish, parts
from omnicomp.passes.attention.session import Attempt, Chosen, Session
from omnicomp.passes.attention.site import FIXED_SIZES, Fill, MatchEnded, Site
from omnicomp.passes.attention.terms import Axis, flat
from omnicomp.passes.attention.timings import UNFUSED, Timed, decide, problem_of
from omnicomp.passes.attention.visited import settle_visited
from omnicomp.passes.base import PassContext

# About half a millisecond on one core.
_NEGLIGIBLE_FLOPS: Final = 1 << 25
# T5 with 1024 tokens, training on an H200: 1.00 to 1.12 times the unfused time. Windows of 49 keys: 0.62 of it.
_TRAINED_PAIRS: Final = 2048 * 2048
_TRAINED_WINDOW: Final = 64 * 64
# Of torch's kernels, where rule and habit say nothing.
_ORDER: Final = ("flash", "efficient", "cudnn")
_Way = Callable[[Attempt], Chosen | None]


def choose(site: Site, session: Session) -> Chosen:
    """Insert the best fused form of an attention before its output.

    Raises:
        MatchEnded: there is none, or it would not be faster; the graph is as it was.
    """
    if site.dropout and session.eager_random:
        raise MatchEnded(
            site.output,
            "a fused kernel draws other random numbers than eager, and fallback_random asks for eager's",
            observed=f"dropout={site.dropout:g}",
            needed="no active dropout",
            lever="set the attention's dropout to 0, or fallback_random to False",
            code="not_equal",
        )
    if is_spread(site.fake()) and (site.call is not None or site.dropout or site.sinks):
        raise _spread(site, "a call, a dropout or a sink")
    ended: list[MatchEnded] = []
    errors: list[str] = []
    for way in _ways(site, session, ended):
        with session.attempt(site) as attempt:
            try:
                chosen = way(attempt)
            except MatchEnded as end:
                ended.append(end)
                continue
            except UnknownSize as error:
                needed = "each size of the fused call as a size of a tensor"
                ended.append(MatchEnded(site.output, str(error), needed=needed, lever=FIXED_SIZES))
                continue
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                errors.append(str(error).splitlines()[0])
                continue
            if chosen is not None:
                session.relied_on.add(session.read_last)
                return chosen
    if ended:
        # The first says what the program does, the others what else was tried.
        first, *others = ended
        told = dict.fromkeys(str(other) for other in others if str(other) != str(first))
        first.observed = "; ".join([first.observed, *told, *errors])
        raise first
    raise _not_profitable(site, session.context, errors)


def _ways(site: Site, session: Session, ended: list[MatchEnded]) -> Iterator[_Way]:
    """The ways to fuse a site, best first; why a whole family of them is out goes to `ended`."""
    try:
        form = positive_scale(dense_form(site, session.reader), site.dtype)
    except MatchEnded as end:
        ended.append(end)
        if not site.sinks and not is_spread(site.fake()):
            form = positive_scale(open_form(site, session.reader), site.dtype)
            yield functools.partial(insert, site, form, _masking(site, form, session))
        return
    masking = _masking(site, form, session)
    if is_spread(site.fake()):
        if not (masking.is_full or masking.is_causal) or masking.biases:
            ended.append(_spread(site, f"mask ({masking.name})"))
            return
        for variant in _variants(site, form, masking):
            yield functools.partial(_plain, site, form, masking, variant)
        return
    if site.sinks:
        for variant in _variants(site, form, masking):
            yield functools.partial(_with_sink, site, form, masking, variant)
        return
    if site.call is not None:
        yield from _ways_of_call(site, form, masking, session)
        return
    flexible = functools.partial(insert, site, form, masking)
    # The dtype policy lowers no FlexAttention, whose graphs and tiles are made for one dtype.
    lowered = session.computed_dtype(site) is not site.dtype
    if not lowered and flex_pays(site, form, masking, session):
        yield flexible
    for variant in _filled(site, form, masking, session):
        way = _plain if on_host(site) else _few_queries
        yield functools.partial(way, site, form, masking, variant)
    for variant in _variants(site, form, masking):
        yield functools.partial(_plain, site, form, masking, variant)
    for variant in _variants(site, form, masking):
        yield functools.partial(_with_bias, site, form, masking, variant)


def _ways_of_call(site: Site, form: Form, masking: Masking, session: Session) -> Iterator[_Way]:
    """The ways to better a call: without its mask, without copies of heads, or on a fused kernel at all."""
    assert site.call is not None
    if site.call.flex:
        for variant in _variants(site, form, masking):
            if variant.unmasked or variant.is_causal:
                yield functools.partial(_plain, site, form, masking, variant)
        return
    told = site.call.mask is None and bool(form.mask)
    if told and not (masking.is_causal or masking.is_full):
        return  # `is_causal` of a call whose sizes do not say that this is a causal mask
    lowered = session.computed_dtype(site) is not site.dtype
    if not lowered and not site.call.default_scale and flex_pays(site, form, masking, session):
        yield functools.partial(insert, site, form, masking)
    for variant in _filled(site, form, masking, session) if site.call.mask is not None else ():
        if on_host(site):
            yield functools.partial(_same_mask, site, form, masking, variant, better=True)
        elif not site.call.default_scale and _sure_of_rows(site, form, variant, session):
            yield functools.partial(_few_queries, site, form, masking, variant)
    repeated = any(
        hint_of(fake_value(given).numel()) > hint_of(held.value.fake.numel())
        for given, held in zip(site.call.operands[1:], (site.key, site.value), strict=True)
    )
    for variant in _variants(site, form, masking):
        unmasked = site.call.mask is not None and (variant.unmasked or variant.is_causal)
        if unmasked:
            yield functools.partial(_plain, site, form, masking, variant)
        else:
            better = variant.grouped and repeated
            yield functools.partial(_same_mask, site, form, masking, variant, better=better)
    # In torch's decomposition scores are float32, and the least number of float16 swallows none.
    added = site.call.mask is not None and site.call.mask.value.fake.dtype is site.dtype is not torch.float16
    if added and not site.call.default_scale and not _called_kernel(site, session):
        for variant in _variants(site, form, masking):
            yield functools.partial(_plain, site, form, masking, dataclasses.replace(variant, guarded=True))


def _same_mask(
    site: Site, form: Form, masking: Masking, variant: Variant, attempt: Attempt, *, better: bool
) -> Chosen | None:
    """The call with other operands: grouped heads, or in a form that a fused kernel takes where it has none.

    Or on another kernel, where that was measured to be faster.
    """
    before = _called_kernel(site, attempt.session)
    if before and not better and not attempt.session.budget.enabled:
        return None
    chosen = _plain(site, form, masking, variant, attempt)
    if before and not better and chosen is not None and not (chosen.timed and chosen.kernel):
        attempt.kept = False
        return None
    same = chosen is not None and bool(before) and chosen.detail.endswith(f"kernel {before}")
    if not same and not _sure_of_rows(site, form, variant, attempt.session):
        attempt.kept = False
        return None
    return chosen


def _sure_of_rows(site: Site, form: Form, variant: Variant, session: Session) -> bool:
    """Whether all kernels agree about the rows of a call.

    They don't about rows in which a number hides every key: on the CPU in half precision and in gradients.
    """
    old, reader = site.fake(), session.reader
    sure = old.device.type == "cpu" and not old.requires_grad and site.dtype != torch.float16
    return sure or variant.rows_nonempty or all(isinstance(s, Fill) or not hides(s, reader) for s in form.mask)


def as_called(site: Site, session: Session) -> str:
    """What a call that stays as it is was told, and which kernel that takes, for the timeline."""
    form = dense_form(site, session.reader)
    if site.call is not None and site.call.flex:
        name = read_masking(site, form, session.reader).name
        words = [f"scale={form.scale:g}", *([f"block mask ({name})"] if form.mask else [])]
        if site.call.visited is not None:
            words.append("the blocks that it visits are not known to be those of its mask")
        return ", ".join(words)
    masking = _masking(site, form, session)
    told = Variant(is_causal=bool(site.call and site.call.mask is None and form.mask))
    with session.attempt(site):
        kernel = _called_kernel(site, session)
    return _describe(site, form, masking, told, kernel or "none, as torch decomposes it")


def _called_kernel(site: Site, session: Session) -> str:
    """The kernel that torch takes for a call as it is, or an empty string if it decomposes it."""
    assert site.call is not None
    dtype, kwargs = session.computed_dtype(site), dict(site.call.arguments)
    if site.call.mask is not None:
        kwargs["attn_mask"] = site.call.mask.node
    return fused_kernel(functools.partial(_try, SDPA, site.call.operands, kwargs, dtype))


def _masking(site: Site, form: Form, session: Session) -> Masking:
    """What the mask hides; read once for all sites that share it."""
    if site.call is not None and site.call.visited is not None:
        return settle_visited(site, form, read_masking(site, form, session.reader), site.call.visited, session)
    session.read_last = key = mask_key(site, form)
    if key not in session.maskings:
        masking = read_masking(site, form, session.reader)
        if session.context.speculate and form.mask:
            masking = settle_mask(site, form, masking, session)
        session.maskings[key] = masking
    return session.maskings[key]


def _variants(site: Site, form: Form, masking: Masking) -> Iterator[Variant]:
    differ = not known_equal(_width(site.features), _width(site.value_features))
    unmasked = masking.is_full and not masking.biases
    causal = masking.is_causal and not unmasked
    # Where no key is left the sink has all the weight, as in eager.
    nonempty = bool(site.sinks and not site.gated) or masking.nonempty or masking.rows_nonempty
    keys = masking.mask is not None and masking.mask.keys_nonempty and not masking.biases
    for padded in (False, True) if differ and not site.sinks else (False,):
        for grouped in (True, False) if form.shared else (False,):
            yield Variant(
                grouped=grouped,
                padded=padded,
                unmasked=unmasked,
                is_causal=causal,
                rows_nonempty=nonempty,
                keys_nonempty=keys,
            )


def _filled(site: Site, form: Form, masking: Masking, session: Session) -> Iterator[Variant]:
    """The ways that read no more keys than are seen, where there may be fewer."""
    if not may_be_filled(site, form, masking, session):
        return
    prefix = is_prefix(site, masking)
    for variant in _variants(site, form, masking):
        if not variant.unmasked and not variant.is_causal:
            # Of the keys that are read, each is seen if what is hidden begins at one key.
            yield dataclasses.replace(variant, filled=True, keys_nonempty=variant.keys_nonempty or prefix)


def _width(features: tuple[Axis, ...]) -> Any:
    size: Any = 1
    for axis in flat(features):
        size = size * axis.size
    return size


def _parts(attempt: Attempt, form: Form, variant: Variant) -> Parts:
    session = attempt.session
    variant = dataclasses.replace(variant, row_gradients=session.empty_row_gradients)
    return parts(attempt.site, form, variant, attempt.builder, session.reader, session.shared)


def _plain(site: Site, form: Form, masking: Masking, variant: Variant, attempt: Attempt) -> Chosen | None:
    """`scaled_dot_product_attention`, if torch takes a fused kernel for it."""
    made = _parts(attempt, form, variant)
    dtype = attempt.session.computed_dtype(site)
    if variant.padded:
        _check_padding(site, made, dtype)
    default = site.call is not None and site.call.default_scale
    kwargs: dict[str, Any] = {} if default else {"scale": form.scale}
    if made.mask is not None:
        kwargs["attn_mask"] = made.mask
    if variant.is_causal:
        kwargs["is_causal"] = True
    if site.dropout:
        kwargs["dropout_p"] = site.dropout
    if variant.grouped:
        kwargs["enable_gqa"] = True
    operands = (made.query, made.key, made.value)
    pinned, kernel, timed = _kernel(site, made, kwargs, dtype, attempt.session)
    if not timed:
        _check_trained_mask(site, made)
    if not kernel:
        return None
    if site.call is not None and "cudnn" in kernel and not variant.rows_nonempty:
        made = _zero_without_keys(made, attempt)
    target: Any = SDPA
    if is_spread(site.fake()):
        if not whole_on_ranks([fake_value(each) for each in operands], dims=2):
            named = zip(("queries", "keys", "values"), operands, strict=True)
            raise _spread(site, ", ".join(f"{name} {placements_of(fake_value(each))}" for name, each in named))
        target, kwargs = local_attention, {"is_causal": False, "enable_gqa": False, **kwargs}
        pinned = ""
    elif pinned:
        target = PINNED_ATTENTION
        kwargs = {k: v for k, v in kwargs.items() if k != "attn_mask"} | {"kernel": pinned}
        operands = operands if made.mask is None else (*operands, made.mask)
    if variant.filled:
        made = cut(made, site, form, attempt)
        operands, kwargs = (made.query, made.key, made.value), {**kwargs, "attn_mask": made.mask}
    fused = attempt.call(target, operands, kwargs)
    fused = finish(site, form, fused, made, attempt.builder)
    tiled = bool(attempt.session.multiples)
    detail = _describe(site, form, masking, variant, kernel, tiled=tiled)
    chosen = attempt.keep(form, fused, target="scaled_dot_product_attention", detail=detail)
    return dataclasses.replace(chosen, timed=timed, kernel=pinned)


def _few_queries(site: Site, form: Form, masking: Masking, variant: Variant, attempt: Attempt) -> Chosen | None:
    """The kernel for few queries, which reads the keys up to the last one seen."""
    made = _parts(attempt, form, variant)
    operands = (made.query, made.key, made.value, made.mask)
    lowered = attempt.session.computed_dtype(site) is not site.dtype
    if lowered or variant.padded or site.dropout or not fits(*map(fake_value, operands)):
        return None
    last = keys_seen(LAST_KEY, made, site, form, attempt)
    fused = finish(site, form, attempt.call(FEW_QUERIES, (*operands, last, form.scale)), made, attempt.builder)
    detail = _describe(site, form, masking, variant, FEW_QUERIES.name())
    return attempt.keep(form, fused, target=FEW_QUERIES.name(), detail=detail)


def _spread(site: Site, observed: str) -> MatchEnded:
    """Why an attention of distributed tensors stays as it is, with the communication that it has."""
    return MatchEnded(
        site.output,
        "the attention is spread over ranks (DTensor), and ranks have no whole heads of queries, keys and values alike",
        observed=observed,
        needed="queries, keys and values sharded alike by batches or heads, with no mask or a causal one",
        lever="redistribute queries, keys and values alike (a replicated one to the placement of the others costs no "
        "communication), or take local tensors, as tensor parallel does for the outputs of its layers",
        code="not_equal",
    )


def _zero_without_keys(made: Parts, attempt: Attempt) -> Parts:
    """Rows of a call in which a mask hides every key are zero, but cuDNN's kernel leaves in them what it likes."""
    if made.mask is None or fake_value(made.mask).dtype is not torch.bool:
        return made
    shared = attempt.session.shared
    name = ("empty", made.mask)
    if name not in shared:
        some = attempt.call(torch.any, (made.mask,), {"dim": -1, "keepdim": True})
        shared[name] = attempt.call(torch.logical_not, (some,))
    return dataclasses.replace(made, empty=shared[name])


def _kernel(
    site: Site, made: Parts, kwargs: dict[str, Any], dtype: torch.dtype, session: Session
) -> tuple[str, str, dict[str, float]]:
    """The kernel that a call is pinned to, or an empty string; the operator that it takes; what was timed.

    It is the fastest of those that take the attention, where that is known or can be measured, and else by rule.

    Raises:
        MatchEnded: the attention is faster unfused.
    """
    operands = (made.query, made.key, made.value)
    facts = [None if node is None else _facts(fake_value(node)) for node in (*operands, made.mask)]
    named, unfused = repr({k: v for k, v in kwargs.items() if k != "attn_mask"}), _unfused(site, session)
    key = (repr(facts), named, dtype, site.fake().requires_grad, unfused)
    if key not in session.kernels:
        session.kernels[key] = _decided(operands, made.mask, kwargs, dtype, site, session, unfused)
    pinned, kernel, timed, multiples = session.kernels[key]
    session.multiples += [(size, TILE) for size in multiples]
    session.timed[site.output] = {} if timed is None else timed.times
    if timed is not None and timed.best == UNFUSED:
        raise MatchEnded(
            site.output,
            "unfused was measured to be faster than any fused kernel",
            observed=str(timed),
            needed="a fused kernel that is faster",
            lever="options={'attention_seconds': 0} goes by rule",
            code="not_profitable",
        )
    return pinned, kernel, {} if timed is None else timed.times


def _unfused(site: Site, session: Session) -> str:
    """What an attention is without a fused kernel, as in `Problem`."""
    if site.call is None or site.call.flex:
        return "operators"
    return "" if _called_kernel(site, session) else "call"


def _facts(fake: torch.Tensor) -> tuple[Any, ...]:
    return (*map(str, fake.shape), *map(str, fake.stride()), fake.dtype, fake.requires_grad)


def _decided(
    operands: tuple[Node, ...],
    mask: Node | None,
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    site: Site,
    session: Session,
    unfused: str,
) -> tuple[str, str, Timed | None, list[torch.SymInt]]:
    query, key, value = map(fake_value, operands)

    def taken(pinned: str) -> str:
        target: Any = PINNED_ATTENTION if pinned else SDPA
        named = {**kwargs, "kernel": pinned} if pinned else kwargs
        return fused_kernel(functools.partial(_try, target, operands, named, dtype))

    usual = taken("")
    if usual and mask is not None and site.call is None and fake_value(mask).dtype not in (torch.bool, query.dtype):
        return "flash", taken("flash"), None, []  # which the CPU has; under autocast, torch's function rounds the mask
    rule = ""
    training = bool(site.fake().requires_grad)
    lengths = [size for size in (query.shape[2], key.shape[2]) if not is_static(size)]
    tiled = bool(lengths and training) and all(may_guard_multiple(size, TILE) for size in lengths)
    wrong = cudnn_is_wrong(query, key, dtype, training=training, tiled=tiled)
    if "scale" in kwargs:
        if wrong and "cudnn" in usual:
            rule = next((name for name in ("flash", "efficient") if name in taken(name)), "")
        elif prefers_cudnn(query, key, dtype, training=training, tiled=tiled):
            rule = "cudnn"
        elif "cudnn" in usual and avoids_cudnn(query, key, dtype):
            rule = "efficient"
    problem = problem_of(
        (query, key, value),
        None if mask is None else fake_value(mask),
        dtype,
        is_causal=kwargs.get("is_causal", False),
        grouped=kwargs.get("enable_gqa", False),
        dropout=kwargs.get("dropout_p", 0.0),
        training=training,
        tf32=session.tf32,
        unfused=unfused,
    )
    timed = None
    if problem is not None and session.budget.enabled and "scale" in kwargs:
        few = tiled or not lengths if training else all(map(is_static, (*query.shape, *key.shape)))
        order = dict.fromkeys((rule, *(name for name in KERNELS if name in usual), *_ORDER))
        takes = {name: kernel for name in order if (kernel := taken(name)) and name and name in kernel}
        # cuDNN plans anew for every size, which takes 65 to 150 ms on an H200.
        timed = decide(problem, [name for name in takes if name != "cudnn" or (few and not wrong)], session.budget)
    best = rule if timed is None else "" if timed.best == UNFUSED or timed.best in usual else timed.best
    kernel = taken(best) if best else usual
    fused = timed is None or timed.best != UNFUSED
    return best, kernel, timed, lengths if tiled and fused and "cudnn" in kernel else []


def _check_trained_mask(site: Site, made: Parts) -> None:
    """The one kernel of CUDA that differentiates a mask is slower than the unfused backward between two lengths.

    Raises:
        MatchEnded: this one is between them.
    """
    if made.mask is None or not fake_value(made.mask).requires_grad or site.fake().device.type != "cuda":
        return
    pairs = 1
    for axis in flat((*site.queries, *site.keys)):
        pairs *= hint_of(axis.size)
    if _TRAINED_WINDOW < pairs < _TRAINED_PAIRS:
        raise MatchEnded(
            site.output,
            "the mask requires grad, and the fused kernel's backward for that is not faster at this length",
            observed=f"{pairs} pairs of queries and keys",
            needed=f"{_TRAINED_PAIRS} pairs or more, {_TRAINED_WINDOW} or fewer, or a mask that requires no grad",
            lever="make the added mask a constant, or run without grad",
            code="not_profitable",
        )


def _check_padding(site: Site, made: Parts, dtype: torch.dtype) -> None:
    """Zeros that are computed with cost time on the CPU, where it has no spare.

    Raises:
        MatchEnded: more than the fused kernel saves.
    """
    shape = [hint_of(size) for size in fake_value(made.query).shape]
    keys, narrow, wide = (
        hint_of(fake_value(made.key).shape[2]),
        hint_of(_width(site.features)),
        hint_of(_width(site.value_features)),
    )
    train = bool(site.fake().requires_grad)
    if site.fake().device.type != "cpu" or _negligible(site):
        return
    if not head_sizes_pay((*shape[:3], narrow), keys, wide, dtype, train=train):
        raise MatchEnded(
            site.output,
            "the CPU's kernel takes one head size, and padding to it costs more than it saves at this size",
            observed=f"head sizes {narrow} and {wide}, {shape[2]} queries and {keys} keys",
            needed="equal head sizes, or a larger attention",
            lever="give queries and values one head size",
            code="not_profitable",
        )


def _negligible(site: Site) -> bool:
    """Whether the attention is so small that no form of it takes a measurable part of a model's time on the CPU."""
    work = 2 * (hint_of(_width(site.features)) + hint_of(_width(site.value_features)))
    for axis in flat((*site.batch, *site.queries, *site.keys)):
        work *= hint_of(axis.size)
    return work <= _NEGLIGIBLE_FLOPS


def _try(target: Any, operands: tuple[Node, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Call the operator with stand-ins, floating-point ones in this dtype."""

    def stand_in(node: Node) -> Any:
        value = concrete(fake_value(node))
        return value.to(dtype) if value.is_floating_point() else value

    named = {k: stand_in(v) if isinstance(v, Node) else v for k, v in kwargs.items()}
    return target(*map(stand_in, operands), **named)


def _with_bias(site: Site, form: Form, masking: Masking, variant: Variant, attempt: Attempt) -> Chosen | None:
    """The CPU's fused attention with a mask that requires grad."""
    if not variant.padded and not known_equal(_width(site.features), _width(site.value_features)):
        return None
    made = _parts(attempt, form, variant)
    fake = fake_value(made.query)
    trained = made.mask is not None and fake_value(made.mask).requires_grad
    if fake.device.type != "cpu" or not trained or site.dropout or site.sinks:
        return None
    sizes = [hint_of(size) for size in fake.shape]
    dtype = attempt.session.computed_dtype(site)
    pays = bias_pays(tuple(sizes), hint_of(fake_value(made.key).shape[2]), dtype)
    if not pays and not _negligible(site):
        raise MatchEnded(
            site.output,
            f"the mask {made.mask} requires grad, and its gradient costs more than a fused kernel saves",
            observed=f"scores of {sizes[:3]} and {fake_value(made.key).shape[2]} keys in {dtype}",
            needed="float32 scores of 32 MiB or more on the CPU, or a mask that requires no grad",
            lever="make the added mask a constant, or run without grad",
            code="not_profitable",
        )
    kwargs: dict[str, Any] = {"scale": form.scale}
    if variant.grouped:
        kwargs["enable_gqa"] = True
    operands = (made.query, made.key, made.value, made.mask)
    fused = finish(site, form, attempt.call(ATTENTION_WITH_BIAS, operands, kwargs), made, attempt.builder)
    detail = _describe(site, form, masking, variant, "_scaled_dot_product_flash_attention_for_cpu")
    return attempt.keep(form, fused, target="omnicomp.attention_with_bias", detail=detail)


def _with_sink(site: Site, form: Form, masking: Masking, variant: Variant, attempt: Attempt) -> Chosen | None:
    """A fused attention, scaled by what the sink leaves of the weights."""
    if len(site.sinks) != 1 or site.dropout:
        raise MatchEnded(
            site.softmax.node,
            "several logits without values take part in the softmax, or dropout is active",
            needed="one sink for each head and no dropout",
        )
    made = _parts(attempt, form, variant)
    query, masked = fake_value(made.query), made.mask is not None
    trained = masked and fake_value(made.mask).requires_grad
    kernel = sink_kernel(query, fake_value(made.key), masked=masked, trained=trained, is_causal=variant.is_causal)
    if not kernel:
        return None
    if not (trained and kernel == "flash_cpu"):  # whose backward divides by the sum itself
        made = beside_sink(site, form, made, attempt.builder, attempt.session.reader)
    if kernel == "flash" and _takes_cudnn(made, variant, form.scale, training=bool(site.fake().requires_grad)):
        kernel = "cudnn"
    batch, heads, queries, _ = form.groups(site)
    sink = attempt.builder.term(site.sinks[0], (batch, heads, queries, ()), query.device)
    kwargs: dict[str, Any] = {"scale": form.scale, "kernel": kernel}
    if variant.is_causal:
        kwargs["is_causal"] = True
    if variant.grouped:
        kwargs["enable_gqa"] = True
    operands = (made.query, made.key, made.value, sink, made.mask)
    fused = finish(site, form, attempt.call(ATTENTION_WITH_SINK, operands, kwargs), made, attempt.builder)
    detail = _describe(site, form, masking, variant, kernel)
    return attempt.keep(form, fused, target="omnicomp.attention_with_sink", detail=detail)


def _takes_cudnn(made: Parts, variant: Variant, scale: float, *, training: bool) -> bool:
    """Whether cuDNN's kernel is the fastest for an attention without a mask, and takes it."""
    operands = (made.query, made.key, made.value)
    dtype = fake_value(made.query).dtype
    if not prefers_cudnn(fake_value(made.query), fake_value(made.key), dtype, training=training):
        return False
    kwargs = {"scale": scale, "is_causal": variant.is_causal, "enable_gqa": variant.grouped}
    return "cudnn" in fused_kernel(functools.partial(_try, PINNED_ATTENTION, operands, kwargs, dtype))


def _describe(site: Site, form: Form, masking: Masking, variant: Variant, kernel: str, *, tiled: bool = False) -> str:
    words = [] if site.call is not None and site.call.default_scale else [f"scale={form.scale:g}"]
    if variant.is_causal:
        words.append("is_causal")
    elif form.mask and not variant.unmasked:
        words.append(f"dense mask ({masking.name})")
    if variant.filled:
        words.append("keys up to the last one seen")
    if variant.grouped:
        words.append("enable_gqa")
    if variant.padded:
        words.append("padded head size")
    if site.sinks:
        words.append("sink")
    if site.dropout:
        words.append(f"dropout={site.dropout:g}")
    if tiled:
        words.append(f"for multiples of {TILE}")
    return "; ".join(filter(None, (", ".join(words), f"kernel {kernel}")))


def _not_profitable(site: Site, context: PassContext, errors: list[str]) -> MatchEnded:
    query, value = site.query.value.fake, site.value.value.fake
    observed, lever = f"{site.dtype}, shapes {list(query.shape)} and {list(value.shape)}", "use a dtype or head size"
    lever += " that torch's fused attention takes on this device"
    if site.dropout:
        observed, lever = f"dropout={site.dropout:g}", "set the attention's dropout to 0"
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
