"""Code that a generated module calls several times: `invoke_subgraph` in a graph after autograd, lowered by Inductor.

Inductor lowers the graph that is invoked once, and makes one function of it. It takes what a call returns for memory of
its own, and what it is given for laid out like the fake values of the first call.
"""

import contextlib
import operator
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final

import torch
import torch._inductor.config
from torch._higher_order_ops.effects import with_effects
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.fx_utils import get_node_storage
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import fallbacks
from torch._inductor.virtualized import V
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from omnicomp._torch.autograd import mutations
from omnicomp._torch.fx import all_nodes, submodules
from omnicomp._torch.repairs.needed import Exchange
from omnicomp._torch.user_code import OURS

_aten: Final = torch.ops.aten
_CALLED: Final = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
        torch.ops.higher_order.flex_attention,
        torch.ops.higher_order.flex_attention_backward,
    }
)
PURE: Final = frozenset({torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward})
KNOWN: Final = ("aten", "prims", "inductor", *OURS)
_EARLY_PASSES: Final = ("pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass")
_LATE_PASSES: Final = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")
_SEEDED: Final = torch.ops.prims.inductor_lookup_seed.default


def is_called(node: Node) -> bool:
    """Whether Inductor calls a kernel for an operator, which it fuses with nothing unless it tunes."""
    return is_called_operator(node.target)


def is_called_operator(target: Any) -> bool:
    """The same of an operator."""
    return (
        target in _CALLED
        or target in fallbacks
        or (isinstance(target, OpOverload) and target.namespace not in ("aten", "prims", "inductor"))
    )


def is_seed(node: Node) -> bool:
    """Whether a node takes one of the seeds of a graph, by its number."""
    return node.target is _SEEDED


def is_movable(node: Node) -> bool:
    """Whether an operator depends on nothing but its inputs, and does nothing but return new tensors or views."""
    target: Any = node.target
    if target is operator.getitem:
        return True
    if isinstance(target, HigherOrderOperator):
        return target in PURE
    if not isinstance(target, OpOverload):
        return not isinstance(node.meta.get("val"), torch.Tensor)  # arithmetic on sizes
    if target._schema.is_mutable or draws(target, node.args, node.kwargs) or node.is_impure():
        return False
    return target.namespace in KNOWN and not node.meta.get("unbacked_bindings")


def draws(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for index, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given != 0
    return True


def is_view(node: Node) -> bool:
    """Whether the result of an operator is in the memory of its first argument, whatever its schema says of it.

    `_unsafe_view` says nothing.
    """
    if mutations.is_view(node):
        return True
    storage = get_node_storage(node)
    return storage is not None and any(get_node_storage(source) == storage for source in node.all_input_nodes)


def unshareable(module: GraphModule, *, before_autograd: bool = False) -> str:
    """Why no code of a graph can be called twice, or an empty text."""
    config: Any = torch._inductor.config
    passes = _LATE_PASSES + _EARLY_PASSES if before_autograd else _LATE_PASSES
    if config.cpp_wrapper or config.fx_wrapper:
        return "the C++ wrapper of generated code calls no functions"
    if config.freezing:
        return "weights are constants of the code"
    if config.max_autotune or config.max_autotune_gemm:
        return "autotuned kernels may be fused with what is around them"
    if any(getattr(config, each) is not None for each in passes):
        return "a pass of the program's would see the graph in pieces"
    if any(node.target is with_effects for node in all_nodes(module)):
        return "the graph has effects that are in order"
    return ""


def wants_layouts(module: GraphModule, *, is_inference: bool) -> bool:
    """Whether Inductor chooses layouts of its own for the convolutions of a graph."""
    return bool(GraphLowering.decide_layout_opt(module, is_inference=is_inference))


def is_convolution(node: Node) -> bool:
    """Whether a node of a graph after autograd is a convolution, or the backward of one."""
    return node.target in (_aten.convolution.default, _aten.convolution_backward.default)


def has_constants(module: GraphModule) -> bool:
    """Whether a graph fetches tensors of its own."""
    return any(
        node.op == "get_attr" and not isinstance(getattr(module, str(node.target), None), GraphModule)
        for node in module.graph.nodes
    ) or any(map(has_constants, submodules(module)))


def invoke(name: Node, identifier: str, operands: Sequence[Node], value: Any) -> Node:
    """Insert a call of a graph that `name` fetches, in front of where the graph of `name` inserts."""
    node = name.graph.call_function(torch.ops.higher_order.invoke_subgraph, (name, identifier, *operands))
    node.meta["val"] = value
    return node


def _compared(original: Callable[..., None]) -> Callable[..., None]:
    """The method, which compares what a call is given with what the function was generated for."""

    def codegen_invoke_subgraph(self: Any, call: Any) -> None:
        graph = call.subgraph.graph
        for name, given in zip(graph.graph_input_names, call.inputs, strict=True):
            wanted = graph.graph_inputs[name]
            if isinstance(wanted, ir.TensorBox) and _layout(given) != _layout(wanted):
                laid_out = f"{_layout(given)} and not {_layout(wanted)}"
                raise RuntimeError(f"{graph.name} is called with {name} laid out as {laid_out}")
        before = getattr(_called, "name", "")
        _called.name = graph.name
        try:
            original(self, call)
        finally:
            _called.name = before

    return codegen_invoke_subgraph


def _not_asserted(original: Callable[..., None]) -> Callable[..., None]:
    """The method, which has a function that is called assert nothing of its inputs: the layouts were compared."""

    def codegen_input_size_asserts(self: Any) -> None:
        if self.subgraph_name != getattr(_called, "name", ""):
            original(self)

    return codegen_input_size_asserts


def _layout(value: Any) -> list[tuple[Any, Any]]:
    """Sizes and strides; the stride of a single element says nothing, and none does where there are no elements."""
    sizes, strides = (list(map(V.graph.sizevars.simplify, each)) for each in (value.get_size(), value.get_stride()))
    empty = 0 in sizes
    return [(size, None if empty or size == 1 else step) for size, step in zip(sizes, strides, strict=True)]


_called: Final = threading.local()
_CALLS: Final = Exchange(PythonWrapperCodegen, "codegen_invoke_subgraph", _compared)
_ASSERTS: Final = Exchange(SubgraphPythonWrapperCodegen, "codegen_input_size_asserts", _not_asserted)


@contextlib.contextmanager
def calls_compared() -> Generator[None]:
    """Inside, generated code compares layouts with those that a function was made for once, and not in each call.

    A Llama of 12 small layers took 0.92 of the host's time in a training step without the asserts (two CPU cores).
    """
    with _CALLS, _ASSERTS:
        yield
