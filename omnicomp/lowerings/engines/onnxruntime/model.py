"""Forms of operators that come before those of torch's exporter, which computes them otherwise than torch does.

The exporter rounds a quotient down where torch corrects what rounding made of it, divides integers in float32, and
leaves sums of 64-bit integers to the runtime, which adds them in float64. Here remainders are those of C's `fmod`,
which are exact, quotients follow from them, and a 64-bit integer is added in two halves.
"""

import dataclasses
import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule

from omnicomp import records
from omnicomp._torch.fx import copy_module
from omnicomp._torch.onnx import translated
from omnicomp.lowerings.engines.canonical import canonical
from omnicomp.lowerings.engines.lazy import Lazy
from omnicomp.lowerings.engines.subgraph import Subgraph

_library: Any = Lazy("onnxscript.onnx_opset")
_HALF: Final = 2**32


class _Operators:
    """ONNX's operators, of a set that has all that are needed; what they do is the same in later ones."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_library.opset18, name)


op: Any = _Operators()


def _like(value: float, x: Any) -> Any:
    return op.CastLike(op.Constant(value_float=float(value)), x)


def _number(value: Any, x: Any) -> Any:
    """An operand, which may be a number, in the dtype of another one."""
    if not isinstance(value, (bool, int, float)):
        return value
    if x.dtype.is_integer():
        return op.CastLike(op.Constant(value_int=int(value)), x)
    return _like(value, x)


def _signs_differ(x: Any, y: Any, zero: Any) -> Any:
    return op.Xor(op.Less(x, zero), op.Less(y, zero))


def _c_remainder(x: Any, y: Any) -> Any:
    """With the sign of the dividend."""
    if not x.dtype.is_integer():
        return op.Mod(x, y, fmod=1)
    zero = _number(0, x)
    rest = op.Mod(x, y)  # with the sign of the divisor
    other = op.And(op.Not(op.Equal(rest, zero)), _signs_differ(x, y, zero))
    return op.Where(other, op.Sub(rest, y), rest)


def _python_remainder(x: Any, y: Any) -> Any:
    """With the sign of the divisor."""
    if x.dtype.is_integer():
        return op.Mod(x, y)
    zero = _like(0, x)
    rest = op.Mod(x, y, fmod=1)
    other = op.And(op.Not(op.Equal(rest, zero)), _signs_differ(rest, y, zero))
    return op.Where(other, op.Add(rest, y), rest)


def _floor_quotient(x: Any, y: Any) -> Any:
    if x.dtype.is_integer():
        return op.Div(op.Sub(x, op.Mod(x, y)), y)
    # As torch's `div_floor_floating`: the dividend less the remainder is a multiple of the divisor but for rounding.
    near = op.Div(op.Sub(x, _python_remainder(x, y)), y)
    down = op.Floor(near)
    exact = op.Where(op.Greater(op.Sub(near, down), _like(0.5, x)), op.Add(down, _like(1, x)), down)
    return op.Where(op.Equal(y, _like(0, x)), op.Div(x, y), exact)


def _fmod(self: Any, other: Any) -> Any:
    return _c_remainder(self, _number(other, self))


def _remainder(self: Any, other: Any) -> Any:
    return _python_remainder(self, _number(other, self))


def _floor_divide(self: Any, other: Any) -> Any:
    return _floor_quotient(self, _number(other, self))


def _div_mode(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    other = _number(other, self)
    if rounding_mode == "floor":
        return _floor_quotient(self, other)
    quotient = op.Div(self, other)  # of integers, rounded towards zero
    if rounding_mode is None or self.dtype.is_integer():
        return quotient
    return op.Mul(op.Sign(quotient), op.Floor(op.Abs(quotient)))


def _summed(x: Any, dim: Sequence[int] | None, keepdim: bool) -> Any:
    given = [dim] if isinstance(dim, int) else list(dim or ())
    axes = [op.Constant(value_ints=given)] if given else []
    return op.ReduceSum(x, *axes, keepdims=int(keepdim))


def _sum(self: Any, dim: Sequence[int] | None = None, keepdim: bool = False, dtype: int = -1) -> Any:
    if not len(self.shape):
        total = op.Identity(self)
    elif self.dtype.name != "INT64":
        total = _summed(self, dim, keepdim)
    else:
        half = _number(_HALF, self)
        low = op.Mod(self, half)
        high = op.Div(op.Sub(self, low), half)
        total = op.Add(_summed(low, dim, keepdim), op.Mul(_summed(high, dim, keepdim), half))
    return total if dtype in (-1, None) else op.Cast(total, to=dtype)


def _whole_sum(self: Any, dtype: int = -1) -> Any:
    return _sum(self, None, False, dtype)


aten = torch.ops.aten
FORMS: Final[Mapping[Any, Callable[..., Any]]] = {
    aten.fmod.Tensor: _fmod,
    aten.fmod.Scalar: _fmod,
    aten.remainder.Tensor: _remainder,
    aten.remainder.Scalar: _remainder,
    aten.floor_divide.default: _floor_divide,
    aten.div.Tensor_mode: _div_mode,
    aten.div.Scalar_mode: _div_mode,
    aten.sum.default: _whole_sum,
    aten.sum.dim_IntList: _sum,
}
"""Forms by operator; each takes ONNX values, and the operator's numbers as they are."""


