"""Operators in a form whose result for a row does not depend on the other rows, for `numerics="batch-invariant"`.

Kernels of the CPU choose their code by the number of rows: a product of matrices has other sums for one row than for
many, and an activation other code for the rest beside vectors. Here such a kernel always gets one shape: its rows are
cut into blocks of a fixed size, the last one is filled up with zeros, and each has memory of its own, aligned the same.
That a row's place in its block does not matter is seen, not proved: the tests compare drawn sizes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from omnicomp.analysis.layouts import layout_of, restride
from omnicomp.analysis.nodes import fake_value, op_name, source_line
from omnicomp.lowerings.exact import MOVING, computes
from omnicomp.timeline import Reason

_ROWS: Final = 16
"""Rows of a block of products and reductions."""
_WIDTH: Final = 16
"""Sizes of matrices are filled up to multiples of it, so that all rows begin at the same alignment."""
_VECTORS, _GRAIN = 64, 16384
"""Elements of a block of pointwise operators: whole vectors, and few enough for one thread."""


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in text.split())


_ALIKE: Final = MOVING | _names(
    "_to_copy _unsafe_index abs add all amax amin any arange argmax argmin argsort ceil clamp clamp_max clamp_min "
    "copy copy_ detach div empty eq floor ge gt index_put isinf isnan le logical_and logical_not logical_or "
    "logical_xor lt max max_pool2d_with_indices maximum min minimum mul ne neg relu round scatter sgn sign sort "
    "sqrt sub topk trunc"
)
"""They move values, or round once."""
_POINTWISE: Final = _names("hardshrink hardsigmoid hardswish log_sigmoid_forward mish rsub softshrink")
"""Pointwise operators that torch does not tag."""
_EACH: Final = _names(
    "_adaptive_avg_pool2d _native_batch_norm_legit_no_training _scaled_dot_product_flash_attention_for_cpu avg_pool2d "
    "baddbmm bmm convolution native_group_norm upsample_bicubic2d upsample_bilinear2d upsample_linear1d "
    "upsample_nearest1d upsample_nearest2d"
)
"""Their first dimension is one of independent computations."""
_ATTENTION: Final = "aten._scaled_dot_product_flash_attention_for_cpu"
_OPERANDS: Final = {"aten.bmm": 2, "aten.baddbmm": 3, _ATTENTION: 3}
"""How many of the operands have that dimension, if not the first alone."""
_SCANS: Final = _names("_log_softmax _safe_softmax _softmax cumprod cumsum")
_REDUCTIONS: Final = _names("linalg_vector_norm logsumexp mean prod std std_mean sum var var_mean")


def refusal(node: Node, device: str, by: str) -> Reason | None:
    """Why an operator may compute other values for a row if the others change; None if it does not."""
    why = ""
    if device != "cpu":
        why = "forms of operators that do not depend on the number of rows are known for the CPU only"
    elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _without_dropout(node):
        why = "the random numbers of a row depend on its place in the batch"
    elif _inexact(node) and _form(node) is None:
        why = "no form of it is known whose result for a row does not depend on the number of rows"
    if not why:
        return None
    return Reason(
        code="not_batch_invariant",
        by=by,
        sentence=why,
        node=f"{node.name} ({op_name(node)})",
        source=source_line(node),
        lever='leave out options={"numerics": "batch-invariant"}',
    )


def _without_dropout(node: Node) -> bool:
    return _name(node.target) == _ATTENTION and not any(node.args[3:4])


def put_forms(module: GraphModule) -> None:
    """Give the operators of a graph their forms, in place."""
    for node in module.graph.nodes:
        form = _form(node) if _inexact(node) else None
        if form is not None:
            value = fake_value(node)
            layouts = list(map(layout_of, value)) if isinstance(value, (tuple, list)) else layout_of(value)
            node.target = _called(form, node.target, layouts)


def _inexact(node: Node) -> bool:
    """Whether an operator computes floating-point numbers that its kernel may round in more than one way."""
    if node.op != "call_function" or not computes(node):
        return False
    made = [value for value in tree_leaves(fake_value(node)) if isinstance(value, Tensor)]
    given = [value for value in map(fake_value, node.all_input_nodes) if isinstance(value, Tensor)]
    kinds = {value.dtype for value in (*made, *given)}
    if not made or not any(kind.is_floating_point or kind.is_complex for kind in kinds):
        return False
    alike = _name(node.target) in _ALIKE and "alpha" not in node.kwargs and "rounding_mode" not in node.kwargs
    return not alike or any(kind.is_complex for kind in kinds)


def _form(node: Node) -> Callable[..., Any] | None:
    """The function that computes the operator, of the operator and its arguments."""
    name, tags = _name(node.target), getattr(node.target, "tags", ())
    if any(isinstance(v, Tensor) and v.is_complex() for v in map(fake_value, [node, *node.all_input_nodes])):
        return None
    if torch.Tag.pointwise in tags or name in _POINTWISE:
        return _pointwise
    forms = {"aten.mm": _mm, "aten.addmm": _addmm, "aten.native_layer_norm": _layer_norm}
    groups = ((_EACH, _each), (_SCANS, _scan), (_REDUCTIONS, _reduction))
    return forms.get(name) or next((form for names, form in groups if name in names), None)


def _name(target: Any) -> str:
    return str(target).rpartition(".")[0]


def _called(form: Callable[..., Any], operator: Any, layouts: Any) -> Callable[..., Any]:
    """The form as a function of the operator's arguments, with results in the layouts that the graph says."""

    def call(*args: Any, **kwargs: Any) -> Any:
        found = form(operator, *args, **kwargs)
        if isinstance(found, tuple):
            return tuple(map(restride, found, layouts))
        return restride(found, layouts)

    call.__name__ = call.__qualname__ = f"batch_invariant_{str(operator).replace('.', '_')}"
    return call


