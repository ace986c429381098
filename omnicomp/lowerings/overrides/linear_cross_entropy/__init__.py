"""An override for the loss of language models: a linear layer over a large vocabulary, then its cross-entropy.

The program makes the logits of all tokens, and in training their gradient: for 8192 tokens and 128256 classes 2 GiB of
bfloat16 each. Here they exist for one chunk of tokens at a time. In training the gradients of the layer's inputs are
computed with the loss, from the chunk's logits before they are gone, and scaled in the backward by the gradient of the
loss; nothing is computed twice. That order of work is Liger-Kernel's (Hsu et al. 2024, arXiv:2410.10989, section 3.2);
that the logits need not be kept is also the point of Cut Cross-Entropy (Wijmans et al. 2024, arXiv:2411.09009), which
recomputes them in the backward.
"""

import importlib.util
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from omnicomp._torch.autograd.attention import hint_of
from omnicomp.lowerings.overrides.linear_cross_entropy import cpu
from omnicomp.lowerings.overrides.linear_cross_entropy.cpu import by_chunks
from omnicomp.lowerings.overrides.linear_cross_entropy.search import search
from omnicomp.lowerings.overrides.registry import override
from omnicomp.timeline import Reason

__all__ = ["SOURCE_FILES", "check", "linear_cross_entropy", "memory", "reference", "rows_of_chunk"]

SOURCE_FILES: Final[tuple[Path, ...]] = tuple(
    Path(__file__).with_name(name) for name in ("__init__.py", "cpu.py", "cuda.py", "search.py")
)
"""The files whose content decides what the operator computes; it belongs into the key of every compile cache."""

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
# Below these sizes of all logits, with gradients and without, it is slower than the program under Inductor: fewer rows
# a product. Measured with bench/bench_overrides.py.
_MIN_BYTES: Final = {("cuda", True): 2**30, ("cuda", False): 2**28, ("cpu", True): 2**27, ("cpu", False): 2**27}
_MIN_SAVING: Final = 1.5
_GRADIENTS: Final = ("hidden_grad", "weight_grad", "bias_grad")


