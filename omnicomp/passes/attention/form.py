"""The arguments of a fused kernel for the scores: a scale, and a mask that is added to them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from omnicomp.passes.attention.candidates import PRODUCTS
from omnicomp.passes.attention.piecewise import additive
from omnicomp.passes.attention.reader import Reader
from omnicomp.passes.attention.site import Add, Fill, Floor, MatchEnded, Narrow, Scale, Site, Step, axes_in
from omnicomp.passes.attention.structure import term_key
from omnicomp.passes.attention.terms import Apply, Axis, Index, Number, Read, Term, flat
from omnicomp.passes.attention.trace import Value
from omnicomp.passes.attention.views import VIEWS

# A number below this swallows, when it is added, scores of any usual size.
SWALLOWS: Final = -1e8
# No bias that a program reads from memory is taken to lift a number below this.
BEYOND_LIFT: Final = -1e30
LEAST_IN_HALF: Final = torch.finfo(torch.float16).min
# A bias that reaches below this is a mask.
_MASKS: Final = -1e3
# A score that is so far below another one has a weight of 0, also in double precision.
NO_WEIGHT: Final = 1000.0
# Trained parameters are taken to be small: added to the most negative number of any dtype, they do not overflow.
_TRAINED: Final = 8.0
# Where the question is only whether a product may be -inf.
_PRODUCT: Final = 2.0**14
# Operators that take elements of their first operand.
_PICKS: Final = ("gather", "index", "index_select")
# Queries and keys are fewer.
_POSITIONS: Final = 2.0**24
# What may make any number of small parameters.
_UNBOUNDED: Final = "log full div masked_fill where full_like arange autograd_function_apply".split()
_Range = tuple[float, float]
_UNKNOWN: Final[_Range] = (-math.inf, math.inf)


@dataclasses.dataclass(kw_only=True)
class Form:
    """Scores as `scale * factors * (q . k) + mask`."""

    scale: float  # a number
    factors: list[Scale]  # other factors, which depend on batch axes only
    mask: list[Step]  # the steps that make the mask from zero, in order
    batch: tuple[Axis, ...]  # the axes of batches and heads; those that keys and values lack come last
    heads: int  # how many of the last axes of `Site.batch`, as ordered in `batch`, are heads
    shared: tuple[Axis, ...]  # the axes that keys and values lack: grouped heads
    inner: tuple[Step, ...] = ()  # steps on the scaled scores before the mask, which only FlexAttention can take

    def groups(self, site: Site) -> tuple[tuple[Axis, ...], ...]:
        """The axes of the four dimensions of the scores: batch, heads, queries, keys."""
        cut = len(self.batch) - self.heads
        return self.batch[:cut], self.batch[cut:], site.queries, site.keys


def number(term: Term) -> float | None:
    """The number that a term is everywhere, behind casts that keep it."""
    while isinstance(term, Apply) and term.op == "cast":
        term = term.args[0]
    if isinstance(term, Number) and isinstance(term.value, int | float):
        return float(term.value)
    return None


def dense_form(site: Site, reader: Reader) -> Form:
    """Read the steps as a scale and a mask.

    Args:
        site: the attention.
        reader: of the trace that the site was found in.

    Raises:
        MatchEnded: they are something else.
    """
    if site.steps is None:
        raise _ended(site, "the scores are used twice before the softmax", "one use")
    scale, factors, mask = site.scale, list(site.factors), list[Step]()
    queries_and_keys = {*flat(site.queries), *flat(site.keys)}
    steps = _narrowed(site, site.steps, reader)
    for number_of_step, step in enumerate(steps):
        if isinstance(step, Scale):
            constant = number(step.term)
            if constant is not None:
                if not math.isfinite(constant) or constant == 0:
                    raise _ended(site, "the scale is not a finite number other than zero", "a finite scale")
                scale = scale / constant if step.divide else scale * constant
            elif axes_in(step.term) & queries_and_keys:
                raise _ended(
                    site,
                    "the scores are multiplied by a tensor that differs between queries or keys",
                    "one value for each head",
                    lever="if it is a mask, write scores.masked_fill(~mask, torch.finfo(scores.dtype).min) in "
                    "the place of the product; if it is none, multiply the queries by it, or the keys",
                )
            else:
                factors.append(step)
            _scale_mask(mask, step)
        elif isinstance(step, Fill):
            value = number(step.value)
            if value is None or not _absorbs(value, step.value.dtype):
                raise MatchEnded(
                    site.softmax.node,
                    "the filled value does not absorb every score, therefore adding it is not the same as filling",
                    observed="a fill that is no number" if value is None else f"fill={value:g}",
                    needed="torch.finfo(scores.dtype).min, or -inf",
                    lever="fill with torch.finfo(scores.dtype).min",
                    code="not_equal",
                )
            _check_hidden(site, value, steps[number_of_step + 1 :], reader)
            mask.append(step)
        elif isinstance(step, Floor):
            if not _absorbs(step.value, torch.float32):
                raise _ended(
                    site, "the scores are clamped", "a bound that no score reaches", f"clamp(min={step.value})"
                )
            if mask:  # scores alone do not reach the bound
                mask.append(step)
        elif isinstance(step, Add):
            _check_hidden(site, least_added(step, reader, _MASKS), steps[number_of_step + 1 :], reader, added=True)
            mask.append(step)
        else:
            raise _ended(
                site,
                f"the scores go through {step.op}, which scaled_dot_product_attention does not know",
                "scale, mask and bias, or FlexAttention on this device",
                step.op,
                lever=f"leave {'the soft cap' if step.op == 'tanh' else step.op} out, or run it where FlexAttention "
                "does: with 128 keys or more, on CUDA or for inference on a CPU",
            )
    # The softmax does not see what is the same for all keys, unless it hides them all. A parameter that is added keeps
    # its gradient of zeros.
    while mask and isinstance(last := mask[-1], Add) and not axes_in(last.term) & set(flat(site.keys)):
        maximum = _is_maximum(last.term)
        if site.sinks or not (maximum or (_hides_nothing(last.term, reader) and not site.fake().requires_grad)):
            break
        mask.pop()
    batch, shared = _ordered(site)
    form = Form(scale=scale, factors=factors, mask=mask, batch=batch, heads=0, shared=shared)
    form.heads = _heads(site, form)
    return form


def positive_scale(form: Form, dtype: torch.dtype) -> Form:
    """The form with a scale that is positive in float32; the rest is a factor.

    The kernels multiply the -inf of what `is_causal` hides by the scale (torch 2.13 on the CPU:
    `scaled_dot_product_attention(q, k, v, is_causal=True, scale=-1.0)` is NaN).
    """
    scale, factors = abs(form.scale), list(form.factors)
    if form.scale < 0:
        factors.append(Scale(Number(dtype=dtype, value=-1.0)))
    if scale < torch.finfo(torch.float32).tiny:
        factors.append(Scale(Number(dtype=dtype, value=scale)))
        scale = 1.0
    return dataclasses.replace(form, scale=scale, factors=factors)


def _narrowed(site: Site, steps: Sequence[Step | Narrow], reader: Reader) -> list[Step]:
    """The steps with each cast to a smaller range carried out in what was filled or added before it."""
    made: list[Step] = []
    for step in _without_gates(site, steps, reader):
        if isinstance(step, Narrow):
            made = [_overflowed(site, before, step.least, reader) for before in made]
        else:
            made.append(step)
    return made


def _without_gates(site: Site, steps: Sequence[Step | Narrow], reader: Reader) -> list[Step | Narrow]:
    """The steps with `scores * mask - 1e9 * (1 - mask)`, of a mask of ones and zeros, as the fill that it is."""
    made: list[Step | Narrow] = []
    for step in steps:
        fill = _closed(site, made[-1], step, reader) if made else None
        if fill is not None:
            made.pop()
        made.append(fill or step)
    return made


def _closed(site: Site, gate: Step | Narrow, step: Step | Narrow, reader: Reader) -> Fill | None:
    """The fill that a product with one or zero and an addition where it is zero make; None if they make none."""
    if not isinstance(gate, Scale) or not isinstance(step, Add) or not step.term.dtype.is_floating_point:
        return None
    if gate.divide or not axes_in(gate.term) & set(flat(site.keys)):
        return None
    named = {"batch": flat(site.batch), "heads": (), "query": flat(site.queries), "key": flat(site.keys)}
    opened = additive(reader.expand(gate.term), **named)
    added = additive(reader.expand(step.term), **named)
    if opened is None or added is None or added.sentinel is None or set(opened.values) != {0.0, 1.0}:
        return None
    hidden = -added.sentinel if step.negative else added.sentinel
    shown = opened.where(lambda value: value == 1)
    if not _absorbs(hidden, step.term.dtype) or term_key(shown, **named) != term_key(added.keep(), **named):
        return None
    return Fill(Apply(dtype=torch.bool, op="not", args=(shown,)), Number(dtype=step.term.dtype, value=hidden))


def _overflowed(site: Site, step: Step, least: float, reader: Reader) -> Step:
    if isinstance(step, Fill):
        value = number(step.value)
        low = value is not None and value < least
        return Fill(step.condition, Number(dtype=step.value.dtype, value=-math.inf)) if low else step
    if not isinstance(step, Add) or not axes_in(step.term) & set(flat(site.keys)):
        return step
    term, dtype = step.term, step.term.dtype
    bound, far = (-least, math.inf) if step.negative else (least, -math.inf)
    low, high = _range(term, reader, {})
    if not dtype.is_floating_point or torch.finfo(dtype).min >= least or (-high if step.negative else low) >= least:
        return step
    beyond = Apply(dtype=torch.bool, op="gt" if step.negative else "lt", args=(term, Number(dtype=dtype, value=bound)))
    return Add(Apply(dtype=dtype, op="where", args=(beyond, Number(dtype=dtype, value=far), term)), step.negative)


def least_added(step: Add, reader: Reader, bound: float = SWALLOWS) -> float:
    """The least number that a step is known to add, if it is no greater than the bound; else 0."""
    low, high = _range(step.term, reader, {})
    least = -high if step.negative else low
    return least if -math.inf < least <= bound else 0.0


def greatest_added(step: Add, reader: Reader) -> float:
    """The greatest number that a step may add."""
    low, high = _range(step.term, reader, {})
    return -low if step.negative else high


def _check_hidden(site: Site, value: float, later: Sequence[Step], reader: Reader, *, added: bool = False) -> None:
    """Check that a score to which such a number was filled in, or added, has no weight after the steps that follow.

    Raises:
        MatchEnded: it may have, and would be another than in eager.
    """
    if value == 0 or _stays_hidden(site, value, later, reader, added=added):
        return
    raise MatchEnded(
        site.softmax.node,
        "the scores are changed after the mask in a way that may bring back what it hides, or that is not known",
        observed=f"{'added' if added else 'fill'}={value:g}, then {', '.join(type(s).__name__.lower() for s in later)}",
        needed="a mask after the scale and the bias, or -inf",
        lever="apply the mask last, with torch.finfo(scores.dtype).min or -inf",
        code="not_equal",
    )


def _stays_hidden(site: Site, value: float, later: Sequence[Step], reader: Reader, *, added: bool = False) -> bool:
    lift, absorbed = 0.0, value
    beyond_lift = value <= (LEAST_IN_HALF if site.dtype == torch.float16 else BEYOND_LIFT)
    for step in later:
        if isinstance(step, Scale):
            constant = number(step.term)
            if constant is None:
                if not added and not _is_positive(step.term, reader):
                    return False
                continue  # a sum that is scaled stays the same sum
            if not constant > 0:
                return False
            factor = 1 / constant if step.divide else constant
            absorbed, lift = absorbed * factor, lift * factor
        elif isinstance(step, Add) and axes_in(step.term) & set(flat(site.keys)):
            low, high = _range(step.term, reader, {})
            most = -low if step.negative else high
            if math.isfinite(most):
                lift += max(most, 0.0)
            elif not added and not beyond_lift:
                return False
        elif isinstance(step, Floor):
            absorbed = max(absorbed, step.value)
    return (added or absorbed <= -NO_WEIGHT) and lift <= -absorbed / 2


def _is_positive(term: Term, reader: Reader) -> bool:
    while isinstance(term, Apply) and term.op == "cast":
        term = term.args[0]
    if isinstance(term, Read):
        inner = reader.define(term)
        return inner is not None and _is_positive(inner, reader)
    if isinstance(term, Number):
        return isinstance(term.value, int | float) and term.value > 0
    if not isinstance(term, Apply):
        return False
    if term.op in ("exp", "sigmoid", "softplus"):
        return True
    if term.op in ("sqrt", "rsqrt", "reciprocal", "mul", "div", "add", "minimum"):
        return all(_is_positive(a, reader) for a in term.args)
    return term.op == "maximum" and any(_is_positive(a, reader) for a in term.args)


def _scale_mask(mask: list[Step], scale: Scale) -> None:
    """Scale what was added so far. What was filled stays filled: scaled down, it might not absorb scores any more."""
    constant = number(scale.term)
    fills: list[Step] = []
    if constant is not None and constant > 0:
        factor = 1 / constant if scale.divide else constant
        while mask and isinstance(last := mask[-1], Fill):
            fills.insert(0, _scaled_fill(last, factor))
            mask.pop()
    if mask:
        mask.append(scale)
    mask.extend(fills)


def _scaled_fill(fill: Fill, factor: float) -> Fill:
    value, dtype = number(fill.value), fill.value.dtype
    if value is None or factor <= 1:
        return fill
    overflows = value * factor < torch.finfo(dtype).min
    return Fill(fill.condition, Number(dtype=dtype, value=-math.inf if overflows else value * factor))


def open_form(site: Site, reader: Reader) -> Form:
    """The form of scores that are not read as scale and mask: other steps, and the mask that comes after them."""
    batch, shared = _ordered(site)
    steps = _narrowed(site, site.steps or (), reader)
    cut = len(steps)
    while cut and _is_mask(site, steps[cut - 1], steps[cut:], reader):
        cut -= 1
    form = Form(
        scale=site.scale,
        factors=list(site.factors),
        mask=steps[cut:],
        batch=batch,
        heads=0,
        shared=shared,
        inner=tuple(steps[:cut]),
    )
    form.heads = _heads(site, form)
    return form


def _is_mask(site: Site, step: Step, later: Sequence[Step], reader: Reader) -> bool:
    if isinstance(step, Fill):
        value = number(step.value)
        if value is None or not _absorbs(value, step.value.dtype):
            return False
        return _stays_hidden(site, value, later, reader)
    return isinstance(step, Add) and _stays_hidden(site, least_added(step, reader, _MASKS), later, reader, added=True)


def _ended(site: Site, sentence: str, needed: str, observed: str = "", lever: str = "") -> MatchEnded:
    observed = observed or "arithmetic on the scores"
    return MatchEnded(site.softmax.node, sentence, needed=needed, observed=observed, lever=lever)


def _is_maximum(term: Term) -> bool:
    """Whether a term is a usual number, or a row's maximum, which nothing is trained through."""
    value = number(term)
    if value is not None:
        return math.isfinite(value) and not _absorbs(-abs(value), term.dtype)
    while isinstance(term, Apply) and term.op == "cast":
        term = term.args[0]
    if isinstance(term, Read) and term.value.op is not None:
        return term.value.op.name in ("amax", "max", "logsumexp", "detach")
    return False


