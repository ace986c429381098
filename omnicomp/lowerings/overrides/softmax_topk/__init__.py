"""An override for the router of mixture-of-experts models: softmax over a small last dimension, then topk of it.

Inductor makes a kernel of the softmax, writes all probabilities to memory, and calls ATen's topk on them. Here one
kernel reads the logits and writes only the k chosen probabilities and their indices.
"""

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from omnicomp.lowerings.overrides.registry import override
from omnicomp.lowerings.overrides.softmax_topk import cpu
from omnicomp.timeline import Reason

__all__ = ["MAX_K", "MAX_N", "SOURCE_FILES", "check", "reference", "softmax_topk"]

MAX_N: Final = 1024
"""The longest row that the kernels take."""

MAX_K: Final = 32
"""The most elements of a row that the kernels choose."""

SOURCE_FILES: Final[tuple[Path, ...]] = tuple(
    Path(__file__).with_name(name) for name in ("__init__.py", "cpu.py", "cuda.py")
)
"""The files whose content decides what the operator computes; it belongs into the key of every compile cache."""

# Calling a Python operator costs about ten microseconds more than the two calls that it replaces, whatever the size,
# and launching Triton from it another thirty. The kernels are ahead of that from this many logits on, for every k; on
# the CPU, rows shorter than a vector are padded, and lose. Measured with bench/bench_softmax_topk.py. On one H200 the
# override is 0.6 times as fast as Inductor up to 4096 rows of 256, where both only wait for the host, 0.97 times at
# 65536 rows of 8, and 2.5 to 4.3 times at 65536 rows of 64 and more.
_CPU_MIN_LOGITS: Final = 32768
_CPU_MIN_N: Final = 8
_CUDA_MIN_LOGITS: Final = 4_194_304
_CUDA_MIN_N: Final = 64


def reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What the operator computes, in plain torch: the pattern that it replaces.

    Args:
        logits: (..., n), floating point.
        k: how many to choose, 1 <= k <= n.

    Returns:
        The k largest softmax probabilities of each row, largest first, as (..., k) in the logits' dtype, and their
        indices, as (..., k) in int64.
    """
    probabilities = torch.softmax(logits, dim=-1)
    values, indices = torch.topk(probabilities, k, dim=-1)
    return values, indices


def check(logits: Tensor, k: int) -> Reason | None:
    """Whether the operator may, and should, replace the reference for these arguments.

    Reads only metadata, and puts no guard on a symbolic size: a symbolic number of rows is judged by its hint.

    Returns:
        None if so, otherwise the reason why not.
    """
    if logits.device.type not in ("cpu", "cuda"):
        return _refuse(
            "softmax_topk has no kernel for the device",
            observed=f"device={logits.device.type}",
            needed="cpu or cuda",
            lever="move the router to the CPU or a CUDA device",
        )
    if logits.dtype != torch.float32:
        # In half precision different logits round to equal probabilities, and of equals topk may choose any: the
        # indices would differ from those of eager.
        return _refuse(
            "softmax_topk takes only float32, since rounded probabilities tie and topk would choose others",
            observed=f"dtype={logits.dtype}",
            needed="torch.float32",
            lever="compute the router's softmax in float32, for example softmax(logits.float(), dim=-1)",
        )
    if logits.dim() < 2:
        return _refuse(
            "softmax_topk takes a batch of rows",
            observed=f"{logits.dim()} dimensions",
            needed="at least 2",
            lever="give the logits a batch dimension",
        )
    if logits.requires_grad:
        return _refuse(
            "softmax_topk has no gradient",
            observed="requires_grad=True",
            needed="logits that need no gradient",
            lever="run the model under torch.no_grad() or torch.inference_mode()",
        )
    n = logits.shape[-1]
    on_cpu = logits.device.type == "cpu"
    smallest = _CPU_MIN_N if on_cpu else _CUDA_MIN_N
    if not _static(n) or not smallest <= n <= MAX_N:
        return _refuse(
            "softmax_topk takes only rows of a fixed, small length",
            observed=f"n={n}" if _static(n) else f"a symbolic n ({n})",
            needed=f"a fixed n with {smallest} <= n <= {MAX_N}",
            lever="" if _static(n) else "mark the last dimension as static (torch._dynamo.mark_static)",
        )
    if not _static(k) or not 1 <= k <= min(n, MAX_K):
        return _refuse(
            "softmax_topk chooses only a fixed, small number of elements",
            observed=f"k={k}" if _static(k) else f"a symbolic k ({k})",
            needed=f"a fixed k with 1 <= k <= {min(n, MAX_K)}",
            lever="" if _static(k) else "pass k as a constant",
        )
    rows = _rows_hint(logits)
    fewest = _CPU_MIN_LOGITS if on_cpu else _CUDA_MIN_LOGITS
    if rows is None or rows * n < fewest:
        return _refuse(
            "softmax_topk would not be faster on so few rows, where calling an operator costs more than its work",
            observed=f"{'an unknown number of' if rows is None else rows} rows of n={n}",
            needed=f"at least {-(-fewest // n)} rows",
            lever="run more rows at once",
        )
    return None


def _refuse(sentence: str, *, observed: str, needed: str, lever: str) -> Reason:
    return Reason(
        code="override_refused", sentence=sentence, observed=observed, needed=needed, lever=lever, by="softmax_topk"
    )


def _static(size: Any) -> bool:
    """Whether a size is a plain number; any comparison of a symbolic one would put a guard on it."""
    return isinstance(size, int) and not isinstance(size, bool)


def _rows_hint(logits: Tensor) -> int | None:
    """How many rows the example has, without a guard; None if a size has no hint (it depends on data)."""
    rows = 1
    for size in logits.shape[:-1]:
        hint: Any = size if _static(size) else getattr(getattr(size, "node", None), "hint", None)
        if not _static(hint):
            return None
        rows *= hint
    return rows


def _require(logits: Tensor, k: int) -> None:
    """Raise for what the kernels can't take; symbolic sizes are let through, and are seen again when it runs."""
    if logits.dtype != torch.float32:
        raise TypeError(f"softmax_topk takes float32 logits, not {logits.dtype}")
    if logits.dim() < 1:
        raise ValueError("softmax_topk takes logits of at least one dimension")
    n = logits.shape[-1]
    if _static(n) and not 1 <= n <= MAX_N:
        raise ValueError(f"softmax_topk takes rows of 1 to {MAX_N} logits, not {n}")
    if _static(n) and _static(k) and not 1 <= k <= min(n, MAX_K):
        raise ValueError(f"softmax_topk chooses 1 to {min(n, MAX_K)} of {n} logits, not {k}")


