"""Rewrites of attention and its like, right ones and wrong ones, over finite fields."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import python
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from omnicomp.analysis import certify
from omnicomp.analysis.certify import Assumption, Certificate, check

Function = Callable[..., Any]


def graph(function: Function, inputs: Sequence[torch.Tensor]) -> GraphModule:
    """The graph of a function before autograd, with all that it makes."""
    mode = FakeTensorMode()
    with torch.no_grad(), mode:
        return make_fx(function, pre_dispatch=True)(*[mode.from_tensor(each, static_shapes=True) for each in inputs])


def compared(
    before: Function, after: Function, *inputs: torch.Tensor, assume: Sequence[Assumption] = ()
) -> Certificate:
    """The certificate of a rewrite of one function to another."""
    return check(graph(before, inputs), graph(after, inputs), assumptions=assume)


HEADS = [torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5, 8)]
SCALE = 1 / math.sqrt(8)
INF = float("inf")


def eager(q: Any, k: Any, v: Any) -> Any:
    """Attention as it is written by hand."""
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8), -1) @ v


def causal(q: Any, k: Any, v: Any) -> Any:
    """The same with a causal mask of minus infinity."""
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    return torch.softmax((q @ k.transpose(-1, -2) * SCALE).masked_fill(~seen, -INF), -1) @ v


def shifted(q: Any, k: Any, v: Any) -> Any:
    """With the maximum subtracted, and the division after the product."""
    scores = q @ k.transpose(-1, -2) * SCALE
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e @ v) / e.sum(-1, keepdim=True)


def scores(q: Any, k: Any) -> Any:
    """Scaled products."""
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def bottom_right(q: Any, k: Any, v: Any) -> Any:
    """Causal, with the last query at the last key."""
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
    return torch.softmax(scores(q, k).masked_fill(~seen, -INF), -1) @ v


def window(width: int, *, first: int = 0, grouped: bool = True) -> Function:
    """Attention to a number of keys that end `first` keys before the query."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        ago = torch.arange(2048)[:, None] - torch.arange(2048)[None]
        if not grouped:
            k, v = k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(ago >= first) & (ago < width), enable_gqa=grouped)

    return attend


def grouped_window(q: Any, k: Any, v: Any) -> Any:
    """The same as transformers spells it, in a large size."""
    k, v = (x[:, :, None].expand(2, 8, 4, 2048, 128).reshape(2, 32, 2048, 128) for x in (k, v))
    ago = torch.arange(2048)[:, None] - torch.arange(2048)[None]
    weights = torch.softmax(scores(q, k).masked_fill((ago < 0) | (ago >= 512), -INF).float(), -1)
    return weights.to(q.dtype) @ v


def filled(times: float) -> Function:
    """A fill of -1e9, and a factor behind it."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return torch.softmax(scores(q, k).masked_fill(hidden, -1e9) * times, -1) @ v

    return attend


def written(first: int, second: int) -> Function:
    """Two writes to one row."""

    def write(x: Any, y: Any) -> Any:
        x = x.clone()
        x[0] = y[first]
        x[0] = y[second]
        return x

    return write


def online(q: Any, k: Any, v: Any) -> Any:
    """Two blocks of keys, whose sums are added."""
    parts = [(torch.exp(scores(q, k[:, :, keys])), v[:, :, keys]) for keys in (slice(2), slice(2, None))]
    return sum(e @ x for e, x in parts) / sum(e.sum(-1, keepdim=True) for e, _ in parts)


def powers_of_two(q: Any, k: Any, v: Any) -> Any:
    """A softmax of powers of two."""
    e = torch.exp2(q @ k.mT * (SCALE * math.log2(math.e)))
    return (e @ v) / e.sum(-1, keepdim=True)


def zeros_for_hidden(q: Any, k: Any, v: Any) -> Any:
    """A mask whose fill does not hide."""
    return torch.softmax(scores(q, k).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), 0.0), -1) @ v


def sdpa(**options: Any) -> Function:
    """torch's own attention."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def stacked(attend: Function) -> Function:
    """Two layers of attention."""
    return lambda q, k, v: attend(attend(q, k, v), k, v)


