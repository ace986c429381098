"""TVM's forms of operators that compute each element by itself.

TVM's `max` and `min` drop NaN, which torch's keep; so they are written as comparisons here.
"""

import math
from typing import Any

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.conversion import declare_pointwise, form, overloads
from omnicomp.lowerings.engines.tvm.engine import TvmEngine
from omnicomp.lowerings.engines.tvm.library import const, counted, dtype_of, emit, op, truth

aten = torch.ops.aten

_SAME = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "exp", "floor", "log", "round", "rsqrt"),
    *("sigmoid", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc"),
)
declare_pointwise(TvmEngine, op, {**{name: name for name in _SAME}, "neg": "negative"}, arity=1, promote="result")
declare_pointwise(TvmEngine, op, {"bitwise_not": "bitwise_not"}, arity=1, promote="")
declare_pointwise(
    TvmEngine,
    op,
    {"mul": "multiply", "div": "divide", "atan2": "atan2"}
    | {f"bitwise_{name}": f"bitwise_{name}" for name in ("and", "or", "xor")},
    arity=2,
    promote="result",
)
declare_pointwise(
    TvmEngine,
    op,
    {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"},
    arity=2,
    promote="operands",
)


@TvmEngine.op(*overloads("eq", 2))
@form("operands")
def eq(x: Any, y: Any) -> Any:
    """TVM takes a value to equal itself, which NaN doesn't."""
    return op.logical_not(op.isnan(x)) if x.same_as(y) and is_float(x) else op.equal(x, y)


@TvmEngine.op(*overloads("ne", 2))
@form("operands")
def ne(x: Any, y: Any) -> Any:
    """As `eq`."""
    return op.isnan(x) if x.same_as(y) and is_float(x) else op.not_equal(x, y)


def _whole_divisor(node: Node) -> str:
    """Dividing integers by zero ends the process, where torch raises."""
    if fake_value(node).dtype.is_floating_point:
        return ""
    divisor = node.args[1]
    return "" if isinstance(divisor, (int, float)) and divisor else "it divides integers by known numbers alone"


declare_pointwise(
    TvmEngine,
    op,
    {"fmod": "mod"},
    arity=2,
    promote="result",
    check=_whole_divisor,
)


@TvmEngine.op(*overloads("remainder", 2), check=_whole_divisor)
@form("result")
def remainder(x: Any, y: Any) -> Any:
    return _remainder(x, y) if is_float(x) else op.floor_mod(x, y)


def _remainder(x: Any, y: Any) -> Any:
    """With the sign of the divisor, of the exact remainder; TVM's own is off by what rounding makes of the quotient."""
    zero = const(0, x)
    rest = op.mod(x, y)
    other = op.logical_and(op.not_equal(rest, zero), op.logical_xor(op.less(rest, zero), op.less(y, zero)))
    return op.where(other, op.add(rest, y), rest)


def _floor_quotient(x: Any, y: Any) -> Any:
    """As torch's: the dividend less the remainder is a multiple of the divisor but for rounding."""
    near = op.divide(op.subtract(x, _remainder(x, y)), y)
    down = op.floor(near)
    exact = op.where(op.greater(op.subtract(near, down), const(0.5, x)), op.add(down, const(1, x)), down)
    return op.where(op.equal(y, const(0, x)), op.divide(x, y), exact)


def is_float(x: Any) -> bool:
    """Whether a variable may be NaN."""
    return dtype_of(x).startswith("float")


def maximum(x: Any, y: Any) -> Any:
    """The larger one; NaN if one of them is."""
    larger = op.where(op.greater_equal(x, y), x, y)
    return op.where(op.isnan(x), x, larger) if is_float(x) else larger


def minimum(x: Any, y: Any) -> Any:
    """The smaller one; NaN if one of them is."""
    smaller = op.where(op.less_equal(x, y), x, y)
    return op.where(op.isnan(x), x, smaller) if is_float(x) else smaller


def at_least(x: Any, low: Any) -> Any:
    """The element or the bound, which is no NaN."""
    return op.where(op.less(x, low), low, x)


def at_most(x: Any, high: Any) -> Any:
    """The element or the bound, which is no NaN."""
    return op.where(op.greater(x, high), high, x)


@TvmEngine.op(*overloads("maximum", 2), *overloads("max", 2))
@form("result")
def larger(x: Any, y: Any) -> Any:
    return maximum(x, y)


@TvmEngine.op(*overloads("minimum", 2), *overloads("min", 2))
@form("result")
def smaller(x: Any, y: Any) -> Any:
    return minimum(x, y)


@TvmEngine.op(aten.isnan.default)
@form("operands")
def isnan(x: Any) -> Any:
    return op.isnan(x) if is_float(x) else op.not_equal(x, x)


@TvmEngine.op(aten.isinf.default)
@form("operands")
def isinf(x: Any) -> Any:
    return op.equal(op.abs(x), const(math.inf, x)) if is_float(x) else op.not_equal(x, x)


@TvmEngine.op(aten.logical_not.default)
def logical_not(x: Any) -> Any:
    return op.logical_not(truth(x))


@TvmEngine.op(aten.logical_and.default)
def logical_and(x: Any, y: Any) -> Any:
    return op.logical_and(truth(x), truth(y))


@TvmEngine.op(aten.logical_or.default)
def logical_or(x: Any, y: Any) -> Any:
    return op.logical_or(truth(x), truth(y))


@TvmEngine.op(aten.logical_xor.default)
def logical_xor(x: Any, y: Any) -> Any:
    return op.not_equal(counted(emit(truth(x))), counted(emit(truth(y))))


@TvmEngine.op(*overloads("sign", 1), *overloads("sgn", 1))
@form("result")
def sign(x: Any) -> Any:
    """Zero for NaN, as torch has it."""
    one, zero = const(1, x), const(0, x)
    return op.where(op.greater(x, zero), one, op.where(op.less(x, zero), const(-1, x), zero))


@TvmEngine.op(aten.reciprocal.default)
@form("result")
def reciprocal(x: Any) -> Any:
    return op.divide(const(1, x), x)


@TvmEngine.op(aten.exp2.default)
@form("result")
def exp2(x: Any) -> Any:
    return op.power(const(2, x), x)


@TvmEngine.op(aten.log2.default)
@form("result")
def log2(x: Any) -> Any:
    return op.divide(op.log(x), const(math.log(2), x))


@TvmEngine.op(aten.log10.default)
@form("result")
def log10(x: Any) -> Any:
    return op.divide(op.log(x), const(math.log(10), x))


@TvmEngine.op(aten.log1p.default)
@form("result")
def log1p(x: Any) -> Any:
    return logarithm_of_one_more(x)


def logarithm_of_one_more(x: Any) -> Any:
    """log(1 + x) also where x is lost in the sum: log(u) x / (u - 1) with u = 1 + x as rounded (Kahan)."""
    one = const(1, x)
    u = emit(op.add(one, x))
    near = op.divide(op.multiply(op.log(u), x), op.subtract(u, one))
    far = op.where(op.equal(op.abs(u), const(math.inf, x)), op.log(u), near)
    return op.where(op.equal(u, one), x, far)


@TvmEngine.op(aten.expm1.default)
@form("result")
def expm1(x: Any) -> Any:
    return exponential_less_one(x)


def exponential_less_one(x: Any) -> Any:
    """exp(x) - 1 also where it is next to nothing: 2 sinh(x / 2) exp(x / 2), by the tanh that TVM computes exactly."""
    one, half = const(1, x), const(0.5, x)
    rise = emit(op.tanh(op.multiply(x, half)))
    near = op.divide(op.multiply(const(2, x), rise), op.subtract(one, rise))
    return op.where(op.less(op.abs(x), half), near, op.subtract(op.exp(x), one))


@TvmEngine.op(aten.frac.default)
@form("result")
def frac(x: Any) -> Any:
    return op.subtract(x, op.trunc(x))


@TvmEngine.op(aten.relu.default)
@form("result")
def relu(x: Any) -> Any:
    return at_least(x, const(0, x))


@TvmEngine.op(aten.hardtanh.default)
@form("result")
def hardtanh(x: Any, low: Any, high: Any) -> Any:
    return at_most(emit(at_least(x, low)), high)


@TvmEngine.op(aten.silu.default)
@form("result")
def silu(x: Any) -> Any:
    return op.multiply(x, op.sigmoid(x))


@TvmEngine.op(aten.gelu.default)
@form("result")
def gelu(x: Any, *, approximate: str) -> Any:
    half, one = const(0.5, x), const(1, x)
    if approximate == "tanh":
        cube = op.multiply(const(0.044715, x), op.multiply(x, op.multiply(x, x)))
        inner = op.tanh(op.multiply(const(math.sqrt(2 / math.pi), x), op.add(x, cube)))
    else:
        inner = op.erf(op.multiply(x, const(math.sqrt(0.5), x)))
    return op.multiply(op.multiply(half, x), op.add(one, inner))


@TvmEngine.op(aten.hardsigmoid.default)
@form("result")
def hardsigmoid(x: Any) -> Any:
    return _hard_share(x)


@TvmEngine.op(aten.hardswish.default)
@form("result")
def hardswish(x: Any) -> Any:
    return op.multiply(x, _hard_share(x))


def _hard_share(x: Any) -> Any:
    shifted = emit(at_least(emit(op.add(x, const(3, x))), const(0, x)))
    return op.divide(at_most(shifted, const(6, x)), const(6, x))


@TvmEngine.op(aten.softplus.default)
@form("result")
def softplus(x: Any, beta: Any, threshold: Any) -> Any:
    scaled = emit(op.multiply(x, beta))
    rise = emit(op.exp(at_most(scaled, threshold)))
    return op.where(op.greater(scaled, threshold), x, op.divide(logarithm_of_one_more(rise), beta))


@TvmEngine.op(aten.mish.default)
@form("result")
def mish(x: Any) -> Any:
    rise = emit(op.exp(at_most(x, const(20, x))))
    smooth = op.where(op.greater(x, const(20, x)), x, logarithm_of_one_more(rise))
    return op.multiply(x, op.tanh(smooth))


@TvmEngine.op(aten.elu.default)
@form("result")
def elu(x: Any, alpha: Any, scale: Any, input_scale: Any) -> Any:
    zero = const(0, x)
    low = emit(op.multiply(at_most(x, zero), input_scale))
    negative = op.multiply(exponential_less_one(low), op.multiply(alpha, scale))
    return op.where(op.greater(x, zero), op.multiply(x, scale), negative)


@TvmEngine.op(aten.leaky_relu.default)
@form("result")
def leaky_relu(x: Any, slope: Any) -> Any:
    return op.where(op.greater(x, const(0, x)), x, op.multiply(x, slope))


@TvmEngine.op(aten.threshold.default)
@form("result")
def threshold(x: Any, limit: Any, value: Any) -> Any:
    return op.where(op.less_equal(x, limit), value, x)


@TvmEngine.op(aten.add.Tensor, aten.add.Scalar)
@form("result", keep=("alpha",))
def add(x: Any, y: Any, alpha: Any = 1) -> Any:
    return op.add(x, _times(y, alpha))


@TvmEngine.op(aten.sub.Tensor, aten.sub.Scalar)
@form("result", keep=("alpha",))
def sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return op.subtract(x, _times(y, alpha))


@TvmEngine.op(aten.rsub.Tensor, aten.rsub.Scalar)
@form("result", keep=("alpha",))
def rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return op.subtract(y, _times(x, alpha))


def _times(x: Any, alpha: float) -> Any:
    return x if alpha == 1 else op.multiply(x, const(alpha, x))


@TvmEngine.op(aten.div.Tensor_mode, aten.div.Scalar_mode, check=_whole_divisor)
@form("result")
def div_mode(x: Any, y: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode == "floor":
        return _floor_quotient(x, y) if is_float(x) else op.floor_divide(x, y)
    made = op.divide(x, y)
    return op.trunc(made) if rounding_mode == "trunc" and is_float(x) else made


@TvmEngine.op(aten.pow.Tensor_Tensor, aten.pow.Scalar, dtypes=(torch.float32, torch.float64))
@form("result")
def power(x: Any, y: Any) -> Any:
    return op.power(x, y)


@TvmEngine.op(aten.pow.Tensor_Scalar, dtypes=(torch.float32, torch.float64))
@form("result", keep=("exponent",))
def power_of_scalar(x: Any, exponent: float) -> Any:
    if exponent in (2, 3):
        return op.multiply(x, op.multiply(x, x)) if exponent == 3 else op.multiply(x, x)
    if exponent == 0.5:
        return op.sqrt(x)
    return op.power(x, const(exponent, x))


@TvmEngine.op(aten.where.self)
@form("result", keep=("condition",))
def where(condition: Any, x: Any, y: Any) -> Any:
    return op.where(condition, x, y)


@TvmEngine.op(aten.clamp.default, aten.clamp.Tensor)
@form("result")
def clamp(x: Any, low: Any, high: Any) -> Any:
    x = x if low is None else emit(maximum(x, low))
    return x if high is None else minimum(x, high)


@TvmEngine.op(aten.clamp_min.default, aten.clamp_min.Tensor)
@form("result")
def clamp_min(x: Any, low: Any) -> Any:
    return maximum(x, low)


@TvmEngine.op(aten.clamp_max.default, aten.clamp_max.Tensor)
@form("result")
def clamp_max(x: Any, high: Any) -> Any:
    return minimum(x, high)


@TvmEngine.op(aten.lerp.Scalar, aten.lerp.Tensor)
@form("result")
def lerp(x: Any, y: Any, weight: Any) -> Any:
    """From the nearer end, as torch computes it, so that both ends are exact."""
    way = emit(op.subtract(y, x))
    from_x = op.add(x, op.multiply(weight, way))
    from_y = op.subtract(y, op.multiply(way, op.subtract(const(1, x), weight)))
    return op.where(op.less(op.abs(weight), const(0.5, x)), from_x, from_y)


@TvmEngine.op(aten.addcmul.default)
@form("result")
def addcmul(x: Any, y: Any, z: Any, *, value: Any) -> Any:
    return op.add(x, op.multiply(op.multiply(value, y), z))


@TvmEngine.op(aten.addcdiv.default)
@form("result")
def addcdiv(x: Any, y: Any, z: Any, *, value: Any) -> Any:
    return op.add(x, op.multiply(value, op.divide(y, z)))


@TvmEngine.op(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
@form("result", keep=("mask",))
def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return op.where(mask, value, x)


@TvmEngine.op(
    aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten._to_copy.default
)
def same(x: Any, **_: Any) -> Any:
    """The element itself, which is cast to the dtype of the result."""
    return x
