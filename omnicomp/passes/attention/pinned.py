"""`scaled_dot_product_attention` pinned to the kernel that was measured to be the fastest on a device.

torch prefers its flash kernel. On Hopper, cuDNN's is faster wherever it runs (docs/benchmarks.md). Only the calls that
a pass makes are pinned: a program's own calls stay what they are.
"""

from typing import Final

import torch
import torch.nn.functional as F

from omnicomp._torch.autograd import sdpa
from omnicomp._torch.autograd.attention import cudnn_first, is_static

__all__ = ["PINNED_ATTENTION", "pinned_attention", "prefers_cudnn"]


def prefers_cudnn(query: torch.Tensor, key: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether cuDNN's kernel is to be taken if it takes the attention.

    Args:
        query: [B, H, Q, D], fake or real; with symbolic sizes cuDNN would plan anew for each of them.
        key: [B, Hkv, K, D].
        dtype: that the attention will compute in.
    """
    if query.device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    if not all(map(is_static, (*query.shape, *key.shape))):
        return False
    return torch.cuda.get_device_capability(query.device) >= (9, 0)


def pinned_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    scale: float,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` on cuDNN's kernel if that takes it, otherwise on what torch chooses.

    Args:
        query: [B, H, Q, D].
        key: [B, Hkv, K, D].
        value: [B, Hkv, K, Dv].
        attn_mask: in the queries' dtype, broadcastable to [B, H, Q, K].
        scale: factor of the products.
        dropout_p: probability that a weight is dropped.
        is_causal: hide the keys after the query.
        enable_gqa: several query heads share one head of keys and values.

    Returns:
        [B, H, Q, Dv].
    """
    with cudnn_first():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )


PINNED_ATTENTION: Final = sdpa.define(
    "pinned_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, *, float scale, "
    "float dropout_p=0., bool is_causal=False, bool enable_gqa=False) -> Tensor",
    pinned_attention,
)
