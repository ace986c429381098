"""On a CUDA device: attention with a sink on each kernel equals the unfused program, with its gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from omnicomp.passes.attention.differentiable import ATTENTION_WITH_SINK, attention_with_sink, sink_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BATCH, HEADS, SIZE, SCALE = 2, 8, 64, 0.125


def operands(queries: int, keys: int, shared: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = [(queries, HEADS), (keys, shared), (keys, shared)]
    made = [torch.randn(BATCH, n, h, size, device="cuda", dtype=dtype).transpose(1, 2) for n, h in sizes]
    return [*(t.requires_grad_() for t in made), torch.randn(HEADS, device="cuda", dtype=dtype).requires_grad_()]


def unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sink: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * SCALE
    scores = scores if mask is None else scores + mask
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    sink = sink.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sink), -1).softmax(-1, dtype=torch.promote_types(torch.float32, scores.dtype))
    return weights[..., :-1].to(value.dtype) @ value


def results(function: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    out = function(*leaves)
    torch.manual_seed(1)
    grad = torch.randn(out.shape, device="cuda").to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def no_worse_than_unfused(
    fused: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor]
) -> None:
    """Compare the errors against float64: of the fused attention, and of the same program as written."""
    exact = results(plain, [leaf.detach().double().requires_grad_() for leaf in leaves])
    for number, (found, eager, true) in enumerate(
        zip(results(fused, leaves), results(plain, leaves), exact, strict=True)
    ):
        error, bound = (found - true).norm(), (eager - true).norm()
        # A float32 product in eager may be nearly exact; then a few roundings more are none too many.
        floor = 8 * torch.finfo(leaves[0].dtype).eps * true.norm() / (1 if leaves[0].dtype == torch.float32 else 8)
        assert error <= torch.maximum(1.5 * bound, floor), f"result {number}: {error:.3g}, unfused {bound:.3g}"


def kernel_named(name: str) -> None:
    if name == "cudnn" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("cuDNN's attention needs a newer device")


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("queries", "keys"), [(128, 128), (77, 77), (33, 160), (160, 33)])
@pytest.mark.parametrize("shared", [2, HEADS])
def test_sink_and_its_gradients(kernel: str, dtype: torch.dtype, queries: int, keys: int, shared: int) -> None:
    kernel_named(kernel)
    if dtype == torch.float32 and kernel != "efficient":
        pytest.skip("half precision only")
    leaves = operands(queries, keys, shared, SIZE, dtype)
    fused = functools.partial(attention_with_sink, scale=SCALE, enable_gqa=shared != HEADS, kernel=kernel)
    no_worse_than_unfused(fused, unfused, leaves)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("count", [96, 128])
def test_causal_sink(kernel: str, count: int) -> None:
    kernel_named(kernel)
    leaves = operands(count, count, HEADS, SIZE, torch.bfloat16)
    fused = functools.partial(attention_with_sink, scale=SCALE, is_causal=True, kernel=kernel)
    no_worse_than_unfused(fused, functools.partial(unfused, is_causal=True), leaves)


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
@pytest.mark.parametrize("shape", [(1, 1, 77, 77), (1, HEADS, 77, 77), (BATCH, 1, 77, 77), (77, 77)], ids=str)
def test_sink_with_a_mask(kernel: str, shape: tuple[int, ...]) -> None:
    kernel_named(kernel)
    leaves = operands(77, 77, 2, SIZE, torch.bfloat16)
    later = torch.ones(77, 77, device="cuda", dtype=torch.bool).triu(1)
    mask = torch.randn(shape, device="cuda", dtype=torch.bfloat16).masked_fill(later, -1e9)
    fused = functools.partial(attention_with_sink, attn_mask=mask, scale=SCALE, enable_gqa=True, kernel=kernel)
    no_worse_than_unfused(fused, lambda *x: unfused(*x, mask), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, HEADS, 77, 77), (BATCH, HEADS, 77, 77), (1, 1, 77, 77)], ids=str)
def test_sink_with_a_mask_that_requires_grad(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    mask = torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()
    leaves = [*operands(77, 77, HEADS, SIZE, dtype), mask]
    no_worse_than_unfused(functools.partial(attention_with_sink, scale=SCALE), unfused, leaves)


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.bfloat16).min])
def test_a_row_hidden_as_a_whole_looks_only_at_the_sink(kernel: str, fill: float) -> None:
    kernel_named(kernel)
    leaves = operands(128, 128, HEADS, SIZE, torch.bfloat16)
    mask = torch.zeros(BATCH, 1, 128, 128, device="cuda", dtype=torch.bfloat16)
    mask[:, :, :5] = fill
    out, *grads = results(functools.partial(attention_with_sink, attn_mask=mask, scale=SCALE, kernel=kernel), leaves)
    assert not out[:, :, :5].any()
    assert not grads[0][:, :, :5].any()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("size", [20, 96, 128])
def test_head_sizes(size: int) -> None:
    leaves = operands(64, 64, HEADS, size, torch.bfloat16)
    assert sink_kernel(leaves[0], leaves[1], masked=False, trained=False, is_causal=True) == "flash"
    fused = functools.partial(attention_with_sink, scale=SCALE, is_causal=True)
    no_worse_than_unfused(fused, functools.partial(unfused, is_causal=True), leaves)


@pytest.mark.inductor
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_inductor_compiles_every_kernel(kernel: str) -> None:
    kernel_named(kernel)
    leaves = operands(77, 77, HEADS, SIZE, torch.bfloat16)

    def program(*x: torch.Tensor) -> torch.Tensor:
        return ATTENTION_WITH_SINK(*x, scale=SCALE, is_causal=True, kernel=kernel) * 2

    def plain(*x: torch.Tensor) -> torch.Tensor:
        return unfused(*x, is_causal=True) * 2

    no_worse_than_unfused(torch.compile(program, fullgraph=True), plain, leaves)
    with torch.no_grad():
        found, wanted = torch.compile(program, fullgraph=True)(*leaves), plain(*(leaf.double() for leaf in leaves))
    torch.testing.assert_close(found.double(), wanted, atol=3e-2, rtol=3e-2)


def test_a_mask_that_requires_grad_without_a_sink_keeps_the_kernel_of_torch() -> None:
    from omnicomp.passes.attention.differentiable import attention_with_bias

    query, key, value, _ = operands(64, 64, HEADS, SIZE, torch.bfloat16)
    mask: Any = torch.randn(1, HEADS, 64, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = attention_with_bias(query, key, value, mask, scale=SCALE)
    (grad,) = torch.autograd.grad(out.float().square().sum(), mask)
    assert grad.shape == mask.shape
    assert grad.any()
