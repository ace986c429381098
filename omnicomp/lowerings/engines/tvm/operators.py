"""The operators that TVM takes: those of its importer's map that compute what torch does.

They were compared with eager on the samples of PyTorch's operator database. What the importer lacks or gets wrong is
decomposed here, has a function in `converters`, or is refused by a check.
"""

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node

from omnicomp._torch.autograd.decompose import decompositions_of
from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.checks import argument, first_alone, no_dropout, numeric, of_several, pads
from omnicomp.lowerings.engines.tvm.engine import TvmEngine

aten = torch.ops.aten

_FLOATS: Final = (torch.float32, torch.float64)
_NUMBERS: Final = (*_FLOATS, torch.int64, torch.int32)
_ALL: Final = (*_NUMBERS, torch.bool)
_take = TvmEngine.operators.take


def _known_divisor(node: Node) -> str:
    """Dividing integers by zero ends the process, where torch raises."""
    divisor = node.args[1]
    known = fake_value(node).dtype.is_floating_point or (isinstance(divisor, (int, float)) and divisor)
    return "" if known else "it divides integers by known numbers alone"


def _plain_average(node: Node) -> str:
    given = argument(node, "ceil_mode") or argument(node, "divisor_override") is not None
    return "it takes no averages over rounded-up windows or with a divisor" if given else ""


def _known_convolution(node: Node) -> str:
    weight, plain = fake_value(node.args[1]), argument(node, "groups") == 1 and set(argument(node, "dilation")) == {1}
    if argument(node, "transposed") and (weight.dim() > 4 or not plain):
        return "of transposed convolutions it takes those in one or two dimensions without groups and dilation"
    return ""


def _leading_numbers(node: Node) -> str:
    given: Any = argument(node, "indices")
    values = [fake_value(each) for each in given if isinstance(each, Node)]
    if any(value.dtype in (torch.bool, torch.uint8) for value in values):
        return "the size of what a mask picks is only known when it runs"
    return "" if len(values) == len(given) else "it takes indices of the first dimensions alone"


# What moves elements.
_take(
    "_unsafe_view view reshape permute expand slice.Tensor squeeze squeeze.dim squeeze.dims unsqueeze cat stack clone"
    " alias detach lift_fresh_copy _to_copy full full_like new_full new_ones new_zeros ones ones_like zeros zeros_like"
    " scalar_tensor select.int repeat arange arange.start arange.start_step where.self"
    " masked_fill.Scalar split_with_sizes split.Tensor",
    dtypes=_ALL,
)
_take("flip roll unbind.int transpose.int index_select gather", dtypes=_ALL, check=of_several)
_take("embedding", dtypes=_ALL)
_take("tril triu", dtypes=_NUMBERS)
_take("constant_pad_nd", dtypes=_NUMBERS, check=pads)
_take("scatter.src scatter.value scatter_add", dtypes=_NUMBERS, check=of_several)
_take("index.Tensor _unsafe_index.Tensor", dtypes=_ALL, check=_leading_numbers)

# What computes each element by itself.
_take(
    "abs acos asin atan cos cosh erf exp log log10 log2 neg reciprocal rsqrt sigmoid sin sinh sqrt square tan tanh"
    " div.Tensor div.Scalar atan2"
    " lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar"
    " eq.Tensor eq.Scalar ne.Tensor ne.Scalar logical_not logical_and logical_or logical_xor isnan isinf"
    " bitwise_not bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_and.Scalar bitwise_or.Scalar"
    " bitwise_xor.Scalar",
    dtypes=_ALL,
)
_take("add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar", dtypes=_ALL, check=numeric)
_take("ceil floor round trunc gelu silu leaky_relu pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar", dtypes=_FLOATS)
_take("fmod.Tensor fmod.Scalar remainder.Tensor remainder.Scalar", dtypes=_NUMBERS, check=_known_divisor)
_take("div.Tensor_mode div.Scalar_mode floor_divide floor_divide.Scalar", dtypes=_NUMBERS, check=_known_divisor)

# What goes along dimensions, and layers.
_take("sum mean prod", dtypes=_ALL)
_take("sum.dim_IntList mean.dim prod.dim_int cumsum cumprod", dtypes=_ALL, check=of_several)
_take("amax amin argmax argmin sort", dtypes=_NUMBERS)
_take("_softmax _log_softmax", dtypes=_FLOATS, check=of_several)
_take("mm bmm", dtypes=_ALL)
_take("convolution", dtypes=(torch.float32,), check=_known_convolution)
_take("max_pool2d_with_indices", dtypes=_NUMBERS, check=first_alone)
_take("avg_pool2d", dtypes=_FLOATS, check=_plain_average)
_take("_adaptive_avg_pool2d", dtypes=_FLOATS)
_take("_native_batch_norm_legit_no_training", dtypes=_FLOATS, check=first_alone)
_take("_scaled_dot_product_flash_attention_for_cpu", dtypes=_FLOATS, check=no_dropout)


