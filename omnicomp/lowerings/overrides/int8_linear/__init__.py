"""An override for linear layers with a weight of int8 and few rows, as in decoding: the weight is read as it is.

The program casts the weight to the dtype of the activations first, which writes twice the bytes of the weight and reads
them again, where the product of a few rows is bound by reading. Here the weight is cast in registers.
"""

import importlib.util
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from omnicomp._torch.autograd.attention import hint_of
from omnicomp._torch.autograd.overrides import put_fake, put_kernel
from omnicomp.lowerings.overrides.int8_linear.search import search
from omnicomp.lowerings.overrides.registry import override
from omnicomp.timeline import Reason

__all__ = ["SOURCE_FILES", "check", "int8_linear", "reference"]

SOURCE_FILES: Final[tuple[Path, ...]] = tuple(
    Path(__file__).with_name(name) for name in ("__init__.py", "cuda.py", "search.py")
)
"""The files whose content decides what the operator computes; it belongs into the key of every compile cache."""

_HALF: Final = (torch.bfloat16, torch.float16)
# Measured with bench/bench_overrides.py.
_MAX_ROWS: Final = {
    ("cuda", torch.bfloat16): 64,
    ("cuda", torch.float16): 64,
    ("cpu", torch.bfloat16): 16,
    ("cpu", torch.float32): 1,
}
# Calling the operator and launching its kernel takes the host about as long as Inductor's two kernels take a GPU for a
# weight of this size; in CUDA graphs smaller ones would gain as well, but a check does not know of those.
_MIN_WEIGHTS: Final = {"cuda": 40_000_000, "cpu": 2**20}
_MULTIPLE: Final = 256


def reference(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """What the operator computes, in plain torch; the parameters are the operator's."""
    return F.linear(x, weight.to(x.dtype)) * scale


def check(x: Tensor, weight: Tensor, scale: Tensor) -> Reason | None:
    """Whether the operator may, and should, take a layer; reads metadata only, and guards no symbolic size.

    Args:
        x: (..., k).
        weight: (n, k), int8.
        scale: n elements.

    Returns:
        None if so, otherwise the reason why not.
    """
    device = weight.device.type
    most = _MAX_ROWS.get((device, x.dtype))
    if most is None or (device == "cuda" and importlib.util.find_spec("triton") is None):
        return _refuse(
            "int8_linear has no kernel for the device and dtype",
            observed=f"{x.dtype} on {device}",
            needed="bfloat16 or float16 on CUDA with Triton, bfloat16 or float32 on the CPU",
            lever="cast the activations",
        )
    if x.requires_grad or scale.requires_grad:
        return _refuse(
            "int8_linear has no gradient",
            observed="requires_grad=True",
            needed="activations and scales that need no gradient",
            lever="run the model under torch.no_grad() or torch.inference_mode()",
        )
    sizes: tuple[Any, ...] = tuple(weight.shape)
    if not all(isinstance(size, int) for size in sizes) or not weight.is_contiguous() or sizes[1] % _MULTIPLE:
        return _refuse(
            "int8_linear takes only a contiguous weight of fixed sizes",
            observed=f"{list(sizes)}, strides {list(weight.stride())}",
            needed=f"contiguous rows of a multiple of {_MULTIPLE}",
            lever="pad the weight, or call contiguous() on it once",
        )
    if sizes[0] * sizes[1] < _MIN_WEIGHTS[device]:
        return _refuse(
            "int8_linear would not be faster on so small a weight, where calling an operator costs more than its work",
            observed=f"{sizes[0]} x {sizes[1]}",
            needed=f"at least {_MIN_WEIGHTS[device]} elements",
            lever="use a larger layer",
        )
    rows: Any = 1
    for size in x.shape[:-1]:
        rows *= hint_of(size)
    if not 1 <= rows <= most:
        return _refuse(
            "int8_linear is only for few rows: with many, casting the weight costs little beside the product",
            observed=f"{rows} rows",
            needed=f"1 to {most} rows",
            lever="run fewer rows at once",
        )
    return None


def _refuse(sentence: str, *, observed: str, needed: str, lever: str) -> Reason:
    return Reason(
        code="override_refused", sentence=sentence, observed=observed, needed=needed, lever=lever, by="int8_linear"
    )


def _require(x: Tensor, weight: Tensor, scale: Tensor) -> None:
    if weight.dtype != torch.int8 or scale.dtype != x.dtype:
        raise TypeError(f"int8_linear takes an int8 weight and a scale of {x.dtype}, not {weight.dtype}, {scale.dtype}")
    if weight.dim() != 2 or scale.dim() != 1 or x.dim() < 1:
        raise ValueError("int8_linear takes x (..., k), weight (n, k) and scale (n)")


# Defined without `torch.library.custom_op`, whose wrappers double the time of a call.
_library: Final = torch.library.Library("omnicomp", "FRAGMENT")
_library.define("int8_linear(Tensor x, Tensor weight, Tensor scale) -> Tensor")


def _cpu(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    _require(x, weight, scale)
    rows = x.reshape(-1, x.shape[-1])
    if not 1 <= rows.shape[0] <= _MAX_ROWS.get(("cpu", x.dtype), 0):
        return reference(x, weight, scale)
    product = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), weight, scale)
    return product.reshape(*x.shape[:-1], weight.shape[0])


def _cuda(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    from omnicomp.lowerings.overrides.int8_linear.cuda import int8_linear_cuda  # needs Triton

    _require(x, weight, scale)
    rows = x.reshape(-1, x.shape[-1])
    # A graph with a symbolic number of rows can be called with more than it was checked for.
    if x.dtype not in _HALF or not 1 <= rows.shape[0] <= _MAX_ROWS["cuda", x.dtype] or x.shape[-1] % _MULTIPLE:
        return reference(x, weight, scale)
    return int8_linear_cuda(rows, weight.contiguous(), scale.contiguous()).reshape(*x.shape[:-1], weight.shape[0])


put_kernel(_library, "int8_linear", _cpu, "CPU")
put_kernel(_library, "int8_linear", _cuda, "CUDA")


def _fake(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    _require(x, weight, scale)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


put_fake(_library, "int8_linear", _fake)


@override(
    name="int8_linear",
    search=search,
    reference=reference,
    operators=(torch.ops.omnicomp.int8_linear.default,),
    devices=("cpu", "cuda"),
    dtypes=(torch.float32, *_HALF),
    training="forward only",
    check=check,
    sources=tuple(str(path) for path in SOURCE_FILES),
)
def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`F.linear(x, weight.to(x.dtype)) * scale`, reading the weight as int8; forward only.

    The product is summed and scaled in float32 and rounded once. On the CPU it is ATen's `_weight_int8pack_mm`. Beyond
    64 rows on CUDA, and 16 of bfloat16 or one of float32 on the CPU, the weight is cast as in the program.

    Args:
        x: (..., k) in bfloat16 or float16 on CUDA, or in bfloat16 or float32 on the CPU.
        weight: (n, k) in int8.
        scale: (n) in the dtype of `x`.

    Returns:
        (..., n) in the dtype of `x`, contiguous.

    Raises:
        TypeError: the weight is not int8, or the scale of another dtype than x.
        ValueError: a tensor has another number of dimensions.
        RuntimeError: the result was differentiated.
        ModuleNotFoundError: the tensors are on a CUDA device and Triton is not installed.
    """
    return torch.ops.omnicomp.int8_linear.default(x, weight, scale)
