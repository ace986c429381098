"""Fused attention that `scaled_dot_product_attention` does not offer, with its gradients.

Two operators for a graph that is still to be differentiated:

- `ATTENTION_WITH_BIAS`: an additive mask that requires grad, on the CPU, where torch has no fused kernel for that.
- `ATTENTION_WITH_SINK`: one more logit in each row's softmax, whose weight is dropped afterwards.

They are operators and no Python functions, because AOTAutograd caches a graph of operators, but none that calls a
function it does not know. Their kernels are "composite implicit": running or tracing one runs the function below, so a
compiled graph has only ATen operators in it, and an interpreter gets real autograd. The gradients are those of a
`torch.autograd.Function`, which AOTAutograd traces as well. Inside transforms of `torch.func`, which such a function
does not know, the attention is computed unfused. None can be differentiated twice.
"""

from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from omnicomp._torch.autograd import sdpa
from omnicomp._torch.autograd.attention import SDPA, known_equal

# The scores are made anew a few heads at a time: that keeps the memory small, and it is used again for the next heads.
_CHUNKS: Final = 4
# glibc gets every block of more than 32 MiB from the system anew, page by page, which is what makes scores expensive.
_SCORES_BYTES: Final = 32 * 2**20
_HALF: Final = (torch.float16, torch.bfloat16)
# A score that was rounded otherwise than in the forward pass may exceed a huge log-sum-exp; it must not overflow.
_LARGEST_EXPONENT: Final = 60.0


def bias_pays(query_shape: tuple[Any, ...], keys: Any, dtype: torch.dtype) -> bool:
    """Whether a training step on the CPU is faster with `attention_with_bias` than unfused, under Inductor.

    Unfused keeps the weights and needs six products, where the fused form makes the scores anew and needs seven; what
    it saves is memory that has to be fetched from the system. It is ahead once the scores of all heads take 32 MiB.

    Args:
        query_shape: [B, H, Q, D]; numbers, as they are known when the graph is compiled.
        keys: the number of keys.
        dtype: dtype of the queries.

    Returns:
        False for half precision too, where the unfused products are the fast ones.
    """
    return dtype not in _HALF and _scores_are_large(query_shape, keys, dtype)


def head_sizes_pay(
    query_shape: tuple[Any, ...], keys: Any, value_size: Any, dtype: torch.dtype, *, train: bool
) -> bool:
    """Whether zeros that make two head sizes equal leave the CPU's kernel faster than unfused, under Inductor.

    Measured in float32: it was behind for scores below 32 MiB, and ahead from there on, save for the training of large
    heads (192 and 128), where the products with the zeros cost more than the scores' memory.

    Args:
        query_shape: [B, H, Q, D]; numbers, as they are known when the graph is compiled.
        keys: the number of keys.
        value_size: head size of the values.
        dtype: dtype of the queries.
        train: whether gradients are computed too.
    """
    small = max(query_shape[3], value_size) <= 64
    return dtype not in _HALF and (small or not train) and _scores_are_large(query_shape, keys, dtype)