def rows_of_chunk(rows: int, device: str) -> int:
    """How many rows a chunk has: a quarter, within the sizes whose products are fast and whose logits are few."""
    smallest, largest = (1024, 4096) if device == "cuda" else (128, 512)
    return max(smallest, min(largest, -(-rows // 4)))


def memory(
    rows: int, classes: int, features: int, size: int, weight_size: int, *, gradient: bool, of_weight: bool, device: str
) -> tuple[int, int]:
    """Bytes that the program has at most beside its inputs, and that the operator has.

    Args:
        rows: number of tokens.
        classes: size of the vocabulary.
        features: size of a token.
        size: bytes of an element of the logits.
        weight_size: bytes of an element of the weight, which is cast if that is another.
        gradient: whether any gradient is computed.
        of_weight: whether the weight's is.
        device: device type.
    """
    matrix = classes * features
    cast = matrix * size if weight_size != size else 0
    theirs = cast + classes * rows * size + (matrix * size if of_weight else 0)
    chunk = classes * min(rows, rows_of_chunk(rows, device)) * size
    total = matrix * 4 if of_weight else 0  # in the backward it is scaled into a gradient of the weight's dtype
    ours = cast + max(chunk + total, total + (matrix * weight_size if of_weight else 0))
    inputs = rows * features if gradient else 0
    return theirs + inputs * size, ours + inputs * 4


def reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    hidden_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the operator computes, in plain torch and with all logits; the parameters are the operator's.

    Returns:
        The loss; the gradients of the sum over rows for hidden, weight and bias, empty where they are not asked for;
        and the factor that makes them the gradients of the loss. In float32, or float64 for float64.
    """
    dtype = hidden.dtype
    matrix = weight.to(dtype)
    logits = F.linear(hidden, matrix, None if bias is None else bias.to(dtype))
    wide = logits if dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(wide, target, ignore_index=ignore_index, reduction=reduction)
    empty = wide.new_empty(0)
    kept = target != ignore_index
    count = kept.sum()
    scale = torch.where(count > 0, 1 / count, 0.0) if reduction == "mean" else torch.ones_like(count)
    if not (hidden_grad or weight_grad or bias_grad):
        return loss, empty, empty.clone(), empty.clone(), scale.to(wide.dtype)
    kept = kept.to(wide.dtype).unsqueeze(1)
    grad = torch.softmax(wide, 1).mul_(kept)
    grad = grad.scatter_add_(1, torch.where(kept.bool(), target.unsqueeze(1), 0), -kept).to(dtype)
    return (
        loss,
        (grad @ matrix).to(wide.dtype) if hidden_grad else empty,
        (grad.t() @ hidden).to(wide.dtype) if weight_grad else empty.clone(),
        grad.sum(0, dtype=wide.dtype) if bias_grad else empty.clone(),
        scale.to(wide.dtype),
    )


def check(
    weight: Tensor,
    target: Tensor,
    logits: Tensor,
    reduction: str,
    hidden_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> Reason | None:
    """Whether the operator may, and should, take a loss; reads metadata only, and guards no symbolic size.

    Args:
        weight: (v, k), or (k, v) where the program multiplies by it as it is.
        target: (n), int64.
        logits: (..., v); its dtype is the one that the layer computes in.
        reduction: of the loss.
        hidden_grad: whether its gradient is asked for; the others likewise.
        weight_grad: see above.
        bias_grad: see above.

    Returns:
        None if so, otherwise the reason why not.
    """
    device = logits.device.type
    gradient = hidden_grad or weight_grad or bias_grad
    if device not in ("cpu", "cuda") or (device == "cuda" and importlib.util.find_spec("triton") is None):
        return _refuse(
            "linear_cross_entropy has no kernel for the device",
            observed=f"device={device}" + (" without Triton" if device == "cuda" else ""),
            needed="cpu, or cuda with Triton",
        )
    if logits.dtype not in _DTYPES or weight.dtype not in (logits.dtype, torch.float32):
        return _refuse(
            "linear_cross_entropy has no kernel for the dtypes",
            observed=f"logits in {logits.dtype}, weight in {weight.dtype}",
            needed="float32, bfloat16 or float16, and a weight of that or of float32",
        )
    if device == "cpu" and logits.dtype != torch.float32:
        return _refuse(
            "linear_cross_entropy is slower than the program in half precision on the CPU",
            observed=str(logits.dtype),
            needed="torch.float32",
        )
    if gradient and logits.dtype == torch.float16:
        return _refuse(
            "in float16 the gradient of the logits would be rounded before the loss is scaled up, and vanish",
            observed="torch.float16",
            needed="bfloat16 or float32 in training",
            lever="train in bfloat16",
        )
    if gradient and reduction == "none":
        return _refuse(
            "linear_cross_entropy computes the gradient with the loss, where the weights of the rows are not known yet",
            observed="reduction='none'",
            needed="reduction='mean' or 'sum'",
            lever="let the loss sum or average over the rows",
        )
    fixed: tuple[Any, ...] = (*weight.shape, logits.shape[-1])
    if not all(isinstance(size, int) for size in fixed):
        return _refuse(
            "linear_cross_entropy takes only a weight of fixed sizes",
            observed=f"a weight {list(weight.shape)}",
            needed="numbers",
            lever="mark the weight's dimensions as static (torch._dynamo.mark_static)",
        )
    classes = logits.shape[-1]
    sizes = (hint_of(target.shape[0]), classes, weight.numel() // classes)
    return _too_small(sizes, logits, weight, gradient=gradient, weight_grad=weight_grad)


def _too_small(sizes: Any, logits: Tensor, weight: Tensor, *, gradient: bool, weight_grad: bool) -> Reason | None:
    rows, classes, features = sizes
    device, size = logits.device.type, logits.element_size()
    least = _MIN_BYTES[device, gradient]
    if rows * classes * size < least:
        return _refuse(
            "linear_cross_entropy would not pay for so few logits",
            observed=f"{rows} rows of {classes}, {rows * classes * size / 2**20:.0f} MiB",
            needed=f"at least {least >> 20} MiB of logits",
            lever="take more tokens at once",
        )
    theirs, ours = memory(
        rows, classes, features, size, weight.element_size(), gradient=gradient, of_weight=weight_grad, device=device
    )
    if theirs < _MIN_SAVING * ours:
        return _refuse(
            "linear_cross_entropy would save little memory, as the weight's gradient is larger than the logits",
            observed=f"{theirs / 2**30:.2f} GiB, and {ours / 2**30:.2f} GiB with it",
            needed=f"{_MIN_SAVING} times less",
            lever=f"take more tokens at once, at least {4 * features}",
        )
    return None


def _refuse(sentence: str, *, observed: str, needed: str, lever: str = "move or cast the layer") -> Reason:
    return Reason(
        code="override_refused",
        sentence=sentence,
        observed=observed,
        needed=needed,
        lever=lever,
        by="linear_cross_entropy",
    )


def _require(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str, gradient: bool) -> None:
    if hidden.dtype not in _DTYPES or target.dtype != torch.int64:
        raise TypeError(
            f"linear_cross_entropy takes half or single precision and int64, not {hidden.dtype}, {target.dtype}"
        )
    if hidden.dim() != 2 or weight.dim() != 2 or target.dim() != 1:
        raise ValueError("linear_cross_entropy takes hidden (n, k), weight (v, k) and target (n)")
    if reduction not in ("mean", "sum", "none") or (gradient and reduction == "none"):
        raise ValueError(f"linear_cross_entropy has no gradient for, or does not know, reduction={reduction!r}")


@torch.library.custom_op("omnicomp::linear_cross_entropy", mutates_args=(), device_types="cpu")
def _operator(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    hidden_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    needs = (hidden_grad, weight_grad, bias_grad)
    return _computed(cpu.step, hidden, weight, bias, target, ignore_index, reduction, *needs)


def _cuda(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from omnicomp.lowerings.overrides.linear_cross_entropy.cuda import step  # needs Triton

    return _computed(step, *args)


def _computed(
    step: cpu.Step,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _require(hidden, weight, target, reduction, any(needs))
    if hidden.is_cpu and int(((target != ignore_index) & ((target < 0) | (target >= weight.shape[0]))).sum()):
        raise IndexError(f"a target is out of bounds: there are {weight.shape[0]} classes")
    rows = rows_of_chunk(hidden.shape[0], hidden.device.type)
    return by_chunks(step, rows, hidden, weight, bias, target, ignore_index, reduction, needs)


_operator.register_kernel("cuda", _cuda)


@_operator.register_fake
def _fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    hidden_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _require(hidden, weight, target, reduction, hidden_grad or weight_grad or bias_grad)
    wide: Any = {"dtype": torch.float32}
    return (
        hidden.new_empty(target.shape if reduction == "none" else (), **wide),
        hidden.new_empty(hidden.shape if hidden_grad else (0,), **wide),
        hidden.new_empty(weight.shape if weight_grad else (0,), **wide),
        hidden.new_empty((weight.shape[0],) if bias_grad else (0,), **wide),
        hidden.new_empty((), **wide),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.computed = inputs[-3:]
    ctx.dtypes = [None if item is None else item.dtype for item in inputs[:3]]
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(other is not None for other in others):
        raise RuntimeError("linear_cross_entropy has no second derivative")
    wanted = ctx.needs_input_grad[:3]
    for want, has, name in zip(wanted, ctx.computed, _GRADIENTS, strict=True):
        if want and not has:
            raise RuntimeError(f"linear_cross_entropy was called with {name}=False, and that gradient is asked for")
    if grad is None:
        return (None,) * 9
    *sums, scale = ctx.saved_tensors
    factor = grad * scale
    triples = zip(wanted, sums, ctx.dtypes, strict=True)
    scaled = [(saved * factor).to(dtype) if want else None for want, saved, dtype in triples]
    return (*scaled, None, None, None, None, None, None)


_operator.register_autograd(_backward, setup_context=_setup_context)


def excerpt(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *others: Any
) -> tuple[Any, ...] | None:
    """A call on fewer rows, spread over all, with a chunk that is full and one that is not.

    The reference has the logits of all rows, in float64 for the comparison; that is the memory that the operator saves.

    Args:
        hidden: (n, k); the other arguments are the operator's as well.
        weight: (v, k).
        bias: (v), or None.
        target: (n).
        others: what is passed on.

    Returns:
        The arguments, or None where there are few rows anyhow.
    """
    rows = hidden.shape[0]
    wanted = rows_of_chunk(1, hidden.device.type) + 32
    if rows <= wanted:
        return None
    chosen = torch.arange(wanted, device=hidden.device) * rows // wanted
    return (hidden[chosen], weight, bias, target[chosen], *others)


@override(
    name="linear_cross_entropy",
    search=search,
    reference=reference,
    operators=(torch.ops.omnicomp.linear_cross_entropy.default,),
    devices=("cpu", "cuda"),
    dtypes=_DTYPES,
    check=check,
    excerpt=excerpt,
    sources=tuple(str(path) for path in SOURCE_FILES),
)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The cross-entropy of `hidden @ weight.T + bias`, without all of its logits in memory.

    Equal to `F.cross_entropy(F.linear(hidden, weight, bias).float(), target, ...)`, gradients included; the weight's
    is summed in float32. A row whose target is `ignore_index` counts nothing. Where no row counts, the mean is NaN and
    the gradients are zero. On CUDA a target that is no class gives NaN, where eager stops the device.

    Args:
        hidden: (n, k) in float32, bfloat16 or float16, on the CPU or a CUDA device; float16 has no gradient.
        weight: (v, k), in that dtype or in float32, from which it is cast.
        target: (n) in int64: classes from 0 to v - 1, or `ignore_index`.
        bias: (v), in the dtype of the weight.
        ignore_index: the target that marks rows to leave out.
        reduction: `mean`, `sum`, or (without gradient) `none`.

    Returns:
        The loss in float32: a scalar, or (n) without reduction. It can be differentiated once.

    Raises:
        TypeError: a dtype is another one.
        ValueError: a shape does not fit, or a gradient is asked for that there is not.
        IndexError: a target is no class (CPU).
        RuntimeError: it was differentiated twice.
        ModuleNotFoundError: the tensors are on a CUDA device and Triton is not installed.
    """
    inputs = (hidden, weight, bias)
    needs = [torch.is_grad_enabled() and item is not None and item.requires_grad for item in inputs]
    if any(needs) and hidden.dtype == torch.float16:
        raise TypeError("linear_cross_entropy has no gradient in float16, where it would vanish")
    return torch.ops.omnicomp.linear_cross_entropy.default(
        hidden, weight, bias, target, ignore_index, reduction, *needs
    )[0]
