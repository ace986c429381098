"""Casts to half precision that a program asks for, and that Inductor leaves out.

Generated code computes in float32, and takes a value that was cast to float16 or bfloat16 as it was before the cast: in
`x - x.bfloat16().float()` nothing is left, and `x.half().float()` is 1e6 where eager has inf. What operators round on
their way is another thing, and is left to Inductor's `emulate_precision_casts`.
"""

import contextlib
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch._inductor import config, lowering
from torch._inductor.codegen import cpp
from torch._inductor.fx_passes import joint_graph
from torch._inductor.utils import is_gpu
from torch._inductor.virtualized import V, ops
from torch.fx import Node

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/185337")
_DROPPED: Final = Needed(first="2.11", fixed="2.13", issue="https://github.com/pytorch/pytorch/issues/185337")
_HALVES: Final = (torch.float16, torch.bfloat16)


def _rounding(original: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of casts, which rounds where the program itself casts to half precision."""

    def to_dtype(x: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        source = x.get_dtype()
        if dtype not in _HALVES or not source.is_floating_point or source == dtype or not _asked_for(dtype):
            return original(x, dtype, *args, **kwargs)

        def rounded(value: Any) -> Any:
            narrow = ops.to_dtype(value, dtype, src_dtype=source, use_compute_types=False)
            # The C++ generator widens it where that is needed, and takes two casts to one dtype for the second alone.
            return ops.to_dtype(narrow, dtype) if is_gpu(x.get_device().type) else narrow

        return lowering.make_pointwise(rounded, override_return_dtype=dtype)(x)

    return to_dtype


def _asked_for(dtype: torch.dtype) -> bool:
    """Whether what is lowered is a cast of the program to that dtype, to be seen in more than the last digit.

    A float16 may overflow. A bfloat16 rounds alone, which counts where the program takes the cast back.
    """
    node: Any = getattr(V.graph, "current_node", None)
    return node is not None and _casts_to(node, dtype) and (dtype is torch.float16 or _cast_back(node))


def _casts_to(node: Node, *dtypes: torch.dtype) -> bool:
    """Whether the program has that cast, and not an operator's decomposition."""
    if str(node.target) != "prims.convert_element_type.default" or node.args[1] not in dtypes:
        return False
    return str(node.meta.get("original_aten")) == "aten._to_copy.default"


def _cast_back(node: Node) -> bool:
    return any(
        _casts_to(user, torch.float32, torch.float64) or (getattr(user.target, "is_view", False) and _cast_back(user))
        for user in node.users
    )


_exact = threading.local()


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    """The C++ of a cast, which is not taken back for nothing where it is to round (as from torch 2.13 on)."""

    def to_dtype(x: Any, dtype: torch.dtype, src_dtype: Any = None, use_compute_types: bool = True) -> Any:
        _exact.wanted = not use_compute_types or config.emulate_precision_casts
        try:
            return original(x, dtype, src_dtype, use_compute_types)
        finally:
            _exact.wanted = False

    return to_dtype


def _unless_exact(original: Callable[..., Any]) -> Callable[..., Any]:
    """The note of a kernel that a value was cast from another one, which it then reads in place of the cast back."""

    def cache_dtype_convert(*args: Any) -> None:
        if not getattr(_exact, "wanted", False):
            original(*args)

    return cache_dtype_convert


_CASTS: Final = Exchange(lowering, "to_dtype", _rounding)
_TAKEN_BACK: Final = (
    Exchange(cpp.CppOverrides, "to_dtype", _noting),
    Exchange(cpp.CppVecOverrides, "to_dtype", _noting),
    Exchange(cpp.CppKernel, "cache_dtype_convert", _unless_exact),
)


@contextlib.contextmanager
def casts_rounded() -> Generator[None]:
    """Inside, Inductor rounds in the casts to half precision that a program asks for."""
    with NEEDED.exchanging(_CASTS), _DROPPED.exchanging(*_TAKEN_BACK):
        yield


def _of_no_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """The rewrite of two casts to the second, where the first loses nothing."""

    def rewrite(match: Any, arg: Node, dtype1: torch.dtype, dtype2: torch.dtype) -> None:
        value: Any = arg.meta.get("val")
        if dtype1.itemsize >= max(dtype2.itemsize, getattr(value, "dtype", dtype2).itemsize):
            original(match, arg, dtype1, dtype2)

    return rewrite


_REWRITES: Final = [
    Exchange(entry, "handler", _of_no_loss)
    for entries in joint_graph.patterns.patterns.values()
    for entry in entries
    if getattr(getattr(entry, "handler", None), "__name__", "") == "pointless_convert"
]


def casts_kept() -> AbstractContextManager[None]:
    """Inside, Inductor's graph passes take no cast away that narrows, as they do before torch 2.13."""
    return _DROPPED.exchanging(*_REWRITES)
