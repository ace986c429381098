"""A chunk of logits on a CUDA device: a Triton kernel reads each row for its log-sum-exp, and again for the gradient.

Import this module only where Triton is installed.
"""

# pyright: basic, reportMissingImports=false, reportUnknownParameterType=false, reportIndexIssue=false

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 16384


@triton.jit
def _kernel(
    logits,
    target,
    losses,
    stride,
    n_classes,
    ignore_index,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Loads of the first reading ask to stay in the L2 cache for the second; sums are in powers of two.
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * stride
    label = tl.load(target + row)
    columns = tl.arange(0, BLOCK)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros([BLOCK], logits.dtype.element_ty)
            for start in range(0, n_classes, BLOCK):
                tl.store(first + start + columns, zeros, mask=start + columns < n_classes)
    else:
        largest = -float("inf")
        total = 0.0
        for start in range(0, n_classes, BLOCK):
            inside = start + columns < n_classes
            x = tl.load(first + start + columns, mask=inside, other=-float("inf"), eviction_policy="evict_last")
            x = x.to(tl.float32) * LOG2E
            new = tl.maximum(largest, tl.max(x, 0))
            shift = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp2(largest - shift) + tl.sum(tl.exp2(x - shift), 0)
            largest = new
        log_sum = largest + tl.log2(total)
        valid = (label >= 0) & (label < n_classes)
        chosen = tl.load(first + label, mask=valid, other=0.0).to(tl.float32) * LOG2E
        # A label that is no class makes the loss NaN.
        loss = tl.where(valid, (log_sum - chosen) / LOG2E, float("nan"))
        tl.store(losses + row, loss)
        if GRADIENT:
            tl.debug_barrier()  # `chosen` is read before another thread overwrites it
            for start in range(0, n_classes, BLOCK):
                inside = start + columns < n_classes
                x = tl.load(first + start + columns, mask=inside, other=-float("inf"), eviction_policy="evict_first")
                grad = tl.exp2(x.to(tl.float32) * LOG2E - log_sum)
                grad = tl.where(start + columns == label, grad - 1.0, grad)
                tl.store(first + start + columns, grad, mask=inside, cache_modifier=".cs")


def step(logits: Tensor, target: Tensor, losses: Tensor, ignore_index: int, gradient: bool) -> Tensor:
    """See `cpu.Step`; the gradient takes the place of the logits."""
    with torch.cuda.device(logits.device):
        _kernel[(logits.shape[0],)](
            logits,
            target,
            losses,
            logits.stride(0),
            logits.shape[1],
            ignore_index,
            GRADIENT=gradient,
            BLOCK=min(_BLOCK, triton.next_power_of_2(logits.shape[1])),
            num_warps=16,
        )
    return logits
