"""The computation by chunks of rows: a chunk's logits live in one buffer, and become their gradient in place.

With N rows, V classes and K features, the logits of all rows take N·V elements, and their gradient as many again. A
chunk of R rows takes R·V. Gradients are returned in float32, and rounded when they have been scaled: the weight's is a
sum over chunks, and rounding the partial sums to bfloat16 made it up to 1.6 times as wrong as the program's own
gradient, which is rounded once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor, Tensor, int, bool], Tensor]
"""`step(logits, target, losses, ignore_index, gradient)` writes the losses of a chunk of rows, and returns the
gradient of their sum, in the logits' dtype; it may overwrite the logits."""


def by_chunks(
    step: Step,
    rows: int,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, the gradients of the sum over rows, and what those are multiplied with for the gradients of the loss.

    All are float32. The factor stays apart, as rounding it with the logits' gradient would make all rows wrong alike.

    Args:
        step: what a device does with a chunk of logits.
        rows: rows of a chunk, at most.
        hidden: (n, k).
        weight: (v, k); it is cast to the dtype of `hidden`.
        bias: (v) or None; likewise.
        target: (n), int64.
        ignore_index: rows with this target count nothing.
        reduction: `mean` (over the rows that count), `sum` or `none`.
        needs: which gradients are wanted, of hidden, weight and bias; the others are empty. With the reduction `none`,
            none is.
    """
    n, v, dtype = hidden.shape[0], weight.shape[0], hidden.dtype
    gradient = any(needs)
    cast = weight.to(dtype)
    offset = None if bias is None else bias.to(dtype)
    losses = torch.empty(n, dtype=torch.float32, device=hidden.device)
    count = (target != ignore_index).sum(dtype=torch.float32)
    scale = torch.where(count > 0, 1 / count, 0.0) if reduction == "mean" else torch.ones_like(count)
    wide: Any = {"dtype": torch.float32, "device": hidden.device}
    grad_hidden = torch.empty(hidden.shape if needs[0] else 0, **wide)
    grad_weight = torch.empty(weight.shape if needs[1] else 0, **wide)
    grad_bias = torch.zeros(v if needs[2] else 0, **wide)
    buffer = hidden.new_empty(min(rows, n), v)
    for start in range(0, n, rows):
        part = slice(start, min(start + rows, n))
        x, logits = hidden[part], buffer[: min(rows, n - start)]
        if offset is None:
            torch.mm(x, cast.t(), out=logits)
        else:
            torch.addmm(offset, x, cast.t(), out=logits)
        grad = step(logits, target[part], losses[part], ignore_index, gradient)
        if needs[0]:
            _product(grad, cast, grad_hidden[part], add=False)
        if needs[1]:
            _product(grad.t(), x, grad_weight, add=start > 0)
        if needs[2]:
            grad_bias += grad.sum(0, dtype=torch.float32)
    if n == 0:
        grad_weight.zero_()
    if reduction == "mean":
        loss = losses.sum() / count
    else:
        loss = losses.sum() if reduction == "sum" else losses
    return loss, grad_hidden, grad_weight, grad_bias, scale


def _product(left: Tensor, right: Tensor, out: Tensor, *, add: bool) -> None:
    """Put `left @ right` into `out`, in float32, or add it to that."""
    if left.dtype == torch.float32:
        torch.addmm(out, left, right, beta=int(add), out=out)
    elif left.device.type != "cuda":  # only CUDA multiplies half precision into float32
        _product(left.float(), right.float(), out, add=add)
    elif add:
        torch.addmm(out, left, right, out_dtype=torch.float32, out=out)
    else:
        torch.mm(left, right, out_dtype=torch.float32, out=out)


def step(logits: Tensor, target: Tensor, losses: Tensor, ignore_index: int, gradient: bool) -> Tensor:
    """See `Step`."""
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
