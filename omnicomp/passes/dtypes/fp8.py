"""Linear layers in float8: operands scaled to the range of E4M3 by their largest element, products by `_scaled_mm`.

With a scale for each row (of the activations: each token; of the weight: each output), one large element costs the
other rows nothing; with one for the tensor there is less to compute. Both are found in the graph, from the operands in
the low-precision dtype that the policy computes in; those of a parameter leave it afterwards
(`omnicomp.passes.dtypes.weights`), as they stay the same until it changes.
"""

import dataclasses
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value, insert_call
from omnicomp.options.dtype_policy import NAME, DtypePolicy
from omnicomp.passes.base import PassContext
from omnicomp.passes.dtypes.operators import kind
from omnicomp.passes.dtypes.rewrite import Compute
from omnicomp.timeline import Reason
from omnicomp.weights.cast_copies import FLOAT8 as FLOAT8
from omnicomp.weights.cast_copies import scaled

_MULTIPLE: Final = 16  # of both sizes of the weight, for the kernels
_aten: Final = torch.ops.aten


def in_fp8(node: Node, policy: DtypePolicy, context: PassContext) -> Compute | Reason | None:
    """How a linear layer is computed in float8.

    Returns:
        What inserts it, for operands in `policy.compute`; the reason why it is not done; None for what is no linear
        layer.
    """
    if policy.fp8 is None or kind(node) != "linear":
        return None
    weight = fake_value(node.args[1] if len(node.args) > 1 else node.kwargs.get("weight"))
    sizes = tuple(weight.shape) if isinstance(weight, torch.Tensor) else ()
    if context.training:
        return _reason("float8 is for inference, and the graph is differentiated", "a graph under torch.no_grad()")
    if FLOAT8 not in context.device.capabilities().storage_dtypes:
        return _reason(f"the {context.device.type} device has no float8", "a GPU of compute capability 8.9 or newer")
    if policy.compute is not torch.bfloat16:
        return _reason("products of float8 are given out in bfloat16", "compute=bfloat16", str(policy.compute))
    if len(sizes) != 2 or not all(type(size) is int and size % _MULTIPLE == 0 for size in sizes):
        return _reason("the weight's sizes do not fit the kernels", f"multiples of {_MULTIPLE}", f"{sizes}")
    operand = node.args[0] if node.args else node.kwargs.get("input")
    if any(type(size) is int and size == 0 for size in fake_value(operand).shape):
        return _reason("its input is empty, and has no largest element", "one row or more")
    rows = policy.fp8 == "row"

    def compute(node: Node, args: Any, kwargs: Any, dtype: torch.dtype) -> Node:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return _linear(node, given["input"], given["weight"], given.get("bias"), dtype, rows=rows)

    return compute


def _linear(anchor: Node, x: Node, weight: Node, bias: Node | None, dtype: torch.dtype, *, rows: bool) -> Node:
    def insert(target: Any, *args: Any, **kwargs: Any) -> Node:
        return insert_call(anchor, target, args, kwargs)

    shape = fake_value(x).shape
    flat = x if len(shape) == 2 else insert(_aten.reshape.default, x, [-1, shape[-1]])
    low_x, scale_x = scaled(flat, insert, rows=rows)
    low_w, scale_w = scaled(weight, insert, rows=rows)
    scale_w = insert(_aten.t.default, scale_w) if rows else scale_w
    product = insert(_aten._scaled_mm.default, low_x, insert(_aten.t.default, low_w), scale_x, scale_w, out_dtype=dtype)
    if len(shape) != 2:
        sizes = [s if type(s) is int else insert(_aten.sym_size.int, x, i) for i, s in enumerate(shape[:-1])]
        product = insert(_aten.reshape.default, product, [*sizes, fake_value(weight).shape[0]])
    return product if bias is None else insert(_aten.add.Tensor, product, bias)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled:
    """What `omnicomp.weights.cast_copies.scaled` has put into a graph.

    Attributes:
        value: what was scaled.
        numbers, scale: what came of it.
        rows: whether each row has a scale.
        steps: all nodes between the two, and these; each before those that read it.
    """

    value: Node
    numbers: Node
    scale: Node
    rows: bool
    steps: tuple[Node, ...]


def read_scaled(node: Node) -> Scaled | None:
    """Read a node as the numbers of a scaled value; None if it is anything else."""
    if fake_value(node).dtype is not FLOAT8:
        return None
    for rows in (True, False):
        numbers, scale = scaled(_VALUE, _Step, rows=rows)
        found: dict[Any, Node] = {}
        if _reads_as(node, numbers, found):
            value = found.pop(_VALUE)
            return Scaled(value=value, numbers=node, scale=found[scale], rows=rows, steps=tuple(found.values()))
    return None


class _Step:
    """An operator that `scaled` asks for, with steps, `_VALUE` and constants as its arguments."""

    def __init__(self, target: Any, *args: Any) -> None:
        self.target, self.args = target, args


_VALUE: Final = object()


def _reads_as(node: Any, step: Any, found: dict[Any, Node]) -> bool:
    """Whether a node is this step; `found` gets the nodes of all steps, operands first."""
    if not isinstance(step, _Step) and step is not _VALUE:
        return bool(node == step)
    if step in found or not isinstance(node, Node):
        return found.get(step) is node
    if isinstance(step, _Step):
        alike = node.op == "call_function" and node.target is step.target and not node.kwargs
        if not alike or len(node.args) != len(step.args):
            return False
        if not all(_reads_as(one, other, found) for one, other in zip(node.args, step.args, strict=True)):
            return False
    found[step] = node
    return True


def _reason(sentence: str, needed: str, observed: str = "") -> Reason:
    return Reason(
        code="option_ineffective",
        by=NAME,
        sentence=f"the layer is not computed in float8: {sentence}",
        observed=observed,
        needed=needed,
        lever='choose dtype_policy="bf16" to compute as it does now',
    )
