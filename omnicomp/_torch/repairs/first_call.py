"""The first call of a graph that AOTAutograd compiled is made under a dispatch mode, which changes results.

The mode looks for custom operators whose results alias their inputs. Under any dispatch mode, operators that are made
of others in C++ take another path, which forgets conjugations: the first `linalg.pinv` of a complex matrix is wrong,
and all later ones are right.
"""

import contextlib
from collections.abc import Generator
from typing import Any, Final

import torch
import torch._dynamo  # pyright: ignore[reportUnusedImport]  # the next line can't be imported before it
from torch._functorch._aot_autograd import runtime_wrappers
from torch.fx import GraphModule, Node

from omnicomp._torch.fx import all_nodes
from omnicomp._torch.repairs.needed import Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/198118")
_BUILTIN: Final = ("aten", "prim", "prims")


def has_custom_operators(module: GraphModule) -> bool:
    """Whether a graph has operators of other libraries than torch, which the dispatch mode is for."""
    return any(map(_is_custom, all_nodes(module)))


@contextlib.contextmanager
def unobserved_first_call() -> Generator[None]:
    """While AOTAutograd compiles a graph: make its first call without the dispatch mode, as all later ones."""
    context = runtime_wrappers._FirstInvocationContext
    original = context.__init__

    def init(self: Any) -> None:
        original(self)
        self._is_first = False

    # The compile lock is held, so nothing else is compiled meanwhile.
    context.__init__ = init
    try:
        yield
    finally:
        context.__init__ = original


def _is_custom(node: Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        return not target._qualified_op_name.startswith(tuple(f"{name}::" for name in _BUILTIN))
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in _BUILTIN