def _remainder(x: Tensor, y: Any) -> Tensor:
    """With the sign of the divisor, of the exact remainder; TVM's own is off by what rounding makes of the quotient."""
    rest = torch.fmod(x, y)
    return torch.where((rest != 0) & ((rest < 0) ^ (y < 0)), rest + y, rest)


def _floor_divide(x: Tensor, y: Any) -> Tensor:
    """As torch's: the dividend less the remainder is a multiple of the divisor but for rounding."""
    if not torch.result_type(x, y).is_floating_point:
        return NotImplemented
    near = (x - _remainder(x, y)) / y
    down = torch.floor(near)
    made = torch.where(near - down > 0.5, down + 1, down)
    if isinstance(y, Tensor):
        return torch.where(y == 0, x / y, made)
    return made if y else x / y


def _rounded_quotient(x: Tensor, y: Any, *, rounding_mode: str | None) -> Tensor:
    if rounding_mode == "floor":
        return torch.floor_divide(x, y)
    if rounding_mode is None:
        return x / y
    floats = torch.result_type(x, y).is_floating_point
    return torch.trunc(x / y) if floats else torch.floor_divide(x - torch.fmod(x, y), y)


def _scaled(function: Any) -> Any:
    """The importer leaves `alpha` out."""
    return lambda x, y, alpha=1: NotImplemented if alpha == 1 else function(x, y * alpha)


def _of_numbers(compare: Any) -> Any:
    """TVM generates no code that compares booleans."""

    def call(x: Tensor, y: Any) -> Tensor:
        if torch.result_type(x, y) is not torch.bool:
            return NotImplemented
        return compare(x.int(), y.int() if isinstance(y, Tensor) else int(y))

    return call


def _at_least(x: Tensor, low: Any) -> Tensor:
    return torch.where(x < low, low, x)


def _at_most(x: Tensor, high: Any) -> Tensor:
    return torch.where(x > high, high, x)


def _maximum(x: Tensor, y: Tensor) -> Tensor:
    return x | y if x.dtype is y.dtype is torch.bool else torch.where((x > y) | x.isnan(), x, y)


def _minimum(x: Tensor, y: Tensor) -> Tensor:
    return x & y if x.dtype is y.dtype is torch.bool else torch.where((x < y) | x.isnan(), x, y)


def _clamp_min(x: Tensor, low: Any) -> Tensor:
    return torch.maximum(x, low) if isinstance(low, Tensor) else _at_least(x, low)


def _clamp_max(x: Tensor, high: Any) -> Tensor:
    return torch.minimum(x, high) if isinstance(high, Tensor) else _at_most(x, high)


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    x = x if low is None else _clamp_min(x, low)
    return x if high is None else _clamp_max(x, high)


def _sign(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1, torch.where(x < 0, -1, 0)).to(x.dtype)


def _log1p(x: Tensor) -> Tensor:
    """Also where x is lost in the sum: log(u) x / (u - 1) with u = 1 + x as rounded (Kahan)."""
    x = x if x.is_floating_point() else x.float()
    u = 1 + x
    far = torch.where(u.abs() == math.inf, u.log(), u.log() * x / (u - 1))
    return torch.where(u == 1, x, far)


def _expm1(x: Tensor) -> Tensor:
    """Also where it is next to nothing: by the tanh that TVM computes exactly."""
    x = x if x.is_floating_point() else x.float()
    rise = torch.tanh(x * 0.5)
    return torch.where(x.abs() < 0.5, 2 * rise / (1 - rise), x.exp() - 1)


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, _log1p(_at_most(scaled, threshold).exp()) / beta)


def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return torch.where(x > 0, x * scale, _expm1(_at_most(x, 0) * input_scale) * (alpha * scale))