def attention_with_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    *,
    scale: float,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention with an additive mask that may require grad: softmax(scale * query @ key.T + attn_mask) @ value.

    On the CPU the forward pass is the flash kernel; the backward pass makes the weights anew from its log-sum-exp and
    differentiates the softmax by dS = P * (dP - rowsum(P * dP)). The mask's gradient is dS summed over the dimensions
    that it was broadcast along. The weights are normalised once more, because a log-sum-exp near finfo.min has no
    digits left for the number of keys. On other devices, or where the mask requires no grad, it is
    `scaled_dot_product_attention`.

    Args:
        query: [B, H, Q, D].
        key: [B, Hkv, K, D]; Hkv divides H and is H without `enable_gqa`.
        value: [B, Hkv, K, D].
        attn_mask: floating point, broadcastable to [B, H, Q, K]. A row that is -inf for every key gives zeros.
        scale: factor of the products.
        is_causal: also hide the keys after the query, counted from the first of each.
        enable_gqa: several query heads share one head of keys and values.

    Returns:
        [B, H, Q, D] in the queries' dtype.

    Raises:
        RuntimeError: the shapes or dtypes do not fit together.
    """
    on_cpu = query.device.type == "cpu"
    mask = _mask_for_cpu(attn_mask, query.dtype) if on_cpu else attn_mask.to(query.dtype)
    if not on_cpu or not (torch.is_grad_enabled() and attn_mask.requires_grad) or sdpa.in_transform():
        mask = _hide_later(mask, query.shape[2], key.shape[2]) if is_causal else mask
        return SDPA(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
    return _apply(_BiasAttention, *map(_dense, (query, key, value)), mask, scale, is_causal)


def attention_with_sink(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sink: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    scale: float,
    is_causal: bool = False,
    enable_gqa: bool = False,
    kernel: str = "",
) -> torch.Tensor:
    """Attention whose softmax has one more logit, the sink, with no value: softmax([scores, sink])[:-1] @ value.

    The weights of a softmax without the sink only have to be scaled by sigmoid(logsumexp(scores) - sink), and that is
    done to the output of a fused kernel. The backward kernels compute their weights as exp(scores - logsumexp) and
    dS = P * (dP - rowsum(dO * O)). Given logaddexp(logsumexp, sink) and the scaled output instead, they give the
    gradients of this attention as they are. The sink is a column with dP = 0, so its gradient is the sum of
    -exp(sink - logsumexp') * rowsum(dO * O).

    Args:
        query: [B, H, Q, D].
        key: [B, Hkv, K, D]; Hkv divides H and is H without `enable_gqa`.
        value: [B, Hkv, K, Dv].
        sink: [H], or broadcastable to [B, H, Q, 1] with four dimensions.
        attn_mask: boolean (False hides), or added to the scores, and then it may require grad; broadcastable to
            [B, H, Q, K].
        scale: factor of the products; not of the sink.
        is_causal: also hide the keys after the query, counted from the first of each.
        enable_gqa: several query heads share one head of keys and values.
        kernel: one of `omnicomp._torch.autograd.sdpa.KERNELS`; if empty, what `sink_kernel` says.

    Returns:
        [B, H, Q, Dv] in the queries' dtype. Unfused where no kernel fits.

    Raises:
        RuntimeError: the shapes or dtypes do not fit together.
        ValueError: `kernel` does not take this attention.
    """
    sink = sink.view(1, -1, 1, 1) if sink.dim() == 1 else sink
    trained = torch.is_grad_enabled() and attn_mask is not None and attn_mask.requires_grad
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -torch.inf)
    kernel = kernel or sink_kernel(query, key, masked=attn_mask is not None, trained=trained, is_causal=is_causal)
    if not kernel or sdpa.in_transform():
        return _unfused(query, key, value, sink, attn_mask, scale, is_causal)
    if kernel == "flash_cpu":
        attn_mask = None if attn_mask is None else _mask_for_cpu(attn_mask, query.dtype)
    elif attn_mask is not None:
        attn_mask = _mask_for_cuda(attn_mask, query, key)
    if kernel == "efficient" and not known_equal(query.shape[1], key.shape[1]):
        key, value = _repeat(key, query.shape[1]), _repeat(value, query.shape[1])
    width = value.shape[-1]
    query, key, value = _pad(query, key, value, kernel)
    out = _apply(_SinkAttention, query, key, value, sink, attn_mask, scale, is_causal, kernel)
    return out if known_equal(out.shape[-1], width) else out[..., :width]


def sink_kernel(query: torch.Tensor, key: torch.Tensor, *, masked: bool, trained: bool, is_causal: bool) -> str:
    """The kernel that `attention_with_sink` takes if it is told none; empty where it computes unfused.

    Args:
        query: [B, H, Q, D].
        key: [B, Hkv, K, D].
        masked: whether there is a mask.
        trained: whether the mask requires grad.
        is_causal: whether later keys are hidden without a mask.
    """
    if query.device.type == "cpu":
        return "flash_cpu"
    if query.device.type != "cuda" or query.dtype == torch.float64:
        return ""
    square = known_equal(query.shape[2], key.shape[2])
    if query.dtype not in _HALF or masked or trained or (is_causal and not square) or query.shape[-1] > 256:
        return "efficient"
    return "flash"


class _BiasAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scale: float,
        is_causal: bool,
    ) -> torch.Tensor:
        out, lse, _ = sdpa.forward("flash_cpu", query, key, value, mask, is_causal=is_causal, scale=scale)
        ctx.save_for_backward(query, key, value, mask, lse)
        ctx.scale, ctx.is_causal = scale, is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, mask, lse = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            grads = _recompute(grad, query, key, value, mask, lse, None, ctx.scale, ctx.is_causal)
        return *grads, None, None


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sink: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        is_causal: bool,
        kernel: str,
    ) -> torch.Tensor:
        out, lse, saved = sdpa.forward(kernel, query, key, value, mask, is_causal=is_causal, scale=scale)
        share = torch.sigmoid(lse.unsqueeze(-1) - sink)
        out = (out * share).to(query.dtype)
        ctx.save_for_backward(query, key, value, sink, mask, out, lse, *saved.tensors)
        ctx.sizes, ctx.padding = saved.sizes, saved.padding
        ctx.scale, ctx.is_causal, ctx.kernel = scale, is_causal, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, sink, mask, out, lse, *tensors = ctx.saved_tensors
        mask_grad = ctx.needs_input_grad[4]
        logits = sink.to(lse.dtype)
        total = torch.logaddexp(lse, logits.squeeze(-1))
        row_sums = (grad.to(lse.dtype) * out).sum(-1, keepdim=True)
        sink_grad = -(torch.exp(logits - total.unsqueeze(-1)) * row_sums)
        if mask_grad and ctx.kernel == "flash_cpu":
            share = torch.sigmoid(lse.unsqueeze(-1) - logits)
            with torch.autocast("cpu", enabled=False):
                grads = _recompute(grad, query, key, value, mask, lse, share, ctx.scale, ctx.is_causal)
        else:
            grads = sdpa.backward(
                ctx.kernel,
                grad,
                query,
                key,
                value,
                mask,
                out,
                total,
                sdpa.Saved(tuple(tensors), ctx.sizes, ctx.padding),
                is_causal=ctx.is_causal,
                scale=ctx.scale,
                mask_grad=mask_grad,
            )
        return *grads[:3], _reduce(sink_grad, sink), grads[3], None, None, None


def _scores_are_large(query_shape: tuple[Any, ...], keys: Any, dtype: torch.dtype) -> bool:
    batch, heads, queries, _ = query_shape
    return batch * heads * queries * keys * dtype.itemsize >= _SCORES_BYTES


def _apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    return cast(torch.Tensor, function.apply(*args))


def _recompute(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    lse: torch.Tensor,
    share: torch.Tensor | None,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of queries, keys, values and mask; `share` is what all keys of a row together weigh, if not 1."""
    heads, shared = query.shape[1], key.shape[1]
    wide = [tensor if known_equal(heads, shared) else _repeat(tensor, heads) for tensor in (key, value)]
    lse = lse.unsqueeze(-1)
    operands = (grad, query, *wide, mask, lse, share)
    found: list[list[torch.Tensor]] = []
    for chunk in zip(*(_split(tensor, heads) for tensor in operands), strict=True):
        grad, query, key, value, part, lse, share = chunk
        scores = torch.matmul(query, key.transpose(-2, -1)).to(lse.dtype) * scale + part
        if is_causal:
            scores = _hide_later(scores, scores.shape[-2], scores.shape[-1])
        weights = torch.exp((scores - lse).clamp(max=_LARGEST_EXPONENT))
        total = weights.sum(-1, keepdim=True)
        # A row without any key sums to zero.
        weights = weights / total.masked_fill(total == 0, 1)
        weights = weights if share is None else weights * share
        weight_grad = torch.matmul(grad, value.transpose(-2, -1))
        # rowsum(dO * O), which is the same, would have the rounding of the output.
        score_grad = weights * (weight_grad - (weights * weight_grad).sum(-1, keepdim=True))
        factor = (score_grad * scale).to(query.dtype)
        found.append(
            [
                torch.matmul(factor, key),
                torch.matmul(factor.transpose(-2, -1), query),
                torch.matmul(weights.to(query.dtype).transpose(-2, -1), grad),
                _reduce(score_grad, part),
            ]
        )
    columns = list(zip(*found, strict=True))
    query_grad, key_grad, value_grad = (torch.cat(column, 1) for column in columns[:3])
    if not known_equal(heads, shared):
        key_grad, value_grad = (g.unflatten(1, (shared, -1)).sum(2) for g in (key_grad, value_grad))
    if known_equal(mask.shape[1], 1):
        return query_grad, key_grad, value_grad, torch.stack(columns[3]).sum(0)
    return query_grad, key_grad, value_grad, torch.cat(columns[3], 1)


def _split(tensor: torch.Tensor | None, heads: Any) -> tuple[torch.Tensor | None, ...]:
    """Chunks of heads; what is the same for all heads is repeated."""
    if not isinstance(heads, int):
        return (tensor,)
    size = -(-heads // _CHUNKS)
    if tensor is None or known_equal(tensor.shape[1], 1):
        return (tensor,) * -(-heads // size)
    return tensor.split(size, 1)


def _unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sink: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
) -> torch.Tensor:
    heads = query.shape[1]
    if not known_equal(heads, key.shape[1]):
        key, value = _repeat(key, heads), _repeat(value, heads)
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    scores = scores if mask is None else scores + mask
    if is_causal:
        scores = _hide_later(scores, scores.shape[-2], scores.shape[-1])
    sink = sink.to(scores.dtype).expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat((scores, sink), -1), -1)
    return torch.matmul(weights[..., :-1].to(value.dtype), value)


def _hide_later(scores: torch.Tensor, queries: Any, keys: Any) -> torch.Tensor:
    later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1)
    return torch.where(later, -torch.inf, scores)


