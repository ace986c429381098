"""What is around linear layers of one row, read so that their kernel computes it: an RMSNorm, a gate, a sum.

A token of a decoder is a chain of kernels of a few microseconds, where each that goes saves its start and its end. On
an H100, the products of 16 layers of a Llama of 1 B took 0.91 of the time with all three taken in, 0.98 with the norms
and sums alone.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node

from omnicomp.analysis.nodes import fake_value, op_name
from omnicomp.passes.attention.nodes import active_dropout
from omnicomp.passes.dtypes.operators import is_cast

_PRODUCTS: Final = frozenset("operator.mul torch.mul Tensor.mul".split())
_SUMS: Final = frozenset("operator.add torch.add Tensor.add".split())
_QUOTIENTS: Final = frozenset("operator.truediv torch.div Tensor.div".split())
_POWERS: Final = frozenset("operator.pow torch.pow Tensor.pow".split())
_MEANS: Final = frozenset("torch.mean Tensor.mean".split())
_RMS_NORMS: Final = frozenset("torch.rms_norm torch.nn.functional.rms_norm".split())
_GELUS: Final = {"none": "gelu", "tanh": "gelu_tanh"}


@dataclasses.dataclass(frozen=True)
class Norm:
    """An RMSNorm over the last dimension: `x / sqrt(mean(x²) + eps) * (gain + offset)`."""

    x: Node
    gain: Node
    offset: float
    eps: float


def norm_of(node: Node) -> Norm | None:
    """The RMSNorm that a node is the result of, whatever is cast on the way; None for all else."""
    while (whole := _unsliced(node := _uncast(node))) is not None:
        node = whole
    if op_name(node) in _RMS_NORMS:
        found = _called(node)
    else:
        found = next(filter(None, (_scaled(gain, x) for gain, x in _operands(node, _PRODUCTS))), None)
    if found is None:
        return None
    x, gain = fake_value(found.x), fake_value(found.gain)
    fits = x.shape == fake_value(node).shape and gain.shape == x.shape[-1:]
    return found if fits and all(_is_dense(each) for each in (x, gain)) else None


def gate_of(first: Node, second: Node) -> tuple[Node, Node, Node, str] | None:
    """The product of the activation of one layer with another layer that nothing else reads.

    Returns:
        The product, the layer behind the activation, the other, and the activation's name for the kernel.
    """
    for gate, factor in ((first, second), (second, first)):
        active, product = _only_user(gate), _only_user(factor)
        if active is None or product is None or _only_user(active) is not product:
            continue
        name = _activation(active)
        if name and active.args == (gate,) and any(pair == (active, factor) for pair in _operands(product, _PRODUCTS)):
            return product, gate, factor, name
    return None


def halves_of(node: Node) -> tuple[Node, Node] | None:
    """Both halves of a layer's outputs, if nothing else reads them: `chunk`, `split`, or two slices."""
    size, last = fake_value(node).shape[-1], fake_value(node).dim() - 1
    parts: dict[int, Node] = {}
    split = _only_user(node)
    if split is not None and op_name(split).rpartition(".")[2] in ("chunk", "split"):
        given = dict(zip(("input", "number", "dim"), split.args, strict=False)) | dict(split.kwargs)
        number, dim = given.get("number", given.get("chunks", given.get("split_size_or_sections"))), given.get("dim", 0)
        halved = number == 2 if "chunk" in op_name(split) else number in (size // 2, [size // 2] * 2, (size // 2,) * 2)
        if size % 2 or not halved or dim not in (-1, last):
            return None
        parts = {user.args[1]: user for user in split.users if op_name(user) == "operator.getitem"}  # type: ignore[misc]
        count = len(split.users)
    else:
        bounds = {0: slice(None, size // 2), 1: slice(size // 2, None)}
        for user in node.users if size % 2 == 0 else ():
            index: Any = user.args[1] if op_name(user) == "operator.getitem" else None
            leading = isinstance(index, tuple) and all(each in (..., slice(None)) for each in index[:-1])
            whole = leading and (... in index or len(index) == last + 1)
            parts |= {at: user for at, bound in bounds.items() if whole and index[-1] == bound}
        count = len(node.users)
    return (parts[0], parts[1]) if count == 2 and parts.keys() == {0, 1} else None


def addend_of(node: Node) -> tuple[Node, Node] | None:
    """The sum that alone reads a node, and the tensor of the same shape and dtype that is added to it."""
    total = _only_user(node)
    while total is not None and "dropout" in op_name(total) and active_dropout(total) is None:
        node, total = total, _only_user(total)
    if total is None:
        return None
    for mine, other in _operands(total, _SUMS):
        if mine is node and isinstance(other, Node) and other is not node:
            same = [fake_value(each) for each in (node, other, total)]
            dense = all(map(_is_dense, same)) and len({(each.shape, each.dtype) for each in same}) == 1
            return (total, other) if dense else None
    return None


def _called(node: Node) -> Norm | None:
    """A call of `rms_norm` over the last dimension with a weight and a number."""
    given = dict(zip(("x", "shape", "weight", "eps"), node.args, strict=False)) | dict(node.kwargs)
    x, gain, eps = given.get("input", given.get("x")), given.get("weight"), given.get("eps")
    shape: Any = given.get("normalized_shape", given.get("shape"))
    if not isinstance(x, Node) or not isinstance(gain, Node) or not isinstance(eps, float):
        return None
    return Norm(x, gain, 0.0, eps) if tuple(shape) == tuple(fake_value(x).shape[-1:]) else None


def _scaled(gain: Any, x: Any) -> Norm | None:
    """A normalised tensor times a gain of one dimension, to which a number may have been added."""
    if not isinstance(gain, Node) or not isinstance(x, Node) or (found := _normalised(_uncast(x))) is None:
        return None
    gain, offset = _uncast(gain), 0.0
    for number, other in _operands(gain, _SUMS):
        if isinstance(number, int | float) and isinstance(other, Node):
            gain, offset = _uncast(other), float(number)
            break
    return Norm(found[0], gain, offset, found[1])


def _normalised(node: Node) -> tuple[Node, float] | None:
    """`x` and `eps` of `x * rsqrt(mean(x²) + eps)`, however it is spelt."""
    for x, scale in _operands(node, _PRODUCTS):
        if isinstance(x, Node) and isinstance(scale, Node):
            name, given = op_name(scale), scale.args
            inverse = name in ("torch.rsqrt", "Tensor.rsqrt") or (name in _POWERS and given[1:] == (-0.5,))
            if inverse and (eps := _mean_square(given[0], x)) is not None:
                return _uncast(x), eps
    for x, scale in _operands(node, _QUOTIENTS, ordered=True):
        if isinstance(x, Node) and isinstance(scale, Node):
            name, given = op_name(scale), scale.args
            root = name in ("torch.sqrt", "Tensor.sqrt") or (name in _POWERS and given[1:] == (0.5,))
            if root and (eps := _mean_square(given[0], x)) is not None:
                return _uncast(x), eps
    return None


def _mean_square(node: Any, x: Node) -> float | None:
    """`eps` of the mean of the squares of `x` over its last dimension, plus `eps`."""
    for mean, eps in _operands(node, _SUMS):
        if not isinstance(mean, Node) or not isinstance(eps, float) or op_name(mean) not in _MEANS:
            continue
        given = dict(zip(("input", "dim", "keepdim"), mean.args, strict=False)) | dict(mean.kwargs)
        dim: Any = given.get("dim")
        last = dim in (-1, [-1], (-1,)) or dim == fake_value(x).dim() - 1
        if not last or given.get("keepdim") is not True or given.keys() - {"input", "dim", "keepdim"}:
            continue
        square: Any = given["input"]
        bases = [pair[0] for pair in _operands(square, _POWERS, ordered=True) if pair[1] == 2]
        bases += [pair[0] for pair in _operands(square, _PRODUCTS) if pair[0] is pair[1]]
        if isinstance(square, Node) and op_name(square) in ("torch.square", "Tensor.square"):
            bases.append(square.args[0])
        if any(isinstance(base, Node) and _uncast(base) is _uncast(x) for base in bases):
            return eps
    return None


def _activation(node: Node) -> str:
    name, kwargs = op_name(node), dict(node.kwargs)
    if name == "torch.nn.functional.silu":
        return "silu" if not kwargs.get("inplace") else ""
    if name == "torch.nn.functional.gelu":
        return _GELUS.get(str(kwargs.get("approximate", "none")), "")
    return ""


def _operands(node: Any, names: frozenset[str], *, ordered: bool = False) -> Iterator[tuple[Any, Any]]:
    """Both operands of a node that is one of these operators, in either order."""
    if isinstance(node, Node) and op_name(node) in names and len(node.args) == 2 and not node.kwargs:
        first, second = node.args
        yield first, second
        if not ordered:
            yield second, first


def _uncast(node: Node) -> Node:
    """What a node was before it was cast between floating dtypes."""
    while is_cast(node) and isinstance(given := node.args[0], Node):
        before, after = fake_value(given), fake_value(node)
        if not all(isinstance(each, Tensor) and each.dtype.is_floating_point for each in (before, after)):
            break
        if before.device != after.device or torch.float64 in (before.dtype, after.dtype):
            break
        node = given
    return node


def _unsliced(node: Node) -> Node | None:
    """What a node takes all of by slices, such as `x[:, -1:]` of one row; None if it is no such slice."""
    given: Any = node.args[0] if op_name(node) == "operator.getitem" else None
    if not isinstance(given, Node) or not isinstance(fake_value(given), Tensor):
        return None
    index: Any = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    sliced = all(isinstance(each, slice) or each is ... for each in index)
    return given if sliced and fake_value(given).shape == fake_value(node).shape else None


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_dense(value: Any) -> bool:
    dense = isinstance(value, Tensor) and value.layout is torch.strided and value.is_contiguous()
    return dense and value.dtype.is_floating_point and value.dtype is not torch.float64