def _any(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    dims = [dim] if isinstance(dim, int) else dim or []
    return torch.amax(x.bool().int(), dims, keepdim) > 0


def _all(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return ~_any(~x.bool(), dim, keepdim)


def _var_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    count = math.prod(x.shape[each] for each in dims) - (1 if correction is None else correction)
    away = x - torch.mean(x, dims, True)
    return torch.sum(away * away, dims, keepdim) / max(count, 0), torch.mean(x, dims, keepdim)


def _addmm(bias: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    made = x @ y if alpha == 1 else x @ y * alpha
    return made if beta == 0 else torch.add(made, bias, alpha=beta)


def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = (1, -1, *(1,) * (x.dim() - 2))
    scale = torch.rsqrt(variance + eps) if weight is None else torch.rsqrt(variance + eps) * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return x * scale.view(wide) + shift.view(wide), mean, variance


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    values, order = torch.sort(x, dim, largest)
    return (values.narrow(dim, 0, k), order.narrow(dim, 0, k)) if x.dim() else (values, order)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0,
    causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> tuple[Tensor, Tensor]:
    """The result, and the logarithm of the sum of exponentials of each row; zero in one that is masked as a whole."""
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        rows, columns = (torch.arange(size) for size in scores.shape[-2:])
        visible = rows.unsqueeze(1) >= columns
        scores = torch.where(visible, scores, -math.inf)
    scores = scores if attn_mask is None else scores + attn_mask
    top = torch.amax(scores, -1, True)
    top = torch.where(top == -math.inf, 0, top)
    rise = torch.exp(scores - top)
    total = rise.sum(-1, True)
    hidden = total == 0
    weights = torch.where(hidden, 0, rise / total)
    return weights @ v, torch.where(hidden, 0, total.log() + top).squeeze(-1)


TvmEngine.decompositions = {
    **decompositions_of(
        (
            *("addmv", "addr", "celu", "glu", "log_sigmoid_forward", "_prelu_kernel", "hardshrink", "softshrink", "t"),
            *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "std_mean"),
            *("pixel_shuffle", "pixel_unshuffle", "binary_cross_entropy_with_logits", "_safe_softmax", "count_nonzero"),
            *("addcmul", "addcdiv", "lerp", "frac", "hardtanh", "hardsigmoid", "hardswish", "threshold", "rsub"),
            *("logsumexp", "linalg_vector_norm", "native_layer_norm", "native_group_norm", "dot", "mv"),
            *("_unsafe_index", "sgn"),
        )
    ),
    **{
        getattr(packet, overload): function
        for packet, function in {
            **{packet: _of_numbers(packet) for packet in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)},
            **{packet: _scaled(packet) for packet in (aten.add, aten.sub)},
            aten.maximum: _maximum,
            aten.minimum: _minimum,
            aten.clamp: _clamp,
            aten.clamp_min: _clamp_min,
            aten.clamp_max: _clamp_max,
            aten.remainder: _remainder,
            aten.floor_divide: _floor_divide,
            aten.any: _any,
            aten.all: _all,
        }.items()
        for overload in packet.overloads()
    },
    aten.floor_divide.Scalar: lambda x, y: aten.floor_divide.default(x, y),
    aten.div.Tensor_mode: _rounded_quotient,
    aten.div.Scalar_mode: _rounded_quotient,
    aten.relu.default: lambda x: _at_least(x, 0),
    aten.sign.default: _sign,
    aten.log1p.default: _log1p,
    aten.expm1.default: _expm1,
    aten.pow.Tensor_Scalar: lambda x, y: {2: lambda: x * x, 3: lambda: x * x * x}.get(y, lambda: NotImplemented)(),
    aten.exp2.default: lambda x: torch.pow(2.0, x),
    aten.softplus.default: _softplus,
    aten.mish.default: lambda x: x * torch.tanh(_softplus(x)),
    aten.elu.default: _elu,
    aten.masked_fill.Tensor: lambda x, mask, value: torch.where(mask, value.to(x.dtype), x),
    aten.masked_fill.Scalar: lambda x, mask, value: torch.where(mask, value, x).to(x.dtype),
    aten.max.default: lambda x: torch.amax(x, []),
    aten.min.default: lambda x: torch.amin(x, []),
    aten.max.dim: lambda x, dim, keepdim=False: (torch.amax(x, dim, keepdim), torch.argmax(x, dim, keepdim)),
    aten.min.dim: lambda x, dim, keepdim=False: (torch.amin(x, dim, keepdim), torch.argmin(x, dim, keepdim)),
    aten.var_mean.correction: _var_mean,
    aten.var.correction: lambda x, dim=None, **options: _var_mean(x, dim, **options)[0],
    aten.std.correction: lambda x, dim=None, **options: torch.sqrt(_var_mean(x, dim, **options)[0]),
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten.sort.stable: lambda x, *, stable=None, dim=-1, descending=False: torch.sort(x, dim, descending),
    aten.argsort.default: lambda x, dim=-1, descending=False: torch.sort(x, dim, descending)[1],
    aten.topk.default: _topk,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
}
