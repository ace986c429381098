"""What eager gives for rows without keys, sentinels and half precision is what the fused attention gives."""

import itertools
import math

import pytest
import torch
from fusion import Backend, compiled, differentiate, fuse, inputs, leaves, results
from tiers import fast

from omnicomp.options.policy import Policy
from omnicomp.passes.attention import sdpa
from omnicomp.timeline import Rewrite

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Each dtype, and each of both, in the fast tier.
DTYPES_AND_TRAINING = fast(
    itertools.product(DTYPES, (False, True)), lambda case: case[1] is (case[0] is not torch.bfloat16)
)
KEPT = torch.ones(2, 1, 6, 8, dtype=torch.bool)
KEPT[0, :, :3] = False  # rows without a key
KEPT[1, :, 3, 2:] = False
EMPTY = ~KEPT.any(-1, keepdim=True)
LEFT = torch.arange(8) < 4


def lowest(x):
    """The most negative number of the scores; eager in float64 is the reference, and takes its own."""
    return torch.finfo(x.dtype).min


def added(q, kept):
    return torch.zeros_like(kept, dtype=q.dtype).masked_fill(~kept, lowest(q))


def attend(scores, v):
    return torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype) @ v


FINITE = {
    "filled": lambda q, k, v, kept: attend((q @ k.mT * 0.25).masked_fill(~kept, lowest(q)), v),
    "added": lambda q, k, v, kept: attend(q @ k.mT * 0.25 + added(q, kept), v),
    "chosen": lambda q, k, v, kept: attend(torch.where(kept, q @ k.mT * 0.25, lowest(q)), v),
    "in place": lambda q, k, v, kept: attend((q @ k.mT * 0.25).masked_fill_(~kept, lowest(q)), v),
    "clamped": lambda q, k, v, kept: attend(
        (q @ k.mT * 0.25).masked_fill(~kept, -math.inf).clamp(min=torch.finfo(q.dtype).min), v
    ),
    "of queries": lambda q, k, v, kept: attend(
        q @ k.mT * 0.25 + torch.zeros_like(EMPTY, dtype=q.dtype).masked_fill(EMPTY, lowest(q)), v
    ),
    "scaled later": lambda q, k, v, kept: attend((q @ k.mT).masked_fill(~kept, lowest(q)) * 0.25, v),
}
INFINITE = {
    "filled": lambda q, k, v, kept: attend((q @ k.mT * 0.25).masked_fill(~kept, -math.inf), v),
    "added": lambda q, k, v, kept: attend(q @ k.mT * 0.25 + torch.where(kept, 0.0, -math.inf).to(q.dtype), v),
    "of queries": lambda q, k, v, kept: attend(q @ k.mT * 0.25 + torch.where(EMPTY, -math.inf, 0.0).to(q.dtype), v),
    "added twice": lambda q, k, v, kept: attend(q @ k.mT * 0.25 + added(q, kept) + added(q, kept), v),
    "overflowed": lambda q, k, v, kept: attend((q @ k.mT * 0.25 + added(q, kept)) * 1.5, v),
    "summed": lambda q, k, v, kept: attend(q @ k.mT * 0.25 + (added(q, kept) + added(q, kept)), v),
    "some added, some filled": lambda q, k, v, kept: attend(
        (q @ k.mT * 0.25 + torch.where(kept | LEFT, 0.0, -math.inf).to(q.dtype)).masked_fill(~kept & LEFT, -math.inf),
        v,
    ),
}


def check_rows(function, dtype, training):
    """Empty rows as in eager, the others as near to float64 as eager's."""
    q, k, v, _ = inputs(dtype)
    q.requires_grad_(training)
    backend = Backend(training=training)
    found, eager = compiled(function, backend)(q, k, v, KEPT), function(q, k, v, KEPT)
    assert torch.equal(found.isnan(), eager.isnan())
    empty = EMPTY.expand(2, 4, 6, 1)[..., 0]
    exact = function(q.detach().double(), k.double(), v.double(), KEPT)
    own = (eager.double() - exact)[~empty].abs().max()
    eps = torch.finfo(dtype).eps
    assert (found.double() - exact)[~empty].abs().max() <= max(1.5 * own, 4 * eps)
    torch.testing.assert_close(found[empty], eager[empty], rtol=0, atol=4 * eps, equal_nan=True)
    return backend, found[empty]


