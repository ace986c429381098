"""An attention as FlexAttention: for scores that go through a function, and for masks that leave out whole blocks."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp._torch.autograd.attention import SCORES_BYTES, hint_of, known_equal
from omnicomp.analysis.nodes import fake_value
from omnicomp.passes.attention.flex import FlexSpec, insert_flex, unsupported
from omnicomp.passes.attention.form import Form, number
from omnicomp.passes.attention.masking import Masking, mask_key, own_masking, seen_by_value
from omnicomp.passes.attention.operands import visible
from omnicomp.passes.attention.reader import cast
from omnicomp.passes.attention.sdpa import Variant, check_empty_rows, finish, for_each_head, parts
from omnicomp.passes.attention.session import Attempt, Chosen, Session
from omnicomp.passes.attention.site import Add, Fill, Floor, Function, MatchEnded, Scale, Site, Step, axes_in
from omnicomp.passes.attention.terms import Apply, Axis, Index, Number, Position, Read, Scores, Term, flat, leaves
from omnicomp.passes.mask_classes import BLOCK, VISITED

# Pairs of a query and a key from which a mask made of blocks is faster than one read element by element.
SPARSE_PAIRS: Final = 1024 * 1024
# The same for a bias that is computed from indices instead of being read.
_COMPUTED_PAIRS: Final = 1024 * 1024
# FlexAttention's time over that of unfused code is _FIXED, and this for the share of blocks that it visits, by the
# largest head size and whether there is a backward: in float32 and in TF32. Measured on an H200 with 2048 tokens, with
# causal masks and windows, and met within 0.1 but for windows where head sizes are 256.
_FIXED: Final = 0.25
_FOR_BLOCKS: Final = {
    (32, False): (1.0, 0.3),
    (32, True): (2.6, 0.4),
    (64, False): (1.8, 0.3),
    (64, True): (4.0, 0.7),
    (128, False): (3.7, 0.8),
    (128, True): (6.3, 1.3),
    (256, False): (9.5, 1.8),
    (256, True): (12.3, 5.2),
}
# In 16 bits it takes longer only in training with wide heads and few keys, and there only than unfused code.
_WIDE_HALF: Final = 1.7
_FEW_KEYS: Final = 8192
# A function of the scores costs it more than unfused code: with a cap in TF32 (heads of 128, training) FlexAttention
# took 1.24 times as long, and unfused code 1.12 times.
_BY_FUNCTION: Final = 1.1
# FlexAttention is taken where it takes at most so much of the time of unfused code.
_MOST_TIME: Final = 0.95


def skips_blocks(site: Site) -> bool:
    """Whether FlexAttention is faster on a site's device where it leaves out blocks."""
    return site.fake().device.type == "cuda"


def flex_pays(site: Site, form: Form, masking: Masking, session: Session) -> bool:
    """Whether FlexAttention is faster than `scaled_dot_product_attention` with a dense mask, where both can be had."""
    plain = masking.is_causal or (masking.is_full and not masking.biases)
    if not skips_blocks(site) or not form.mask or plain or site.dropout:
        return False
    if too_slow(site, masking, session):
        return False
    if masking.runs:
        return True
    pairs = count((*site.queries, *site.keys))
    if masking.biases:
        masking = own_masking(site, form, masking, session.reader)
        computed = all(isinstance(s, Add) and _computed(s.term, site, session) is not None for s in masking.biases)
        return pairs >= _COMPUTED_PAIRS and computed
    return pairs >= SPARSE_PAIRS and masking.mask is not None and masking.mask.name != "unknown"


def too_slow(site: Site, masking: Masking, session: Session) -> bool:
    """Whether FlexAttention is slower on CUDA than the attention as written, by a rule."""
    if site.fake().device.type != "cuda":
        return False
    size, training = _size(site), bool(site.fake().requires_grad)
    if site.dtype is torch.float32:
        width = next((limit for limit in (32, 64, 128) if size <= limit), 256)
        for_blocks = _FOR_BLOCKS[width, training][session.tf32]
    else:
        keys = count(site.keys)
        scores = keys * count((*site.batch, *site.queries)) * site.dtype.itemsize
        measured = session.budget.enabled and scores <= SCORES_BYTES
        if not (training and size > 128 and keys < _FEW_KEYS and measured):
            return False
        for_blocks = _WIDE_HALF
    by_function = _BY_FUNCTION if any(isinstance(step, Function) for step in site.steps or ()) else 1.0
    return (_FIXED + for_blocks * _visited(site, masking)) * by_function > _MOST_TIME


def count(axes: Iterable[Axis]) -> int:
    """How many elements there are along some axes, for the sizes seen at compile time."""
    return math.prod(hint_of(axis.size) for axis in flat(axes))


def _size(site: Site) -> int:
    return max(map(count, (site.features, site.value_features)))


