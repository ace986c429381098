"""Operators that Inductor's code calls as eager's kernels, on memory that is laid out as eager has it.

Inductor calls a kernel of eager's for what it can't generate code for, on operands in a layout that suits Inductor. The
bits of a result may depend on that: a sum adds up in the order of memory. Here what such a kernel reads, and what a
graph returns, has the strides that it has in eager. What only generated code reads may have any.
"""

import contextlib
import types
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final

import torch
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.dependencies import ReadWrites, StarDep
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ExternKernel, FallbackKernel, IRNode, TensorBox
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from omnicomp._torch.autograd.mutations import root
from omnicomp._torch.fx import fake_value
from omnicomp._torch.repairs.needed import Exchange
from omnicomp._torch.symbols import free_unbacked_symbols

_CARRIED: Final = "custom"  # what torch puts on the nodes that are traced from a node
_EAGER: Final = "omnicomp_eager"
_HELD: Final = "omnicomp_held"
_LAST: Final = "omnicomp_last_drawn"
_MODULES: Final[dict[str, Any]] = {"torch": torch, "torch._C._nn": torch._C._nn}  # type: ignore[attr-defined]


def call_eager(nodes: Iterable[Node]) -> None:
    """Have generated code call eager's kernels for operators, also once their graph was traced again."""
    for node in nodes:
        node.meta[_CARRIED] = {**node.meta.get(_CARRIED, {}), _EAGER: True}


def calls_eager(node: Node) -> bool:
    """Whether generated code is to call eager's kernel for a node."""
    return isinstance(node.target, torch._ops.OpOverload) and _EAGER in node.meta.get(_CARRIED, ())


def hold(graph: Graph) -> None:
    """Have what eager's kernels read, and what a graph returns, in memory as eager has it: of views, what they show."""
    for node in graph.nodes:
        if node.op == "output" or calls_eager(node):
            for held in (node, *map(root, node.all_input_nodes)):
                held.meta[_HELD] = True


def _lowered(original: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's lowering of a call, with ours of what `call_eager` and `hold` marked."""

    def call_function(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        node: Node = self.current_node
        if target is not node.target:  # a part of what a node is lowered to
            return original(self, target, args, kwargs)
        if calls_eager(node):
            return _external(self, node, args, kwargs)
        result = original(self, target, args, kwargs)
        if _HELD in node.meta and isinstance(result, TensorBox):
            result.realize()
            return _laid_out(result, fake_value(node))
        return result

    return call_function


def _returned(original: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's lowering of what a graph returns, in eager's strides if `hold` asked for that."""

    def output(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        node: Node = self.current_node
        return original(self, target, _like_eager(args, node.args) if _HELD in node.meta else args, kwargs)

    return output


class _EagerKernel(FallbackKernel):
    """A call of eager's kernel, by a name of the generated module: torch looks one up and checks it at each call."""

    called: str = ""  # a function of torch's that calls the operator; empty if there is none
    drawn_before: FallbackKernel | None = None  # what draws random numbers before this one does

    def get_read_writes(self) -> ReadWrites:
        reads_writes = super().get_read_writes()
        if self.drawn_before is not None:
            reads_writes.reads.add(StarDep(self.drawn_before.get_name()))
        return reads_writes

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        operator: Any = self.op_overload
        if type(wrapper) is PythonWrapperCodegen:
            full = str(self.python_kernel_name)
            name = f"{'eager' if self.called else 'dispatched'}_{operator._overloadname}_{operator._opname}"
            wrapper.add_import_once(f"{name} = {self.called}  # {full}" if self.called else f"{name} = {full}")
            self.python_kernel_name = name
        super().codegen(wrapper)


def _external(graph: Any, node: Node, args: Any, kwargs: Any) -> Any:
    """A call of eager's kernel; if it draws random numbers, behind all calls before it that do."""
    before, target = len(graph.operations), node.target
    assert isinstance(target, torch._ops.OpOverload)
    args, kwargs = _like_eager(args, node.args), _like_eager(kwargs, node.kwargs)
    result = _EagerKernel.create(target, *args, **kwargs)
    kernel = next(each for each in graph.operations[before:] if isinstance(each, _EagerKernel))
    kernel.called = _function_of(target, *map_arg((node.args, node.kwargs), fake_value))
    if torch.Tag.nondeterministic_seeded in target.tags:
        kernel.drawn_before = getattr(graph, _LAST, None)
        setattr(graph, _LAST, kernel)
    return tree_map(lambda each: TensorBox.create(each) if isinstance(each, IRNode) else each, result)


def _function_of(target: torch._ops.OpOverload, args: Any, kwargs: Any) -> str:
    """The function of torch's that calls an operator alone, and with these arguments, in a third of the time."""
    leaves = tree_leaves((args, kwargs))
    if not all(isinstance(leaf, FakeTensor) for leaf in leaves if isinstance(leaf, (torch.Tensor, torch.SymInt))):
        return ""
    for name, module in _MODULES.items():
        function = getattr(module, target._opname, None)
        if isinstance(function, types.BuiltinFunctionType):
            calls = _Calls()
            with V.graph.fake_mode, calls, contextlib.suppress(TypeError):  # of a signature that it does not have
                target(*args, **kwargs)
                function(*args, **kwargs)
            if len(calls.seen) == 2 and _alike(*calls.seen):
                return f"{name}.{target._opname}"
    return ""


class _Calls(TorchDispatchMode):
    """Notes which operators are called, with what."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, args, kwargs or {}))
        return func(*args, **kwargs or {})


def _alike(first: Any, second: Any) -> bool:
    (one, structure), (other, same) = tree_flatten(first), tree_flatten(second)
    return structure == same and all(
        a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b)
        for a, b in zip(one, other, strict=True)
    )


def _like_eager(values: Any, nodes: Any) -> Any:
    """Arguments as Inductor has them, in the strides that those of the graph have in eager."""
    return _in_strides(values, map_arg(nodes, fake_value))


def _in_strides(value: Any, like: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_in_strides(each, own) for each, own in zip(value, like, strict=True))
    if isinstance(value, dict):
        return {name: _in_strides(each, like[name]) for name, each in value.items()}
    return _laid_out(value, like) if isinstance(value, TensorBox) else value


def _laid_out(value: Any, like: torch.Tensor) -> Any:
    strides = like.stride()
    if not strides or any(map(free_unbacked_symbols, strides)):
        return value
    return ExternKernel.require_exact_strides(value, strides)


_CALLS: Final = Exchange(GraphLowering, "call_function", _lowered)
_OUTPUT: Final = Exchange(GraphLowering, "output", _returned)


@contextlib.contextmanager
def eager_kernels_called() -> Generator[None]:
    """Inside, Inductor lowers what is marked as `call_eager` and `hold` ask for it; on whatever thread."""
    with _CALLS, _OUTPUT:
        yield
