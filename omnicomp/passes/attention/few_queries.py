"""Attention of few queries on CUDA, whose keys are shared out among many programs and read up to the last one seen.

A step of one token has fewer heads than the GPU has processors, and a mask that hides what was not written yet. The
number of keys stays on the device, so that the step waits for nothing and can be recorded as a CUDA graph.
"""

from typing import Any, Final

import torch

from omnicomp._torch.autograd.attention import SDPA
from omnicomp._torch.inductor import triton_ops
from omnicomp._torch.inductor.triton_ops import Buffer, Launch, Plan

_ROWS: Final = 16
_HEAD_SIZES: Final = (16, 32, 64, 128, 256)
_BLOCK: Final = 64
# Programs of the GPU together, and parts of one head at most: 8 to 64 heads, 1024 to 8192 keys on an H200.
_PROGRAMS: Final = 512
_PARTS: Final = 32


def _reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, last: torch.Tensor, scale: float
) -> torch.Tensor:
    del last  # keys behind it have no weight
    grouped = query.shape[1] != key.shape[1]
    return SDPA(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped).contiguous()


def _plan(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, last: torch.Tensor, scale: float
) -> Plan:
    from omnicomp.passes.kernels import few_queries  # needs Triton

    batch, heads, queries, _ = query.shape
    kept, keys = key.shape[1:3]
    rows, width = heads // kept * queries, value.shape[-1]
    wanted = min(_PROGRAMS // (batch * kept), -(-keys // _BLOCK), _PARTS)
    parts = 1 << (max(wanted, 1).bit_length() - 1)
    out = Buffer((batch * kept, parts, _ROWS, width), torch.float32)
    sums = Buffer((batch * kept, parts, _ROWS, 2), torch.float32)
    result = Buffer((batch, heads, queries, width), query.dtype)
    strides: dict[str, int] = {}
    for name, tensor in (("q", query), ("k", key), ("v", value)):
        strides |= dict(
            zip((f"{name}b", f"{name}h", f"{name}{'q' if name == 'q' else 'k'}"), tensor.stride(), strict=False)
        )
    for name, size, stride in zip(("mb", "mh", "mq", "mk"), mask.shape, mask.stride(), strict=True):
        strides[name] = 0 if size == 1 else stride
    arguments: dict[str, Any] = {
        "query": query, "key": key, "value": value, "mask": mask, "last": last, "out": out, "sums": sums,
        "heads": kept, "queries": queries, "rows": rows, **strides,
        "D": query.shape[-1], "DV": width, "BLOCK": _BLOCK, "PARTS": parts, "HIDES": mask.dtype is torch.bool,
        "SCALE": scale,  # Inductor would hand over a number in double precision
    }  # fmt: skip
    joined = {"out": out, "sums": sums, "result": result, "rows": rows, "DV": width, "PARTS": parts}
    launches = (
        Launch(kernel=few_queries.parts, grid=(batch * kept, parts), warps=4, arguments=arguments),
        Launch(kernel=few_queries.joined, grid=(batch * heads * queries,), warps=1, arguments=joined),
    )
    return Plan(results=(result,), launches=launches)


FEW_QUERIES: Final = triton_ops.define(
    "attention_of_few_queries(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor last, float scale) -> Tensor",
    _reference,
    _plan,
)
"""`scaled_dot_product_attention` with a mask that hides all keys from the number `last` on."""


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether the kernel takes these operands, of which batch and heads are those of sdpa."""
    dense = all(each.stride(-1) == 1 for each in (query, key, value))
    return (
        dense
        and query.dtype in (torch.bfloat16, torch.float16)
        and all(each.dtype is query.dtype for each in (key, value))
        and mask.dtype in (query.dtype, torch.bool)
        and query.shape[-1] in _HEAD_SIZES
        and value.shape[-1] in _HEAD_SIZES
        and query.shape[1] // key.shape[1] * query.shape[2] <= _ROWS
        and all(type(size) is int for each in (query, key, value, mask) for size in each.shape)
    )
