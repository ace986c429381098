"""Tensors that depend on no input, computed while the graph is compiled.

Masks are often made by operators that index arithmetic does not know (`cumsum`, `diff`, a gather) from `arange` alone:
transformers looks for packed sequences in position ids that it made itself. If the result is one number everywhere,
that is what it means.
"""

import contextlib
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from omnicomp._torch.autograd.flex import on_real_tensors
from omnicomp.passes.attention.trace import Value

__all__ = ["uniform"]

_MOST_ELEMENTS: Final = 1 << 20
_MOST_OPERATORS: Final = 100


def uniform(value: Value) -> int | bool | None:
    """The number that every element of a tensor of integers or bools is, in every call; None if that is not known."""
    if value.fake.dtype.is_floating_point or value.fake.is_complex():
        return None
    order = _operators(value)
    if order is None:
        return None
    results: dict[int, Any] = {}
    with on_real_tensors(), contextlib.suppress(_UnknownError):
        for item in order:
            results[id(item)] = _compute(item, results)
        found = results[id(value)].unique()
        return found.item() if found.numel() == 1 else None
    return None


class _UnknownError(Exception):
    pass


def _operators(value: Value) -> list[Value] | None:
    """The values that `value` is made of, operands first; None if one is an input, random, large or symbolic."""
    order: list[Value] = []
    seen: set[int] = set()

    def visit(item: Value) -> bool:
        if id(item) in seen:
            return True
        seen.add(id(item))
        op = item.op
        if op is None or op.target is None or len(seen) > _MOST_OPERATORS:
            return False
        if torch.Tag.nondeterministic_seeded in op.target.tags:
            return False
        leaves = tree_leaves((op.args, dict(op.kwargs), list(item.fake.shape)))
        if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
            return False
        if item.fake.numel() > _MOST_ELEMENTS or not all(visit(v) for v in op.inputs):
            return False
        order.append(item)
        return True

    return order if visit(value) else None


def _compute(item: Value, results: dict[int, Any]) -> Any:
    op = item.op
    assert op is not None
    get = lambda leaf: results[id(leaf)] if isinstance(leaf, Value) else leaf  # noqa: E731
    kwargs = {name: tree_map(get, given) for name, given in op.kwargs.items()}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    result = op.target(*tree_map(get, tuple(op.args)), **kwargs)
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if item.index >= len(tensors):
        raise _UnknownError
    return tensors[item.index]