def _hides_nothing(term: Term, reader: Reader) -> bool:
    """Whether a term is known to be so small a number everywhere that it swallows no score."""
    low, high = _range(term, reader, {})
    return not _absorbs(min(low, -high), term.dtype)


def _absorbs(value: float, dtype: torch.dtype) -> bool:
    return value <= (torch.finfo(dtype).min if dtype == torch.float16 else SWALLOWS)


def _ordered(site: Site) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    held = {axis for o in (site.key, site.value) for position in o.at for axis in position.flat()}
    batch = flat(site.batch)
    shared = tuple(axis for axis in batch if axis not in held)
    return (*(axis for axis in batch if axis in held), *shared), shared


def _heads(site: Site, form: Form) -> int:
    """Where to part batches from heads: where the mask need not be expanded for a part of either."""
    batch, least = form.batch, len(form.shared)
    own = len(batch) - least
    if own <= 1:
        # A single axis besides shared heads: heads, so that a mask for each has its dimension, unless the queries
        # have it in front of other dimensions.
        at = site.query.at
        in_front = own == 1 and len(at) >= 4 and batch[0] in at[0].flat()
        return least if in_front else len(batch)
    usual = least + 1
    used = {axis for step in form.mask for axis in _axes(step)}
    best, cost = usual, _expansion(batch, usual, used)
    for heads in range(least, len(batch) + 1):
        if (other := _expansion(batch, heads, used)) < cost:
            best, cost = heads, other
    return best


