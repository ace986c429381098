"""XLA's forms of matrix products and convolutions, and of attention."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from omnicomp.lowerings.engines.checks import no_dropout
from omnicomp.lowerings.engines.conversion import form
from omnicomp.lowerings.engines.xla.engine import XlaEngine
from omnicomp.lowerings.engines.xla.library import jax, jnp, lax, precision_of

aten = torch.ops.aten


@XlaEngine.op(aten.mm.default, aten.bmm.default, aten.dot.default, aten.mv.default)
@form("result")
def matmul(x: Any, y: Any) -> Any:
    return jnp.matmul(x, y, precision=precision_of("matmul"))


@XlaEngine.op(aten.addmm.default, aten.baddbmm.default)
@form("result")
def addmm(bias: Any, x: Any, y: Any, *, beta: Any, alpha: Any) -> Any:
    return _scaled(bias, beta) + matmul(x, y) * alpha


def _scaled(bias: Any, beta: Any) -> Any:
    """What is scaled by zero counts as zero, even if it is NaN."""
    return jnp.where(beta == 0, 0, bias * beta)


@XlaEngine.op(aten.convolution.default)
@form("result")
def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    sizes = weight.shape[2:]
    rank = len(sizes)
    stride, padding, dilation, output_padding = (
        tuple(each) * (rank if len(each) == 1 else 1) for each in (stride, padding, dilation, output_padding)
    )
    pads = [(each, each) for each in padding]
    spread = (1,) * rank
    if transposed:
        # The gradient of a convolution: the input is spread out, the kernel is turned round and its channels swapped.
        reach = [step * (size - 1) for step, size in zip(dilation, sizes, strict=True)]
        pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
        stride, spread = spread, stride
        weight = jnp.flip(weight, tuple(range(2, 2 + rank)))
        weight = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).swapaxes(1, 2)
        weight = weight.reshape(-1, *weight.shape[2:])
    made = lax.conv_general_dilated(
        x,
        weight,
        stride,
        pads,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=precision_of("conv"),
    )
    return made if bias is None else made + bias.reshape(-1, *(1,) * rank)


@XlaEngine.op(aten.convolution_backward.default)
@form("result")
def convolution_backward(grad: Any, x: Any, weight: Any, bias_sizes: Any, *settings: Any) -> tuple[Any, ...]:
    *rest, mask = settings

    def forward(x: Any, weight: Any) -> Any:
        return convolution(x, weight, None, *rest)

    _, pull = jax.vjp(forward, x, weight)
    of_x, of_weight = pull(grad)
    of_bias = jnp.sum(grad, axis=(0, *range(2, grad.ndim)))
    return tuple(made if wanted else None for made, wanted in zip((of_x, of_weight, of_bias), mask, strict=True))


@XlaEngine.op(aten._scaled_dot_product_flash_attention_for_cpu.default, devices=("cpu",), check=no_dropout)
@form("result", keep=("scale", "dropout_p"))
def attention(q: Any, k: Any, v: Any, dropout: float, causal: bool, *, attn_mask: Any, scale: Any) -> tuple[Any, Any]:
    """The result, and the logarithm of the sum of exponentials of each row, which the backward needs.

    Of a row that is masked as a whole it is zero, as torch's kernel has it, and the result too.
    """
    scores = _scores(q, k, causal, attn_mask, scale)
    total = jax.nn.logsumexp(scores, axis=-1)
    total = jnp.where(jnp.isneginf(total), 0, total)
    return matmul(_weights(scores, total), v), total


@XlaEngine.op(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, devices=("cpu",), check=no_dropout)
@form("result", keep=("scale", "dropout_p"))
def attention_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    total: Any,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Any,
    scale: Any,
) -> tuple[Any, Any, Any]:
    weights = _weights(_scores(q, k, causal, attn_mask, scale), total)
    of_weights = matmul(grad, jnp.swapaxes(v, -1, -2))
    of_scores = weights * (of_weights - jnp.sum(grad * out, axis=-1, keepdims=True)) * _scale(q, scale)
    of_k = matmul(jnp.swapaxes(of_scores, -1, -2), q)
    return matmul(of_scores, k), of_k, matmul(jnp.swapaxes(weights, -1, -2), grad)


def _scale(q: Any, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _scores(q: Any, k: Any, causal: bool, mask: Any, scale: float | None) -> Any:
    scores = matmul(q, jnp.swapaxes(k, -1, -2)) * _scale(q, scale)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return scores if mask is None else scores + mask


def _weights(scores: Any, total: Any) -> Any:
    """The softmax of each row; zero in one that is masked as a whole, whose total is."""
    return jnp.exp(scores - total[..., None])