def _reduce(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sum over the dimensions along which `like` was broadcast."""
    dims = [dim for dim, size in enumerate(like.shape) if known_equal(size, 1)]
    return (grad.sum(dims, keepdim=True) if dims else grad).to(like.dtype)


def _repeat(tensor: torch.Tensor, heads: Any) -> torch.Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _dense(operand: torch.Tensor) -> torch.Tensor:
    return operand if known_equal(operand.stride(-1), 1) else operand.contiguous()


def _pad(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: str) -> tuple[torch.Tensor, ...]:
    """Zeros after the features, where the kernel wants one head size, or a multiple of some number."""
    # CUDA's kernels read 16 bytes at once.
    multiple = 1 if kernel == "flash_cpu" else 16 // query.dtype.itemsize
    sizes = [-(-operand.shape[-1] // multiple) * multiple for operand in (query, key, value)]
    if kernel in ("flash_cpu", "flash") and not known_equal(sizes[0], sizes[2]):
        sizes = [max(sizes)] * 3
    return tuple(
        _dense(tensor if known_equal(tensor.shape[-1], size) else F.pad(tensor, (0, size - tensor.shape[-1])))
        for tensor, size in zip((query, key, value), sizes, strict=True)
    )


def _mask_for_cpu(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Four dimensions, in a dtype that the kernel takes: the queries', or float32."""
    mask = mask if mask.dtype == dtype or (mask.dtype == torch.float32 and dtype in _HALF) else mask.to(dtype)
    return mask[(None,) * (4 - mask.dim())]


def _mask_for_cuda(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[B, H, Q, K] in the queries' dtype, with rows that start at a multiple of 16 elements."""
    keys = key.shape[2]
    mask = mask.to(query.dtype).expand(*mask.shape[:-1], keys)
    if not known_equal(keys % 16, 0):
        mask = F.pad(mask, (0, -keys % 16))[..., :keys]
    return mask.expand(*query.shape[:3], keys)


_OPERANDS: Final = "Tensor query, Tensor key, Tensor value"
_CALL: Final = "float scale, bool is_causal=False, bool enable_gqa=False"
ATTENTION_WITH_BIAS: Final = sdpa.define(
    f"attention_with_bias({_OPERANDS}, Tensor attn_mask, *, {_CALL}) -> Tensor", attention_with_bias
)
ATTENTION_WITH_SINK: Final = sdpa.define(
    f'attention_with_sink({_OPERANDS}, Tensor sink, Tensor? attn_mask=None, *, {_CALL}, str kernel="") -> Tensor',
    attention_with_sink,
)
