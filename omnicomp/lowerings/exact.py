"""Operators of which Inductor's code gives eager's bits, for `numerics="eager"`.

Some move values and compute none. Of the others `bench/sweep_numerics.py` compared generated code with eager's kernels:
on all numbers of the half precisions, and on many of float32. What it never saw to differ is in its table; whatever is
in neither list, such as products of matrices, reductions and random numbers, is eager's to compute.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.autograd.mutations import is_view
from omnicomp._torch.symbols import free_unbacked_symbols
from omnicomp.analysis.nodes import fake_value, op_name
from omnicomp.lowerings.exact_operators import EXACT_OPERATORS
from omnicomp.timeline import Reason

MOVING: Final = frozenset(
    f"aten.{name}"
    for name in (
        "_unsafe_view cat clone constant_pad_nd embedding flip full full_like gather index index_select "
        "lift_fresh_copy masked_fill new_full new_ones new_zeros ones ones_like repeat roll scalar_tensor "
        "select_backward select_scatter slice_backward slice_scatter stack tril triu where zeros zeros_like"
    ).split()
)
"""They move values, or fill in a number of the program."""


def inexact(node: Node, by: str) -> Reason | None:
    """Why generated code of an operator may differ from eager's kernel in a bit; None if it gives eager's bits."""
    if not computes(node) or _is_size(node):
        return None
    name = op_name(node).rpartition(".")[0]
    key = key_of(node.target, node.args, node.kwargs)
    values = _values(node, *node.all_input_nodes)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    dtypes = {str(value.dtype).removeprefix("torch.") for value in tensors}
    exact = name in MOVING or (_rounds_alike(tensors) if name == "aten._to_copy" else False)
    exact = exact or (name == "aten.copy_" and len({(value.dtype, value.device) for value in tensors}) == 1)
    # Masks are the results of comparisons, and come beside other operands.
    compared = dtypes - {"bool"} or dtypes
    differing = () if exact else tuple(sorted(compared.difference(EXACT_OPERATORS.get(key, ()))))
    if tensors and not differing and all(map(_is_plain, tensors)):
        return None
    return Reason(
        code="not_exact",
        by=by,
        sentence="its code is not known to give eager's bits, and the option numerics asks for them",
        observed=", ".join(differing),
        node=f"{node.name} ({op_name(node)})",
        lever='leave out options={"numerics": "eager"}',
    )


def key_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The key of a call in the table: code for numbers of the program is other code than that for tensors."""
    numbers = any(isinstance(value, (int, float)) and type(value) is not bool for value in (*args, *kwargs.values()))
    kind = " scaled" if "alpha" in kwargs else " number" if numbers else ""  # eager's sums may fuse the product
    return f"{str(target).rpartition('.')[0]}{kind}"


def computes(node: Node) -> bool:
    """Whether an operator is more than a view."""
    return node.target is not operator.getitem and not is_view(node)


def _is_size(node: Node) -> bool:
    """Whether a node computes a size of sizes."""
    return isinstance(fake_value(node), torch.SymInt) and not any(
        isinstance(value, torch.SymFloat) or _of_data(value) for value in _values(node, *node.all_input_nodes)
    )


def called_by_code(node: Node, by: str) -> Reason | None:
    """Why generated code calls eager's kernel of an operator; None if it does not, or can't."""
    return inexact(node, by) if has_external_kernel(node) else None


def has_external_kernel(node: Node) -> bool:
    """Whether generated code can call eager's kernel of an operator.

    Not of one that is the program's, or of a collective, which may have effects; that writes to its operands; or that
    has sizes or numbers that only data decides.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    known = (torch.Tensor, torch.SymInt, int, float, type(None))
    made = tree_leaves(fake_value(node))
    return any(isinstance(value, torch.Tensor) for value in made) and all(
        isinstance(value, known) and not _of_data(value) and _is_plain(value)
        for value in (*made, *_values(*node.all_input_nodes))
    )


def _values(*nodes: Node) -> list[Any]:
    return tree_leaves(list(map(fake_value, nodes)))


def _of_data(value: Any) -> bool:
    """Whether it is, or has, a size that only data decides."""
    return isinstance(value, (torch.Tensor, torch.SymInt)) and bool(free_unbacked_symbols(value))


def _is_plain(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or (
        value.layout is torch.strided and not value.is_complex() and not value.is_quantized
    )


def _rounds_alike(tensors: list[Any]) -> bool:
    """Whether a cast has a result for each number: to an integer, too large ones are undefined."""
    made, *given = tensors
    return made.dtype.is_floating_point or not any(value.dtype.is_floating_point for value in given)
