"""On a CUDA device: hand-written attention takes fused kernels, and is as near to float64 as eager."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorded import events
from torch.nn.attention import SDPBackend, sdpa_kernel

from omnicomp.passes.attention import assume, timings
from omnicomp.timeline import NearMiss, Ran, Rewrite, Speculation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Function = Callable[..., torch.Tensor]
FAST = r"kernel _scaled_dot_product_(flash|cudnn)_attention$"
DENSE = r"kernel _scaled_dot_product_(efficient|cudnn)_attention$"
LENGTH = 1024


@pytest.fixture(autouse=True)
def by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "measurable", lambda device: False)


def operands(
    *,
    dtype: torch.dtype = torch.bfloat16,
    size: int = 64,
    heads: int = 4,
    shared: int = 4,
    queries: int = LENGTH,
    keys: int = LENGTH,
    batch: int = 2,
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(queries, heads), (keys, shared), (keys, shared)]
    made = [torch.randn(batch, n, h, size, device="cuda", dtype=dtype).transpose(1, 2) for n, h in shapes]
    return [tensor.requires_grad_() for tensor in made]


def indices(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    return rows[:, None], columns


def attend(scores: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The softmax in float32, as transformers writes it; in float64 for the reference."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, -1, dtype=wide).to(value.dtype) @ value


def product(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])


def lowest(scores: torch.Tensor) -> float:
    return torch.finfo(scores.dtype).min


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = product(q, k)
    rows, columns = indices(scores)
    return attend(scores.masked_fill(columns > rows, lowest(scores)), v)


def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(product(q, k), v)


def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = product(q, k)
    rows, columns = indices(scores)
    return attend(scores.masked_fill((columns > rows) | (rows - columns >= 100), -torch.inf), v)


def bottom_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = product(q, k)
    rows, columns = indices(scores)
    return attend(scores.masked_fill(columns > rows + (k.shape[-2] - q.shape[-2]), lowest(scores)), v)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    return causal(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    scores = product(q, k)
    rows, columns = indices(scores)
    return attend(scores.masked_fill((columns > rows) | (kept[:, None, None] == 0), lowest(scores)), v)


def softcapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.tanh(product(q, k) / 30) * 30
    rows, columns = indices(scores)
    return attend(scores.masked_fill(columns > rows, lowest(scores)), v)


def alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = product(q, k)
    rows, columns = indices(scores)
    slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1, device=q.device)
    scores = scores + (slopes[:, None, None] * (columns - rows)).to(scores.dtype)
    return attend(scores.masked_fill(columns > rows, lowest(scores)), v)


def t5_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2)
    rows, columns = indices(scores)
    bias = F.embedding((rows - columns).abs().clamp(max=31), table).permute(2, 0, 1).unsqueeze(0)
    return attend(scores / 8 + bias, v)


def called_with_bias(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """As T5 calls it: the keys of the mask are not one after the other in memory."""
    place = torch.arange(k.shape[2], device=q.device)
    bias = F.embedding((place[:, None] - place).abs().clamp(max=31), table).permute(2, 0, 1).unsqueeze(0)
    mask = torch.where(kept[:, None, None] == 1, bias, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.125)


def with_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    scores = product(q, k)
    rows, columns = indices(scores)
    scores = scores.masked_fill(columns > rows, lowest(scores))
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.cat((scores, column), -1).softmax(-1, dtype=wide)
    return weights[..., :-1].to(v.dtype) @ v


def results(function: Function, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [a.detach().clone().requires_grad_(a.requires_grad) for a in arguments]
    out = function(*leaves)
    torch.manual_seed(1)
    grad = torch.randn(out.shape, device="cuda").to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], grad)]


def check(function: Function, arguments: list[torch.Tensor], **options: Any) -> Rewrite:
    """Values and gradients are no farther from float64 than those of eager; the only site was fused."""
    doubled = [a.detach().double() if a.is_floating_point() else a for a in arguments]
    exact = results(function, [d.requires_grad_(a.requires_grad) for d, a in zip(doubled, arguments, strict=True)])
    found = results(torch.compile(function, backend="omni", fullgraph=True, **options), arguments)
    eps = torch.finfo(arguments[0].dtype).eps
    for number, (got, own, true) in enumerate(zip(found, results(function, arguments), exact, strict=True)):
        assert torch.equal(got.isnan(), own.isnan())
        error, bound = ((x.double() - true).nan_to_num().norm() for x in (got, own))
        # In float32 both are a few roundings off.
        assert error <= 1.5 * bound + 16 * eps * true.nan_to_num().norm(), f"result {number}: {error:.3g} > {bound:.3g}"
    assert events(NearMiss) == []
    (rewrite,) = events(Rewrite)
    return rewrite


def kernels() -> set[str]:
    return {kernel for ran in events(Ran) for kernel in ran.kernels}


@pytest.mark.parametrize("size", [64, 128, 256])
def test_causal_attention_needs_no_mask(size: int) -> None:
    detail = check(causal, operands(size=size)).detail
    assert "is_causal" in detail
    assert re.search(FAST, detail)
    assert any("_scaled_dot_product" in kernel and "backward" in kernel for kernel in kernels()), kernels()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_causal_attention_in_other_dtypes(dtype: torch.dtype) -> None:
    detail = check(causal, operands(dtype=dtype)).detail
    assert "is_causal" in detail
    # Only the memory-efficient kernel computes in float32.
    assert re.search(FAST if dtype == torch.float16 else DENSE, detail)


def test_attention_without_a_mask() -> None:
    detail = check(full, operands()).detail
    assert re.search(FAST, detail)
    assert "mask" not in detail


def test_lengths_beside_cudnn_s_tiles_have_their_gradients() -> None:
    rewrite = check(full, operands(queries=1500, keys=1500, heads=16, shared=16, batch=4))
    if torch.cuda.get_device_capability()[0] == 9:
        assert "cudnn" not in rewrite.detail


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("timed", [False, True])
def test_plans_of_another_gradient_s_layout_are_not_taken(*, dense: bool, timed: bool) -> None:
    """The layout of a gradient is missing in the key under which torch keeps a plan of cuDNN's backward."""
    size = 384 + 128 * dense + 256 * timed  # a key of its own: plans are kept as long as the process lives

    def leaf() -> torch.Tensor:
        return torch.randn(4, size, 8, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    torch.manual_seed(0)
    leaves = [leaf() for _ in range(3)]
    gradient = torch.randn(4, 8, size, 64, device="cuda", dtype=torch.bfloat16)
    other = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    first, second = (other, gradient) if dense else (gradient, other)

    def through(function: Any, *tensors: torch.Tensor, given: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(function(*tensors), tensors, given))

    if timed:  # a gradient that is laid out as `other` is
        torch.compile(full, backend="omni", options={"lowerings": ["eager"]})(*leaves)
    else:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            through(F.scaled_dot_product_attention, *leaves, given=first)
    wide = [tensor.detach().float().requires_grad_() for tensor in leaves]
    expected = through(full, *wide, given=second.float())
    if timed:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = through(F.scaled_dot_product_attention, *leaves, given=second)
    else:
        found = through(torch.compile(full, backend="omni"), *leaves, given=second)
    for mine, its in zip(found, expected, strict=True):
        assert (mine.float() - its).norm() < 0.02 * its.norm()


def test_grouped_heads_are_not_repeated() -> None:
    detail = check(grouped, operands(heads=8, shared=2)).detail
    assert "enable_gqa" in detail
    assert "is_causal" in detail
    assert re.search(FAST, detail)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_window_leaves_out_blocks(size: int) -> None:
    rewrite = check(window, operands(size=size))
    assert rewrite.target == "flex_attention"
    assert "sliding window of 100" in rewrite.detail


def test_a_short_window_is_a_dense_mask() -> None:
    rewrite = check(window, operands(queries=256, keys=256))
    assert rewrite.target == "scaled_dot_product_attention"
    assert re.search(DENSE, rewrite.detail)


def test_queries_at_the_end_of_the_keys() -> None:
    assert "causal, offset 512" in check(bottom_right, operands(queries=512)).detail


@pytest.mark.parametrize("size", [64, 128])
def test_softcap_is_flex_attention(size: int) -> None:
    rewrite = check(softcapped, operands(size=size))
    assert rewrite.target == "flex_attention"
    assert "tanh" in rewrite.detail


def test_alibi_is_computed_and_not_read() -> None:
    rewrite = check(alibi, operands())
    assert rewrite.target == "flex_attention"
    assert "bias" in rewrite.detail


@pytest.mark.parametrize("length", [LENGTH, 700])
def test_a_call_whose_mask_no_kernel_takes_gets_one_that_some_do(length: int) -> None:
    table = torch.randn(32, 4, device="cuda", dtype=torch.bfloat16)
    kept = (torch.arange(LENGTH, device="cuda") < length).long().expand(2, -1)
    rewrite = check(called_with_bias, [*operands(), table, kept], options={"speculate": False})
    assert not rewrite.kept
    assert re.search(DENSE, rewrite.detail)


def test_a_learned_bias_has_its_gradient() -> None:
    table = torch.randn(32, 4, device="cuda", dtype=torch.bfloat16).requires_grad_()
    assert re.search(DENSE, check(t5_bias, [*operands(queries=2048, keys=2048), table]).detail)


def test_a_short_learned_bias_costs_more_than_a_kernel_saves() -> None:
    table = torch.randn(32, 4, device="cuda", dtype=torch.bfloat16).requires_grad_()
    torch.compile(t5_bias, backend="omni", fullgraph=True)(*operands(queries=512, keys=512), table)
    (miss,) = events(NearMiss)
    assert miss.reason.code == "not_profitable"
    assert "requires grad" in miss.reason.sentence


def test_sinks_have_their_gradient() -> None:
    sinks = torch.randn(4, device="cuda", dtype=torch.bfloat16).requires_grad_()
    rewrite = check(with_sinks, [*operands(), sinks])
    assert rewrite.target == "omnicomp.attention_with_sink"
    assert "is_causal" in rewrite.detail


def test_padding_on_the_right() -> None:
    kept = torch.ones(2, LENGTH, device="cuda", dtype=torch.long)
    kept[0, 700:] = 0
    assert "causal and padding" in check(padded, [*operands(), kept], options={"speculate": False}).detail


@pytest.mark.parametrize("length", [256, LENGTH])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_without_keys_are_those_of_eager(length: int, dtype: torch.dtype) -> None:
    """Padding on the left leaves the first queries no key: one finite minimum shares them equally."""
    kept = torch.ones(2, length, device="cuda", dtype=torch.long)
    kept[0, : length // 3] = 0
    q, k, v = (x.detach() for x in operands(queries=length, keys=length, dtype=dtype))
    compiled = torch.compile(padded, backend="omni", fullgraph=True, options={"speculate": False})
    with torch.no_grad():
        found, eager = compiled(q, k, v, kept), padded(q, k, v, kept)
    assert len(events(Rewrite)) == 1
    torch.testing.assert_close(found[0, :, : length // 3], eager[0, :, : length // 3], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(found, eager, rtol=5e-2, atol=2e-2)


@pytest.mark.parametrize("length", [256, LENGTH])
def test_rows_of_minus_infinity_are_nan(length: int) -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return attend(product(q, k).masked_fill(kept[:, None, None] == 0, -torch.inf), v)

    kept = torch.ones(2, length, device="cuda", dtype=torch.long)
    kept[1] = 0
    q, k, v = (x.detach() for x in operands(queries=length, keys=length))
    with torch.no_grad():
        found = torch.compile(function, backend="omni", options={"speculate": False})(q, k, v, kept)
    assert len(events(Rewrite)) == 1
    assert not found[0].isnan().any()
    assert found[1].isnan().all()


def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.softmax(product(q, k), -1), 0.25, training=True) @ v


def test_dropout_has_its_probability_and_repeats_under_a_seed() -> None:
    """With values of one everywhere the output is the sum of the weights that are left, 1 on the average."""
    q, k, v = operands(size=64)
    compiled = torch.compile(dropped, backend="omni", fullgraph=True)

    def step(value: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(11)
        return results(compiled, [q, k, value])

    first, second = step(v), step(v)
    (rewrite,) = events(Rewrite)
    assert "dropout=0.25" in rewrite.detail
    # The kernels' backward adds up the gradient of the queries in any order, unless it is asked not to.
    assert torch.equal(first[0], second[0])
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)
    sums = step(torch.ones_like(v).requires_grad_())[0].float()[..., 0]
    eager = torch.softmax(product(q, k).float(), -1).detach()
    # Each weight is kept with probability 3/4 and scaled by 4/3.
    variance = (eager.square().sum(-1) * (0.25 / 0.75)).mean()
    assert abs(float(sums.mean()) - 1) < 0.01
    assert float(sums.var()) == pytest.approx(float(variance), rel=0.15)
    torch.manual_seed(12)
    assert not torch.equal(first[0], compiled(q, k, v))


def test_gradients_repeat_under_a_seed_with_deterministic_algorithms() -> None:
    arguments = operands(size=64)
    compiled = torch.compile(dropped, backend="omni", fullgraph=True)

    def step() -> list[torch.Tensor]:
        torch.manual_seed(11)
        return results(compiled, arguments)

    torch.use_deterministic_algorithms(True)
    try:
        first, second = step(), step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(events(Rewrite)) == 1
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_the_gradient_has_the_dropout_of_the_forward() -> None:
    """The output is linear in the values: their gradient, summed, is the output for values of one."""
    q, k, v = (x.detach() for x in operands())
    value = torch.ones_like(v).requires_grad_()
    out = torch.compile(dropped, backend="omni", fullgraph=True)(q, k, value)
    (grad,) = torch.autograd.grad(out.float().sum(), value)
    torch.testing.assert_close(grad.float().sum((2, 3)), out.float().sum((2, 3)), rtol=1e-2, atol=1.0)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_full_padding_mask_is_speculated_away_with_and_without_cuda_graphs(mode: str) -> None:
    arguments = [x.detach() for x in operands(batch=4, heads=16, shared=16, queries=2048, keys=2048)]
    whole = torch.ones(4, 2048, device="cuda", dtype=torch.long)
    part = whole.clone()
    part[1, 1500:] = 0
    compiled = torch.compile(padded, backend="omni", mode=mode)
    with torch.no_grad():
        for kept in (whole, whole, part, whole, part, part):
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(*arguments, kept).clone()
            torch.testing.assert_close(found, padded(*arguments, kept), rtol=5e-2, atol=2e-2)
    states = [(event.state, event.variant) for event in events(Speculation)]
    assert ("held", "assumed") in states
    assert ("held", "assumed2") in states, "a class of its own: the first key is seen"
    details = [event.detail for event in events(Rewrite)]
    assert sum("is_causal" in detail for detail in details) == 1
    assert len(details) == 2, "two variants, and nothing compiled again"


def with_added_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return attend(product(q, k) + mask, v)


def test_the_host_launches_a_call_with_a_new_mask_before_it_reads_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assume, "worth", lambda *args, **kwargs: None)
    q, k, v = (x.detach() for x in operands())
    compiled = torch.compile(with_added_mask, backend="omni", fullgraph=True)
    rows, columns = indices(q @ k.mT)
    classes = [columns > rows, columns > rows + 3, columns > rows]
    with torch.no_grad():
        for hidden in classes:
            for step in range(5):
                mask = torch.zeros(1, 1, LENGTH, LENGTH, device="cuda", dtype=q.dtype)
                mask.masked_fill_(hidden, torch.finfo(q.dtype).min)
                # Whatever makes the host wait raises, but for waiting for an event.
                torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
                try:
                    found = compiled(q, k, v, mask)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                torch.testing.assert_close(found, with_added_mask(q, k, v, mask), rtol=5e-2, atol=2e-2)
    assert "is_causal" in events(Rewrite)[0].detail


def test_a_mask_is_looked_at_behind_what_the_program_launched_to_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assume, "worth", lambda *args, **kwargs: None)
    q, k, v = (x.detach() for x in operands())
    compiled = torch.compile(with_added_mask, backend="omni", fullgraph=True)
    rows, columns = indices(q @ k.mT)
    low = torch.finfo(q.dtype).min
    with torch.no_grad():
        for step in range(8):
            mask = torch.zeros(1, 1, LENGTH, LENGTH, device="cuda", dtype=q.dtype)
            hidden = columns > rows + (3 if step == 5 else 0)
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            mask.masked_fill_(hidden, low)
            found = compiled(q, k, v, mask)
            torch.testing.assert_close(found, with_added_mask(q, k, v, mask), rtol=5e-2, atol=2e-2)
    assert {event.state for event in events(Speculation) if event.variant == "assumed2"} >= {"compiled", "held"}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["bools", "numbers", "call"])
