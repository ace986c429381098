"""The CUDA kernel of `int8_linear`: Triton. Import this module only where Triton is installed."""

# pyright: basic, reportMissingImports=false, reportUnknownParameterType=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(
    x,
    weight,
    scale,
    out,
    rows,
    n,
    k,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    # Columns beyond the end are read again from the start, and not written: loads of the weight need no mask then.
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, BLOCK_K)
    weights = weight + (column % n)[:, None].to(tl.int64) * k + inner[None, :]
    valid = column < n
    factor = tl.load(scale + column, mask=valid, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    if WEIGHT_FIRST:
        inputs = x + row[None, :] * x_stride + inner[:, None]
        sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
        for _ in range(0, k, BLOCK_K):
            w = tl.load(weights, eviction_policy="evict_first").to(dtype)
            sums = tl.dot(w, tl.load(inputs, mask=(row < rows)[None, :], other=0.0), sums)
            weights += BLOCK_K
            inputs += BLOCK_K
        result = sums * factor[:, None]
        tl.store(out + row[None, :] * n + column[:, None], result, mask=valid[:, None] & (row < rows)[None, :])
    else:
        inputs = x + row[:, None] * x_stride + inner[None, :]
        sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for _ in range(0, k, BLOCK_K):
            w = tl.load(weights, eviction_policy="evict_first").to(dtype)
            sums = tl.dot(tl.load(inputs, mask=(row < rows)[:, None], other=0.0), tl.trans(w), sums)
            weights += BLOCK_K
            inputs += BLOCK_K
        result = sums * factor[None, :]
        tl.store(out + row[:, None] * n + column[None, :], result, mask=valid[None, :] & (row < rows)[:, None])


def _shape_of_tiles(rows: int, n: int) -> tuple[int, int, int, int, bool]:
    """Columns and features of a tile, warps, stages, and which operand comes first: what was fastest on an H200."""
    many = n >= 8192  # at 32 columns a program, about two for each multiprocessor
    if rows <= 16:
        return (32, 128, 2, 5, True) if many else (32, 256, 4, 4, False)
    if rows <= 32:
        return (64, 128, 4, 5, False) if many else (16, 256, 4, 4, False)
    return (64, 128, 4, 4, True) if many else (32, 256, 4, 4, False)


def int8_linear_cuda(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """See `int8_linear`; x (m, k) with 1 <= m <= 64, weight (n, k) contiguous with k a multiple of 256."""
    rows, n = x.shape[0], weight.shape[0]
    out = x.new_empty(rows, n)
    if x.stride(1) != 1:
        x = x.contiguous()
    block_n, block_k, warps, stages, first = _shape_of_tiles(rows, n)
    with torch.cuda.device(x.device):
        _kernel[(triton.cdiv(n, block_n),)](
            x,
            weight,
            scale,
            out,
            rows,
            n,
            weight.shape[1],
            x.stride(0),
            ROWS=max(16, triton.next_power_of_2(rows)),
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            WEIGHT_FIRST=first,
            num_warps=warps,
            num_stages=stages,
        )
    return out