@pytest.mark.parametrize(("dtype", "training"), DTYPES_AND_TRAINING, ids=str)
@pytest.mark.parametrize("name", FINITE)
def test_rows_at_one_finite_minimum_are_uniform(name, dtype, training):
    backend, empty = check_rows(FINITE[name], dtype, training)
    if not backend.of(Rewrite):
        assert (name, dtype) in [("clamped", torch.float16), ("scaled later", torch.float16)]
    assert not empty.isnan().any()


@pytest.mark.parametrize(("dtype", "training"), DTYPES_AND_TRAINING, ids=str)
@pytest.mark.parametrize("name", INFINITE)
def test_rows_of_minus_infinity_or_twice_the_minimum_are_nan(name, dtype, training):
    backend, empty = check_rows(INFINITE[name], dtype, training)
    assert len(backend.of(Rewrite)) == 1
    assert empty.isnan().all()


@pytest.mark.parametrize("number", [1e30, -1e30])
def test_numbers_that_swallow_all_scores_of_a_row_are_uniform_in_the_backward(number):
    keys = torch.ones(6, 8).tril(-1)
    function = lambda q, k, v: (q @ k.mT * 0.25 + number * keys).softmax(-1) @ v  # noqa: E731
    assert differentiate(function, *inputs()[:3]).rewrite()


REPAIRED = {
    "weights": lambda s, v, kept: torch.nan_to_num(s.masked_fill(~kept, -math.inf).softmax(-1)) @ v,
    "replaced": lambda s, v, kept: torch.softmax(s.masked_fill(~kept, -math.inf), -1).masked_fill(~kept, 0.0) @ v,
    "rows": lambda s, v, kept: attend(s.masked_fill(~kept, lowest(s)), v).masked_fill(EMPTY, 0.0),
    "weights of rows": lambda s, v, kept: torch.softmax(s.masked_fill(~kept, -1e30), -1) * ~EMPTY @ v,
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", REPAIRED)
def test_rows_without_keys_that_the_program_repairs(name, training):
    q, k, v, _ = inputs()
    run = differentiate if training else fuse
    backend = run(lambda q, k, v, kept: REPAIRED[name](q @ k.mT * 0.25, v, kept), q, k, v, KEPT)
    assert backend.rewrite()


LIFTED = {
    "lifted": lambda s, v, kept: (
        torch.nan_to_num((s.masked_fill(~kept, -math.inf) + torch.where(kept, 0.0, math.inf)).softmax(-1)) @ v
    ),
    "infinite": lambda s, v, kept: torch.nan_to_num((s + torch.where(kept, 0.0, math.inf)).softmax(-1)) @ v,
}


@pytest.mark.parametrize("name", LIFTED)
def test_rows_that_infinity_is_added_to_and_the_program_repairs(name):
    q, k, v, _ = inputs()
    assert fuse(lambda q, k, v, kept: LIFTED[name](q @ k.mT * 0.25, v, kept), q, k, v, KEPT).rewrite()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fill", [-math.inf, -1e9, torch.finfo(torch.float32).min])
def test_a_mask_that_is_an_input_is_not_trusted_to_keep_a_key(fill, training):
    q, k, v, _ = inputs()
    mask = torch.zeros(2, 1, 6, 8).masked_fill(~KEPT, fill)
    q.requires_grad_(training)
    backend = Backend(training=training)
    function = lambda q, k, v, m: attend(q @ k.mT * 0.25 + m, v)  # noqa: E731
    found = compiled(function, backend)(q, k, v, mask)
    assert backend.rewrite()
    torch.testing.assert_close(found, function(q, k, v, mask), equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FINITE)
def test_gradients_where_nothing_is_learned_from_rows_without_keys(name):
    q, k, v, _ = inputs()
    assert differentiate(FINITE[name], q, k, v, KEPT, keep=~EMPTY).rewrite()


@pytest.mark.parametrize("name", FINITE)
def test_the_values_gradient_from_rows_without_keys_is_that_of_eager(name):
    q, k, v, _ = inputs()
    assert differentiate(lambda v: FINITE[name](q, k, v, KEPT), v).rewrite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["added", "of queries", "filled", "scaled later"])
