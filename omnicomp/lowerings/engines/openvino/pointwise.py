"""OpenVINO's forms of operators that compute each element by itself."""

import math
from typing import Any

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.checks import argument, floating, numeric
from omnicomp.lowerings.engines.conversion import declare_pointwise, form, overloads
from omnicomp.lowerings.engines.openvino.engine import OpenVinoEngine
from omnicomp.lowerings.engines.openvino.library import NAMES, OpenVino, number, openvino, ops

aten = torch.ops.aten

_SAME = (
    *("ceil", "cos", "cosh", "exp", "floor", "log", "sin", "sinh", "sqrt", "tan", "tanh", "erf", "sigmoid"),
    *("relu", "asin", "acos", "atan", "asinh", "acosh", "atanh", "sign", "mish"),
)
declare_pointwise(
    OpenVinoEngine,
    ops,
    {**{name: name for name in _SAME}, "neg": "negative", "silu": "swish", "hardswish": "hswish"},
    arity=1,
    promote="result",
)
declare_pointwise(
    OpenVinoEngine,
    ops,
    {"isnan": "is_nan", "isinf": "is_inf"},
    arity=1,
    promote="operands",
    dtypes=(torch.float32, torch.float16, torch.bfloat16, torch.bool),
)
declare_pointwise(
    OpenVinoEngine, ops, {"maximum": "maximum", "minimum": "minimum"}, arity=2, promote="result", check=numeric
)
declare_pointwise(
    OpenVinoEngine,
    ops,
    {"ne": "not_equal", "eq": "equal", "lt": "less", "le": "less_equal"},
    arity=2,
    promote="operands",
)


def _floating(node: Node) -> str:
    fake = fake_value(node)
    return "" if fake.dtype.is_floating_point else "it divides floating-point numbers alone"


@OpenVinoEngine.op(*overloads("gt", 2))
@form("operands")
def greater(x: Any, y: Any) -> Any:
    """OpenVINO's own `Greater` is true of NaN."""
    return ops.less(y, x)


@OpenVinoEngine.op(*overloads("ge", 2))
@form("operands")
def greater_equal(x: Any, y: Any) -> Any:
    return ops.less_equal(y, x)


@OpenVinoEngine.op(aten.isfinite.default, check=floating)
@form("operands")
def isfinite(x: Any) -> Any:
    """OpenVINO's own operation is false of subnormal numbers."""
    return ops.less_equal(magnitude(x), number(torch.finfo(torch.float32).max, x))


@OpenVinoEngine.op(aten.abs.default)
@form("result")
def absolute(x: Any) -> Any:
    return magnitude(x)


def magnitude(x: Any) -> Any:
    """Not by `Abs`: OpenVINO 2026.4 leaves it out where what it is of is computed from constants."""
    return ops.maximum(x, ops.negative(x))


@OpenVinoEngine.op(aten.add.Tensor, aten.add.Scalar)
@form("result")
def add(x: Any, y: Any, alpha: Any) -> Any:
    if x.get_element_type() == openvino.Type.boolean:
        return ops.logical_or(x, y)
    return ops.add(x, _scaled(y, alpha))


@OpenVinoEngine.op(aten.sub.Tensor, aten.sub.Scalar)
@form("result")
def sub(x: Any, y: Any, alpha: Any) -> Any:
    return ops.subtract(x, _scaled(y, alpha))


@OpenVinoEngine.op(aten.rsub.Tensor, aten.rsub.Scalar)
@form("result")
def rsub(x: Any, y: Any, alpha: Any) -> Any:
    return ops.subtract(y, _scaled(x, alpha))


def _scaled(x: Any, factor: Any) -> Any:
    node = factor.get_node() if hasattr(factor, "get_node") else None
    if node is not None and node.get_type_name() == "Constant" and (node.get_data() == 1).all():
        return x
    return ops.multiply(x, factor)


@OpenVinoEngine.op(*overloads("mul", 2))
@form("result")
def mul(x: Any, y: Any) -> Any:
    return (ops.logical_and if x.get_element_type() == openvino.Type.boolean else ops.multiply)(x, y)


