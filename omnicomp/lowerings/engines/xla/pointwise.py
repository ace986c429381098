"""XLA's forms of operators that compute each element by itself."""

from typing import Any

import torch

from omnicomp.lowerings.engines.conversion import declare_pointwise, form, overloads
from omnicomp.lowerings.engines.lazy import Lazy
from omnicomp.lowerings.engines.xla.engine import XlaEngine
from omnicomp.lowerings.engines.xla.library import jax, jnp, lax

aten = torch.ops.aten

_SAME = (
    *("abs", "ceil", "cos", "cosh", "exp", "exp2", "expm1", "floor", "log", "log10", "log1p", "log2", "reciprocal"),
    *("sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc", "round", "deg2rad", "rad2deg"),
)
declare_pointwise(
    XlaEngine,
    jnp,
    {**{name: name for name in _SAME}, "neg": "negative"}
    | {f"a{name}": f"arc{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    arity=1,
    promote="result",
)
declare_pointwise(
    XlaEngine,
    lax,
    {"rsqrt": "rsqrt", "erf": "erf", "erfc": "erfc", "erfinv": "erf_inv", "lgamma": "lgamma"},
    arity=1,
    promote="result",
)
declare_pointwise(
    XlaEngine,
    Lazy("jax.nn"),
    {"sigmoid": "sigmoid", "silu": "silu"},
    arity=1,
    promote="result",
)
declare_pointwise(
    XlaEngine,
    jnp,
    {"isnan": "isnan", "isinf": "isinf", "logical_not": "logical_not", "signbit": "signbit"},
    arity=1,
    promote="operands",
)
declare_pointwise(XlaEngine, jnp, {"bitwise_not": "invert"}, arity=1, promote="")
declare_pointwise(
    XlaEngine,
    jnp,
    {
        "mul": "multiply",
        "div": "true_divide",
        "maximum": "maximum",
        "minimum": "minimum",
        "fmax": "fmax",
        "fmin": "fmin",
        "atan2": "arctan2",
        "fmod": "fmod",
        "remainder": "remainder",
        "hypot": "hypot",
        "copysign": "copysign",
        "logaddexp": "logaddexp",
        "logaddexp2": "logaddexp2",
        "bitwise_and": "bitwise_and",
        "bitwise_or": "bitwise_or",
        "bitwise_xor": "bitwise_xor",
        "bitwise_left_shift": "left_shift",
        "bitwise_right_shift": "right_shift",
        "heaviside": "heaviside",
    },
    arity=2,
    promote="result",
)
declare_pointwise(
    XlaEngine,
    jnp,
    {
        "eq": "equal",
        "ne": "not_equal",
        "lt": "less",
        "le": "less_equal",
        "gt": "greater",
        "ge": "greater_equal",
        "logical_and": "logical_and",
        "logical_or": "logical_or",
        "logical_xor": "logical_xor",
    },
    arity=2,
    promote="operands",
)


@XlaEngine.op(*overloads("max", 2))
@form("result")
def max_other(x: Any, y: Any) -> Any:
    return jnp.maximum(x, y)


@XlaEngine.op(*overloads("min", 2))
@form("result")
def min_other(x: Any, y: Any) -> Any:
    return jnp.minimum(x, y)


@XlaEngine.op(*overloads("sign", 1), *overloads("sgn", 1))
@form("result")
def sign(x: Any) -> Any:
    """Zero for NaN, as torch has it."""
    return jnp.asarray(x > 0, x.dtype) - jnp.asarray(x < 0, x.dtype) if x.dtype != jnp.bool_ else x


@XlaEngine.op(aten.nan_to_num.default)
@form("result")
def nan_to_num(x: Any, nan: Any, above: Any, below: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.nan_to_num(x, nan=0 if nan is None else nan, posinf=above, neginf=below)


@XlaEngine.op(aten.digamma.default)
@form("result")
def digamma(x: Any) -> Any:
    """Infinite at zero, on the side of its sign, as torch has it."""
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x))


@XlaEngine.op(aten.frac.default)
@form("result")
def frac(x: Any) -> Any:
    return x - jnp.trunc(x)


@XlaEngine.op(aten.relu.default)
@form("result")
def relu(x: Any) -> Any:
    return jnp.maximum(x, 0)


@XlaEngine.op(aten.gelu.default)
@form("result")
def gelu(x: Any, *, approximate: str) -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@XlaEngine.op(aten.hardtanh.default)
@form("result")
def hardtanh(x: Any, low: Any, high: Any) -> Any:
    return jnp.minimum(jnp.maximum(x, low), high)


@XlaEngine.op(aten.hardsigmoid.default)
@form("result")
def hardsigmoid(x: Any) -> Any:
    return jnp.clip(x + 3, 0, 6) / 6


@XlaEngine.op(aten.hardswish.default)
@form("result")
def hardswish(x: Any) -> Any:
    return x * jnp.clip(x + 3, 0, 6) / 6


@XlaEngine.op(aten.mish.default)
@form("result")
def mish(x: Any) -> Any:
    return x * jnp.tanh(jax.nn.softplus(x))


@XlaEngine.op(aten.softplus.default)
@form("result")
def softplus(x: Any, beta: Any, threshold: Any) -> Any:
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(scaled, threshold))) / beta)


