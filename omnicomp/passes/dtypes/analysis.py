"""What the dtype pass must know of a graph before it changes a dtype in it: writes, scopes, exact integers, angles."""

import itertools
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from omnicomp._torch.dtypes import storage_key, was_written, writes_or_aliases
from omnicomp.analysis.nodes import fake_value, op_name
from omnicomp.passes.dtypes.operators import is_cast, kind, source, tensors

_WIDE_INTEGERS: Final = frozenset((torch.int16, torch.int32, torch.int64))
_FLOATS: Final = frozenset((torch.bfloat16, torch.float16, torch.float32))
_TO_FLOAT32: Final = frozenset((torch.bfloat16, torch.float16))


class Scopes:
    """Which state of grad mode, autocast and such each node of a graph runs under.

    Attributes:
        number: a number for that state, by node.
        entered: for a node inside `torch.autocast` or a functorch transform, the node that enters the outermost one.
    """

    def __init__(self, module: GraphModule) -> None:
        self.number: dict[Node, int] = {}
        self.entered: dict[Node, Node] = {}
        opened: list[Node] = []
        number = 0
        for node in module.graph.nodes:
            name = op_name(node).rpartition(".")[2] if node.op == "call_function" else ""
            if name == "_enter_autocast" or name.endswith("_increment_nesting"):
                opened.append(node)
            elif opened and (name == "_exit_autocast" or name.endswith("_decrement_nesting")):
                opened.pop()
            # _set_grad_enabled, _enter_inference_mode, …: a call for its effect alone, on no tensor, and no assertion.
            if name and fake_value(node) is None and not any(map(tensors, node.all_input_nodes)):
                number += not name.startswith(("_check", "_assert"))
            self.number[node] = number
            if opened:
                self.entered[node] = opened[0]


def storages(node: Node) -> set[int]:
    """The identities of the fake storages of a node's value: views share them."""
    return {key for key in map(storage_key, tensors(node)) if key is not None}


def changed_storages(module: GraphModule) -> set[int]:
    """Storages that the graph writes to."""
    changed: set[int] = set()
    for node in module.graph.nodes:
        if any(map(was_written, tensors(node))):
            changed |= storages(node)
    # Dropout outside of training returns its operand itself, which its fake implementation doesn't tell.
    aliases = [n for n in module.graph.nodes if "dropout" in op_name(n) and n.args and isinstance(n.args[0], Node)]
    for node in itertools.chain(aliases, reversed(aliases)):
        both = storages(node) | storages(node.args[0])
        if not changed.isdisjoint(both):
            changed |= both
    return changed


def is_floating_work(node: Node, device: str) -> bool:
    """Whether the node computes floating-point tensors of at most 32 bits from such tensors, on the device."""
    if not kind(node) or not node.kwargs.keys().isdisjoint(("out", "out_dtype")):
        return False
    operands = [fake_value(operand) for operand in node.all_input_nodes]
    results = tensors(node)
    if any(operand is None for operand in operands) or not all(value.is_floating_point() for value in results):
        return False
    computed = [v for v in tree_leaves(operands) if isinstance(v, torch.Tensor)]
    computed = [v for v in computed if v.is_floating_point() or v.is_complex()]
    return (
        bool(computed and results)
        and all(v.dtype in _FLOATS and v.layout is torch.strided for v in (*results, *computed))
        and all(v.device.type == device for v in (*results, *computed))
        and _multiplies(node)
    )


def is_plain_call(node: Node) -> bool:
    """Whether the operator makes new tensors of its operands and leaves these as they are, with no dtype given to it.

    Only such an operator means the same in another dtype: a view has nothing to compute, a write has to reach what is
    written to, such as the running statistics of a normalisation, and a dtype in the call is the user's choice.
    """
    if any(isinstance(v, torch.dtype) for v in tree_leaves((node.args, dict(node.kwargs)))) or is_cast(node):
        return False
    if node.meta.get("unbacked_bindings") or kind(node).endswith("_") or _updates_statistics(node):
        return False
    value = fake_value(node)
    if isinstance(value, (tuple, list)) and not all(
        kind(user) == "getitem" and isinstance(user.args[1], int) for user in node.users
    ):
        return False
    target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
    args, kwargs = map_arg((node.args, dict(node.kwargs)), fake_value)
    return not writes_or_aliases(target, args, kwargs)


def _updates_statistics(node: Node) -> bool:
    """Whether a normalisation writes to running statistics, which its schema and its fake implementation hide."""
    if kind(node) not in ("batch_norm", "instance_norm"):
        return False
    named = (node.kwargs.get("training"), node.kwargs.get("use_input_stats"))
    training = node.args[5] if len(node.args) > 5 else next((v for v in named if v is not None), False)
    running = node.args[1] if len(node.args) > 1 else node.kwargs.get("running_mean")
    return isinstance(running, Node) and training is not False


def wide_cast(value: Node) -> Node | None:
    """The user's own cast of half precision to float32 that an operand is, or is a view of.

    A cast to the dtype that a value has already tells nothing: Dynamo shows `x.to(y.dtype)` as one. `x.float()` does.
    """
    before: Node | None = value
    while before is not None:
        if is_cast(before) and all(v.dtype is torch.float32 for v in tensors(before)):
            came = tensors(before.args[0]) if before.args and isinstance(before.args[0], Node) else []
            if came and came[0].is_floating_point() and (kind(before) == "float" or came[0].dtype in _TO_FLOAT32):
                return before
        value, before = before, source(before)
    return None


def exactness(node: Node) -> Node | None:
    """The node for which the operator needs float32: it computes angles, such as RoPE's positions times frequencies.

    A half-precision number has 8 or 11 bits: a position of some thousands, or an angle of some thousand radians, would
    be off by whole turns.
    """
    return next(filter(None, map(_integers, node.all_input_nodes)), None) or _angle(node)


def _multiplies(node: Node) -> bool:
    """Whether products are summed up, for an einsum: a transposition or an outer product has nothing to gain."""
    if kind(node) != "einsum":
        return True
    equation = node.args[0]
    if not isinstance(equation, str) or "," not in equation:
        return False
    inputs, arrow, output = equation.partition("->")
    return not arrow or bool(set(inputs) - set(output) - set(" ,."))


def _integers(value: Node) -> Node | None:
    """The conversion of integers to float32 that an operand comes from."""
    before = source(value)
    while before is not None:
        value, before = before, source(before)
    operands = [leaf for node in value.all_input_nodes for leaf in tensors(node)]
    converted = bool(operands) and value.op.startswith("call_") and all(v.dtype in _WIDE_INTEGERS for v in operands)
    floating = any(v.is_floating_point() for v in tensors(value))
    return value if (converted and floating) or kind(value) == "arange" else None


def _angle(node: Node) -> Node | None:
    """The sine or cosine that reads a result, also scaled by a number."""
    seen: set[Node] = set()
    open_nodes = [node]
    while open_nodes:
        value = open_nodes.pop()
        for user in value.users:
            name = kind(user)
            if name in ("sin", "cos", "polar"):
                return user
            scaled = name in ("mul", "div", "truediv") and len(user.all_input_nodes) == 1
            if user not in seen and (scaled or name in ("cat", "concat") or source(user) is not None):
                seen.add(user)
                open_nodes.append(user)
    return None