@OpenVinoEngine.op(*overloads("div", 2), check=_floating)
@form("result")
def div(x: Any, y: Any) -> Any:
    return ops.divide(x, y)


def _rounds_as_torch(node: Node) -> str:
    """Torch corrects what rounding made of a quotient before it rounds it down."""
    divisor = node.args[1]
    exact = isinstance(divisor, (int, float)) and abs(math.frexp(divisor)[0]) == 0.5  # a power of two
    if argument(node, "rounding_mode") == "floor" and not exact:
        return "it rounds quotients by powers of two alone down"
    return _floating(node)


@OpenVinoEngine.op(aten.div.Tensor_mode, aten.div.Scalar_mode, check=_rounds_as_torch)
@form("result", keep=("rounding_mode",))
def div_mode(x: Any, y: Any, *, rounding_mode: str | None) -> Any:
    made = ops.divide(x, y)
    return made if rounding_mode is None else ops.floor(made) if rounding_mode == "floor" else _trunc(made)


@OpenVinoEngine.op(aten.reciprocal.default)
@form("result")
def reciprocal(x: Any) -> Any:
    return ops.divide(number(1, x), x)


@OpenVinoEngine.op(aten.rsqrt.default)
@form("result")
def rsqrt(x: Any) -> Any:
    return ops.divide(number(1, x), ops.sqrt(x))


@OpenVinoEngine.op(aten.square.default)
@form("result")
def square(x: Any) -> Any:
    return ops.multiply(x, x)


@OpenVinoEngine.op(*overloads("pow", 2), check=_floating)
@form("result")
def power(x: Any, y: Any) -> Any:
    return ops.power(x, y)


@OpenVinoEngine.op(aten.exp2.default)
@form("result")
def exp2(x: Any) -> Any:
    return ops.power(number(2, x), x)


@OpenVinoEngine.op(aten.log2.default)
@form("result")
def log2(x: Any) -> Any:
    return ops.multiply(ops.log(x), number(1 / math.log(2), x))


@OpenVinoEngine.op(aten.log10.default)
@form("result")
def log10(x: Any) -> Any:
    return ops.multiply(ops.log(x), number(1 / math.log(10), x))


@OpenVinoEngine.op(aten.erfc.default)
@form("result")
def erfc(x: Any) -> Any:
    return ops.subtract(number(1, x), ops.erf(x))


def _trunc(x: Any) -> Any:
    return ops.multiply(ops.sign(x), ops.floor(magnitude(x)))


@OpenVinoEngine.op(aten.trunc.default, check=_floating)
@form("result")
def trunc(x: Any) -> Any:
    return _trunc(x)


@OpenVinoEngine.op(aten.frac.default)
@form("result")
def frac(x: Any) -> Any:
    return ops.subtract(x, _trunc(x))


@OpenVinoEngine.op(aten.round.default, check=_floating)
@form("result")
def rounded(x: Any) -> Any:
    return ops.round(x, "half_to_even")


def _boolean(x: Any) -> Any:
    return OpenVino().cast(x, torch.bool)


@OpenVinoEngine.op(aten.logical_not.default)
def logical_not(x: Any) -> Any:
    return ops.logical_not(_boolean(x))


@OpenVinoEngine.op(aten.logical_and.default)
def logical_and(x: Any, y: Any) -> Any:
    return ops.logical_and(_boolean(x), _boolean(y))


@OpenVinoEngine.op(aten.logical_or.default)
def logical_or(x: Any, y: Any) -> Any:
    return ops.logical_or(_boolean(x), _boolean(y))


@OpenVinoEngine.op(aten.logical_xor.default)
def logical_xor(x: Any, y: Any) -> Any:
    return ops.logical_xor(_boolean(x), _boolean(y))


_LOGICAL = {"bitwise_and": logical_and, "bitwise_or": logical_or, "bitwise_xor": logical_xor}


def _of_booleans(node: Node) -> str:
    return "" if fake_value(node).dtype is torch.bool else "it takes booleans alone"


for _name, _function in _LOGICAL.items():
    OpenVinoEngine.op(*overloads(_name, 2), check=_of_booleans)(form("result")(_function))
