"""The operators that ONNX Runtime takes: torch's exporter has a form of each, and the runtime a kernel for the dtypes.

They were compared with eager on the samples of PyTorch's operator database. What the exporter writes otherwise than
torch computes has a check that refuses it.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.checks import (
    all_of,
    argument,
    dense,
    filled,
    first_alone,
    floating,
    no_dropout,
    no_masks,
    numeric,
    of_several,
    pads,
    same_heads,
    whole_divisor,
)
from omnicomp.lowerings.engines.onnxruntime.engine import OnnxRuntimeEngine

_FLOATS: Final = (torch.float32, torch.float16)
_INTEGERS: Final = (torch.int64, torch.int32)
_MOVED: Final = (*_FLOATS, torch.float64, *_INTEGERS, torch.bool)
_NUMBERS: Final = (*_FLOATS, *_INTEGERS, torch.bool)


def _take(names: str, dtypes: tuple[torch.dtype, ...], check: Callable[[Node], str] | None = None) -> None:
    OnnxRuntimeEngine.operators.take(names, dtypes=dtypes, check=check)


def _averages(node: Node) -> str:
    plain = not argument(node, "ceil_mode") and argument(node, "divisor_override") is None
    return "" if plain else "it divides by the number of elements, and rounds sizes down"


def _inference(node: Node) -> str:
    return "it has no batch norm that computes statistics" if argument(node, "training") else first_alone(node)


def _scales(node: Node) -> str:
    given = [argument(node, name) for name in ("scales", "scales_h", "scales_w", "scales_d")]
    return "it resizes by sizes alone" if any(each is not None for each in given) else ""


def _reduces(node: Node) -> str:
    if argument(node, "reduce") == "mean":
        return "it takes no mean of what is scattered"
    return _as_many(node) or of_several(node)


def _as_many(node: Node) -> str:
    """Torch takes of what is scattered as much as there are indices."""
    sizes = [tuple(map(str, fake_value(argument(node, name)).shape)) for name in ("index", "src")]
    return "" if sizes[0] == sizes[1] else "it scatters as many elements as there are indices"


def _fitting(node: Node) -> str:
    """Vectors without elements fit anything in torch, and nothing in ONNX."""
    tensors: Any = node.args[0]
    legacy = any(tuple(fake_value(each).shape) == (0,) for each in tensors)
    return "it joins no empty vectors" if legacy else ""


# What moves elements, or compares them.
_take(
    "_unsafe_view view view_copy reshape clone alias detach lift_fresh_copy permute t transpose.int expand repeat flip"
    " roll select.int slice.Tensor split.Tensor split_with_sizes unbind.int unfold squeeze squeeze.dim squeeze.dims"
    " unsqueeze stack diagonal tril triu index_select select_scatter slice_scatter full_like new_full new_ones"
    " new_zeros ones_like zeros_like fill.Scalar eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor"
    " eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar logical_and logical_or logical_xor logical_not"
    " maximum minimum _to_copy full ones zeros scalar_tensor arange"
    " arange.start arange.start_step embedding",
    _MOVED,
)
_take("where.self where.ScalarOther where.ScalarSelf masked_fill.Scalar masked_fill.Tensor", _MOVED, numeric)
_take("cat", _MOVED, _fitting)
_take("constant_pad_nd", _MOVED, pads)
_take("gather scatter.value", _MOVED, of_several)
_take("scatter.src", _MOVED, all_of(of_several, _as_many))
_take("scatter_add", (torch.float32, *_INTEGERS), all_of(of_several, _as_many))
_take("scatter_reduce.two", (torch.float32, torch.int64), _reduces)
_take("index.Tensor _unsafe_index.Tensor", _MOVED, no_masks)
_take("index_put", (torch.float32, *_INTEGERS, torch.bool), no_masks)
_take("index_add index_copy", (torch.float32, *_INTEGERS), of_several)
_take("as_strided", _MOVED, dense)
_take("sort max.dim min.dim argmax argmin", (torch.float32, *_INTEGERS), all_of(of_several, filled))
_take("topk", (torch.float32, torch.int64), all_of(floating, of_several, filled))
_take("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_not", (*_INTEGERS, torch.bool))

# What computes each element by itself. Without atan2, whose sign is another one on the negative axis, and without
# expm1, log1p, logaddexp and logaddexp2, which lose what is small next to 1.
_take("abs neg add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar addcmul", _NUMBERS, numeric)
_take("clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor hardtanh sign", _NUMBERS, numeric)
_take("pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar", _NUMBERS, numeric)
_take("relu ceil floor round trunc frac", _FLOATS)
_take("div.Tensor div.Scalar", _NUMBERS, whole_divisor)
_take("div.Tensor_mode div.Scalar_mode floor_divide", _NUMBERS, whole_divisor)
_take("fmod.Tensor fmod.Scalar remainder.Tensor remainder.Scalar", _NUMBERS, whole_divisor)
_take(
    "acos acosh asin asinh atan atanh cos cosh deg2rad elu erf erfc exp exp2 gelu glu"
    " hardsigmoid hardswish leaky_relu log log10 log2 logit mish rad2deg reciprocal"
    " rsqrt selu sigmoid silu sin sinc sinh softplus sqrt tan tanh addcdiv lerp.Scalar celu _prelu_kernel"
    " mse_loss xlogy.Tensor",
    _NUMBERS,
)
_take("isnan isinf isneginf isposinf", (*_FLOATS, torch.bool), floating)

# What sums, and what is computed by multiplying matrices.
_take("sum sum.dim_IntList mean mean.dim", _NUMBERS, filled)
_take("cumsum", (torch.float32, torch.int64, torch.bool), of_several)
# A product of integers would leave what its float64 holds.
_take("prod prod.dim_int", (torch.float32,), all_of(of_several, filled))
_take("amax amin", (*_FLOATS, *_INTEGERS), all_of(of_several, filled))
_take("max min", (*_FLOATS, *_INTEGERS), filled)
_take("any any.dim any.dims all all.dim all.dims", _NUMBERS, all_of(of_several, filled))
_take("_softmax _log_softmax logsumexp", _FLOATS, filled)
_take("linalg_vector_norm var var.dim var.correction std.correction", (torch.float32,), filled)
_take("var_mean.correction std_mean.correction", (torch.float32,), filled)
_take("mm bmm mv dot", _FLOATS)
_take("addmm baddbmm addbmm addmv addr", (torch.float32,), filled)
_take("convolution", (torch.float32,), filled)
_take(
    "_scaled_dot_product_flash_attention_for_cpu",
    (*_FLOATS, torch.bool),
    all_of(no_dropout, first_alone, filled, same_heads),
)

# Layers.
_take("native_layer_norm native_group_norm", (torch.float32,), all_of(first_alone, filled))
_take("native_batch_norm", (torch.float32,), _inference)
_take("_native_batch_norm_legit_no_training", (torch.float32,), first_alone)
_take("avg_pool2d avg_pool3d", (torch.float32,), all_of(_averages, filled))
_take("max_pool2d_with_indices max_pool3d_with_indices", (torch.float32, torch.int64), all_of(floating, filled))
_take("nll_loss_forward", (torch.float32, torch.int64), first_alone)
_take("upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d", (torch.float32,), _scales)
_take("upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d", (torch.float32,), _scales)
_take("reflection_pad1d reflection_pad2d reflection_pad3d", (torch.float32,), all_of(pads, filled))
_take("replication_pad1d replication_pad2d replication_pad3d", (torch.float32,), all_of(pads, filled))
_take("pixel_shuffle pixel_unshuffle", _FLOATS, filled)
