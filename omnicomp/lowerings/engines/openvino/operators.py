"""The operators that OpenVINO takes: its frontend reads them, and its CPU plugin computes what torch does.

They were compared with eager on the samples of PyTorch's operator database. What the frontend has no form of, or gets
wrong, is decomposed here; what is left of that has a check that refuses it.
"""

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node

from omnicomp._torch.autograd.decompose import decompositions_of
from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.checks import (
    all_of,
    argument,
    dense,
    first_alone,
    floating,
    no_dropout,
    no_masks,
    numeric,
    of_several,
    pads,
    same_heads,
)
from omnicomp.lowerings.engines.openvino.engine import OpenVinoEngine
from omnicomp.lowerings.engines.operators import DECOMPOSITIONS

aten = torch.ops.aten

_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_INTEGERS: Final = (torch.int64, torch.int32)
_NUMBERS: Final = (*_FLOATS, *_INTEGERS)
_ALL: Final = (*_NUMBERS, torch.bool)
_take = OpenVinoEngine.operators.take


def _whole(node: Node) -> str:
    """Of a reduction: the operand may be no single number."""
    return of_several(node)


def _divides(node: Node) -> str:
    return "" if fake_value(node).dtype.is_floating_point else "it divides floating-point numbers alone"


def _rounds_as_torch(node: Node) -> str:
    """Torch corrects what rounding made of a quotient before it rounds it down."""
    divisor = node.args[1]
    exact = isinstance(divisor, (int, float)) and abs(math.frexp(divisor)[0]) == 0.5  # a power of two
    if argument(node, "rounding_mode") == "floor" and not exact:
        return "it rounds quotients by powers of two alone down"
    return _divides(node)


def _batched(node: Node) -> str:
    rank = len(fake_value(node.args[1]).shape) - 2
    plain = 1 <= rank <= 3 and len(fake_value(node.args[0]).shape) == rank + 2
    return "" if plain else "it convolves over one, two or three dimensions, of a batch"


def _pools(node: Node) -> str:
    size: Any = node.args[1]
    if len(fake_value(node.args[0]).shape) != len(size) + 2:
        return "it pools a batch alone"
    return floating(node)


def _averages(node: Node) -> str:
    plain = argument(node, "divisor_override") is None and not argument(node, "ceil_mode")
    return _pools(node) if plain else "it divides by the number of elements alone, and rounds sizes down"


def _resizes(node: Node) -> str:
    given = [argument(node, name) for name in ("scales_h", "scales_w")]
    return "it resizes by sizes alone" if any(each is not None for each in given) else ""


def _norms(node: Node) -> str:
    order = argument(node, "ord")
    return "" if order in (1, 2, math.inf) else "it knows the norms 1, 2 and infinity alone"


def _gathers(node: Node) -> str:
    """Torch gathers of as much as there are indices."""
    dim: Any = node.args[1]
    sizes = [list(map(str, fake_value(argument(node, name)).shape)) for name in ("self", "index")]
    for each in sizes:
        del each[dim]
    return "" if sizes[0] == sizes[1] else "it gathers of as much as there are indices"


def _fitting(node: Node) -> str:
    tensors: Any = node.args[0]
    legacy = any(tuple(fake_value(each).shape) == (0,) for each in tensors)
    return "it joins no empty vectors" if legacy else ""


def _bias(node: Node) -> str:
    """A bias that counts for nothing does so even if it is NaN."""
    return "it adds a bias" if argument(node, "beta") == 0 else floating(node)


