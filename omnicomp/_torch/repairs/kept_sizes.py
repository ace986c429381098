"""Images resized by a factor that keeps a size, or doubles it: most of eager's kernels then ignore the factor.

`F.interpolate(x, scale_factor=1.3)` makes 3 by 3 pixels of 3 by 3. Eager copies them; torch's decompositions read the
rows 0, 0 and 1. A reproducer is `tests/_torch/repairs/test_kept_sizes.py`.

On CPUs the kernels look at each dimension by itself (`nearest_idx` and `compute_source_index_and_lambda` in ATen's
`native/cpu/UpSampleKernel.cpp`). On CUDA (`native/cuda/UpSample*.cu`) those of the linear modes look at all dimensions
together, and those of the modes `nearest` and `nearest-exact` at each one, in 2-D alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch.fx.experimental.symbolic_shapes import guard_or_false

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/198201")
DEVICES: Final = ("cpu", "cuda")

_Factors = Sequence[float | None]


def _effective(image: Tensor, size: Sequence[int], factors: _Factors, ignored: Sequence[float]) -> list[float | None]:
    """The factors by which eager resizes: one of `ignored` where the size changes by exactly that."""

    def effective(before: int, after: int, factor: float | None) -> float | None:
        if factor is None:
            return None
        exact = (whole for whole in ignored if guard_or_false(after == before * int(whole)))
        return next(exact, factor)

    return [effective(*dimension) for dimension in zip(image.shape[2:], size, factors, strict=True)]


def _linear(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`_upsample_linear` of one to three dimensions."""

    def resize(image: Tensor, output_size: Sequence[int], align_corners: bool, scales: _Factors) -> Tensor:
        if not align_corners:  # aligned corners are resized by the sizes alone
            kept = all(guard_or_false(a == b) for a, b in zip(image.shape[2:], output_size, strict=True))
            if image.device.type == "cpu" or (image.device.type == "cuda" and kept):
                scales = _effective(image, output_size, scales, (1.0,))
        return original(image, output_size, align_corners, scales)

    return resize


def _nearest(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`_upsample_nearest` of one to three dimensions."""

    def resize(image: Tensor, output_size: Sequence[int], scales: _Factors, exact: bool = False) -> Tensor:
        if image.device.type == "cpu" and not exact and _ignores_factors(image):
            scales = _effective(image, output_size, scales, (1.0, 2.0))
        elif image.device.type == "cuda" and image.ndim == 4:
            scales = _effective(image, output_size, scales, (1.0,))
        return original(image, output_size, scales, exact)

    return resize


def _ignores_factors(image: Tensor) -> bool:
    """Whether one of those of eager's kernels on CPUs resizes it by `nearest` that look at the sizes first."""
    if image.ndim == 5:
        return image.shape[1] > 3 and image.is_contiguous(memory_format=torch.channels_last_3d)
    return image.ndim == 4


_RESIZES: Final = (
    Exchange(decompositions, "_upsample_linear", _linear),
    Exchange(decompositions, "_upsample_nearest", _nearest),
)


def sizes_kept() -> AbstractContextManager[None]:
    """While AOTAutograd traces: a factor that changes no size changes no value."""
    return NEEDED.exchanging(*_RESIZES)