@torch.library.custom_op("omnicomp::softmax_topk", mutates_args=(), device_types="cpu")
def _operator(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    _require(logits, k)
    kernel = cpu.kernel()
    if kernel is None:  # logged there
        values, indices = reference(logits, k)
        return values.contiguous(), indices.contiguous()
    return kernel(logits, k)


def _cuda(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    _require(logits, k)
    from omnicomp.lowerings.overrides.softmax_topk.cuda import softmax_topk_cuda  # needs Triton

    return softmax_topk_cuda(logits, k)


_operator.register_kernel("cuda", _cuda)


@_operator.register_fake
def _fake(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    _require(logits, k)
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


@override(
    name="softmax_topk",
    reference=reference,
    example=lambda: (torch.rand(17, 61),),
    scalars={"k": 13},
    operators=(torch.ops.omnicomp.softmax_topk.default,),
    devices=("cpu", "cuda"),
    dtypes=(torch.float32,),
    check=check,
    sources=tuple(str(path) for path in SOURCE_FILES),
)
def softmax_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest softmax probabilities of each row of logits, and their indices, by one kernel.

    On the CPU the indices are eager's: rows in which chosen probabilities are equal or nearly so, or NaN, are computed
    again by eager, whose order of equal elements follows from its algorithm. On CUDA, where eager's order is any, equal
    elements are chosen lowest index first, and a row that has a NaN or +inf, or nothing but -inf, gives NaN values and
    the indices 0 to k-1. An element of -inf has probability 0. Forward only.

    Args:
        logits: (..., n) in float32 on the CPU or a CUDA device, of any strides; 1 <= n <= `MAX_N`, and any number of
            rows, none included.
        k: how many to choose; 1 <= k <= min(n, `MAX_K`).

    Returns:
        Values (..., k) in float32, largest first, and indices (..., k) in int64; both contiguous.

    Raises:
        TypeError: the logits are not float32.
        ValueError: the logits have no dimension, or n or k is out of range.
        NotImplementedError: the device has no kernel.
        RuntimeError: the result was differentiated.
        ModuleNotFoundError: the logits are on a CUDA device and Triton is not installed.
    """
    return _operator(logits, k)
