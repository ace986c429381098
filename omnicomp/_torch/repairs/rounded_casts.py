"""Casts to half precision that a program asks for, and that Inductor leaves out.

Generated code computes in float32, and takes a value that was cast to float16 or bfloat16 as it was before the cast: in
`x - x.bfloat16().float()` nothing is left, and `x.half().float()` is 1e6 where eager has inf. What operators round on
their way is another thing, and is left to Inductor's `emulate_precision_casts`.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._inductor import lowering
from torch._inductor.utils import is_gpu
from torch._inductor.virtualized import V, ops
from torch.fx import Node

from omnicomp._torch.repairs.method_patch import Exchange
from omnicomp._torch.repairs.needed import Needed

__all__ = ["NEEDED", "casts_rounded"]

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/185337")
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


_CASTS: Final = Exchange(lowering, "to_dtype", _rounding)


def casts_rounded() -> contextlib.AbstractContextManager[None]:
    """Inside, Inductor rounds in the casts to half precision that a program asks for."""
    return _CASTS if NEEDED.here else contextlib.nullcontext()
