"""The form of a graph that importers read, of fixed sizes: casts are written out, views and constants are few."""

import math
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.checks import argument

aten = torch.ops.aten

_COMPARE: Final = frozenset("eq ne lt le gt ge".split())
_COMBINE: Final = frozenset(
    "add sub rsub mul div pow maximum minimum fmod remainder where atan2 addcmul addcdiv lerp cat stack clamp clamp_min"
    " clamp_max xlogy logaddexp floor_divide masked_fill bitwise_and bitwise_or bitwise_xor heaviside".split()
)
_OF_FLOATS: Final = frozenset(
    "sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh exp exp2 expm1 log log2 log10 log1p sqrt rsqrt"
    " reciprocal sigmoid erf erfc mean rad2deg deg2rad logit sum cumsum prod sinc".split()
)
_KEPT: Final = {"where": ("condition",), "masked_fill": ("mask",)}
_ATTENTION: Final = aten._scaled_dot_product_flash_attention_for_cpu.default
_VIEWS: Final = frozenset("squeeze unsqueeze _unsafe_view reshape".split())
_GROWS: Final = ("expand", "repeat")
_FILLED: Final = {"zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
_FULL: Final = {"full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "scalar_tensor": "s"}


def canonical(graph: Graph) -> None:
    """Bring a graph of fixed sizes to the form; it is changed."""
    for node in [each for each in graph.nodes if each.op == "call_function"]:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        name = schema.name.partition("::")[2]
        if node.target is _ATTENTION:
            _zero_where_all_is_hidden(node)
        elif name in _VIEWS or (name in _GROWS and fake_value(node).shape == fake_value(node.args[0]).shape):
            node.target, node.args = aten.view.default, (node.args[0], list(fake_value(node).shape))
        elif name == "t":
            node.target, node.args = aten.permute.default, (node.args[0], list(range(fake_value(node).ndim))[::-1])
        elif name in _FILLED or name in _FULL or node.target is aten.fill.Scalar:
            value = _FILLED[name] if name in _FILLED else argument(node, _FULL.get(name, "value"))
            fake = fake_value(node)
            node.target, node.args = aten.full.default, (list(fake.shape), value)
            node.kwargs = {"dtype": fake.dtype, "device": fake.device}
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
        hidden = called(result, aten.eq.Scalar, mask, -math.inf)
        hidden = called(hidden, aten.logical_not.default, hidden)
        seen = called(hidden, aten.any.dim, hidden, -1, True)
        hidden = called(seen, aten.logical_not.default, seen)
        filled = called(hidden, aten.masked_fill.Scalar, result, hidden, 0.0)
        for user in users:
            user.replace_input_with(result, filled)


def called(behind: Node, target: Any, *args: Any) -> Node:
    """A call with a fake value, put behind a node."""
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
