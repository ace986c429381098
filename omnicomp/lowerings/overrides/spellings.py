"""Reading a Dynamo graph backwards: linear layers, casts and views in the spellings that programs use."""

import operator
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node

from omnicomp import records
from omnicomp._torch.autograd.overrides import OpOverload
from omnicomp.analysis.nodes import fake_value, insert_call, op_name

_NAMESPACES: Final = ("torch", "torch.nn.functional", "operator", "Tensor", "torch.special")
_VIEWS: Final = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
_CASTS: Final = ("to", "float", "half", "bfloat16", "type", "type_as")
_TRANSPOSES: Final = ("transpose", "swapaxes")
# Operators of exported graphs that take their arguments as torch's functions do.
_ATEN: Final = frozenset({"linear", "matmul", "mm", "mul", "to", "t", "transpose", *_VIEWS})


def kind(node: Any) -> str:
    """The operation of a torch function, method or operator (`linear`, `view`); an empty string for anything else."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    if isinstance(node.target, OpOverload):
        namespace, _, name = node.target._schema.name.partition("::")
        return name if namespace == "aten" and name in _ATEN else ""
    namespace, _, name = op_name(node).rpartition(".")
    return name if namespace in _NAMESPACES or node.target is getattr else ""


def argument(node: Node, name: str, position: int, default: Any = None) -> Any:
    """An argument of a call, wherever it was given."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


@records.dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """`x @ weight.T + bias`, in any spelling."""

    node: Node  # its last step
    steps: tuple[Node, ...]  # its nodes
    x: Node  # (..., k)
    # The node that has the weight's elements, (n, k), or (k, n) where the program multiplies by it as it is.
    source: Node
    transposed: bool  # whether `source` is (k, n)
    bias: Node | None  # (n), or None

    def weight(self, anchor: Node) -> Node:
        """A node with the weight as (n, k), inserted before `anchor` where there is none."""
        return insert_call(anchor, torch.t, (self.source,)) if self.transposed else self.source


def linear(node: Any) -> Linear | None:
    """The linear layer whose result a node is; None if it is none."""
    name = kind(node)
    if name == "linear":
        x, source, bias = argument(node, "input", 0), argument(node, "weight", 1), argument(node, "bias", 2)
        if _is_matrix(source) and isinstance(x, Node):
            return Linear(node=node, steps=(node,), x=x, source=source, transposed=False, bias=bias)
    if name in ("matmul", "mm"):
        x, right = argument(node, "input", 0), argument(node, "mat2" if name == "mm" else "other", 1)
        if not _is_matrix(right) or not isinstance(x, Node) or fake_value(x).dim() < 2:
            return None
        base = _untransposed(right)
        steps = (node,) if base is None else (node, right)
        return Linear(node=node, steps=steps, x=x, source=base or right, transposed=base is None, bias=None)
    return None


def _is_matrix(node: Any) -> bool:
    value = fake_value(node)
    return isinstance(node, Node) and isinstance(value, Tensor) and value.dim() == 2


def _untransposed(node: Node) -> Node | None:
    """What a node is the transpose of, if it is one of a matrix."""
    attribute = node.target is getattr and node.args[1] in ("T", "mT")
    dims = sorted(d % 2 for d in node.args[1:] if isinstance(d, int))
    named = kind(node) == "t" or (kind(node) in _TRANSPOSES and dims == [0, 1])
    base = node.args[0] if node.args else None
    return base if (attribute or named) and _is_matrix(base) else None  # type: ignore[return-value]


def is_cast(node: Node) -> bool:
    """Whether a node only changes the dtype of its first argument."""
    old, new = (fake_value(n) for n in (node.args[0] if node.args else None, node))
    tensors = isinstance(old, Tensor) and isinstance(new, Tensor)
    return kind(node) in _CASTS and tensors and old.device == new.device and old.layout == new.layout


def is_copy(node: Node) -> bool:
    """Whether a node has the elements and the shape of its first argument."""
    return kind(node) in ("contiguous", "clone")


def is_view_of_rows(node: Node) -> bool:
    """Whether a node has the rows of its first argument, in their order, and maybe other leading dimensions."""
    if kind(node) not in _VIEWS:
        return False
    old, new = fake_value(node.args[0]), fake_value(node)
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)) or not old.dim() or not new.dim():
        return False
    sizes: tuple[Any, Any] = old.shape[-1], new.shape[-1]
    return all(isinstance(size, int) for size in sizes) and sizes[0] == sizes[1] and sizes[0] > 1


def slices_rows(node: Node) -> bool:
    """Whether a node takes slices of the leading dimensions of its first argument, and all of the last one."""
    if node.target is not operator.getitem or len(node.args) != 2:
        return False
    old, new, index = fake_value(node.args[0]), fake_value(node), node.args[1]
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)) or old.dim() != new.dim():
        return False
    items: list[Any] = list(index) if isinstance(index, (tuple, list)) else [index]
    if any(not isinstance(i, slice) and i is not Ellipsis for i in items):
        return False
    # What the index says of the last dimension, if it says anything.
    reaches = items[-1] is not Ellipsis if Ellipsis in items else len(items) == old.dim()
    return not reaches or items[-1] == slice(None, None, None)


def copy_slice(node: Node, of: Node, anchor: Node) -> Node:
    """The slices that `node` takes, taken of another tensor with the same leading dimensions."""
    return insert_call(anchor, operator.getitem, (of, node.args[1]))
