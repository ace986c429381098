"""`scaled_dot_product_attention` pinned to a kernel: the one that was measured to be the fastest, or by rule cuDNN's.

torch prefers its flash kernel. On Hopper, cuDNN's is faster nearly wherever it runs (docs/benchmarks.md). On the
CPU, which has one, the mask keeps its dtype, where `torch.autocast` would round it to that of the queries.
"""

from typing import Final

import torch

from omnicomp._torch.autograd import sdpa
from omnicomp._torch.autograd.attention import SDPA, is_static, kernel_first

TILE: Final = 128
"""Rows and columns of a tile of cuDNN's backward on Hopper."""
# Heads of keys from which its kernel is not known to be wrong on a B200.
_HEADS: Final = 8
# An H200 took 0.13 ms for Swin's 49 keys on the memory-efficient kernel, and 0.43 ms on cuDNN's.
_FEW_KEYS: Final = 64


def prefers_cudnn(
    query: torch.Tensor, key: torch.Tensor, dtype: torch.dtype, *, training: bool, tiled: bool = False
) -> bool:
    """Whether cuDNN's kernel is to be taken if it takes the attention, where nothing was measured.

    Args:
        query: [B, H, Q, D], fake or real; with symbolic sizes cuDNN would plan anew for each of them.
        key: [B, Hkv, K, D].
        dtype: that the attention will compute in.
        training: whether there will be a backward.
        tiled: whether symbolic lengths are multiples of `TILE`, or will be guarded to be.
    """
    if cudnn_is_wrong(query, key, dtype, training=training, tiled=tiled):
        return False
    few = is_static(key.shape[2]) and key.shape[2] <= _FEW_KEYS
    return _may_take_cudnn(query, key, dtype, tiled=tiled) and not few


def cudnn_is_wrong(
    query: torch.Tensor, key: torch.Tensor, dtype: torch.dtype, *, training: bool, tiled: bool = False
) -> bool:
    """Whether cuDNN's kernel is known to return wrong numbers; arguments as above.

    On Hopper its backward may return NaN for lengths that its tiles don't divide: with a mask
    (https://github.com/pytorch/pytorch/issues/196678), and for a single query without one, where scores are far below
    zero (https://github.com/NVIDIA/cudnn-frontend/issues/1072). On a B200, models with fewer than eight heads of keys
    generate nonsense with it, and with no other kernel (https://github.com/pytorch/pytorch/issues/193893).
    """
    if query.device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    generation = torch.cuda.get_device_capability(query.device)[0]
    if generation == 10:
        return not (is_static(key.shape[1]) and key.shape[1] >= _HEADS)
    lengths = (query.shape[2], key.shape[2])
    divided = all(size % TILE == 0 if is_static(size) else tiled for size in lengths)
    return training and generation == 9 and not divided


def avoids_cudnn(query: torch.Tensor, key: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether cuDNN's kernel is slower than another one, with which torch may disagree; arguments as above."""
    return _may_take_cudnn(query, key, dtype) and key.shape[2] <= _FEW_KEYS


def _may_take_cudnn(query: torch.Tensor, key: torch.Tensor, dtype: torch.dtype, *, tiled: bool = False) -> bool:
    if query.device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    if not tiled and not all(map(is_static, (*query.shape, *key.shape))):
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
    kernel: str = "cudnn",
) -> torch.Tensor:
    """`scaled_dot_product_attention` on one kernel if that takes it, otherwise on what torch chooses.

    Args:
        query: [B, H, Q, D].
        key: [B, Hkv, K, D].
        value: [B, Hkv, K, Dv].
        attn_mask: broadcastable to [B, H, Q, K], in the queries' dtype, on the CPU also in float32.
        scale: factor of the products.
        dropout_p: probability that a weight is dropped.
        is_causal: hide the keys after the query.
        enable_gqa: several query heads share one head of keys and values.
        kernel: one of `omnicomp._torch.autograd.attention.KERNELS`.

    Returns:
        [B, H, Q, Dv].
    """
    with kernel_first(kernel), torch.autocast("cpu", enabled=False):
        return SDPA(
            query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )


PINNED_ATTENTION: Final = sdpa.define(
    "pinned_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, *, float scale, "
    'float dropout_p=0., bool is_causal=False, bool enable_gqa=False, str kernel="cudnn") -> Tensor',
    pinned_attention,
)
