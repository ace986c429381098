"""Reading and editing FX graphs: names of operators, the user's source lines, module paths, insertion of calls."""

import functools
import re
import types
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten

from omnicomp._torch.fx import all_nodes as all_nodes
from omnicomp._torch.fx import fake_value as fake_value
from omnicomp._torch.fx import submodules as submodules

SAME_VALUE: Final = "same_value"
"""In the metadata of a node to which a pass gave another operator: it has the value that the node of its name had.

What reads it is then compared apart from what computes it.
"""

_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+)')


def op_name(node: Node) -> str:
    """The operator of a node: `aten.mm.default`, `torch.matmul`, `Tensor.view`, or the op for other nodes."""
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    if node.op != "call_function":
        return f"{node.op}:{node.target}"
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", str(target))
    if getattr(torch.Tensor, name, None) is target:
        return f"Tensor.{name}"
    module = getattr(target, "__module__", None) or ""
    module = {
        "_operator": "operator",
        "torch._C._nn": "torch.nn.functional",
        "torch._C._VariableFunctions": "torch",
    }.get(module, module)
    if module.startswith("torch._VF"):
        module = "torch"
    return f"{module}.{name}" if module else name


def source_line(node: Node) -> str:
    """`file:line` of the innermost user frame that made the node, or an empty string."""
    trace = node.meta.get("stack_trace") or node.stack_trace
    return _line_of(trace) if trace else ""


@functools.lru_cache(maxsize=1024)
def _line_of(trace: str) -> str:
    # The nodes of a line, and of the layers of a model, have equal traces.
    frames = _FRAME.findall(trace)
    # The innermost frame is often torch.nn's own forward; the user looks for the line that called it.
    own = [frame for frame in frames if "/torch/nn/modules/" not in frame[0]]
    if not (own or frames):
        return ""
    file, line = (own or frames)[-1]
    return f"{file}:{line}"


def module_path(node: Node) -> str:
    """Qualified name of the module that the node came from, for example `model.layers.3.self_attn`, or empty."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    entry = list(stack.values())[-1]
    path = str(entry[0] if isinstance(entry, tuple) else entry)
    return plain_path(path)


@functools.lru_cache(maxsize=4096)
def plain_path(path: str) -> str:
    """Dynamo's name of a module or tensor as a qualified name: `layers.3.mlp` for `L['self'].layers[3].mlp`."""
    # Dynamo names the root by the variable that held it, L['self'] or G['model'], and keeps some indices in brackets.
    path = re.sub(r"^[LG]\['\w+'\]", "", path)
    kinds = "_(?:modules|parameters|buffers)"
    path = re.sub(rf"\.(?:{kinds}|__dict__\['{kinds}'\])\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return path.lstrip(".")


def function_name(nodes: Iterable[Node]) -> str:
    """The graph's first user function with its file and line, for example `forward (model.py:12)`, or empty."""
    for node in nodes:
        trace = node.meta.get("stack_trace") or node.stack_trace
        match = re.search(r'File "([^"]+)", line (\d+), in (\S+)', trace or "")
        if match:
            return f"{match[3]} ({match[1]}:{match[2]})"
    return ""


def call_count(module: GraphModule) -> int:
    """Number of operators in a graph, submodules of higher-order operators included."""
    own = sum(1 for node in module.graph.nodes if node.op.startswith("call_"))
    return own + sum(call_count(child) for child in submodules(module))


def insert_call(
    anchor: Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Node:
    """Insert a call before `anchor`, with its fake value computed and the metadata of `anchor` (source, module).

    Raises:
        Exception: whatever `target` raises on the fake values of its arguments.
    """
    kwargs = kwargs or {}
    value = evaluate(target, args, kwargs, like=fake_value(anchor))
    # A method as the target of a function call would keep AOTAutograd from caching the graph.
    method = isinstance(target, types.MethodDescriptorType) and getattr(torch.Tensor, target.__name__, None) is target
    with anchor.graph.inserting_before(anchor):
        if method:
            node = anchor.graph.call_method(target.__name__, args, kwargs)
        else:
            node = anchor.graph.call_function(target, args, kwargs)
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "custom"):
        if key in anchor.meta:
            node.meta[key] = anchor.meta[key]
    node.meta["example_value"] = value
    return node


def evaluate(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, like: Any = None) -> Any:
    """Run `target` on the fake values of its arguments, under the fake mode that those, or else `like`, belong to."""
    real_args = map_arg(args, fake_value)
    real_kwargs = map_arg(kwargs, fake_value)
    mode = _fake_mode((real_args, real_kwargs, like))
    if mode is None:
        return target(*real_args, **real_kwargs)
    with mode:
        return target(*real_args, **real_kwargs)


def _fake_mode(values: Any) -> Any:
    leaves, _ = tree_flatten(values)
    return next((leaf.fake_mode for leaf in leaves if hasattr(leaf, "fake_mode")), None)