LONGER = [HEADS[0], torch.zeros(2, 4, 7, 8), torch.zeros(2, 4, 7, 8)]
GROUPED = [HEADS[0], torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8)]
LARGE = [torch.zeros(2, 32, 1, 128).expand(2, 32, 2048, 128), *2 * [torch.zeros(2, 8, 1, 128).expand(2, 8, 2048, 128)]]
SQUARE = [torch.zeros(6, 6), torch.zeros(6, 6)]
HALF = [torch.zeros(6, 6, dtype=torch.bfloat16)]
BYTES = [torch.zeros(3, 64).bfloat16(), torch.zeros(16, 64, dtype=torch.int8), torch.zeros(16).bfloat16()]

RIGHT: list[tuple[str, Function, Function, list[torch.Tensor]]] = [
    ("sdpa", eager, sdpa(), HEADS),
    ("shift", eager, shifted, HEADS),
    ("scale in q", eager, lambda q, k, v: torch.softmax((q * SCALE) @ k.mT, -1) @ v, HEADS),
    ("root of the scale", eager, lambda q, k, v: torch.softmax((q * SCALE**0.5) @ (k * SCALE**0.5).mT, -1) @ v, HEADS),
    ("powers of two", eager, powers_of_two, HEADS),
    ("blocks of keys", eager, online, HEADS),
    ("two layers", stacked(eager), stacked(shifted), HEADS),
    ("causal", causal, sdpa(is_causal=True), HEADS),
    ("window of grouped heads", grouped_window, window(512), LARGE),
    ("dropout", lambda q, k, v: F.dropout(scores(q, k).softmax(-1), 0.1) @ v, sdpa(dropout_p=0.1), HEADS),
    ("a - b + b", lambda a, b, c: a * c, lambda a, b, c: (a - b + b) * c, HEADS),
    ("softmax", lambda a, b, c: a.exp() / a.exp().sum(-1, keepdim=True), lambda a, b, c: a.softmax(-1), HEADS),
    ("reassociated", lambda a, b, c: (a @ b.mT) @ c, lambda a, b, c: a @ (b.mT @ c), HEADS),
    ("log-sum-exp", lambda a, b, c: (a - a.logsumexp(-1, True)).exp(), lambda a, b, c: a.softmax(-1), HEADS),
    (
        "norm",
        lambda x, y: F.rms_norm(x, (6,), None, 1e-6),
        lambda x, y: x / (x.pow(2).mean(-1, True) + 1e-6) ** 0.5,
        SQUARE,
    ),
    (
        "merged projections",
        lambda x, a, b: (x @ a.t(), x @ b.t()),
        lambda x, a, b: torch.tensor_split(x @ torch.cat([a, b]).t(), [3], -1),
        [torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(5, 4)],
    ),
    (
        "scale of whole numbers",
        lambda x, w, s: F.linear(x, w.to(x.dtype) * s[:, None]),
        lambda x, w, s: F.linear(x, w.to(x.dtype)) * s,
        BYTES,
    ),
]

WRONG: list[tuple[str, Function, Function, list[torch.Tensor]]] = [
    ("forgotten scale", eager, sdpa(scale=1.0), HEADS),
    ("forgotten mask", causal, sdpa(), HEADS),
    ("mask too many", eager, sdpa(is_causal=True), HEADS),
    ("alignment", bottom_right, sdpa(is_causal=True), LONGER),
    ("narrow window", grouped_window, window(511), LARGE),
    ("late window", grouped_window, window(512, first=1), LARGE),
    ("tiled heads", grouped_window, window(512, grouped=False), LARGE),
    ("grouping", lambda q, k, v: eager(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)), sdpa(enable_gqa=True), GROUPED),
    ("fill of zero", zeros_for_hidden, sdpa(is_causal=True), HEADS),
    ("mask behind", lambda q, k, v: scores(q, k).softmax(-1).tril() @ v, sdpa(is_causal=True), HEADS),
    ("lost dropout", lambda q, k, v: F.dropout(scores(q, k).softmax(-1), 0.1) @ v, sdpa(), HEADS),
    ("rarer dropout", lambda q, k, v: F.dropout(scores(q, k).softmax(-1), 0.1) @ v, sdpa(dropout_p=0.2), HEADS),
    ("operands", eager, lambda q, k, v: F.scaled_dot_product_attention(k, q, v), HEADS),
    ("difference", lambda a, b, c: a - b, lambda a, b, c: b - a, HEADS),
    ("dimension", lambda a, b: a.softmax(-1) @ b, lambda a, b: a.softmax(-2) @ b, SQUARE),
    ("transposed", lambda a, b: a @ b, lambda a, b: a @ b.t(), SQUARE),
    ("order of writes", written(0, 1), written(1, 0), SQUARE),
    ("lost write", lambda a, b: a.add_(b) * 2, lambda a, b: (a + b) * 2, SQUARE),
    ("constant", lambda a, b, c: a + 1e-5, lambda a, b, c: a + 1e-6, HEADS),
    ("ties", lambda a, b: (a > b).float(), lambda a, b: (a >= b).float(), SQUARE),
    ("integers", lambda a, b: a.int().float(), lambda a, b: a * 1.0, SQUARE),
    ("lost bits", lambda a: (a & 1).float(), lambda a: a.float() % 2, [torch.zeros(6, 6, dtype=torch.int32)]),
    ("dtype", lambda x: x.float() * 2, lambda x: x * 2, HALF),
    ("rounding", lambda x: (x.float() - x.float().mean(-1, True)).bfloat16(), lambda x: x - x.mean(-1, True), HALF),
]