def test_rows_without_keys_pass_on_the_gradients_that_they_do_in_eager(name, dtype):
    q, k, v, _ = inputs(dtype)
    assert differentiate(FINITE[name], q, k, v, KEPT).rewrite()


def of_groups(q, k, v, kept):
    scores = q @ k[:, :2].repeat_interleave(2, 1).mT * 0.25
    return attend(scores + added(q, kept), v[:, :2].repeat_interleave(2, 1))


@pytest.fixture
def a_kernel_that_passes_none(monkeypatch):
    """As those of GPUs."""
    monkeypatch.setattr(sdpa, "_passes_gradients", lambda *args: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["added", "of queries", "of groups"])
def test_by_option_rows_without_keys_pass_gradients_on_whatever_the_kernel_does(name, dtype, a_kernel_that_passes_none):
    q, k, v, _ = inputs(dtype)
    function = {**FINITE, "of groups": of_groups}[name]
    policy = Policy(check_passes=True, empty_row_gradients=True)
    assert differentiate(function, q, k, v, KEPT, policy=policy).rewrite()
    with pytest.raises(AssertionError, match="Mismatched"):
        differentiate(function, q, k, v, KEPT)


@pytest.mark.parametrize("narrow", ["queries", "values"])
def test_by_option_rows_without_keys_pass_gradients_on_beside_zeros_that_pad_heads(narrow, a_kernel_that_passes_none):
    q, k, v, _ = inputs()
    q, k, v = (q[..., :8], k[..., :8], v) if narrow == "queries" else (q, k, v[..., :8])
    given = [x.contiguous() for x in (q, k, v)]
    policy = Policy(check_passes=True, empty_row_gradients=True)
    rewrite = differentiate(FINITE["added"], *given, KEPT, policy=policy).rewrite()
    assert "padded head size" in rewrite.detail


def test_by_option_rows_that_are_filled_pass_none(a_kernel_that_passes_none):
    q, k, v, _ = inputs()
    policy = Policy(check_passes=True, empty_row_gradients=True)
    assert differentiate(FINITE["filled"], q, k, v, KEPT, policy=policy).rewrite()


def test_rows_of_padding_pass_on_their_gradients_beside_a_trained_bias():
    q, k, v, bias = inputs()
    function = lambda q, k, v, bias, kept: attend(q @ k.mT * 0.25 + bias + added(q, kept), v)  # noqa: E731
    assert differentiate(function, q, k, v, bias, KEPT).rewrite().target == "omnicomp.attention_with_bias"