# What moves elements, or compares them.
_take(
    "_unsafe_view view reshape permute t transpose.int expand repeat select.int slice.Tensor squeeze squeeze.dim"
    " squeeze.dims unsqueeze stack clone alias detach lift_fresh_copy full full_like new_full new_ones new_zeros"
    " ones ones_like zeros zeros_like scalar_tensor fill.Scalar tril triu embedding _to_copy arange arange.start"
    " eq.Tensor ne.Tensor lt.Tensor le.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar"
    " logical_and logical_or logical_xor logical_not split_with_sizes",
    dtypes=_ALL,
)
_take("where.self where.ScalarOther where.ScalarSelf masked_fill.Scalar masked_fill.Tensor", dtypes=_ALL)
_take("cat", dtypes=_ALL, check=_fitting)
_take("flip roll unbind.int index_select", dtypes=_ALL, check=of_several)
_take("constant_pad_nd", dtypes=_NUMBERS, check=pads)
_take("scatter.src scatter.value unfold", dtypes=_NUMBERS, check=of_several)
_take("gather", dtypes=_NUMBERS, check=all_of(of_several, _gathers))
_take("index.Tensor _unsafe_index.Tensor", dtypes=_ALL, check=no_masks)
_take("as_strided", dtypes=_NUMBERS, check=all_of(of_several, dense))
_take("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_not", dtypes=(torch.bool,))

# What computes each element by itself.
_take("add.Tensor add.Scalar mul.Tensor mul.Scalar sub.Tensor rsub.Tensor rsub.Scalar neg", dtypes=_ALL, check=numeric)
_take("maximum minimum addcmul relu sign", dtypes=_NUMBERS)
_take("clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor hardtanh", dtypes=_NUMBERS)
_take("div.Tensor div.Scalar pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar", dtypes=_ALL, check=_divides)
_take("div.Tensor_mode", dtypes=_FLOATS, check=_rounds_as_torch)
_take(
    "acos acosh asin asinh atan atanh cos cosh erf exp log log2 log10 reciprocal rsqrt sigmoid sin sinh sqrt tan tanh",
    dtypes=_ALL,
)
_take("ceil floor round elu gelu hardsigmoid hardswish leaky_relu mish silu", dtypes=_FLOATS)
_take("isnan isinf", dtypes=(*_FLOATS, torch.bool), check=floating)

# What sums, and what is computed by multiplying matrices.
_take("sum sum.dim_IntList mean mean.dim cumsum", dtypes=_ALL, check=_whole)
_take("prod prod.dim_int", dtypes=_FLOATS, check=_whole)
_take("amax amin max min argmax argmin sort topk", dtypes=_NUMBERS, check=_whole)
_take("any any.dim any.dims all", dtypes=_ALL, check=_whole)
_take("_softmax _log_softmax", dtypes=_FLOATS, check=_whole)
_take("linalg_vector_norm", dtypes=_FLOATS, check=all_of(_whole, _norms))
_take("mm bmm dot", dtypes=_FLOATS)
_take("addmm baddbmm", dtypes=_FLOATS, check=_bias)
_take("convolution", dtypes=_FLOATS, check=_batched)
_take(
    "_scaled_dot_product_flash_attention_for_cpu",
    dtypes=(*_FLOATS, torch.bool),
    check=all_of(no_dropout, first_alone, same_heads),
)

# Layers.
_take("native_layer_norm native_group_norm _native_batch_norm_legit_no_training", dtypes=_FLOATS, check=first_alone)
_take("max_pool2d_with_indices max_pool3d_with_indices", dtypes=(*_FLOATS, torch.int64), check=_pools)
_take("avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d", dtypes=_FLOATS, check=_averages)
_take("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d", dtypes=_FLOATS, check=_resizes)
_take("reflection_pad1d reflection_pad2d reflection_pad3d", dtypes=_FLOATS, check=pads)
_take("replication_pad1d replication_pad2d replication_pad3d", dtypes=_FLOATS, check=pads)


def _greater(x: Tensor, y: Any) -> Tensor:
    """OpenVINO's own `Greater` is true of NaN."""
    return torch.lt(y if isinstance(y, Tensor) else torch.scalar_tensor(y), x)


def _greater_equal(x: Tensor, y: Any) -> Tensor:
    return torch.le(y if isinstance(y, Tensor) else torch.scalar_tensor(y), x)


def _magnitude(x: Tensor) -> Tensor:
    """OpenVINO 2026.4 leaves `Abs` out where what it is of is computed from constants."""
    return torch.maximum(x, -x)


