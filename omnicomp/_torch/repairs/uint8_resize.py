"""Images of bytes that are resized: AOTAutograd gets an operator that calls eager's kernel, not a decomposition.

Of uint8 on CPUs, ATen's bilinear and bicubic kernels compute with integer weights. Torch decomposes the operators into
arithmetic of floats, whose results differ from the kernels' by one in up to a third of the elements, with any backend.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import torch
import torch._decomp.decompositions as decompositions
from torch import Tensor
from torch._C import DispatchKey
from torch._prims_common import suggest_memory_format
from torch.library import Library

from omnicomp._torch.autograd.overrides import put_fake
from omnicomp._torch.repairs.needed import Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/113024")

_library: Final = Library("omnicomp", "FRAGMENT")
_aten: Final[Any] = torch.ops.aten
_RESIZES: Final[tuple[Any, ...]] = (_aten.upsample_bilinear2d, _aten.upsample_bicubic2d)
_KEYS: Final = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


def _define(resize: Any) -> Any:
    """Make an operator of the namespace `omnicomp` that no decomposition knows, and that calls a kernel of ATen."""
    name = f"{resize.__name__}_of_bytes"
    _library.define(
        f"{name}(Tensor self, SymInt[2] output_size, bool align_corners, float? scales_h, float? scales_w) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag,),
    )

    def kernel(image: Tensor, size: Any, align_corners: bool, height: float | None, width: float | None) -> Tensor:
        return resize.default(image, size, align_corners, height, width)

    def fake(image: Tensor, size: Any, align_corners: bool, height: float | None, width: float | None) -> Tensor:
        del align_corners, height, width
        return torch.empty(
            (*image.shape[:2], *size),
            dtype=image.dtype,
            device=image.device,
            memory_format=suggest_memory_format(image),
        )

    _library.impl(name, kernel, "CPU")
    put_fake(_library, name, fake)
    return getattr(torch.ops.omnicomp, name).default


@functools.cache
def of_bytes() -> dict[Any, Any]:
    """The operators for bytes, by those whose kernels they call; the first call defines them."""
    return {resize: _define(resize) for resize in _RESIZES}


@contextlib.contextmanager
def bytes_resized_by_kernels() -> Generator[None]:
    """While AOTAutograd traces: an image of bytes on a CPU is resized by the kernel that eager calls."""
    replaced: list[tuple[Any, Any, Callable[..., Any]]] = []

    # The compile lock is held, so nothing else is compiled meanwhile; outside of tracing these rules are not asked.
    try:
        for resize in _RESIZES:
            for overload, rule in ((resize.vec, _of_scales), (resize.default, _of_sizes)):
                for key in _KEYS:
                    original = overload.py_kernels.get(key)
                    if original is not None:
                        replaced.append((overload, key, original))
                        _set_rule(overload, key, rule(of_bytes()[resize], original))
        yield
    finally:
        for overload, key, original in replaced:
            _set_rule(overload, key, original)


def _set_rule(overload: Any, key: Any, rule: Callable[..., Any]) -> None:
    overload.py_kernels[key] = rule
    overload._dispatch_cache.clear()


def _is_bytes(image: Tensor) -> bool:
    return image.dtype == torch.uint8 and image.device.type == "cpu"


def _of_sizes(kernel: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def rule(
        image: Tensor,
        output_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Tensor:
        if _is_bytes(image):
            return kernel(image, output_size, align_corners, scales_h, scales_w)
        return original(image, output_size, align_corners, scales_h, scales_w)

    return rule


def _of_scales(kernel: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def rule(
        image: Tensor,
        output_size: Sequence[int] | None,
        align_corners: bool,
        scale_factors: Sequence[float] | None = None,
    ) -> Tensor:
        if _is_bytes(image):
            size: Any = decompositions.upsample_compute_output_size(image.size(), output_size, scale_factors)
            height, width = scale_factors or (None, None)
            return kernel(image, size, align_corners, height, width)
        return original(image, output_size, align_corners, scale_factors)

    return rule
