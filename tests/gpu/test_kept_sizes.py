"""On a CUDA device: images whose size a factor keeps are copied, where eager's kernels copy them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FACTORS = ((1.3, 1.1, 1.2), (1.0, 2.0, 1.3), (0.7, 1.1, 2.1))  # keep sizes of 3, double, or change them
CASES = [
    *(("nearest", n) for n in (1, 2, 3)),
    *(("nearest-exact", n) for n in (1, 2, 3)),
    ("linear", 1),
    ("bilinear", 2),
    ("trilinear", 3),
]


@pytest.mark.parametrize(("mode", "dimensions"), CASES)
def test_images_are_resized_as_in_eager(mode: str, dimensions: int) -> None:
    def resized(x: torch.Tensor) -> list[torch.Tensor]:
        return [F.interpolate(x, scale_factor=factors[:dimensions], mode=mode) for factors in FACTORS]

    compiled: Any = torch.compile(resized, backend="omni", fullgraph=True)
    x = torch.randn(2, 5, *(3,) * dimensions, device="cuda")
    given = [x] if dimensions != 2 else [x, x.contiguous(memory_format=torch.channels_last)]
    for each in given:
        torch.testing.assert_close(compiled(each), resized(each))
