"""Calls of one body in a Dynamo graph: what may be in a body, and how AOTAutograd traces and returns it.

`invoke_subgraph` has a body traced once for all calls that name it alike. What was called stands behind autograd as
one graph and its calls again.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final
from unittest import mock

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.invoke_subgraph import get_invoke_subgraph_cache
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from omnicomp._torch.fx import fake_value, like
from omnicomp._torch.inductor.shared_code import KNOWN, PURE, draws, is_called_operator
from omnicomp._torch.repairs.needed import Exchange, Needed
from omnicomp._torch.user_code import raises

_INVOKE: Final = torch.ops.higher_order.invoke_subgraph
_CALL: Final = "omnicomp_call"
_KNOWN_MODULES: Final = ("torch", "_operator", "math", "builtins")
_FUNCTORCH: Final = ("torch._C._functorch", "torch._functorch", "torch.func")
_NO_STATE: Final = frozenset({"setitem", "_log_api_usage_once", "_check", "_assert", "_assert_async"})
_VARIES: Final = torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output


def sets_state(node: Node) -> bool:
    """Whether a node changes what those behind it mean, as autocast does: equal ones would be traced otherwise."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return False
    module = getattr(node.target, "__module__", None) or ""
    if module.startswith((*_FUNCTORCH, "torch.amp")):
        return True
    return fake_value(node) is None and getattr(node.target, "__name__", "") not in _NO_STATE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a node of a Dynamo graph does."""

    # Whether it depends on nothing but its inputs, and does nothing but return new tensors or views.
    is_pure: bool = False
    is_view: bool = False  # whether a result is in memory of what it takes, or is what it takes
    is_called: bool = False  # whether Inductor calls a kernel for it
    is_convolution: bool = False  # whether there is a convolution in it, for which Inductor may choose layouts
    returned_input: int | None = None  # the index of the input node whose tensor it returns as it is


def facts_of(node: Node) -> Facts:
    """Run a node on fake tensors like its operands, and see what it does.

    A node that may not be run, or writes to what it takes, is not pure. Values in the metadata do not tell what shares
    memory, as a pass may have replaced what they were computed from.
    """
    value, target = fake_value(node), node.target
    results = tree_leaves(value)
    operands = [each for source in node.all_input_nodes for each in tree_leaves(_operand(source))]
    if node.op not in ("call_function", "call_method") or not all(map(_is_known, (*results, *operands))):
        return Facts()
    if target is operator.getitem and not isinstance(fake_value(node.args[0]), torch.Tensor):
        return Facts(is_pure=True)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return Facts(is_pure=target in PURE, is_called=True)
    if node.op == "call_function" and not isinstance(target, torch._ops.OpOverload):
        module = getattr(target, "__module__", None) or type(getattr(target, "__self__", None)).__module__
        if not str(module).startswith(_KNOWN_MODULES):
            return Facts()
    mode = detect_fake_mode([*operands, *results])
    if mode is None:
        return Facts(is_pure=not any(isinstance(each, torch.Tensor) for each in tree_leaves(value)))
    environment = mode.shape_env
    with contextlib.ExitStack() as quiet:
        if environment is not None:
            quiet.enter_context(environment.suppress_guards())
            quiet.enter_context(environment.ignore_fresh_unbacked_symbols())
        quiet.enter_context(mode)
        quiet.enter_context(torch.no_grad())
        passed = {source: tree_map(like, _operand(source)) for source in node.all_input_nodes}
        args, kwargs = map_arg((node.args, node.kwargs), passed.__getitem__)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        versions = [each._version for each in tensors]
        seen = quiet.enter_context(_Recorded())
        call: Any = getattr(args[0], str(target)) if node.op == "call_method" else target
        made = call(*(args[1:] if node.op == "call_method" else args), **kwargs)
    written = any(each._version != version for each, version in zip(tensors, versions, strict=True))
    return Facts(
        is_pure=not written and seen.is_pure,
        is_view=not _memory(tensors).isdisjoint(_memory(made)),
        is_called=any(map(is_called_operator, seen.operators)),
        is_convolution=any("convolution" in str(each) for each in seen.operators),
        returned_input=next((index for index, each in enumerate(passed.values()) if each is made), None),
    )


def number_call(call: Node, number: int) -> None:
    """Have AOTAutograd's trace tell which call of a body a node is."""
    call.meta["custom"] = {**call.meta.get("custom", {}), _CALL: number}


def calls(module: GraphModule, prefix: str) -> list[tuple[Node, GraphModule, str, int]]:
    """The calls in a graph after autograd of bodies whose names begin so: the body, its name, number of the call."""
    found: list[tuple[Node, GraphModule, str, int]] = []
    for node in module.graph.find_nodes(op="call_function", target=_INVOKE):
        fetched, name = node.args[:2]
        if isinstance(fetched, Node) and isinstance(name, str) and prefix in name:
            body = getattr(module, str(fetched.target))
            found.append((node, body, name[name.index(prefix) :], node.meta.get("custom", {}).get(_CALL, -1)))
    return found


@contextlib.contextmanager
def traced_anew() -> Generator[None]:
    """Inside, AOTAutograd knows no bodies of graphs that were traced before in the same compilation of Dynamo's."""
    tracing = TracingContext.try_get()
    if tracing is None:
        yield
        return
    with (
        mock.patch.object(tracing, "hop_dispatch_set_cache", type(tracing.hop_dispatch_set_cache)()),
        _NEEDED.exchanging(_SCHEMAS),
    ):
        yield


def _asked_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """The method that traces a body for what it writes to, which does so once for a body that is known."""

    def gen_schema(self: Any, body: Any, name: str, *operands: Any) -> Any:
        known = get_invoke_subgraph_cache()
        if known is None:
            return original(self, body, name, *operands)
        schemas = vars(known).setdefault("omnicomp_schemas", {})
        key = id(body), name, tuple(map(type, operands))
        if key not in schemas:
            schemas[key] = body, original(self, body, name, *operands)  # with the body, so that its id stays its own
        return schemas[key][1]

    return gen_schema


# Releases that trace a body anew for each call, to learn whether it writes to what it is given.
_NEEDED: Final = Needed(first="2.11", fixed="2.13")
_SCHEMAS: Final = Exchange(type(_INVOKE), "gen_schema", _asked_once)


def propagate(module: GraphModule, inputs: Sequence[Any]) -> None:
    """Compute the fake values of a graph after autograd anew, each in memory of its own."""
    mode = detect_fake_mode(list(inputs))
    if mode is not None:
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)


class _Recorded(TorchDispatchMode):
    """Notes the ATen operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []
        self.is_pure = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operators.append(func)
        known = func.namespace in (*KNOWN, "prim")  # fake tensors ask `prim::device`
        varies = any(tag in func.tags for tag in _VARIES) or raises(func) or draws(func, args, kwargs)
        self.is_pure = self.is_pure and known and not varies
        return func(*args, **kwargs)


def _is_known(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, int, GraphModule)) or _is_plain(value)


def _is_plain(value: Any) -> bool:
    if type(value) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
        return False
    return value.layout == torch.strided and not value.is_nested and not value.is_quantized


def _operand(node: Node) -> Any:
    if node.op == "get_attr":
        found = getattr(node.graph.owning_module, str(node.target), None)
        return found if isinstance(found, GraphModule) else fake_value(node)
    return fake_value(node)


def _memory(value: Any) -> set[int]:
    tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    return {each.untyped_storage()._cdata for each in tensors if torch._C._has_storage(each)}