@XlaEngine.op(aten.elu.default)
@form("result")
def elu(x: Any, alpha: Any, scale: Any, input_scale: Any) -> Any:
    return jnp.where(x > 0, x * scale, jnp.expm1(jnp.minimum(x, 0) * input_scale) * (alpha * scale))


@XlaEngine.op(aten.leaky_relu.default)
@form("result")
def leaky_relu(x: Any, slope: Any) -> Any:
    return jnp.where(x > 0, x, x * slope)


@XlaEngine.op(aten.logit.default)
@form("result")
def logit(x: Any, eps: Any) -> Any:
    x = x if eps is None else jnp.clip(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))


@XlaEngine.op(aten.add.Tensor, aten.add.Scalar)
@form("result")
def add(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x + y * alpha


@XlaEngine.op(aten.sub.Tensor, aten.sub.Scalar)
@form("result")
def sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x - y * alpha


@XlaEngine.op(aten.rsub.Tensor, aten.rsub.Scalar)
@form("result")
def rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return y - x * alpha


@XlaEngine.op(aten.div.Tensor_mode, aten.div.Scalar_mode)
@form("result")
def div_mode(x: Any, y: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    if rounding_mode == "trunc":
        return jnp.trunc(x / y) if jnp.issubdtype(x.dtype, jnp.floating) else lax.div(*jnp.broadcast_arrays(x, y))
    return x / y


@XlaEngine.op(*overloads("floor_divide", 2))
@form("result")
def floor_divide(x: Any, y: Any) -> Any:
    return jnp.floor_divide(x, y)


@XlaEngine.op(aten.pow.Tensor_Tensor, aten.pow.Scalar)
@form("result")
def power(x: Any, y: Any) -> Any:
    return jnp.power(x, y)


@XlaEngine.op(aten.pow.Tensor_Scalar)
@form("result", keep=("exponent",))
def power_of_scalar(x: Any, exponent: int | float) -> Any:
    """A whole number is multiplied out, so that it is exact for negative bases."""
    if float(exponent).is_integer() and abs(exponent) <= 16:
        return lax.integer_pow(x, int(exponent))
    return jnp.power(x, jnp.asarray(exponent, x.dtype))


@XlaEngine.op(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)
@form("result")
def xlogy(x: Any, y: Any) -> Any:
    return jnp.where(jnp.isnan(y), jnp.nan, jnp.where(x == 0, 0, x * jnp.log(y)))


@XlaEngine.op(aten.where.self)
@form("result", keep=("condition",))
def where(condition: Any, x: Any, y: Any) -> Any:
    return jnp.where(condition, x, y)


@XlaEngine.op(aten.clamp.default, aten.clamp.Tensor)
@form("result")
def clamp(x: Any, low: Any, high: Any) -> Any:
    x = x if low is None else jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


@XlaEngine.op(aten.clamp_min.default, aten.clamp_min.Tensor)
@form("result")
def clamp_min(x: Any, low: Any) -> Any:
    return jnp.maximum(x, low)


@XlaEngine.op(aten.clamp_max.default, aten.clamp_max.Tensor)
@form("result")
def clamp_max(x: Any, high: Any) -> Any:
    return jnp.minimum(x, high)


@XlaEngine.op(aten.lerp.Scalar, aten.lerp.Tensor)
@form("result")
def lerp(x: Any, y: Any, weight: Any) -> Any:
    """From the nearer end, as torch computes it, so that both ends are exact."""
    return jnp.where(jnp.abs(weight) < 0.5, x + weight * (y - x), y - (y - x) * (1 - weight))


@XlaEngine.op(aten.addcmul.default)
@form("result")
def addcmul(x: Any, y: Any, z: Any, *, value: Any) -> Any:
    return x + value * y * z


@XlaEngine.op(aten.addcdiv.default)
@form("result")
def addcdiv(x: Any, y: Any, z: Any, *, value: Any) -> Any:
    return x + value * (y / z)


@XlaEngine.op(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
@form("result", keep=("mask",))
def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, value, x)


@XlaEngine.op(aten.threshold.default)
@form("result")
def threshold(x: Any, limit: Any, value: Any) -> Any:
    return jnp.where(x <= limit, value, x)


@XlaEngine.op(aten.threshold_backward.default)
@form("result")
def threshold_backward(grad: Any, x: Any, limit: Any) -> Any:
    return jnp.where(x <= limit, 0, grad)


@XlaEngine.op(aten.sigmoid_backward.default)
@form("result")
def sigmoid_backward(grad: Any, result: Any) -> Any:
    return grad * (1 - result) * result


@XlaEngine.op(aten.tanh_backward.default)
@form("result")
def tanh_backward(grad: Any, result: Any) -> Any:
    return grad * (1 - result * result)


@XlaEngine.op(aten.silu_backward.default)
@form("result")
def silu_backward(grad: Any, x: Any) -> Any:
    share = jax.nn.sigmoid(x)
    return grad * share * (1 + x * (1 - share))


@XlaEngine.op(aten.gelu_backward.default)
@form("result")
def gelu_backward(grad: Any, x: Any, *, approximate: str) -> Any:
    _, pull = jax.vjp(lambda value: jax.nn.gelu(value, approximate=approximate == "tanh"), x)
    return pull(grad)[0]


@XlaEngine.op(
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten._to_copy.default,
)
def same(x: Any, **_: Any) -> Any:
    """The element itself, which is cast to the dtype of the result."""
    return x