OPSET: Final = 20
"""Version of ONNX's operator set: the oldest with `Gelu`."""

DTYPES: Final[dict[torch.dtype, tuple[int, str]]] = {
    torch.float32: (1, "tensor(float)"),
    torch.uint8: (2, "tensor(uint8)"),
    torch.int8: (3, "tensor(int8)"),
    torch.int32: (6, "tensor(int32)"),
    torch.int64: (7, "tensor(int64)"),
    torch.bool: (9, "tensor(bool)"),
    torch.float16: (10, "tensor(float16)"),
    torch.float64: (11, "tensor(double)"),
}
"""Number of the dtype in ONNX's `TensorProto.DataType`, and what ONNX Runtime calls it."""

# Smaller ones are part of the model, so that they can be computed with while it is optimised.
_LARGE: Final = 1024
_NOWHERE: Final = "weights of the program"


@records.dataclass(frozen=True)
class Model:
    """An ONNX model."""

    data: bytes  # the serialised model; without the weights that are given to a session beside it
    results: tuple[int | None, ...]  # for each result of the subgraph the position among the model's, or None for None


def onnx_model(subgraph: Subgraph) -> Model:
    """Write a subgraph as an ONNX model, whose inputs and results are those of a call, in order.

    Raises:
        Exception: what the exporter raises.
    """
    ir = importlib.import_module("onnx_ir")
    subgraph = dataclasses.replace(subgraph, module=copy_module(subgraph.module))
    outputs = subgraph.outputs
    distinct = list(dict.fromkeys(node for node in outputs if node is not None))
    position = {node: index for index, node in enumerate(distinct)}
    graph = subgraph.module.graph
    next(iter(reversed(graph.nodes))).args = (tuple(distinct),)
    graph.eliminate_dead_code()
    canonical(graph)
    inputs, placeholders = set(subgraph.inputs), subgraph.placeholders
    fixed = _as_placeholders(subgraph.module)
    distinct = list(next(iter(reversed(graph.nodes))).args[0])
    model, values = translated(graph, OPSET, FORMS)
    model.graph.inputs.clear()
    model.graph.outputs.clear()
    for index, node in enumerate(placeholders):
        value = values[node.name]
        if index in subgraph.constants:
            value.const_value = _weight(ir, subgraph.constants[index].contiguous(), value.name)
            model.graph.initializers[value.name] = value
        elif node in inputs:
            model.graph.inputs.append(value)
    for name, tensor in fixed.items():
        value = values[name]
        value.const_value = ir.Tensor(tensor.numpy(), dtype=ir.DataType(DTYPES[tensor.dtype][0]), name=value.name)
        model.graph.initializers[value.name] = value
    for index, node in enumerate(distinct):
        # An input or a weight that is a result as it is would be left out of the program, and its memory unwritten.
        copied = ir.Node("", "Identity", [values[node.name]], name=f"result_{index}")
        (result,) = copied.outputs
        result.name = f"result_{index}"
        result.type = ir.TensorType(ir.DataType(DTYPES[node.meta["val"].dtype][0]))
        result.shape = ir.Shape(list(node.meta["val"].shape))
        model.graph.append(copied)
        model.graph.outputs.append(result)
    data = ir.serde.serialize_model(model).SerializeToString()
    return Model(data, tuple(None if node is None else position[node] for node in outputs))


def _as_placeholders(module: GraphModule) -> dict[str, torch.Tensor]:
    """Make inputs of a graph's own constants, which the exporter does not read; their values, by name."""
    found: dict[str, torch.Tensor] = {}
    for node in list(module.graph.find_nodes(op="get_attr")):
        with module.graph.inserting_before(next(iter(module.graph.nodes))):
            given = module.graph.placeholder(f"fixed_{node.name}")
        given.meta["val"] = node.meta["val"]
        found[given.name] = operator.attrgetter(str(node.target))(module).detach().contiguous()
        node.replace_all_uses_with(given)
        module.graph.erase_node(node)
    return found


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a weight is given to a session as it is."""
    return tensor.numel() * tensor.element_size() >= _LARGE


def _weight(ir: Any, tensor: torch.Tensor, name: str) -> Any:
    dtype = ir.DataType(DTYPES[tensor.dtype][0])
    if not is_large(tensor):
        return ir.Tensor(tensor.numpy(), dtype=dtype, name=name)
    size = tensor.numel() * tensor.element_size()
    shape = ir.Shape(list(tensor.shape))
    return ir.ExternalTensor(_NOWHERE, offset=0, length=size, dtype=dtype, shape=shape, name=name)