LENGTH = torch.arange(8) < 6
UNSEEN = {
    "filled": lambda q, k, v, kept: attend((q @ k.mT).masked_fill(~kept, -math.inf), v),
    "filled with a number": lambda q, k, v, kept: attend((q @ k.mT).masked_fill(~kept, -1e9), v),
    "chosen": lambda q, k, v, kept: attend(torch.where(kept, q @ k.mT * 0.25, lowest(q)), v),
    "added": lambda q, k, v, kept: attend(q @ k.mT + added(q, kept), v),
    "one after another": lambda q, k, v, kept: attend(
        (q @ k.mT).masked_fill(torch.ones(6, 8).triu(2) > 0, -1e9).masked_fill(~kept, -1e9), v
    ),
    "joined": lambda q, k, v, kept: attend((q @ k.mT).masked_fill(~(kept & (torch.ones(6, 8).tril() > 0)), -1e9), v),
    "of groups": lambda q, k, v, kept: attend(
        (q @ k[:, :2].repeat_interleave(2, 1).mT).masked_fill(~kept, -1e9), v[:, :2].repeat_interleave(2, 1)
    ),
    "of a query": lambda q, k, v, kept: attend((q[:, :, :1] @ k.mT).masked_fill(torch.arange(8) > 5, -1e9), v),
    "repaired": lambda q, k, v, kept: torch.nan_to_num(torch.softmax(q @ k.mT + added(q, kept), -1)) @ v,
    "repaired in groups": lambda q, k, v, kept: (
        torch.nan_to_num(torch.softmax(q @ k[:, :2].repeat_interleave(2, 1).mT + added(q, kept), -1))
        @ v[:, :2].repeat_interleave(2, 1)
    ),
}


@pytest.mark.parametrize("held", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("name", UNSEEN)
def test_what_keys_hold_that_no_query_sees_matters_as_in_eager(name, where, held):
    q, k, v, _ = inputs()
    (k if where == "key" else v)[:, :, 6:] = held
    backend = Backend()
    found = compiled(UNSEEN[name], backend)(q, k, v, LENGTH)
    assert backend.rewrite()
    torch.testing.assert_close(found, UNSEEN[name](q, k, v, LENGTH), equal_nan=True)


@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_weights_that_are_no_numbers_and_the_program_repairs(where):
    q, k, v, m = inputs()
    arguments = {"query": q, "key": k, "value": v}
    arguments[where][0, 1, 2, 3:] = math.nan
    backend = Backend()
    function = lambda q, k, v, m: torch.nan_to_num(torch.softmax(q @ k.mT + m, -1)) @ v  # noqa: E731
    found = compiled(function, backend)(q, k, v, m)
    assert backend.rewrite()
    torch.testing.assert_close(found, function(q, k, v, m), equal_nan=True)


@pytest.mark.parametrize("training", [False, True])
def test_a_bias_beside_a_number_that_hides_all_keys_is_not_rounded_under_autocast(training):
    """bfloat16 has steps of 64 at minus ten thousand."""
    q, k, v, m = inputs()
    q.requires_grad_(training)

    def function(q, k, v, m):
        with torch.autocast("cpu", torch.bfloat16):
            return attend((q @ k.mT * 0.25).float() + m + torch.where(KEPT, 0.0, -1e4), v)

    backend = Backend(training=training)
    found, eager = compiled(function, backend)(q, k, v, m), function(q, k, v, m)
    assert backend.rewrite().target == "scaled_dot_product_attention"
    torch.testing.assert_close(found, eager, rtol=0, atol=0.03)


def test_a_copy_of_many_keys_for_a_query_is_not_made():
    q, k, v, _ = inputs(queries=1, keys=2048, size=32)
    decode = lambda q, k, v: attend((q @ k.mT).masked_fill(torch.arange(2048) > 60, -math.inf), v)  # noqa: E731
    assert "copy of the keys" in fuse(decode, q, k, v).miss().sentence


def test_keys_that_no_query_sees_take_no_part_in_training():
    q, k, v, _ = inputs()
    k[:, :, 6:] = 3e38
    assert differentiate(UNSEEN["filled"], q, k, v, LENGTH, rtol=1e-3, atol=1e-4).rewrite()


def test_queries_that_see_nothing_may_hold_anything():
    q, k, v, _ = inputs()
    q[EMPTY.expand(2, 4, 6, 1)[..., 0]] = math.nan
    backend = Backend()
    found = compiled(FINITE["filled"], backend)(q, k, v, KEPT)
    assert backend.rewrite()
    torch.testing.assert_close(found, FINITE["filled"](q, k, v, KEPT))


def test_keys_that_are_seen_by_the_query_of_their_index_are_read_as_they_are():
    q, k, v, _ = inputs(keys=6)
    distance = lambda: (torch.arange(6)[:, None] - torch.arange(6)).abs()  # noqa: E731
    backend = fuse(lambda q, k, v: attend((q @ k.mT).masked_fill(distance() > 2, -math.inf), v), q, k, v)
    (call,) = backend.attentions()
    assert torch.masked_fill not in [node.target for node in call.args[1].graph.nodes]


@pytest.mark.parametrize("name", INFINITE)
def test_no_gradient_is_nan_that_is_not_in_eager(name):
    """Where eager's gradient is NaN, there may be a number: nothing is learned from such rows in either."""
    found, eager = [], []
    arguments = [a.requires_grad_() for a in inputs()[:3]]
    backend = Backend(training=True)
    for function, kept in ((compiled(INFINITE[name], backend), found), (INFINITE[name], eager)):
        kept.extend(results(function, [*leaves(arguments), KEPT]))
    assert backend.rewrite()
    for got, want in zip(found, eager, strict=True):
        assert not (got.isnan() & ~want.isnan()).any()
        known = ~want.isnan()
        torch.testing.assert_close(got[known], want[known], rtol=1e-4, atol=1e-5)
    assert found[0].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sentinel", [-1e4, -1e9])
@pytest.mark.parametrize("shift", [0.0, -30.0], ids=["usual scores", "low scores"])
def test_sentinels_leak_as_far_as_they_do_in_eager(sentinel, dtype, shift):
    """With scores of minus ten thousand, a key at -1e4 is attended as well as one that is kept."""
    q, k, v, _ = inputs(dtype)
    kept = KEPT | EMPTY
    k[0, :, 0] = -q[0, :, :1].mean(1) * shift
    if shift:
        q, k = q * 10, k * 10

    def function(q, k, v, kept):
        return attend(q @ k.mT * 0.25 + (1.0 - kept.to(q.dtype if sentinel > -6e4 else torch.float32)) * sentinel, v)

    backend = fuse(function, q, k, v, kept)
    assert backend.rewrite()


def test_a_fill_that_scores_can_reach_is_left_alone():
    for dtype, fill in ((torch.float32, -1e4), (torch.float32, -65504.0), (torch.float16, -1e4)):
        torch._dynamo.reset()
        backend = fuse(lambda q, k, v, m: (q @ k.mT).masked_fill(m > 1, fill).softmax(-1) @ v, *inputs(dtype))  # noqa: B023
        assert backend.miss().code == "not_equal"
        assert "finfo" in backend.miss().lever


@pytest.mark.parametrize("fill", [-math.inf, -1e9, torch.finfo(torch.float32).min])
def test_a_fill_that_no_score_reaches_is_fused(fill):
    assert fuse(lambda q, k, v, m: (q @ k.mT).masked_fill(m > 1, fill).softmax(-1) @ v, *inputs()).rewrite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.25, 2.0])