def _axes(step: Step) -> set[Axis]:
    if isinstance(step, Fill):
        return axes_in(step.condition)
    return axes_in(step.term) if isinstance(step, Add | Scale) else set()


def _expansion(batch: tuple[Axis, ...], heads: int, used: set[Axis]) -> int:
    """By how much the mask must be copied."""
    cut = len(batch) - heads
    copies = 1
    for group in (batch[:cut], batch[cut:]):
        if any(axis in used for axis in group):
            for axis in group:
                copies *= 1 if axis in used else axis.size if isinstance(axis.size, int) else 16
    return copies


def is_finite(term: Term, reader: Reader) -> bool:
    """Whether a mask is known to hold no -inf.

    It is made of numbers that are not, of trained parameters, of tables that parameters are, or of products of tensors,
    such as relative positions.
    """
    return all(map(math.isfinite, _range(term, reader, {}, product=_PRODUCT)))


def _range(term: Term, reader: Reader, memo: dict[int, tuple[Term, _Range]], product: float = math.inf) -> _Range:
    """The least and the greatest number that an element may be; infinite where the dtype may overflow.

    Args:
        term: the number.
        reader: reads what a tensor holds.
        memo: what was found for parts of it.
        product: the greatest that a product of two tensors is taken to be.
    """
    if id(term) not in memo:
        low, high = _range_of(term, reader, memo, product)
        if term.dtype.is_floating_point and max(-low, high) > torch.finfo(term.dtype).max:
            low, high = _UNKNOWN
        memo[id(term)] = term, (low, high)  # the term, so that its id stays its own
    return memo[id(term)][1]


