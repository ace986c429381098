"""A chunk of logits on the CPU, by ATen's kernels."""

import torch
from torch import Tensor

__all__ = ["step"]


def step(logits: Tensor, target: Tensor, losses: Tensor, ignore_index: int, gradient: bool) -> Tensor:
    """See `chunks.Step`."""
    kept = target != ignore_index
    index = torch.where(kept, target, 0).unsqueeze(1)
    work = logits if logits.dtype == torch.float32 else logits.float()
    chosen = work.gather(1, index)
    largest = work.amax(1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    work.sub_(largest).exp_()
    sums = work.sum(1, keepdim=True)
    losses.copy_((sums.log() + largest - chosen).squeeze(1)).masked_fill_(~kept, 0.0)
    if not gradient:
        return logits
    factor = kept.to(work.dtype).unsqueeze(1)
    work.mul_(factor / sums)
    work.scatter_add_(1, index, -factor)
    return work.to(logits.dtype)