def _in_blocks(function: Callable[..., Any], size: int, *operands: Tensor) -> Any:
    """Call a function of rows on blocks of a fixed number of rows; its results have the rows in front."""
    count, found = len(operands[0]), list[Any]()
    for start in range(0, max(count, 1), size):
        rows = [operand[start : start + size] for operand in operands]
        found.append(function(*(_filled(value, (size, *value.shape[1:])) for value in rows)))
    if isinstance(found[0], tuple):
        return tuple(torch.cat(blocks)[:count] for blocks in zip(*found, strict=True))
    return torch.cat(found)[:count]


def _filled(value: Tensor, shape: Sequence[int]) -> Tensor:
    """The values in aligned memory of their own, with zeros behind them."""
    result = value.new_zeros(shape)
    result[tuple(map(slice, value.shape))] = value
    return result


def _pointwise(operator: Any, *args: Any, **kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    # Tensors without dimensions stay what they are, as they do not promote the others.
    places = [index for index, value in enumerate(leaves) if isinstance(value, Tensor) and value.dim()]
    if not places:
        return operator(*args, **kwargs)
    operands = torch.broadcast_tensors(*(leaves[index] for index in places))

    def flat(*values: Tensor) -> Any:
        own = list(leaves)
        for index, value in zip(places, values, strict=True):
            own[index] = value
        args, kwargs = tree_unflatten(own, spec)
        return operator(*args, **kwargs)

    shape, count = operands[0].shape, operands[0].numel()
    size = min(_GRAIN, max(-(-count // _VECTORS), 1) * _VECTORS)
    found = _in_blocks(flat, size, *(value.reshape(-1) for value in operands))
    return tuple(v.view(shape) for v in found) if isinstance(found, tuple) else found.view(shape)


def _mm(operator: Any, x: Tensor, weight: Tensor) -> Tensor:
    del operator
    x, padded = _widened(x, weight)
    return _in_blocks(lambda rows: rows @ padded, _ROWS, x)[:, : weight.shape[1]]


def _addmm(operator: Any, bias: Tensor, x: Tensor, weight: Tensor, **factors: Any) -> Tensor:
    bias = bias.expand(len(x), weight.shape[1])
    x, padded = _widened(x, weight)
    bias = F.pad(bias, (0, padded.shape[1] - bias.shape[1]))
    found = _in_blocks(lambda rows, bias: operator(bias, rows, padded, **factors), _ROWS, x, bias)
    return found[:, : weight.shape[1]]


def _widened(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    depth, width = (max(-(-size // _WIDTH), 1) * _WIDTH for size in weight.shape)
    padded = weight if weight.shape == (depth, width) else _filled(weight, (depth, width))
    return F.pad(x, (0, depth - x.shape[1])), padded


def _each(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """One computation at a time."""
    name = _name(operator)
    count = _OPERANDS.get(name, 1)
    operands, rest = list(args[:count]), list(args[count:])
    batch = max(len(value) for value in operands)
    if name == "aten.native_group_norm":
        rest[2] = 1  # the number of images
    if name == "aten.baddbmm":
        operands[0] = operands[0].expand(batch, operands[1].shape[1], operands[2].shape[2])
    mask = kwargs.pop("attn_mask", None)
    if mask is not None:
        operands.append(mask.expand(batch, *mask.shape[1:]) if mask.dim() == 4 else mask.expand(batch, 1, *mask.shape))

    def one(*values: Tensor) -> Any:
        more = {} if mask is None else {"attn_mask": values[count]}
        return operator(*values[:count], *rest, **kwargs, **more)

    return _in_blocks(one, 1, *operands)


def _scan(operator: Any, x: Tensor, dim: int, *args: Any, **kwargs: Any) -> Tensor:
    if not x.dim():
        return operator(x, dim, *args, **kwargs)
    moved = x.movedim(dim, -1)
    rows = moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])
    found = _in_blocks(lambda rows: operator(rows, 1, *args, **kwargs), _ROWS, rows)
    return found.view(moved.shape).movedim(-1, dim)


def _layer_norm(operator: Any, x: Tensor, shape: Sequence[int], *args: Any) -> tuple[Tensor, ...]:
    lead = x.shape[: x.dim() - len(shape)]
    rows = x.reshape(math.prod(lead), *shape)
    found = _in_blocks(lambda rows: operator(rows, shape, *args), _ROWS, rows)
    return tuple(value.reshape(*lead, *value.shape[1:]) for value in found)


def _reduction(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """One row for each result; without the argument `dim` there is one result for all rows."""
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, dim, keep = given.pop("self"), given.pop("dim", None), given.pop("keepdim", False)
    chosen = [dim] if isinstance(dim, int) else list(dim or ())
    if not chosen or not x.dim():
        return operator(*args, **kwargs)
    dims = sorted(each % x.dim() for each in chosen)
    moved = x.movedim(dims, list(range(-len(dims), 0)))
    lead = moved.shape[: x.dim() - len(dims)]
    inner = 1 if isinstance(dim, int) else [1]
    size = math.prod(moved.shape[len(lead) :])
    found = _in_blocks(lambda rows: operator(rows, dim=inner, **given), _ROWS, moved.reshape(math.prod(lead), size))

    def shaped(value: Tensor) -> Tensor:
        value = value.view(lead)
        for each in dims if keep else ():
            value = value.unsqueeze(each)
        return value

    return tuple(map(shaped, found)) if isinstance(found, tuple) else shaped(found)