def _range_of(term: Term, reader: Reader, memo: dict[int, tuple[Term, _Range]], product: float) -> _Range:
    if term.dtype == torch.bool:
        return 0.0, 1.0
    if isinstance(term, Number):
        value = float(term.value) if isinstance(term.value, int | float) else math.nan
        return _UNKNOWN if math.isnan(value) else (value, value)
    if isinstance(term, Read):
        if _only_parameters(term.value, set(), trained=True):
            return -_TRAINED, _TRAINED
        inner = reader.define(term)
        if inner is None:
            # A parameter without gradient may be a mask, but not what was looked up in it or multiplied with it.
            if term.value.op is not None and _only_parameters(term.value, set(), trained=False):
                return -_TRAINED, _TRAINED
            return (-product, product) if _is_product(term.value) else _UNKNOWN
        return _range(inner, reader, memo, product)
    if isinstance(term, Index):
        return -_POSITIONS, _POSITIONS
    if not isinstance(term, Apply):
        return _UNKNOWN
    if term.op in ("tanh", "sin", "cos", "sigmoid"):
        return -1.0, 1.0
    operands = [_range(a, reader, memo, product) for a in term.args[term.op == "where" :]]
    (low, high), (other_low, other_high) = operands[0], operands[-1]
    if term.op == "add":
        return low + other_low, high + other_high
    if term.op == "sub":
        return low - other_high, high - other_low
    if term.op in ("where", "maximum", "minimum", "cast"):
        return min(low, other_low), max(high, other_high)
    if term.op in ("neg", "abs", "relu"):
        most = max(-low, high)
        return -most, most
    if term.op == "mul" and all(map(math.isfinite, (low, high, other_low, other_high))):
        products = [a * b for a in (low, high) for b in (other_low, other_high)]
        return min(products), max(products)
    return _UNKNOWN


def _is_product(value: Value) -> bool:
    """Whether a tensor is a product of two, or elements of one."""
    while value.op is not None and (value.op.name in _PICKS or value.op.name in VIEWS):
        value = next(value.op.inputs)
    return value.op is not None and value.op.name in PRODUCTS


def _only_parameters(value: Value, seen: set[Any], *, trained: bool) -> bool:
    """Whether a float tensor comes from parameters alone, from `trained` ones if asked, through any operators."""
    if value in seen or not value.fake.dtype.is_floating_point:
        return True
    seen.add(value)
    if len(seen) > 200:
        return False
    if value.op is None:
        fakes: Any = [node.meta.get("example_value") for node in value.holders[:1]]
        return bool(fakes) and isinstance(fakes[0], torch.nn.Parameter) and (fakes[0].requires_grad or not trained)
    if value.op.name in _UNBOUNDED:
        return False
    return any(v.fake.dtype.is_floating_point for v in value.op.inputs) and all(
        _only_parameters(v, seen, trained=trained) for v in value.op.inputs
    )
