"""Torch's settings of how float32 products are computed on CUDA, for the length of a call.

There are older settings (`torch.backends.cuda.matmul.allow_tf32`, `torch.backends.cudnn.allow_tf32`) and newer ones
(`fp32_precision`), and torch raises where the two contradict each other and an older one is read. So the older ones are
set, which sets both, and the newer ones are then put back to what they were. Where the user's contradict each other
already, the newer ones alone are set: they are what kernels go by.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Final

import torch

_TF32: Final = "tf32"
_get: Final = torch._C._get_fp32_precision_getter
_set: Final = torch._C._set_fp32_precision_setter
Older = tuple[Callable[[], bool], Callable[[bool], Any]]
_PRODUCTS: Final[Older] = (torch._C._get_cublas_allow_tf32, torch._C._set_cublas_allow_tf32)
_CONVOLUTIONS: Final[Older] = (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32)


def tf32_settings() -> tuple[str, str]:
    """What products and convolutions on CUDA are set to: `tf32`, `ieee`, or `none`, which is as `ieee`."""
    return _get("cuda", "matmul"), _get("cuda", "conv")


def allow_tf32() -> Callable[[], None] | None:
    """Have float32 products and convolutions on CUDA computed in TF32, in all threads.

    Returns:
        What puts the settings back; None if nothing had to be set.
    """
    products = _exchange(_PRODUCTS, "matmul") if _get("cuda", "matmul") != _TF32 else None
    convolved = _exchange(_CONVOLUTIONS, "conv", "rnn") if _get("cuda", "conv") != _TF32 else None
    if products is None or convolved is None:
        return products or convolved

    def restore() -> None:
        convolved()
        products()

    return restore


@contextlib.contextmanager
def while_compiling() -> Generator[None]:
    """Inside, Inductor generates code for TF32, in its templates of convolutions too, which read the setting of all."""
    restore = allow_tf32()
    before = _get("cuda", "all")
    if before != _TF32:
        _set("cuda", "all", _TF32)
    try:
        yield
    finally:
        if before != _TF32:
            _set("cuda", "all", before)
        if restore is not None:
            restore()


def _exchange(older: Older, *operators: str) -> Callable[[], None]:
    get, put = older
    before = [(operator, _get("cuda", operator)) for operator in operators]
    try:
        allowed = get()
    except RuntimeError:
        allowed = True  # contradictory: the newer settings alone are set, and put back
    if allowed:
        _set("cuda", operators[0], _TF32)
    else:
        put(True)

    def restore() -> None:
        if not allowed:
            put(False)
        for operator, value in before:
            _set("cuda", operator, value)

    return restore