def _isfinite(x: Tensor) -> Tensor:
    """OpenVINO's own operation is false of subnormal numbers."""
    return torch.maximum(x, -x) <= torch.finfo(torch.float32).max


def _trunc(x: Tensor) -> Tensor:
    return torch.sign(x) * torch.floor(torch.maximum(x, -x))


def _var_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    count = math.prod(x.shape[each] for each in dims) - (1 if correction is None else correction)
    away = x - torch.mean(x, dims, True)
    return torch.sum(away * away, dims, keepdim) / max(count, 0), torch.mean(x, dims, keepdim)


def _var(x: Tensor, dim: Any = None, **options: Any) -> Tensor:
    return _var_mean(x, dim, **options)[0]


def _std_mean(x: Tensor, dim: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    variance, middle = _var_mean(x, dim, **options)
    return torch.sqrt(variance), middle


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    return torch.where(x * beta > threshold, x, torch.log(torch.exp(x * beta) + 1) / beta)


def _replication_pad(x: Tensor, pad: Any) -> Tensor:
    for index in range(len(pad) // 2):
        dim, (before, after) = x.dim() - 1 - index, pad[2 * index : 2 * index + 2]
        first, last = x.narrow(dim, 0, 1), x.narrow(dim, x.shape[dim] - 1, 1)
        x = torch.cat([*[first] * before, x, *[last] * after], dim)
    return x


OpenVinoEngine.decompositions = {
    **decompositions_of(
        (
            *("mse_loss", "smooth_l1_loss", "huber_loss", "glu", "hardshrink", "softshrink", "upsample_nearest1d"),
            *("pixel_shuffle", "pixel_unshuffle", "addmv", "addr", "eye", "sinc", "logsumexp", "native_group_norm"),
            *("aminmax", "rot90", "_safe_softmax", "_fused_rms_norm", "logit", "_prelu_kernel", "addcdiv"),
            *("_weight_norm_interface", "select_scatter", "diagonal", "nll_loss_forward", "lerp", "square", "erfc"),
        )
    ),
    **DECOMPOSITIONS,
    aten.gt.Tensor: _greater,
    aten.gt.Scalar: _greater,
    aten.ge.Tensor: _greater_equal,
    aten.ge.Scalar: _greater_equal,
    aten.abs.default: _magnitude,
    aten.isfinite.default: _isfinite,
    aten.trunc.default: _trunc,
    aten.frac.default: lambda x: x - _trunc(x),
    aten.max.dim: lambda x, dim, keepdim=False: (torch.amax(x, dim, keepdim), torch.argmax(x, dim, keepdim)),
    aten.min.dim: lambda x, dim, keepdim=False: (torch.amin(x, dim, keepdim), torch.argmin(x, dim, keepdim)),
    aten.split.Tensor: lambda x, size, dim=0: torch.split_with_sizes(
        x, [min(size, x.shape[dim] - first) for first in range(0, max(x.shape[dim], 1), size)], dim
    ),
    aten.exp2.default: lambda x: torch.pow(2.0, x),
    aten.mv.default: lambda x, y: torch.mm(x, y.unsqueeze(1)).squeeze(1),
    aten.all.dim: lambda x, dim, keepdim=False: ~torch.any(~x.bool(), dim, keepdim),
    aten.all.dims: lambda x, dim=None, keepdim=False: ~torch.any(~x.bool(), dim, keepdim),
    aten.std_mean.correction: _std_mean,
    aten.var_mean.correction: _var_mean,
    aten.var.correction: _var,
    aten.std.correction: lambda x, dim=None, **options: torch.sqrt(_var(x, dim, **options)),
    aten.softplus.default: _softplus,
    aten.sub.Scalar: lambda x, y, alpha=1: torch.add(x, -y * alpha),
    aten.replication_pad1d.default: _replication_pad,
    aten.replication_pad2d.default: _replication_pad,
    aten.replication_pad3d.default: _replication_pad,
}
