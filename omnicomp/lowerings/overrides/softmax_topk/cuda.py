"""The CUDA kernel of `softmax_topk`: Triton. Import this module only where Triton is installed."""

# pyright: basic, reportMissingImports=false, reportUnknownParameterType=false, reportIndexIssue=false

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

# Elements a program holds, unless one row has more. A program is one warp, so no reduction crosses warps. Built for the
# H100 and H200, the kernel takes 128 registers a thread at most (n = 1024), and spills none.
_TILE: Final = 512

# From this many rows on, programs take a whole tile of rows; below, one row each, so that few rows spread over many
# multiprocessors. Only these two shapes: each is compiled by itself.
_MANY_ROWS: Final = 2048


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    logits,
    values,
    indices,
    rows,
    row_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # int64 from here on: rows * row_stride may be beyond 2**31.
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_N)
    in_row = row < rows
    in_column = column < N
    inside = in_row[:, None] & in_column[None, :]
    x = tl.load(logits + row[:, None] * row_stride + column[None, :], mask=inside, other=-float("inf"))

    # tl.max need not pass NaN on, but the sum does: a NaN in the row, +inf in it, or a row of -inf each make it NaN.
    maximum = tl.max(x, axis=1)
    exponentials = tl.where(in_column[None, :], libdevice.exp(x - maximum[:, None]), 0.0)
    total = tl.sum(exponentials, axis=1)
    undefined = total != total

    # The order of floats as the order of integers (-0 as +0), above a place that is larger the further left it is: keys
    # are distinct, so one maximum finds the largest element, leftmost first, and equality with it finds it again.
    # Columns beyond the row get a key below that of -inf.
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == 0.0, 0, bits)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where(in_column[None, :], ordered, -0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (BLOCK_N - 1 - column)[None, :].to(tl.int64)

    slot = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_ROWS, BLOCK_K], dtype=tl.int32)
    place = tl.zeros([BLOCK_ROWS, BLOCK_K], dtype=tl.int32)
    lowest = -0x7FFFFFFFFFFFFFFF
    for t in tl.static_range(K):
        best = tl.max(keys, axis=1)
        keys = tl.where(keys == best[:, None], lowest, keys)
        here = (slot == t)[None, :]
        chosen = tl.where(here, (best >> 32).to(tl.int32)[:, None], chosen)
        place = tl.where(here, (BLOCK_N - 1 - (best & 0x7FFFFFFF)).to(tl.int32)[:, None], place)

    chosen = (chosen ^ ((chosen >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    numerator = libdevice.exp(chosen - maximum[:, None])
    probability = tl.div_rn(numerator, tl.broadcast_to(total[:, None], [BLOCK_ROWS, BLOCK_K]))
    probability = tl.where(undefined[:, None], float("nan"), probability)
    place = tl.where(undefined[:, None], slot[None, :], place)
    offset = row[:, None] * K + slot[None, :]
    stored = in_row[:, None] & (slot < K)[None, :]
    tl.store(values + offset, probability, mask=stored)
    tl.store(indices + offset, place.to(tl.int64), mask=stored)


def softmax_topk_cuda(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Launch the kernel on the logits' device, in its current stream.

    Args:
        logits: (..., n) in float32 on a CUDA device, of any strides, with n <= 1024.
        k: 1 <= k <= min(n, 32).

    Returns:
        Values (..., k) in float32 and indices (..., k) in int64, both contiguous.
    """
    shape = (*logits.shape[:-1], k)
    values = torch.empty(shape, dtype=torch.float32, device=logits.device)
    indices = torch.empty(shape, dtype=torch.int64, device=logits.device)
    n = logits.shape[-1]
    table = logits if logits.dim() == 2 else logits.reshape(-1, n)  # a view where the strides allow one
    if table.stride(1) != 1:
        table = table.contiguous()
    rows = table.shape[0]
    if rows == 0:
        return values, indices
    block_n = triton.next_power_of_2(n)
    block_rows = max(1, _TILE // block_n) if rows >= _MANY_ROWS else 1
    with torch.cuda.device(logits.device):
        _kernel[(triton.cdiv(rows, block_rows),)](
            table,
            values,
            indices,
            rows,
            table.stride(0),
            N=n,
            K=k,
            BLOCK_ROWS=block_rows,
            BLOCK_N=block_n,
            BLOCK_K=triton.next_power_of_2(k),
            num_warps=1,
        )
    return values, indices