@pytest.mark.parametrize("size", [64, 128])
def test_documents_that_come_in_as_a_mask_of_all_pairs_leave_out_blocks(size: int, kind: str, training: bool) -> None:
    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if kind == "call":
            return F.scaled_dot_product_attention(q, k, v, mask.to(q.dtype) if mask.is_floating_point() else mask)
        if kind == "numbers":
            return attend(product(q, k) + mask.to(q.dtype), v)
        return attend(product(q, k).masked_fill(~mask, lowest(q)), v)

    length, heads = 2048, 16
    q, k, v = (
        x.detach().requires_grad_(training)
        for x in operands(size=size, heads=heads, shared=heads, queries=length, keys=length)
    )
    place = torch.arange(length, device="cuda")
    later = (place[:, None] >= place).expand(2, -1, -1).clone(memory_format=torch.contiguous_format)
    compiled = torch.compile(masked, backend="omni", fullgraph=True)
    # Two sequences with documents of their own, and one mask of another class.
    masks = [torch.stack([(place // n)[:, None] == place // n for n in lengths]) for lengths in ((300, 511), (90, 777))]
    for seen in (*masks, *(mask & later for mask in masks), later, masks[0]):
        mask = seen[:, None]
        if kind == "numbers":
            mask = torch.zeros(mask.shape, device="cuda").masked_fill(~mask, torch.finfo(q.dtype).min)
        arguments = [q, k, v, mask]
        doubled = [
            x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in arguments
        ]
        with torch.set_grad_enabled(training):
            outs = [call(*given) for call, given in ((compiled, arguments), (masked, arguments), (masked, doubled))]
            found, own, true = (
                [out, *(torch.autograd.grad(out.square().sum(), given[:3]) if training else ())]
                for out, given in zip(outs, (arguments, arguments, doubled), strict=True)
            )
        for got, eager, exact in zip(found, own, true, strict=True):
            error, bound = ((x.double() - exact).norm() for x in (got, eager))
            assert error <= 1.5 * bound + 1e-3 * exact.norm()
    details = [event.detail for event in events(Rewrite)]
    assert "block mask (short runs of keys)" in details[0]
    assert "is_causal" in details[1]
    assert len(details) == 2, "all documents share a variant"
    assert [event.state for event in events(Speculation)].count("compiled") == 2
    assert {event.lowering for event in events(Ran)} == {"inductor"}


def test_changing_lengths_share_a_graph() -> None:
    compiled = torch.compile(causal, backend="omni", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (512, 640, 1000):
            q, k, v = (x.detach() for x in operands(queries=length, keys=length))
            torch.testing.assert_close(compiled(q, k, v), causal(q, k, v), rtol=5e-2, atol=2e-2)
    assert events(NearMiss) == []
    (rewrite,) = events(Rewrite)
    assert "is_causal" in rewrite.detail


def called_with_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.125)


@pytest.mark.parametrize("function", [with_added_mask, called_with_mask])
def test_lengths_that_cudnn_s_tiles_divide_share_a_graph_in_training(
    monkeypatch: pytest.MonkeyPatch, function: Function
) -> None:
    monkeypatch.undo()  # the kernels are timed
    compiled = torch.compile(function, backend="omni", fullgraph=True, dynamic=True, options={"speculate": False})
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    for length, graphs in ((1024, 1), (1152, 1), (1000, 2 if on_hopper else 1)):
        mask = torch.randn(2, 1, length, length, device="cuda", dtype=torch.bfloat16)
        arguments = [*operands(queries=length, keys=length, heads=16, shared=16), mask]
        for got, own in zip(results(compiled, arguments), results(function, arguments), strict=True):
            torch.testing.assert_close(got, own, rtol=5e-2, atol=2e-2)
        forwards = [ran for ran in events(Ran) if ran.part == "forward"]
        assert len(forwards) == graphs
    if on_hopper:
        assert any("cudnn" in kernel for kernel in forwards[0].kernels)


@pytest.mark.parametrize("training", [False, True])
def test_a_call_that_gets_another_kernel_is_zero_where_no_key_is_left(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    best = timings.Timed(best="cudnn", times={"cudnn": 1.0, "efficient": 2.0})
    monkeypatch.setattr(timings.STORE, "read", lambda key: (best, ""))
    timings.forget()
    q, k, v = (tensor.detach().requires_grad_(training) for tensor in operands(queries=128, keys=128))
    mask = torch.rand(2, 1, 128, 128, device="cuda") > 0.3
    mask[0, 0, 5] = False

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    compiled = torch.compile(function, backend="omni", options={"speculate": False})
    found, expected = (call(q, k, v, mask) for call in (compiled, function))
    timings.forget()
    (rewrite,) = events(Rewrite)
    assert rewrite.timed == best.times
    assert "cudnn" in rewrite.detail
    if rewrite.kept:
        pytest.skip("torch takes cuDNN's kernel by itself, and what that leaves in such rows is the program's")
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    assert not found[0, :, 5].any()
    if training:
        for got, wanted in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, expected)), strict=True):
            torch.testing.assert_close(got, wanted, atol=0.05, rtol=0.05)


def test_a_mask_that_is_cast_where_flexattention_reads_it() -> None:
    """The padding of a batch of one; Inductor would put the cast into the kernel."""
    q, k, v = (tensor.detach() for tensor in operands(batch=1, queries=2048, keys=2048))
    padding = torch.ones(1, 2048, dtype=torch.int64, device="cuda")
    padding[0, 2000:] = 0

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        rows, columns = (torch.arange(2048, device=q.device) for _ in range(2))
        seen = (columns > rows[:, None] - 256) & (columns <= rows[:, None])
        batch = torch.arange(1, device=q.device)[:, None, None, None]
        seen = seen & padding.to(torch.bool)[batch, columns[None, None, None, :]]
        return F.scaled_dot_product_attention(q, k, v, seen)

    found = torch.compile(function, backend="omni", options={"speculate": False})(q, k, v, padding)
    torch.testing.assert_close(found, function(q, k, v, padding), atol=0.02, rtol=0.02)
    assert [event.target for event in events(Rewrite)] == ["flex_attention"]
    assert {event.lowering for event in events(Ran)} == {"inductor"}


@pytest.mark.parametrize(("keys", "fused"), [(49, True), (256, False)])
def test_trained_biases_of_small_windows_are_fused_without_being_timed(keys: int, fused: bool) -> None:
    def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return attend(product(q, k) + bias, v)

    q, k, v = (torch.randn(64, 4, keys, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = torch.randn(4, keys, keys, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(biased, backend="omni", options={"attention_seconds": 0.0})
    compiled(q, k, v, bias).sum().backward()
    assert any("attention" in event.target for event in events(Rewrite)) == fused
    assert fused or [event.reason.code for event in events(NearMiss)] == ["not_profitable"]
