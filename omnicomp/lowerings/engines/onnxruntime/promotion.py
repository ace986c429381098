"""What torch does to operands on its own, written out: ONNX's operators take operands of one dtype."""

import math
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.checks import argument

__all__ = ["promote"]

aten = torch.ops.aten

_COMPARE: Final = frozenset("eq ne lt le gt ge".split())
_COMBINE: Final = frozenset(
    "add sub mul div pow maximum minimum fmod remainder where atan2 addcmul addcdiv lerp cat stack clamp clamp_min"
    " clamp_max xlogy logaddexp floor_divide masked_fill bitwise_and bitwise_or bitwise_xor heaviside".split()
)
_OF_FLOATS: Final = frozenset(
    "sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh exp exp2 expm1 log log2 log10 log1p sqrt rsqrt"
    " reciprocal sigmoid erf erfc mean rad2deg deg2rad logit sum cumsum prod sinc".split()
)
_KEPT: Final = {"where": ("condition",), "masked_fill": ("mask",)}
_ATTENTION: Final = aten._scaled_dot_product_flash_attention_for_cpu.default
_VIEWS: Final = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default)


def promote(graph: Graph) -> None:
    """Write out in a graph of fixed sizes, which is changed, what torch does by itself."""
    for node in [each for each in graph.nodes if each.op == "call_function"]:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        name = schema.name.partition("::")[2]
        if node.target is _ATTENTION:
            _zero_where_all_is_hidden(node)
        elif node.target in _VIEWS:
            node.target, node.args = aten.view.default, (node.args[0], list(fake_value(node).shape))
        elif name in ("amax", "amin") and not argument(node, "dim"):
            node.args = (node.args[0], list(range(fake_value(node.args[0]).ndim)), *node.args[2:])
        elif name in _COMPARE:
            _cast(node, torch.result_type(*[_value(arg) for arg in node.args[:2]]))
        elif name in _COMBINE or name in _OF_FLOATS:
            _cast(node, fake_value(node).dtype, _KEPT.get(name, ()))


def _zero_where_all_is_hidden(node: Node) -> None:
    """What attends to nothing is zero in torch, and NaN where it is computed by a softmax."""
    mask = node.kwargs.get("attn_mask")
    if not isinstance(mask, Node):
        return
    for result in [user for user in node.users if user.args[1] == 0]:
        users = list(result.users)
        hidden = _called(result, aten.eq.Scalar, mask, -math.inf)
        hidden = _called(hidden, aten.all.dim, hidden, -1, True)
        filled = _called(hidden, aten.masked_fill.Scalar, result, hidden, 0.0)
        for user in users:
            user.replace_input_with(result, filled)


def _called(behind: Node, target: Any, *args: Any) -> Node:
    with behind.graph.inserting_after(behind):
        made = behind.graph.call_function(target, args)
    made.meta["val"] = target(*map(_value, args))
    return made


def _value(arg: Any) -> Any:
    return fake_value(arg) if isinstance(arg, Node) else arg


def _cast(node: Node, dtype: torch.dtype, kept: tuple[str, ...] = ()) -> None:
    schema: Any = getattr(node.target, "_schema", None)

    def cast(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [cast(each) for each in value]
        fake = _value(value)
        if not isinstance(value, Node) or not isinstance(fake, torch.Tensor) or fake.dtype == dtype:
            return value
        with node.graph.inserting_before(node):
            made = node.graph.call_function(aten._to_copy.default, (value,), {"dtype": dtype})
        made.meta["val"] = fake.to(dtype)
        return made

    node.args = tuple(arg if schema.arguments[index].name in kept else cast(arg) for index, arg in enumerate(node.args))
