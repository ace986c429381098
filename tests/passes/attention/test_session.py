"""Which kernel an attention becomes is decided for the dtype that the dtype policy computes it in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import omnicomp
from omnicomp._torch.autograd.attention import fused_kernel
from omnicomp.passes.attention import targets
from omnicomp.timeline import Rewrite, current


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * 0.25, -1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * 0.25 + bias, -1) @ v


def operands(length: int = 32) -> list[Tensor]:
    return [torch.randn(2, 4, length, 16) for _ in range(3)]


def run(function: Callable[..., Tensor], *args: Tensor, policy: Any) -> Tensor:
    options = {"lowerings": ["eager"], "dtype_policy": policy, "on_error": "raise"}
    return torch.compile(function, backend="omni", options=options)(*args)


def rewrites(name: str) -> list[tuple[str, str]]:
    return [(e.target, e.detail) for e in current() if isinstance(e, Rewrite) and e.name == name]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The CPU as a device on which cuDNN's kernel is preferred: the dtypes that this was asked for."""
    dtypes: list[torch.dtype] = []

    def prefers(query: Tensor, key: Tensor, dtype: torch.dtype, *, training: bool, tiled: bool = False) -> bool:
        dtypes.append(dtype)
        return dtype in (torch.bfloat16, torch.float16)

    monkeypatch.setattr(targets, "prefers_cudnn", prefers)
    return dtypes


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_lowered_attention_is_pinned_as_one_of_the_low_dtype_is(policy: str, asked: list[torch.dtype]) -> None:
    q, k, v = operands()
    result = run(attention, q, k, v, policy=policy)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[policy]
    assert asked == [low]
    assert result.dtype == torch.float32
    assert 1e-5 < float((result - attention(q, k, v)).norm() / result.norm()) < 2e-2, "it was computed in the low dtype"
    ((_, detail),) = rewrites("dtype_policy")
    assert detail.startswith("scaled_dot_product_attention float32 ->")


@pytest.mark.parametrize(
    "policy",
    [
        "keep",
        "tf32",
        {"preset": "bf16", "keep": ["*"]},
        {"preset": "bf16", "ops": {"operator.matmul": "float32"}},
        {"preset": "bf16", "ops": {"matmul_1": "float32"}},
    ],
)
def test_one_that_is_not_lowered_is_not(policy: Any, asked: list[torch.dtype]) -> None:
    q, k, v = operands()
    run(attention, q, k, v, policy=policy)
    assert asked == [torch.float32]


def test_a_pinned_one_is_lowered_with_its_mask(asked: list[torch.dtype]) -> None:
    q, k, v = operands()
    bias = torch.randn(1, 4, 32, 32)
    result = run(biased, q, k, v, bias, policy="bf16")
    right = biased(*(x.double() for x in (q, k, v, bias)))
    assert float((result - right).norm() / right.norm()) < 2e-2
    assert [target for target, _ in rewrites("dtype_policy")] == ["bfloat16"]


@pytest.mark.parametrize(("policy", "fused"), [("keep", 1), ("bf16", 0)])
def test_a_trained_bias_on_the_cpu_is_judged_in_the_low_dtype(policy: str, fused: int) -> None:
    """In float32 the fused form is ahead for scores of 32 MiB; in bfloat16 the unfused products are."""
    q, k, v = (x.requires_grad_() for x in (torch.randn(4, 8, 512, 16) for _ in range(3)))
    bias = torch.randn(1, 8, 512, 512, requires_grad=True)
    run(biased, q, k, v, bias, policy=policy)
    assert len(rewrites("attention_fusion")) == fused


def test_the_kernel_is_looked_for_in_that_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.dtype] = []

    def note(call: Callable[[], Tensor]) -> str:
        def watched() -> Tensor:
            result = call()
            found.append(result.dtype)
            return result

        return fused_kernel(watched)

    monkeypatch.setattr(targets, "fused_kernel", note)
    for policy in ("keep", "bf16"):
        torch.compiler.reset()
        omnicomp.timeline.clear()
        run(attention, *operands(), policy=policy)
    assert found == [torch.float32, torch.bfloat16]


def test_flex_attention_is_not_taken_where_the_policy_could_not_lower_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(targets, "flex_pays", lambda *args: bool(asked.append("asked")))
    for policy, times in (("bf16", 0), ("keep", 1)):
        torch.compiler.reset()
        run(attention, *operands(), policy=policy)
        assert len(asked) == times