def test_half_inputs_with_a_float32_softmax_are_no_farther_from_float64(dtype, scale):
    backend = fuse(lambda q, k, v, m: attend(q @ k.mT * scale + m, v), *inputs(dtype, keys=128, size=32))
    assert backend.rewrite()


@pytest.mark.parametrize("training", [False, True])
def test_rows_filled_with_a_sentinel_are_uniform_however_large_the_scores(training):
    """-1e9 swallows no score of a hundred; but what is filled does not hold the scores any more."""
    q, k, v, _ = inputs()
    function = lambda q, k, v, kept: attend((q @ k.mT * 20).masked_fill(~kept, -1e9), v)  # noqa: E731
    backend = Backend(training=training)
    found = compiled(function, backend)(q.requires_grad_(training), k, v, KEPT)
    assert backend.rewrite()
    torch.testing.assert_close(found, function(q, k, v, KEPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [False, True])
def test_a_sentinel_that_is_added_in_double_precision_swallows_nothing(training):
    arguments = [x.double() for x in inputs()[:3]]
    run = differentiate if training else fuse
    backend = run(lambda q, k, v, kept: attend(q @ k.mT + torch.where(kept, 0.0, -1e9).double(), v), *arguments, KEPT)
    assert backend.rewrite()


DOUBLES = {
    "a mask of numbers": lambda s, m, kept: (s + m).masked_fill(~kept, -1e9),
    "a fill below it": lambda s, m, kept: (s + m).masked_fill(~kept, -1e30),
    "a bias": lambda s, m, kept: (s - 0.5 * torch.arange(8)).masked_fill(~kept, -1e9),
    "a bias after it": lambda s, m, kept: s.masked_fill(~kept, -1e9) - 0.5 * torch.arange(8),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", DOUBLES)
def test_a_sentinel_that_is_filled_in_in_double_precision_leaves_nothing_of_the_scores(name, training):
    """Of two keys at -1e9, the one to which it was added keeps its score; no mask on the scores can say so."""
    kept = KEPT.clone()
    kept[:, :, 5, :4] = False
    mask = torch.zeros(2, 1, 6, 8, dtype=torch.float64)
    mask[:, :, 5, 4:] = -1e9
    run = differentiate if training else fuse
    q, k, v = (x.double() for x in inputs()[:3])
    backend = run(lambda q, k, v: DOUBLES[name](q @ k.mT, mask, kept).softmax(-1) @ v, q, k, v)
    if name == "a mask of numbers":
        assert backend.miss().code == "not_equal"
    else:
        assert backend.rewrite()


def test_a_wide_mask_over_half_queries_stays_finite():
    """float32's minimum is -inf in float16, and bfloat16 rounds it to -inf, too."""
    for dtype in (torch.bfloat16, torch.float16):
        torch._dynamo.reset()
        q, k, v, _ = inputs(dtype)
        mask = torch.zeros(2, 1, 6, 8).masked_fill(~KEPT, torch.finfo(torch.float32).min)
        backend = fuse(lambda q, k, v, m: attend(q @ k.mT * 0.25 + m, v), q, k, v, mask)
        assert backend.rewrite()


def test_a_mask_is_made_once_for_all_layers():
    def function(q, k, v, m):
        hidden = m > 0
        for _ in range(3):
            q = attend((q @ k.mT * 0.25).masked_fill(hidden, -math.inf), v)
        return q

    backend = fuse(function, *inputs())
    assert len(backend.of(Rewrite)) == 3
    masks = {node.kwargs["attn_mask"] for node in backend.attentions()}
    assert len(masks) == 1


def test_heads_are_padded_to_one_size():
    q, k, v, m = inputs()
    attention = lambda q, k, v, m: attend(q @ k.mT * 0.25 + m, v)  # noqa: E731
    for narrow, wide in (((q, k), v), ((q[..., :8], k[..., :8]), v), ((q, k), v[..., :8])):
        torch._dynamo.reset()
        backend = fuse(attention, *narrow, wide.contiguous(), m)
        assert ("padded head size" in backend.rewrite().detail) == (narrow[0].shape[-1] != wide.shape[-1])


@pytest.mark.parametrize("pick", [False, True])
def test_a_bias_that_is_a_product_hides_no_row(pick):
    """Relative positions as SAM and DeBERTa compute them; nothing looks for rows in which no key is left."""
    index = torch.arange(8).expand(2, 4, 6, 8).flip(-1)

    def function(q, k, v, table):
        bias = q @ table
        bias = bias.gather(-1, index) if pick else bias + (q * 2) @ table
        return torch.softmax(q @ k.mT + bias, -1) @ v

    backend = fuse(function, *inputs(torch.float16)[:3], torch.randn(4, 16, 8, dtype=torch.float16) / 8)
    assert backend.rewrite()
    names = [node.name for node in backend.graphs[0].graph.nodes]
    assert not [name for name in names if name.startswith(("amax", "masked_fill", "le", "isneginf"))]