def _visited(site: Site, masking: Masking) -> float:
    """The share of blocks that FlexAttention visits, at most."""
    if masking.runs:
        return VISITED
    queries, keys = map(count, (site.queries, site.keys))
    mask = masking.mask
    left, right = (None, None) if mask is None else mask.window or (None, mask.offset)
    if mask is not None and mask.bottom_right:
        right = keys - queries
    left, right = (bound if isinstance(bound, int) else keys + queries for bound in (left, right))
    columns, total = math.ceil(keys / BLOCK), 0
    for first in range(0, queries, BLOCK):
        beyond = min((first + BLOCK - 1 + right) // BLOCK + 1, columns)
        total += max(beyond - max((first - left) // BLOCK, 0), 0)
    return total / max(math.ceil(queries / BLOCK) * columns, 1)


def _computed(term: Term, site: Site, session: Session) -> Term | None:
    """A bias as arithmetic of what the graph holds, or None.

    Nothing is read that differs between queries and keys at once, and nothing is trained.
    """
    found = visible(session.reader.expand(term), session.trace, session.reader, site.output)
    for leaf in leaves(found) if found is not None else ():
        if isinstance(leaf, Read):
            axes = axes_in(leaf)
            node = session.trace.holder(leaf.value, site.output)
            trained = node is not None and fake_value(node).requires_grad
            if trained or (axes & set(flat(site.queries)) and axes & set(flat(site.keys))):
                return None
    return found


def insert(site: Site, form: Form, masking: Masking, attempt: Attempt) -> Chosen | None:
    """Insert FlexAttention for a site.

    Raises:
        MatchEnded: it can't say this attention.
    """
    session = attempt.session
    if too_slow(site, masking, session):
        raise MatchEnded(
            site.output,
            "FlexAttention's kernels are slower for this dtype and head size than the attention as it is written",
            observed=f"{site.dtype}, head size {_size(site)}, {_visited(site, masking):.0%} of the blocks visited",
            needed="16-bit operands, TF32, narrower heads, or a mask that leaves out more",
            lever="torch.set_float32_matmul_precision('high'), or options={'dtype_policy': 'bf16'}"
            if site.dtype is torch.float32
            else "options={'attention_seconds': 0} takes FlexAttention, which needs less memory",
            code="not_profitable",
        )
    masking = own_masking(site, form, masking, session.reader)
    bare = Form(scale=form.scale, factors=form.factors, mask=[], batch=form.batch, heads=form.heads, shared=form.shared)
    made = parts(site, bare, Variant(grouped=bool(form.shared)), attempt.builder, session.reader, session.shared)
    batch, heads, queries, keys = form.groups(site)
    training = bool(site.fake().requires_grad)
    if masking.runs:
        masking, keep = dataclasses.replace(masking, biases=()), _between(site, form, masking, attempt)
    elif masking.keep is None or masking.is_full:
        keep = None
    else:
        keep = visible(masking.keep, session.trace, session.reader, site.output)
    score = _score(site, form, masking, session)
    score = None if score is None else visible(score, session.trace, session.reader, site.output)
    rows = masking.mask is None or masking.is_full or masking.mask.rows_nonempty or masking.nonempty
    rows = rows or _empty_rows_are_zero(site, form)
    # The kernels of torch disagree about rows of a call in which a number hides every key.
    average = masking.finite and site.call is None
    if (masking.keep is not None and keep is None and not masking.is_full) or (not rows and not average):
        raise _ended(site, "the mask is not a function that FlexAttention can call", masking.name)
    if not rows and training and session.empty_row_gradients:
        raise _ended(site, "FlexAttention passes no gradients on in rows in which no key is left", masking.name)
    hidden = keep
    if keep is not None and site.fake().device.type == "cpu":
        # Inductor folds constant blocks away, and its C++ template then misses them (torch 2.13).
        score = score if score is not None else Scores(dtype=torch.float32)
        lowest = Number(dtype=torch.float32, value=-math.inf)
        score, keep = Apply(dtype=torch.float32, op="where", args=(keep, score, lowest)), None
    spec = FlexSpec(
        tf32=session.tf32,
        query=made.query,
        key=made.key,
        value=made.value,
        scale=form.scale,
        score=score,
        keep=keep,
        batch=flat(batch),
        heads=flat(heads),
        query_axes=flat(queries),
        key_axes=flat(keys),
        leaf=lambda value: value if isinstance(value, Node) else attempt.holder(value),
        training=training,
    )
    why = unsupported(spec, dropout=site.dropout)
    if why is not None:
        raise _ended(site, why, masking.name or "no mask")
    fused, _ = insert_flex(session.module, site.output, spec, session.blocks)
    if not rows and hidden is not None:
        check_empty_rows(site, form, session.reader)
        fused = _average_empty_rows(site, form, made.value, hidden, fused, attempt)
    fused = finish(site, form, fused, made, attempt.builder)
    words = [f"scale={form.scale:g}"]
    if score is not None:
        words.append("score: " + ", ".join(_words(site, form, masking)))
    if hidden is not None:
        name = "short runs of keys" if masking.runs else masking.mask.name if masking.mask else ""
        words.append(f"{'mask' if keep is None else 'block mask'} ({name})")
    return attempt.keep(form, fused, target="flex_attention", detail=", ".join(words))


def _between(site: Site, form: Form, masking: Masking, attempt: Attempt) -> Term | None:
    """A mask that is a run of keys for each query: between the first and the last one, which are found in the graph.

    Two numbers for each query take the place of one for each pair, and blocks have bounds by them (`flex_blocks`).
    """
    session, call, groups = attempt.session, attempt.call, form.groups(site)
    name = ("runs", mask_key(site, form))
    if name not in session.shared:
        term = visible(seen_by_value(masking), session.trace, session.reader, site.output)
        if term is None:
            return None
        device = site.fake().device
        seen = attempt.builder.term(term, groups, device)
        size = attempt.builder.size(groups[3])
        place = call(torch.arange, (size,), {"dtype": torch.int32, "device": device})
        ends = ((torch.amin, size), (torch.amax, -1))
        session.shared[name] = tuple(
            call(function, (call(torch.where, (seen, place, beyond)),), {"dim": -1}) for function, beyond in ends
        )
    first, last = session.shared[name]
    shape = fake_value(first).shape
    at = tuple(Position(() if known_equal(n, 1) else flat(g)) for n, g in zip(shape, groups[:3], strict=True))
    key = Index(dtype=torch.int64, position=Position(flat(groups[3])))
    found = [
        Apply(dtype=torch.bool, op=op, args=(key, Read(dtype=torch.int32, value=node, at=at)))
        for op, node in (("ge", first), ("le", last))
    ]
    return Apply(dtype=torch.bool, op="and", args=tuple(found))


def _empty_rows_are_zero(site: Site, form: Form) -> bool:
    """Whether a row in which no key is left is zero for the program, as it is in FlexAttention."""
    filled = all(isinstance(step, Fill) and number(step.value) == -math.inf for step in form.mask)
    return filled and site.undefined == 0.0


def _ended(site: Site, sentence: str, observed: str) -> MatchEnded:
    return MatchEnded(
        site.softmax.node,
        sentence,
        observed=observed,
        needed="FlexAttention on this device",
        lever="use scale, mask and bias only",
        code="not_profitable",
    )


def _score(site: Site, form: Form, masking: Masking, session: Session) -> Term | None:
    """What goes into the softmax, without the steps that only hide keys; None if that is the scaled product."""
    if site.steps is None:
        return site.score
    steps = (*form.inner, *masking.biases)
    total: Term = Scores(dtype=torch.float32)
    for step in steps:
        if isinstance(step, Add) and (computed := _computed(step.term, site, session)) is not None:
            step = dataclasses.replace(step, term=computed)
        total = _stepped(total, step)
    return total if steps else None


def _stepped(term: Term, step: Step) -> Term:
    """One step, in float32 as the kernel holds the scores."""
    made = functools.partial(Apply, dtype=torch.float32)
    if isinstance(step, Add):
        return made(op="sub" if step.negative else "add", args=(term, cast(step.term, torch.float32)))
    if isinstance(step, Scale):
        return made(op="div" if step.divide else "mul", args=(term, cast(step.term, torch.float32)))
    if isinstance(step, Fill):
        return made(op="where", args=(step.condition, cast(step.value, torch.float32), term))
    if isinstance(step, Floor):
        return made(op="maximum", args=(term, Number(dtype=torch.float32, value=step.value)))
    return made(op=step.op, args=(term,))


def _words(site: Site, form: Form, masking: Masking) -> list[str]:
    if site.steps is None:
        return ["arithmetic of elements"]
    names = {Add: "bias", Fill: "fill", Floor: "clamp", Scale: "scale"}
    steps = (*form.inner, *masking.biases)
    found = [step.op if isinstance(step, Function) else names[type(step)] for step in steps]
    return list(dict.fromkeys(found))


def _average_empty_rows(site: Site, form: Form, value: Any, keep: Term, fused: Any, attempt: Attempt) -> Any:
    """Rows without a key share equally in eager, where one finite minimum swallows all scores, and are zero here."""
    groups, call = form.groups(site), attempt.call
    made = attempt.builder.term(keep, groups, fake_value(fused).device)
    empty = call(torch.logical_not, (call(torch.any, (made,), {"dim": -1, "keepdim": True}),))
    mean = call(torch.mean, (value,), {"dim": -2, "keepdim": True})
    if form.shared:
        mean = for_each_head(mean, form, attempt.builder)
    return call(torch.where, (empty, mean, fused))
