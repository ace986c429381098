"""Python functions as ATen operators in a graph after autograd, for what is to run without Python."""

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

_PLAIN = ("aten", "prims")


class InlineError(Exception):
    """A function is no composition of ATen operators; the message says why."""


class _NoMemory(TorchFunctionMode):
    """Refuses the address of a tensor, which is zero under a trace: C code that a function calls would crash."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("data_ptr", "const_data_ptr"):
            raise InlineError("it asks for the memory of a tensor")
        return func(*args, **(kwargs or {}))


def inline(node: Node, function: Callable[..., Any]) -> None:
    """Put what a function computes in the place of a node that calls it.

    Args:
        node: with fake values, in a graph after autograd; it is erased.
        function: takes the node's arguments.

    Raises:
        InlineError: its body can't be expressed so.
    """
    values = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda each: each.meta["val"])
    leaves, form = tree_flatten(values)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*given: torch.Tensor) -> Any:
        full = list(leaves)
        for index, value in zip(tensors, given, strict=True):
            full[index] = value
        args, kwargs = tree_unflatten(full, form)
        with _NoMemory():
            return function(*args, **kwargs)

    fakes = [leaves[index] for index in tensors]
    mode: Any = next((value.fake_mode for value in fakes if isinstance(value, FakeTensor)), None) or FakeTensorMode()
    environment: Any = mode.shape_env
    known = len(environment.guards) if environment is not None else 0
    try:
        with torch.no_grad(), mode:
            body = make_fx(torch.func.functionalize(call), decomposition_table=select_decomp_table())(*fakes)
    except InlineError:
        raise
    except Exception as error:
        raise InlineError(f"it can't be traced ({type(error).__name__}: {str(error).partition(chr(10))[0]})") from error
    if environment is not None and len(environment.guards) > known:
        raise InlineError(f"it is right for {environment.guards[-1].expr} alone")
    _check(body.graph, node)
    _splice(body.graph, node, tree_flatten((node.args, dict(node.kwargs)))[0], tensors)


def has_symbolic_sizes(node: Node) -> bool:
    """Whether a size of an argument may be another one in another call."""
    values = [each.meta["val"] for each in node.all_input_nodes]
    return any(isinstance(size, torch.SymInt) for value in tree_leaves(values) for size in getattr(value, "shape", ()))


def _check(body: Graph, node: Node) -> None:
    for each in body.nodes:
        if each.op == "get_attr":
            raise InlineError("it makes a tensor of Python's numbers, or reads one from outside")
        namespace = getattr(each.target, "namespace", "")
        if each.op == "call_function" and namespace not in _PLAIN and each.target.__module__ != "_operator":
            raise InlineError(f"it calls {each.target}")
        if each.op == "call_function" and each.target is torch.ops.aten.copy_.default:
            raise InlineError("it writes to an argument")
    made, expected = (tree_leaves(value) for value in (_returned(body), node.meta["val"]))
    made = [each.meta["val"] if isinstance(each, Node) else each for each in made]
    for one, other in zip(made, expected, strict=False):
        if isinstance(other, torch.Tensor) and (_facts(one) != _facts(other)):
            raise InlineError("its fake kernel tells other sizes, strides or dtypes than it returns")
    if len(made) != len(expected):
        raise InlineError("its fake kernel tells another number of results than it returns")


def _facts(value: Any) -> Any:
    return (value.dtype, value.device, str(tuple(value.shape)), str(value.stride())) if torch.is_tensor(value) else None


def _returned(graph: Graph) -> Any:
    return next(iter(reversed(graph.nodes))).args[0]


def _splice(body: Graph, node: Node, arguments: list[Any], tensors: list[int]) -> None:
    names = body.find_nodes(op="placeholder")
    known: dict[Node, Any] = {name: arguments[index] for name, index in zip(names, tensors, strict=True)}
    about = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
    with node.graph.inserting_before(node):
        for each in body.nodes:
            if each.op == "call_function":
                known[each] = node.graph.node_copy(each, known.__getitem__)
                known[each].meta = {**about, "val": each.meta["val"]}
    results: Any = torch.fx.map_arg(_returned(body), known.__getitem__)
    if not isinstance(results, (tuple, list)):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[_index(user)])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def _index(user: Node) -> int:
    index: Any = user.args[1]
    return int(index)


def lint(module: GraphModule) -> None:
    """Check and recompile a graph in which something was put in."""
    module.graph.lint()
    module.recompile()
