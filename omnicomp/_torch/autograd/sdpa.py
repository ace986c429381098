"""Fused attention operators that also return the log-sum-exp of the scores, and their backward operators.

Each kernel of torch has its own arguments and its own shape of the log-sum-exp; here they have one signature.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch._C._functorch import maybe_current_level
from torch.library import Library

KERNELS: Final = ("flash_cpu", "flash", "efficient", "cudnn")

_library: Final = Library("omnicomp", "FRAGMENT")
_aten: Final[Any] = torch.ops.aten


class Saved(NamedTuple):
    """What a kernel's backward operator needs beside the operands, the output and the log-sum-exp."""

    tensors: tuple[torch.Tensor, ...] = ()  # state of the random numbers; unused without dropout, yet an argument
    sizes: tuple[Any, ...] = ()  # largest sequence lengths as the operator returned them
    padding: Any = 0  # how many elements the kernel's log-sum-exp has beyond the queries


TRANSPARENT: Final[dict[Any, Callable[..., Any]]] = {}
"""The functions of operators that `define` made."""


def define(schema: str, function: Callable[..., Any]) -> Any:
    """Make `function` an operator of the namespace `omnicomp` that is transparent to tracing.

    It has no kernel and no derivative of its own: whoever runs or traces it, with gradients or without, gets the
    operators (and the derivatives) of what `function` calls.

    Returns:
        The operator's overload, a target for `call_function`.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
    _library.impl(name, function, "CompositeImplicitAutograd")
    target = getattr(torch.ops.omnicomp, name).default
    TRANSPARENT[target] = function
    return target


def in_transform() -> bool:
    """Whether a transform of `torch.func` (grad, jvp, vmap) is active."""
    return maybe_current_level() is not None


def forward(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, Saved]:
    """Run a fused attention without dropout.

    Args:
        kernel: one of `KERNELS`.
        query: [B, H, Q, D], its features contiguous.
        key: [B, Hkv, K, D]; `efficient` takes no grouped heads.
        value: [B, Hkv, K, Dv]; `flash` and `flash_cpu` want Dv = D.
        mask: additive and 4-D. `flash` takes none; the other two of CUDA want [B, H, Q, K] in the queries' dtype.
        is_causal: hide keys after the query, counted from the first of each; `flash` wants Q = K then.
        scale: factor of the products.

    Returns:
        The output [B, H, Q, Dv], the natural log-sum-exp of the scores [B, H, Q] in float32 (float64 for float64),
        and what `backward` needs.

    Raises:
        ValueError: `kernel` is unknown, or takes no mask.
    """
    _check(kernel, mask)
    if kernel == "flash_cpu":
        operator = _aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = operator(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
        return out, lse, Saved()
    if kernel == "flash":
        operator = _aten._scaled_dot_product_flash_attention.default
        out, lse, _, _, max_q, max_k, seed, offset, _ = operator(query, key, value, 0.0, is_causal, scale=scale)
        return out, lse, Saved((seed, offset), (max_q, max_k))
    if kernel == "efficient":
        operator = _aten._scaled_dot_product_efficient_attention.default
        out, lse, seed, offset = operator(query, key, value, mask, True, 0.0, is_causal, scale=scale)
        # The kernel writes its log-sum-exp in blocks of 32 queries.
        queries = query.shape[2]
        return out, lse[..., :queries], Saved((seed, offset), (), lse.shape[-1] - queries)
    operator = _aten._scaled_dot_product_cudnn_attention.default
    out, lse, _, _, max_q, max_k, seed, offset, _ = operator(
        query, key, value, mask, True, 0.0, is_causal, False, scale=scale
    )
    return out, lse.squeeze(-1), Saved((seed, offset), (max_q, max_k))


def backward(
    kernel: str,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    saved: Saved,
    *,
    is_causal: bool,
    scale: float,
    mask_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of the attention whose weights are exp(scores - `lse`) and whose output is `out`.

    Args:
        kernel: as in `forward`.
        grad: gradient of the output.
        query: as in `forward`.
        key: as in `forward`.
        value: as in `forward`.
        mask: as in `forward`.
        out: the output [B, H, Q, Dv]. The kernels take from it only its inner product with `grad`.
        lse: [B, H, Q]; need not be what `forward` returned.
        saved: what `forward` returned.
        is_causal: as in `forward`.
        scale: as in `forward`.
        mask_grad: also give the gradient of the mask, which only `efficient` can.

    Returns:
        The gradients of queries, keys, values, and of the mask or None.

    Raises:
        ValueError: `kernel` is unknown, or can't give the gradient that is asked for.
    """
    _check(kernel, mask)
    if mask_grad and kernel != "efficient":
        raise ValueError(f"the kernel {kernel} gives no gradient of a mask; efficient does")
    operands = (grad, query, key, value)
    if kernel == "flash_cpu":
        operator = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return *operator(*operands, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale), None
    if kernel == "flash":
        operator = _aten._scaled_dot_product_flash_attention_backward.default
        rest = (None, None, *saved.sizes, 0.0, is_causal, *saved.tensors)
        return *operator(*operands, out, lse, *rest, scale=scale), None
    if kernel == "efficient":
        operator = _aten._scaled_dot_product_efficient_attention_backward.default
        lse = F.pad(lse, (0, saved.padding), value=torch.inf)
        wanted = [True, True, True, mask_grad]
        grads = operator(*operands, mask, out, lse, *saved.tensors, 0.0, wanted, is_causal, scale=scale)
        return grads if mask_grad else (*grads[:3], None)
    operator = _aten._scaled_dot_product_cudnn_attention_backward.default
    rest = (*saved.tensors, mask, None, None, *saved.sizes, 0.0, is_causal)
    return *operator(*operands, out, lse.unsqueeze(-1), *rest, scale=scale), None


def _check(kernel: str, mask: torch.Tensor | None) -> None:
    if kernel not in KERNELS:
        raise ValueError(f"no attention kernel is named {kernel!r}; there are {', '.join(KERNELS)}")
    if kernel == "flash" and mask is not None:
        raise ValueError("CUDA's flash attention takes no mask; take efficient or cudnn")
