"""Scores read as a scale and a mask, and which masks are known to be finite."""

import math

import pytest
import torch
from fusion import inputs
from traced import site_of

from omnicomp.passes.attention.form import dense_form, is_finite, number, open_form, positive_scale
from omnicomp.passes.attention.site import Add, Fill, MatchEnded, Scale

Q, K, V, M = inputs()
LOWEST, HALF = (torch.finfo(dtype).min for dtype in (torch.float32, torch.float16))


def form_of(scores, *more):
    site, _, reader = site_of(lambda q, k, v, *a: scores(q, k, *a).softmax(-1) @ v, Q, K, V, *more)
    return dense_form(site, reader), site, reader


def baddbmm(q, k):
    return torch.baddbmm(q.new_zeros(1), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.25)


@pytest.mark.parametrize(
    ("scores", "scale"),
    [
        (lambda q, k: q @ k.mT, 1.0),
        (lambda q, k: (q * 2) @ (k / 4).mT * 3, 1.5),
        (lambda q, k: -(q @ k.mT) / 2, -0.5),
        (lambda q, k: q @ k.mT / math.sqrt(16) * torch.tensor(2.0), 0.5),
        (lambda q, k: baddbmm(q, k).unflatten(0, (2, 4)), 0.25),
    ],
)
def test_scales_multiply(scores, scale):
    form, _, _ = form_of(scores)
    assert form.scale == pytest.approx(scale)
    assert not form.factors


def test_a_factor_of_heads_is_kept_apart():
    form, _, _ = form_of(lambda q, k, m: q @ k.mT * m[:, :, :1, :1].exp() * 0.5, M)
    assert form.scale == 0.5
    (factor,) = form.factors
    assert isinstance(factor, Scale)
    with pytest.raises(MatchEnded, match="differs between queries or keys"):
        form_of(lambda q, k, m: q @ k.mT * m, M)


def test_steps_of_the_mask_keep_their_order_and_what_was_filled_is_not_scaled():
    def scores(q, k, m):
        return ((q @ k.mT + m).masked_fill(m > 0, LOWEST) * 0.5).masked_fill(m < -2, -math.inf)

    form, _, _ = form_of(scores, M)
    assert [type(step) for step in form.mask] == [Add, Scale, Fill, Fill]
    assert [number(step.value) for step in form.mask[2:]] == [LOWEST, -math.inf]
    form, _, _ = form_of(lambda q, k, m: (q @ k.mT).masked_fill(m > 0, LOWEST) * 4, M)
    assert number(form.mask[0].value) == -math.inf, "as in eager, it overflows"


