"""The vocabulary of the attention match: what a node does, whatever its spelling in the Dynamo graph."""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp.graphs import fake_value, op_name

__all__ = [
    "POINTWISE",
    "PRODUCTS",
    "PURE",
    "argument",
    "constant",
    "is_cast",
    "is_shape_only",
    "is_transpose",
    "kind",
    "mutates",
    "tensor",
]

_NAMESPACES: Final = ("torch", "torch.nn.functional", "torch.functional", "operator", "Tensor", "torch.special")
_ALIASES: Final = {"truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub"}
_ALIASES.update({f"i{op}": op for op in ("add", "sub", "mul", "matmul")} | {"itruediv": "div", "__matmul__": "matmul"})
_CASTS: Final = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
_SHAPE_ONLY: Final = ("size", "dim", "ndimension", "sym_size", "numel", "stride")
PRODUCTS: Final = ("matmul", "bmm", "baddbmm", "einsum")
POINTWISE: Final = frozenset(
    "add sub mul div neg tanh masked_fill where to type type_as contiguous clone view reshape unsqueeze squeeze expand "
    "clamp clip minimum maximum dropout transpose permute flatten unflatten getitem cat sigmoid exp softplus "
    "float half bfloat16 double nan_to_num pow".split()
)
# What may be erased once nobody uses it.
PURE: Final = (
    POINTWISE
    | {*PRODUCTS, "softmax", "repeat_interleave", "tensor", "full", "sqrt", "swapaxes", "getattr"}
    | {*_SHAPE_ONLY}
)


def kind(node: Any) -> str:
    """The operation of a node whatever its spelling (`mul` for `*`, `torch.mul`, `Tensor.mul_`), or an empty string."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    namespace, _, name = op_name(node).rpartition(".")
    if node.target is getattr:
        return "getattr"
    if namespace not in _NAMESPACES:
        return ""
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return _ALIASES.get(name, name)


def mutates(node: Node) -> bool:
    """Whether a node may change one of its inputs or the state (grad mode, autocast) that other nodes run in."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    namespace, _, name = op_name(node).rpartition(".")
    in_place = name.endswith("_") and not name.endswith("__")
    state = any(word in name for word in ("autocast", "grad_enabled", "inference_mode")) or name == "__setitem__"
    operator = namespace == "operator" and (name == "setitem" or name in _IN_PLACE_OPERATORS)
    return in_place or state or operator or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


_IN_PLACE_OPERATORS: Final = frozenset(
    "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul iconcat".split()
)


def tensor(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node, or None if it is not a node or has none."""
    value = fake_value(node) if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def constant(value: Any) -> float | None:
    """The number that an argument is in every call of the graph: a Python number or a 0-dim tensor made from one."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    fake = tensor(value)
    if (
        not isinstance(value, Node)
        or fake is None
        or fake.dim()
        or not fake.dtype.is_floating_point
        or any(mutates(u) for u in value.users)
    ):
        return None
    name, argument = kind(value), _constant_argument(value)
    number = _FUNCTIONS[name](argument) if name in _FUNCTIONS and argument is not None else None
    # A tensor of half precision holds a rounded number: only take those that it holds exactly.
    bits = {torch.bfloat16: 8, torch.float16: 11}.get(fake.dtype, 53)
    if number is None or (math.isfinite(number) and bits < 53 and (math.frexp(number)[0] * 2**bits) % 1):
        return None
    return number


_FUNCTIONS: Final[dict[str, Callable[[float], float]]] = {
    "tensor": float,
    "full": float,
    "to": float,
    "float": float,
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
}


def _constant_argument(node: Node) -> float | None:
    if kind(node) == "full":
        return constant(argument(node, "fill_value", 1))
    return constant(node.args[0]) if node.args else None


def is_cast(node: Node) -> bool:
    """Whether a node only changes the dtype."""
    name = kind(node)
    before, after = tensor(node.args[0]) if node.args else None, tensor(node)
    if before is None or after is None or before.device != after.device or not after.dtype.is_floating_point:
        return False
    return name in _CASTS or name in ("to", "type", "type_as")


def is_transpose(node: Node) -> bool:
    """Whether a node swaps the last two dimensions of its input."""
    fake = tensor(node)
    if fake is None or not node.args or tensor(node.args[0]) is None:
        return False
    rank, name = fake.dim(), kind(node)
    if name == "permute":
        dims: Any = node.args[1:] if len(node.args) > 2 else argument(node, "dims", 1)
        swapped = (*range(rank - 2), rank - 1, rank - 2)
        return isinstance(dims, list | tuple) and tuple(d % rank for d in dims if isinstance(d, int)) == swapped
    if name in ("transpose", "swapaxes", "swapdims") and len(node.args) == 3:
        dims = node.args[1:]
        return {d % rank for d in dims if isinstance(d, int)} == {rank - 2, rank - 1}
    attribute = node.op == "call_function" and node.target is getattr and node.args[1:] in (("mT",), ("mH",))
    return attribute and not fake.is_complex()


def argument(node: Node, name: str, position: int, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def is_shape_only(node: Node) -> bool:
    attribute = node.op == "call_function" and node.target is getattr
    return kind(node) in _SHAPE_ONLY or (attribute and node.args[1] in ("shape", "ndim", "dtype", "device"))
