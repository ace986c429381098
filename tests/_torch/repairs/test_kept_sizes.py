"""Images whose size a factor keeps or doubles are copied or repeated, as eager does."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table, decompositions
from torch._subclasses import FakeTensorMode

from omnicomp._torch.repairs.kept_sizes import _linear, _nearest, sizes_kept

EAGER: dict[str, Any] = {"lowerings": ["eager"]}
SIZES = ((3, 4, 5), (4, 2, 6))
FACTORS = ((1.3, 2.2, 1.7), (1.1, 1.1, 1.1), (2.1, 0.7, 1.45), (1.0, 2.0, 1.3))  # keep, double, or change a size
CASES = [("nearest", n) for n in (1, 2, 3)] + [("nearest-exact", 2), ("linear", 1), ("bilinear", 2), ("trilinear", 3)]


def image(size: tuple[int, ...], channels: int = 5) -> Tensor:
    count = 2 * channels * int(torch.tensor(size).prod())
    return torch.arange(float(count)).mul(0.7).sin().view(2, channels, *size)


def formats(x: Tensor) -> list[Tensor]:
    """The image in every memory format, some of which have kernels of their own."""
    if x.ndim == 3:
        return [x]
    last = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    return [x, x.contiguous(memory_format=last), x.contiguous(memory_format=last)[:, :3]]


@pytest.mark.parametrize(("mode", "dimensions"), CASES)
def test_decompositions_resize_as_eager_does(mode: str, dimensions: int) -> None:
    name = "_upsample_nearest_exact" if mode == "nearest-exact" else f"upsample_{mode}"
    kernel = getattr(torch.ops.aten, f"{name}{dimensions}d").default
    aligned = () if "nearest" in mode else (False,)
    for size, factors in itertools.product(SIZES, FACTORS):
        for x in formats(image(size[:dimensions])):
            target = [int(one * factor) for one, factor in zip(x.shape[2:], factors, strict=False)]
            arguments = (x, target, *aligned, *factors[:dimensions])
            with sizes_kept():
                found = decomposition_table[kernel](*arguments)
            torch.testing.assert_close(found, kernel(*arguments))


def resized(x: Tensor, mode: str) -> list[Tensor]:
    return [F.interpolate(x, scale_factor=factors[: x.ndim - 2], mode=mode) for factors in FACTORS[::2]]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_graphs_and_their_gradients_are_eagers(mode: str, dynamic: bool) -> None:
    compiled: Any = torch.compile(resized, backend="omni", options=EAGER, dynamic=dynamic, fullgraph=True)
    mine, eagers = (image(SIZES[0][:2]).requires_grad_() for _ in range(2))
    results = [function(x, mode) for x, function in ((mine, compiled), (eagers, resized))]
    torch.testing.assert_close(*results)
    for found in results:
        sum((result * result).sum() for result in found).backward()
    torch.testing.assert_close(mine.grad, eagers.grad)


@pytest.mark.inductor
def test_under_inductor_and_called_directly() -> None:
    def direct(x: Tensor) -> list[Tensor]:
        size = [x.shape[2], 2 * x.shape[3]]
        return [*resized(x, "nearest"), torch.ops.aten.upsample_bilinear2d.default(x, size, False, 1.2, 2.1)]

    with torch.inference_mode():
        x = image((3, 4))
        torch.testing.assert_close(torch.compile(direct, backend="omni")(x), direct(x))


def test_kernels_for_cuda_look_at_all_sizes_together_or_at_those_of_two_dimensions() -> None:
    linear = _linear(lambda image, size, aligned, scales: scales)  # type: ignore[arg-type,return-value]
    nearest = _nearest(lambda image, size, scales, exact: scales)  # type: ignore[arg-type,return-value]
    factors = [1.3, 1.1, 1.2]
    with FakeTensorMode():
        images = [torch.empty(1, 1, *(3,) * n, device="cuda") for n in (1, 2, 3)]
    for n, x in enumerate(images, 1):
        assert linear(x, [3] * n, False, factors[:n]) == [1.0] * n
        assert linear(x, [3] * n, True, factors[:n]) == factors[:n]
        assert linear(x, [4, 3, 3][:n], False, factors[:n]) == factors[:n]
        for exact in (False, True):
            assert nearest(x, [3, 6, 3][:n], factors[:n], exact) == ([1.0, 1.1] if n == 2 else factors[:n])


def test_torch_is_as_it_was_afterwards() -> None:
    before = decompositions._upsample_linear, decompositions._upsample_nearest
    with sizes_kept():
        assert decompositions._upsample_linear is not before[0]
    assert (decompositions._upsample_linear, decompositions._upsample_nearest) == before
