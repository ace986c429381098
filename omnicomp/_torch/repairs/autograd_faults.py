"""Where AOTAutograd is silently wrong: operators that it must not get, or not so, and a check that changes results.

Found by `bench/sweep_operators.py`, on torch 2.13; each has a sample in `tests/test_operators.py`.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Final

import torch
import torch._dynamo  # pyright: ignore[reportUnusedImport]  # the next line can't be imported before it
from torch._functorch._aot_autograd import runtime_wrappers
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch._library.utils import zip_schema
from torch.fx import GraphModule, Node

from omnicomp._torch.fx import all_nodes, submodules
from omnicomp._torch.repairs.method_patch import Exchange

__all__ = [
    "read_before_written",
    "return_inputs_of_dropout",
    "unobserved_first_call",
    "write_to_out",
]

_LOSES_OUT: Final = ("linalg_matrix_rank",)
_WITHOUT_RULE: Final = ("polygamma_",)
_WHENCE: Final = ("stack_trace", "nn_module_stack", "source_fn_stack")
_DROPOUTS: Final = (torch.nn.functional.dropout, torch.dropout, torch.ops.aten.dropout.default)
_BUILTIN: Final = ("aten", "prim", "prims")


def write_to_out(module: GraphModule) -> None:
    """Write results by a copy of their own where AOTAutograd does not write them, in a Dynamo graph.

    `linalg.matrix_rank(x, out=y)` leaves `y` as it was. That `y` has the result's shape is known: Dynamo breaks the
    graph where an `out` would be resized. `polygamma_` is refused, with the whole graph.
    """
    changed = False
    for node in list(all_nodes(module)):
        in_place = node.op == "call_method" and node.target in _WITHOUT_RULE
        out = node.args[0] if in_place else node.kwargs.get("out") if _name(node) in _LOSES_OUT else None
        if not isinstance(out, Node):
            continue
        target, args = node.target, node.args
        with node.graph.inserting_before(node):
            if in_place:
                # The gradient is that of what is overwritten.
                target, args = str(target).removesuffix("_"), (node.graph.call_method("clone", (out,)), *args[1:])
            others = {name: value for name, value in node.kwargs.items() if name != "out"}
            result = node.graph.create_node(node.op, target, args, others)
            written = node.graph.call_method("copy_", (out, result))
        for new in (result, written):
            new.meta.update({key: node.meta[key] for key in _WHENCE if key in node.meta})
        node.replace_all_uses_with(written)
        node.graph.erase_node(node)
        changed = True
    if changed:
        _recompile(module)


def _recompile(module: GraphModule) -> None:
    """Generate the code anew, also that of the graphs which higher-order operators call."""
    for child in submodules(module):
        _recompile(child)
    module.recompile()


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


def read_before_written() -> contextlib.AbstractContextManager[None]:
    """While Inductor lowers a graph: what reads a tensor before an operator changes it is also computed before that.

    Inductor computes pointwise results when they are needed, and those that read a tensor when something writes to it.
    For operators that it only calls, it does the second after it has put the call on its list, so that the readers come
    behind the call: `a = b * 2; custom_op_(b)` makes `a` of what the operator left in `b`. Torch 2.11 to 2.13.
    """
    return _READERS


def _names_written(operator: Any, args: Any, kwargs: Any) -> Generator[str]:
    """Names of the buffers that an operator writes to, among Inductor's nodes that it is called with."""
    for argument, value in zip_schema(operator._schema, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for leaf in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(leaf, ir.IRNode):
                    yield leaf.get_name()


def _is_custom(node: Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        return not target._qualified_op_name.startswith(tuple(f"{name}::" for name in _BUILTIN))
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in _BUILTIN