@pytest.mark.parametrize(("before", "after", "inputs"), [case[1:] for case in RIGHT], ids=[case[0] for case in RIGHT])
def test_right_rewrites_are_proved(before: Function, after: Function, inputs: list[torch.Tensor]) -> None:
    """Identities of sums, products, quotients and exponentials are identities of the fields."""
    found = compared(before, after, *inputs)
    assert found.verdict in (certify.PROVED, certify.PROVED_FOR_SIZES), found
    assert found.probability is not None
    assert found.probability <= -40


@pytest.mark.parametrize(("before", "after", "inputs"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_rewrites_are_refuted(before: Function, after: Function, inputs: list[torch.Tensor]) -> None:
    """What differs, differs for random residues, and the certificate has a witness."""
    found = compared(before, after, *inputs)
    assert found.verdict == certify.REFUTED, found
    assert found.witness is not None
    assert found.witness.sizes or found.witness.method == "effects"


def test_a_fill_hides_where_that_is_assumed_and_nothing_makes_it_small() -> None:
    """The rule that a fill hides whatever follows is refuted by what follows."""
    hides = [Assumption(certify.FILL_HIDES)]
    right = compared(filled(1.0), sdpa(is_causal=True), *HEADS, assume=hides)
    assert right.verdict == certify.PROVED
    assert compared(filled(1.0), sdpa(is_causal=True), *HEADS).verdict == certify.TESTED
    wrong = compared(filled(1e-9), sdpa(is_causal=True, scale=1e-9 * SCALE), *HEADS, assume=hides)
    assert wrong.verdict == certify.REFUTED


def test_masks_are_of_the_class_that_is_assumed() -> None:
    """A mask is full, or causal, for the check alone."""

    def masked(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def without(causal: bool) -> Function:
        return lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    assert compared(masked, without(False), *HEADS, mask).verdict == certify.REFUTED
    for kind, causal in (("full", False), ("causal", True), ("causal", False)):
        assumed = [Assumption(certify.MASK_CLASS, "mask_1", kind)]
        found = compared(masked, without(causal), *HEADS, mask, assume=assumed)
        assert (found.verdict == certify.PROVED) == (causal == (kind == "causal")), found


@pytest.mark.parametrize("hidden", [0, 1])
def test_a_mask_of_ones_and_zeros_in_floats_is_of_its_class(hidden: int) -> None:
    """As a causal buffer of a model that was moved to half precision."""

    def masked(q: Any, k: Any, v: Any, buffer: Any) -> Any:
        return torch.softmax(scores(q, k).masked_fill(buffer == hidden, -INF), -1) @ v

    given = *HEADS, torch.ones(1, 1, 5, 5)
    claim = Assumption(certify.MASK_CLASS, "buffer_1", "causal ones")
    found = compared(masked, lambda q, k, v, _: causal(q, k, v), *given, assume=[claim])
    assert (found.verdict != certify.REFUTED) is (hidden == 0), found


@pytest.mark.parametrize("right", [True, False])
def test_sizes_and_strides_of_memory_that_is_read_anew_become_smaller(right: bool) -> None:
    """As of the numbers of blocks that FlexAttention takes."""

    def blocks(x: Any) -> Any:
        counts = x.sum(-1).contiguous()
        return torch.as_strided(counts, (2, 48, 512), (48 * 512, 512, 1) if right else (512, 1024, 1))

    certificate = compared(lambda x: x.sum(-1), blocks, torch.zeros(2, 48, 512, 80))
    assert certificate.verdict == (certify.PROVED if right else certify.REFUTED), certificate


def test_rows_that_are_empty_are_named() -> None:
    """Eager gives NaN there, and torch's own attention zeros; an assumption covers it."""

    def by_hand(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return torch.softmax(scores(q, k).masked_fill(~mask, -INF), -1) @ v

    def fused(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    found = compared(by_hand, fused, *HEADS, mask)
    assert found.verdict == certify.PROVED
    assert certify.NO_EMPTY_ROW in {each.kind for each in found.open}
    covered = compared(by_hand, fused, *HEADS, mask, assume=[Assumption(certify.NO_EMPTY_ROW)])
    assert certify.NO_EMPTY_ROW not in {each.kind for each in covered.open}


def test_certificates_go_through_json() -> None:
    """What is written is read back equal."""
    for after in (shifted, causal):
        found = compared(eager, after, *HEADS, assume=[Assumption(certify.NO_EMPTY_ROW)])
        assert Certificate.from_json(found.to_json()) == found


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_dropout_is_not_lost_where_other_numbers_may_be_drawn(p: float) -> None:
    found = compared(
        lambda x: F.dropout(x, 0.1), lambda x: F.dropout(x, p), HEADS[0], assume=[Assumption(certify.DRAWS)]
    )
    assert found.verdict == certify.REFUTED


@pytest.mark.parametrize(("word", "right"), [("band 2 0", True), ("band 3 0", False), ("prefix 0 3", False)])
def test_masks_of_a_band_keep_their_numbers(word: str, right: bool) -> None:
    def before(q: Any, mask: Any) -> Any:
        return (q @ q.mT).masked_fill(~mask, -math.inf).softmax(-1) @ q

    def after(q: Any, mask: Any) -> Any:
        at = torch.arange(16)
        far = at[:, None] - at[None, :]
        return (q @ q.mT).masked_fill((far < 0) | (far > 2), -math.inf).softmax(-1) @ q

    given = torch.randn(16, 8), torch.ones(16, 16, dtype=torch.bool)
    claim = Assumption(certify.MASK_CLASS, subject="mask_1", detail=word)
    certificate = compared(before, after, *given, assume=[claim])
    assert (certificate.verdict != certify.REFUTED) == right


@pytest.mark.parametrize(("dtype", "refuted"), [(torch.bfloat16, False), (torch.float8_e4m3fn, True)])
def test_a_bound_of_rounding_allows_what_inputs_of_that_error_make_of_results(dtype: torch.dtype, refuted: bool):
    bound = (certify.Assumption(certify.ROUNDING, detail="0.01"), certify.Assumption(certify.NO_OVERFLOW))
    found = compared(
        lambda x: (x * 8).exp(), lambda x: (x.to(dtype).float() * 8).exp(), torch.zeros(64, 64), assume=bound
    )
    assert (found.verdict == certify.REFUTED) == refuted, found


def lowest(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """A mask of the lowest number, of which whole rows may be hidden."""
    return torch.where(mask, scores(q, k), torch.finfo(torch.float32).min).softmax(-1) @ v


def averaged(dim: int, hidden: float) -> Function:
    """The same with minus infinity, and something else in the rows that hide everything."""

    def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return torch.where(mask.any(-1, keepdim=True), out, v.mean(dim, keepdim=True) * hidden)

    return attention


@pytest.mark.parametrize(("dim", "times", "right"), [(-2, 1.0, True), (-2, 0.0, False), (-1, 1.0, False)])
def test_rows_that_are_filled_as_a_whole_are_averages(dim: int, times: float, right: bool) -> None:
    mask = torch.zeros(2, 1, 1, 5, dtype=torch.bool).expand(2, 1, 5, 5)

    def rows(function: Function) -> Function:  # some of which see no key, whatever the mask is
        return lambda q, k, v, mask: function(q, k, v, mask & (torch.arange(5) < torch.arange(5)[:, None]))

    claims = [Assumption(certify.FILL_HIDES)]
    found = compared(rows(lowest), rows(averaged(dim, times)), *HEADS, mask, assume=claims)
    assert found.verdict == (certify.PROVED if right else certify.REFUTED), found


@pytest.mark.parametrize(("limit", "right"), [(-1e8, True), (1e8, False)])
def test_a_guard_against_rows_that_are_filled_leaves_others_alone(limit: float, right: bool) -> None:
    def guarded(q: Any, k: Any, v: Any, bias: Any) -> Any:
        most = bias.amax(-1, keepdim=True)
        there = torch.isfinite(most)
        most = most.masked_fill(~there, 0.0)
        q = q.masked_fill(-most.abs() <= limit, 0.0).masked_fill(~there, math.nan)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias - most)

    claims = [Assumption(certify.FILL_HIDES), Assumption(certify.FINITE_INPUTS)]
    found = compared(
        lambda q, k, v, bias: (scores(q, k) + bias).softmax(-1) @ v,
        guarded,
        *HEADS,
        torch.zeros(1, 4, 5, 5),
        assume=claims,
    )
    assert found.verdict == (certify.PROVED if right else certify.REFUTED), found


@pytest.mark.parametrize(("scale", "right"), [(1 / 13.875, True), (192**-0.5, False)])
def test_scalars_of_half_precision_are_what_the_program_rounds_them_to(scale: float, right: bool) -> None:
    def divided(x: Any) -> Any:
        return x / torch.sqrt(torch.tensor(64.0) * 3).to(torch.bfloat16)

    found = compared(divided, lambda x: x * scale, torch.zeros(4, 8, dtype=torch.bfloat16))
    assert (found.verdict in (certify.PROVED, certify.PROVED_FOR_SIZES)) is right, found


@pytest.mark.parametrize(
    ("class_", "first", "right"), [("first", True, True), ("rows", True, False), ("rows", False, True)]
)
def test_nothing_but_a_key_of_each_row_is_known_of_a_mask(class_: str, first: bool, right: bool) -> None:
    """Where the first key is seen, or any one, a row is never empty."""

    def masked(q: Any, k: Any, v: Any, mask: Any) -> Any:
        keep = mask[:, None, None, :] != 0
        return torch.where(keep & (torch.arange(5) <= torch.arange(5)[:, None]) if first else keep, scores(q, k), -INF)

    def before(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return lowest_of(masked(q, k, v, mask)).softmax(-1) @ v

    def lowest_of(x: Any) -> Any:
        return torch.where(torch.isneginf(x), torch.finfo(torch.float32).min, x)

    claims = [Assumption(certify.FILL_HIDES), Assumption(certify.MASK_CLASS, "mask_1", class_)]
    after: Function = lambda q, k, v, mask: torch.nan_to_num(masked(q, k, v, mask).softmax(-1), 0.0) @ v  # noqa: E731
    found = compared(before, after, *HEADS, torch.zeros(2, 5, dtype=torch.int64), assume=claims)
    assert (found.verdict in (certify.PROVED, certify.PROVED_FOR_SIZES)) is right, found


@pytest.mark.parametrize(("order", "right"), [((0, 1, 3, 2, 4, 5), True), ((0, 3, 1, 2, 4, 5), False)])
def test_windows_of_an_image_have_small_sizes_whose_products_fit(order: tuple[int, ...], right: bool) -> None:
    """A grid of 8 by 8 windows of 7 by 7 places, 2048 windows and 49 places as one number each."""

    def before(x: Any, bias: Any) -> Any:
        return (x @ x.mT + bias).softmax(-1) @ x

    def after(x: Any, bias: Any) -> Any:
        split = x.view(32, 8, 8, 7, 7, 32).permute(order).permute(0, 1, 3, 2, 4, 5)
        x = split.reshape(2048, 49, 32)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=bias.view(1, 7, 7, 7, 7).reshape(49, 49), scale=1.0)

    large = torch.zeros(1, 1, 1).expand(2048, 49, 32), torch.zeros(49, 49)
    found = compared(before, after, *large)
    assert found.verdict == (certify.PROVED if right else certify.REFUTED), found


def test_its_tables_are_real_where_a_compilation_with_fake_tensors_is_the_first_to_import_it() -> None:
    program = """
import torch
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    from omnicomp.analysis.certify import fields
print(type(fields.moduli(1)) is torch.Tensor)
"""
    assert python("-c", program, check=True).stdout.split() == ["True"]
