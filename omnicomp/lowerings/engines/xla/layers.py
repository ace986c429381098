"""XLA's forms of normalisations, and what is decomposed by torch before XLA gets it."""

from collections.abc import Sequence
from typing import Any

import torch

from omnicomp.lowerings.engines.conversion import form
from omnicomp.lowerings.engines.xla.engine import XlaEngine
from omnicomp.lowerings.engines.xla.library import jnp, lax

aten = torch.ops.aten


@XlaEngine.op(aten.native_layer_norm.default)
@form("result")
def native_layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: Any) -> tuple[Any, Any, Any]:
    along = tuple(range(x.ndim - len(shape), x.ndim))
    made, middle, scale = _normalised(x, along, eps)
    return _affine(made, weight, bias), middle, scale


@XlaEngine.op(aten.native_layer_norm_backward.default)
@form("result")
def native_layer_norm_backward(
    grad: Any, x: Any, shape: Sequence[int], middle: Any, scale: Any, weight: Any, bias: Any, mask: Sequence[bool]
) -> tuple[Any, ...]:
    rows, along = tuple(range(x.ndim - len(shape))), tuple(range(x.ndim - len(shape), x.ndim))
    normal = (x - middle) * scale
    of_normal = grad if weight is None else grad * weight
    of_x = scale * (
        of_normal
        - jnp.mean(of_normal, axis=along, keepdims=True)
        - normal * jnp.mean(of_normal * normal, axis=along, keepdims=True)
    )
    made = (of_x, jnp.sum(grad * normal, axis=rows), jnp.sum(grad, axis=rows))
    return tuple(each if wanted else None for each, wanted in zip(made, mask, strict=True))


@XlaEngine.op(aten.native_group_norm.default)
@form("result")
def native_group_norm(
    x: Any, weight: Any, bias: Any, batch: int, channels: int, size: int, groups: int, eps: Any
) -> tuple[Any, Any, Any]:
    rows = x.reshape(batch, groups, -1)
    made, middle, scale = _normalised(rows, (2,), eps)
    wide = (1, channels, *(1,) * (x.ndim - 2))
    weight, bias = (each if each is None else each.reshape(wide) for each in (weight, bias))
    return _affine(made.reshape(x.shape), weight, bias), middle[..., 0], scale[..., 0]


@XlaEngine.op(aten._native_batch_norm_legit_no_training.default)
@form("result", like=True)
def batch_norm_no_training(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: Any, eps: Any, *, like: Any
) -> tuple[Any, Any, Any]:
    wide = (1, -1, *(1,) * (x.ndim - 2))
    inverse = lax.rsqrt(variance + eps)
    scale = inverse * (1 if weight is None else weight)
    shift = -mean * scale + (0 if bias is None else bias)
    made = x * scale.reshape(wide) + shift.reshape(wide)
    # torch's kernel for the CPU saves nothing here, and the one for CUDA does.
    saved = (mean, inverse) if like[1].numel() else (jnp.zeros(0), jnp.zeros(0))
    return made, *saved


def _normalised(x: Any, along: tuple[int, ...], eps: Any) -> tuple[Any, Any, Any]:
    middle = jnp.mean(x, axis=along, keepdims=True)
    scale = lax.rsqrt(jnp.mean((x - middle) ** 2, axis=along, keepdims=True) + eps)
    return (x - middle) * scale, middle, scale


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
