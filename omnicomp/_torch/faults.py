"""Where AOTAutograd is silently wrong: operators that it must not get, or not so, and a check that changes results.

Found by `bench/sweep_operators.py`, on torch 2.13; each has a sample in `tests/test_operators.py`.
"""

import contextlib
from collections.abc import Generator
from typing import Any, Final

import torch
import torch._dynamo  # pyright: ignore[reportUnusedImport]  # the next line can't be imported before it
from torch._functorch._aot_autograd import runtime_wrappers
from torch.fx import GraphModule, Node

from omnicomp.errors import CompilerFaultError
from omnicomp.graphs import all_nodes, source_line

__all__ = ["refuse_known_faults", "return_inputs_of_dropout", "unobserved_first_call"]

_RESTRIDES: Final = ("as_strided_",)
_LOSES_OUT: Final = ("linalg_matrix_rank",)
_DROPOUTS: Final = (torch.nn.functional.dropout, torch.dropout, torch.ops.aten.dropout.default)
_BUILTIN: Final = ("aten", "prim", "prims")


def refuse_known_faults(module: GraphModule, *, training: bool) -> None:
    """Raise for a Dynamo graph whose results AOTAutograd gets wrong.

    Args:
        module: the graph.
        training: whether it will be differentiated.

    Raises:
        CompilerFaultError: it holds such an operator.
    """
    for node in all_nodes(module):
        name = _name(node)
        if training and name in _RESTRIDES:
            fault = "the gradient of as_strided_ where positions share memory"
        elif name in _LOSES_OUT and node.kwargs.get("out") is not None:
            fault = f"{name} with out=, whose result it does not write there"
        else:
            continue
        where = f" at {source_line(node)}" if source_line(node) else ""
        raise CompilerFaultError(f"AOTAutograd is known to be wrong about {fault}{where}; the graph runs eager")


def _name(node: Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.rpartition("::")[2]
    return getattr(node.target, "__name__", "")


def return_inputs_of_dropout(module: GraphModule) -> None:
    """Replace dropout that drops nothing by its input, in a Dynamo graph.

    Eager returns the input itself. AOTAutograd's decomposition returns a copy, so that what is written to the result
    afterwards would not reach the input. Graphs that higher-order operators call are left alone, as some of these
    operators forbid that a result is an input.
    """
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in _DROPOUTS and _drops_nothing(node):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()


def _drops_nothing(node: Node) -> bool:
    """Whether it is dropout out of place, of its first argument, with no probability or not in training."""
    given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | dict(node.kwargs)
    share, training = given.get("p", 0.5), given.get("training", given.get("train", True))
    return bool(node.args) and not given.get("inplace") and (training is False or (type(share) is float and share == 0))


@contextlib.contextmanager
def unobserved_first_call(module: GraphModule) -> Generator[None]:
    """While AOTAutograd compiles a graph of torch's operators: make its first call one like all later ones.

    It runs the first call under a dispatch mode that looks for custom operators whose results alias their inputs. Under
    any dispatch mode the operators that are made of others in C++ take another path, which forgets conjugations: the
    first `linalg.pinv` of a complex matrix would be wrong, and all later ones right. Graphs with operators of other
    libraries keep the check.
    """
    if any(map(_is_custom, all_nodes(module))):
        yield
        return
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