@pytest.mark.parametrize(
    "gated",
    [
        lambda s, b: s * b - 1e9 * (1 - b),
        lambda s, b: torch.mul(b, s) + (1 - b) * -1e10,
        lambda s, b: s.mul(1 - b).sub(b.mul(1e9)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_a_mask_multiplies_and_its_opposite_is_added_to_are_filled(gated, dtype):
    def scores(q, k):
        i, j = torch.arange(6)[:, None], torch.arange(8)
        return gated(q @ k.mT * 0.25, ((i >= j) & (i != 2)).to(q.dtype))  # one row sees nothing

    def attention(q, k, v):
        return scores(q, k).softmax(-1) @ v

    form, _, _ = form_of(scores)
    assert [type(step) for step in form.mask] == [Fill]
    compiled = torch.compile(attention, backend="omni", options={"lowerings": ["eager"]}, fullgraph=True)
    given = [x.to(dtype) for x in (Q, K, V)]
    torch.testing.assert_close(compiled(*given), attention(*given))


@pytest.mark.parametrize(
    "scores",
    [
        lambda q, k, b: (q @ k.mT) * b - 1e4 * (1 - b),
        lambda q, k, b: (q @ k.mT) * b - 1e9 * b,
        lambda q, k, b: (q @ k.mT) * (b * 0.5) - 1e9 * (1 - b),
    ],
)
def test_scores_that_are_multiplied_otherwise_are_not_filled(scores):
    with pytest.raises(MatchEnded, match="differs between queries or keys"):
        form_of(lambda q, k: scores(q, k, torch.ones(6, 8).tril()))


def test_what_is_the_same_for_all_keys_is_no_mask():
    form, _, _ = form_of(lambda q, k, m: q @ k.mT + m[..., :1].tanh() + 3.0, M)
    assert form.mask == []


@pytest.mark.parametrize("fill", [LOWEST, -math.inf])
def test_what_may_hide_all_keys_of_a_query_is_a_mask(fill):
    form, _, _ = form_of(lambda q, k, m: q @ k.mT + torch.where(m[..., :1] > 0, 0.0, fill), M)
    assert [type(step) for step in form.mask] == [Add]
    form, _, _ = form_of(lambda q, k, m: q @ k.mT + m[..., :1], M)
    assert [type(step) for step in form.mask] == [Add], "an input may hold anything"
    form, _, _ = form_of(lambda q, k: q @ k.mT + fill)
    assert [type(step) for step in form.mask] == [Add]


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        (lambda q, k, m: torch.tanh(q @ k.mT), "tanh"),
        (lambda q, k, m: (q @ k.mT).masked_fill(m > 0, -1e4), "does not absorb"),
        (lambda q, k, m: (q @ k.mT).clamp(min=-5), "clamped"),
        (lambda q, k, m: (q @ k.mT) * 0.0, "other than zero"),
        (lambda q, k, m: (lambda s: s * s)(q @ k.mT), "used twice"),
    ],
)
def test_other_arithmetic_is_no_dense_form(scores, sentence):
    with pytest.raises(MatchEnded, match=sentence):
        form_of(scores, M)


HIDDEN = M > 0
LIFT = torch.where(HIDDEN, 2.5e8, 0.0)


@pytest.mark.parametrize(
    "scores",
    [
        lambda q, k, m, b: (q @ k.mT).masked_fill(m, -1e9) * -0.25,
        lambda q, k, m, b: (q @ k.mT).masked_fill(m, -1e9) * 1e-9,
        lambda q, k, m, b: (q @ k.mT).masked_fill(m, -1e9) / 1e8,
        lambda q, k, m, b: (q @ k.mT).masked_fill(m, -1e9) * 0.25 + torch.where(m, 2.5e8, 0.0),
        lambda q, k, m, b: (q @ k.mT).masked_fill(m, -1e9) + b,
        lambda q, k, m, b: (q @ k.mT).masked_fill(m, -1e9) - -b,
        lambda q, k, m, b: (q @ k.mT).masked_fill(m, -1e9) * b[0, 0, 0, 0],
        lambda q, k, m, b: (q @ k.mT).masked_fill(m, LOWEST) + torch.where(m, -LOWEST, 0.0),
        lambda q, k, m, b: (q @ k.mT + torch.where(m, -1e9, 0.0)) + torch.where(m, 1e9, 0.0),
        lambda q, k, m, b: torch.where(m, -math.inf, q @ k.mT) * -1.0,
        lambda q, k, m, b: (q @ k.mT + torch.where(m, -1e4, 0.0)) * -0.25,
    ],
)
def test_a_mask_that_a_later_step_may_lift_hides_nothing_for_certain(scores):
    with pytest.raises(MatchEnded, match="bring back what it hides"):
        form_of(scores, HIDDEN, LIFT)


@pytest.mark.parametrize(
    "scores",
    [
        lambda q, k, m, b: (q @ k.mT).masked_fill(m, -1e9) * 0.25,
        lambda q, k, m, b: (q @ k.mT).masked_fill(m, -1e9) + torch.tanh(b),
        lambda q, k, m, b: (q @ k.mT).masked_fill(m, -1e9) * b[0, 0, 0, 0].exp(),
        lambda q, k, m, b: (q @ k.mT).masked_fill(m, LOWEST) + b,
        lambda q, k, m, b: torch.where(m, -math.inf, q @ k.mT) + b,
        lambda q, k, m, b: (q @ k.mT).masked_fill(m, -1e9) + torch.where(m, -1e9, 0.0),
        lambda q, k, m, b: (q @ k.mT + torch.where(m, LOWEST, 0.0)) * 0.25,
    ],
)
def test_a_mask_that_no_later_step_lifts_is_one(scores):
    assert form_of(scores, HIDDEN, LIFT)[0].mask


@pytest.mark.parametrize("scores", [lambda s, m: s.masked_fill(m, -1e9), lambda s, m: s + torch.where(m, -1e9, 0.0)])
def test_a_number_below_the_range_of_a_later_dtype_is_minus_infinity(scores):
    form, _, reader = form_of(lambda q, k, m: scores(q @ k.mT, m).half().float(), HIDDEN)
    (step,) = form.mask
    value = step.value if isinstance(step, Fill) else reader.expand(step.term).args[1]
    assert number(value) == -math.inf


@pytest.mark.parametrize("least", [HALF, -65410.0])
@pytest.mark.parametrize("scores", [lambda s, m, x: s.masked_fill(m, x), lambda s, m, x: s + torch.where(m, x, 0.0)])
def test_a_number_that_a_coarser_dtype_rounds_out_of_the_range_is_minus_infinity(scores, least):
    """float16's least number is -65504, bfloat16 has -65536 and -65280."""
    half = [x.half() for x in (Q, K, V)]

    def attention(q, k, v, m):
        return scores(q @ k.mT, m, least).to(torch.bfloat16).half().softmax(-1) @ v

    site, _, reader = site_of(attention, *half, HIDDEN)
    (step,) = dense_form(site, reader).mask
    value = step.value if isinstance(step, Fill) else reader.expand(step.term).args[1]
    assert number(value) == -math.inf


@pytest.mark.parametrize(("scale", "kept"), [(-0.5, 0.5), (1e-44, 1.0), (0.5, 0.5)])
def test_what_is_left_of_a_scale_for_the_kernels_is_positive(scale, kept):
    form = positive_scale(form_of(lambda q, k: q @ k.mT * scale)[0], torch.float32)
    product = form.scale
    for factor in form.factors:
        product *= number(factor.term)
    assert (form.scale, product) == (kept, pytest.approx(scale))


def test_an_open_form_parts_the_mask_from_the_arithmetic_before_it():
    site, _, reader = site_of(
        lambda q, k, v, m: (torch.tanh(q @ k.mT / 5) * 5 + m).masked_fill(m > 1, -math.inf).softmax(-1) @ v, Q, K, V, M
    )
    form = open_form(site, reader)
    assert [type(step) for step in form.mask] == [Add, Fill]
    assert len(form.inner) == 3


def test_grouped_heads_are_the_axes_that_keys_and_values_lack():
    site, _, reader = site_of(
        lambda q, k, v: (q @ k[:, :2].repeat_interleave(2, 1).mT).softmax(-1) @ v[:, :2].repeat_interleave(2, 1),
        Q,
        K,
        V,
    )
    form = dense_form(site, reader)
    assert [axis.size for axis in form.shared] == [2]
    assert [[a.size for a in group] for group in form.groups(site)] == [[2], [2, 2], [6], [8]]


def finite(mask, *more):
    form, _, reader = form_of(lambda q, k, *a: q @ k.mT + mask(*a), *more)
    (step,) = form.mask
    return is_finite(step.term, reader)


def test_which_masks_are_known_to_be_finite():
    lowest = lambda m: torch.zeros(6, 8).masked_fill(m[0, 0] > 0, LOWEST)  # noqa: E731
    assert finite(lowest, M)
    assert finite(lambda m: torch.where(m > 0, 0.0, -1e9), M)
    assert finite(lambda m: (1.0 - (m > 0).float()) * LOWEST, M)
    assert finite(lambda m: lowest(m) + torch.where(m > 1, 1.0, -1e9), M), "too small to overflow"
    assert not finite(lambda m: lowest(m) + lowest(-m), M)
    assert not finite(lambda m: lowest(m) * 2, M)
    assert not finite(lambda m: (2.0 - (m > 0).float()) * LOWEST, M)
    assert not finite(lambda m: torch.where(m > 0, 0.0, -math.inf), M)
    assert not finite(lambda m: m, M), "an input may hold anything"
    assert not finite(lambda m: (m > 0).float().log(), M)
    assert not finite(lambda m: torch.where(m > 0, 0.0, LOWEST).half().float(), M)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_learned_bias_is_finite_and_so_is_a_minimum_added_to_it(frozen):
    class Biased(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.randn(9, 4), requires_grad=not frozen)

        def forward(self, q, k, v, m):
            where = (torch.arange(6)[:, None] - torch.arange(8)).abs()
            bias = self.bias[where].permute(2, 0, 1)[None] + torch.where(m > 0, 0.0, LOWEST)
            return (q @ k.mT + bias).softmax(-1) @ v

    site, _, reader = site_of(Biased(), Q, K, V, M)
    (step,) = dense_form(site, reader).mask
    assert is_finite(step.term, reader)


@pytest.mark.parametrize(("frozen", "expected"), [(False, True), (True, False)])
def test_a_parameter_without_gradient_may_be_a_mask(frozen, expected):
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = torch.nn.Parameter(torch.zeros(9, 8), requires_grad=not frozen)

        def forward(self, q, k, v):
            return (q @ k.mT + self.mask[:6].to(q.dtype) * 2.0).softmax(-1) @ v

    site, _, reader = site_of(Masked(), Q, K, V)
    (step,) = dense_form(site, reader).mask
    assert is_finite(step.term, reader) is expected