OpenVinoEngine.op(aten.bitwise_not.default, check=_of_booleans)(form("result")(logical_not))


@OpenVinoEngine.op(aten.gelu.default)
@form("result", keep=("approximate",))
def gelu(x: Any, *, approximate: str) -> Any:
    return ops.gelu(x, "tanh" if approximate == "tanh" else "erf")


@OpenVinoEngine.op(aten.hardsigmoid.default)
@form("result")
def hardsigmoid(x: Any) -> Any:
    return ops.hsigmoid(x)


def _two_numbers(node: Node) -> str:
    given = [*node.args[1:], *node.kwargs.values()]
    return "its bounds are no numbers" if any(isinstance(each, Node) for each in given) else ""


@OpenVinoEngine.op(aten.hardtanh.default, aten.clamp.default, check=_two_numbers)
@form("result", keep=("min", "max", "min_val", "max_val"))
def clamp(x: Any, low: float | None, high: float | None) -> Any:
    return _clamped(x, None if low is None else number(low, x), None if high is None else number(high, x))


@OpenVinoEngine.op(aten.clamp.Tensor)
@form("result")
def clamp_tensor(x: Any, low: Any, high: Any) -> Any:
    return _clamped(x, low, high)


@OpenVinoEngine.op(aten.clamp_min.default, aten.clamp_min.Tensor)
@form("result")
def clamp_min(x: Any, low: Any) -> Any:
    return _clamped(x, low, None)


@OpenVinoEngine.op(aten.clamp_max.default, aten.clamp_max.Tensor)
@form("result")
def clamp_max(x: Any, high: Any) -> Any:
    return _clamped(x, None, high)


def _clamped(x: Any, low: Any, high: Any) -> Any:
    x = x if low is None else ops.maximum(x, low)
    return x if high is None else ops.minimum(x, high)


@OpenVinoEngine.op(aten.leaky_relu.default)
@form("result")
def leaky_relu(x: Any, slope: Any) -> Any:
    return ops.prelu(x, slope)


@OpenVinoEngine.op(aten._prelu_kernel.default)
@form("result")
def prelu(x: Any, weight: Any) -> Any:
    return ops.select(ops.greater(x, number(0, x)), x, ops.multiply(x, weight))


@OpenVinoEngine.op(aten.elu.default)
@form("result")
def elu(x: Any, alpha: Any, scale: Any, input_scale: Any) -> Any:
    below = ops.multiply(ops.subtract(ops.exp(_scaled(x, input_scale)), number(1, x)), alpha)
    return _scaled(ops.select(ops.greater(x, number(0, x)), x, below), scale)


@OpenVinoEngine.op(aten.softplus.default)
@form("result")
def softplus(x: Any, beta: Any, threshold: Any) -> Any:
    scaled = _scaled(x, beta)
    return ops.select(ops.greater(scaled, threshold), x, ops.divide(ops.softplus(scaled), beta))


@OpenVinoEngine.op(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
@form("result", keep=("condition",))
def where(condition: Any, x: Any, y: Any) -> Any:
    return ops.select(_boolean(condition), x, y)


@OpenVinoEngine.op(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
@form("result", keep=("mask",))
def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return ops.select(mask, value, x)


@OpenVinoEngine.op(aten.addcmul.default)
@form("result")
def addcmul(x: Any, first: Any, second: Any, *, value: Any) -> Any:
    return ops.add(x, _scaled(ops.multiply(first, second), value))


@OpenVinoEngine.op(aten.addcdiv.default)
@form("result")
def addcdiv(x: Any, first: Any, second: Any, *, value: Any) -> Any:
    return ops.add(x, _scaled(ops.divide(first, second), value))


@OpenVinoEngine.op(aten._to_copy.default)
@form(keep=("dtype",), like=True)
def to_copy(x: Any, *, dtype: torch.dtype | None, like: Any) -> Any:
    return OpenVino().cast(x, like.dtype) if like.dtype in NAMES else x


@OpenVinoEngine.op(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def same(x: Any) -> Any:
    return x
