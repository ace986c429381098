"""Images of bytes are resized as eager does, bit by bit."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from omnicomp._torch.repairs.uint8_resize import bytes_resized_by_kernels

EAGER: dict[str, Any] = {"lowerings": ["eager"]}
aten: Any = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def resized(x: torch.Tensor, mode: str) -> tuple[torch.Tensor, ...]:
    up = F.interpolate(x, scale_factor=1.7, mode=mode)
    down = F.interpolate(x, size=(9, 13), mode=mode, align_corners=True)
    direct = getattr(aten, f"upsample_{mode}2d").default(x, (17, 5), False)
    return up, down, direct


def check(compiled: Any, x: torch.Tensor, mode: str) -> None:
    for got, wanted in zip(compiled(x, mode), resized(x, mode), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        assert got.stride() == wanted.stride()


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("channels", [2, 3])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_bytes_are_resized_as_in_eager(mode: str, channels: int, memory_format: torch.memory_format) -> None:
    compiled: Any = torch.compile(resized, backend="omni", options=EAGER, dynamic=True, fullgraph=True)
    for size in (19, 23):
        check(compiled, image(2, channels, size, size + 2).to(memory_format=memory_format), mode)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_bytes_are_resized_as_in_eager_in_inference_mode(mode: str) -> None:
    compiled: Any = torch.compile(resized, backend="omni", options=EAGER)
    with torch.inference_mode():
        check(compiled, image(1, 3, 20, 20), mode)


@pytest.mark.inductor
def test_bytes_are_resized_as_in_eager_under_inductor() -> None:
    compiled: Any = torch.compile(resized, backend="omni")
    check(compiled, image(1, 3, 20, 20), "bilinear")


def test_other_images_are_decomposed_as_before() -> None:
    x = image(1, 2, 5, 5).float().requires_grad_()
    compiled: Any = torch.compile(
        lambda x: F.interpolate(x, size=(7, 4), mode="bicubic"), backend="omni", options=EAGER
    )
    expected = F.interpolate(x, size=(7, 4), mode="bicubic")
    given = torch.ones_like(expected)
    (wanted,) = torch.autograd.grad(expected, x, given)
    result = compiled(x)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(torch.autograd.grad(result, x, given)[0], wanted)


def test_the_rules_of_torch_are_put_back() -> None:
    rules = aten.upsample_bilinear2d.vec.py_kernels
    before = dict(rules)
    with bytes_resized_by_kernels():
        assert rules != before
    assert rules == before
