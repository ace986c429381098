"""Inductor computes readers of a tensor too late, if an operator that it only calls writes to the tensor.

Inductor computes pointwise results when they are needed, and those that read a tensor when something writes to it. For
operators that it only calls, it does the second after it has put the call on its list, so that the readers come behind
the call: `a = b * 2; custom_op_(b)` makes `a` of what the operator left in `b`. A reproducer is
`tests/_torch/repairs/test_read_before_written.py`.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch._library.utils import zip_schema

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11")


def _reading_first(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor, before which what reads the buffers that the operator writes to is computed."""

    def init(self: Any, layout: Any, kernel: Any, tensor_args: Any, rest: Any, unflatten: Any, *more: Any, **kw: Any):
        if isinstance(kernel, torch._ops.OpOverload) and kernel._schema.is_mutable:
            for name in _names_written(kernel, *unflatten(tensor_args, rest)):
                for reader in V.graph.name_to_users.get(name, ()):
                    reader.realize()
        original(self, layout, kernel, tensor_args, rest, unflatten, *more, **kw)

    return init


_READERS: Final = Exchange(ir.FallbackKernel, "__init__", _reading_first)


def read_before_written() -> AbstractContextManager[None]:
    """While Inductor lowers a graph: what reads a tensor before an operator changes it is also computed before that."""
    return NEEDED.exchanging(_READERS)


def _names_written(operator: Any, args: Any, kwargs: Any) -> Generator[str]:
    """Names of the buffers that an operator writes to, among Inductor's nodes that it is called with."""
    for argument, value in zip_schema(operator._schema, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for leaf in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(leaf, ir.IRNode):
                    yield leaf.get_name()
