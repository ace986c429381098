"""Hashes of nodes: an exact one of what generated code depends on, and one that is stable across runs and machines."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.symbols import expression
from omnicomp.analysis.nodes import all_nodes, fake_value, op_name

# The address in a repr would make every process see another graph.
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def exact_hash(nodes: Sequence[Node], *, names: bool = False) -> str:
    """Hash of the content of a run of nodes.

    Args:
        nodes: neighbours in a graph after autograd, with `meta["val"]`; a whole graph's may contain its placeholders.
        names: whether the names of the nodes belong to it.

    Returns:
        64 hexadecimal digits; the same for runs that Inductor would build the same code for.
    """
    writer, members = _Writer(), set(nodes)
    for node in nodes:
        if node.op == "output":
            writer.add("output", node.args, node.meta.get("user_visible_output_idxs"))
            continue
        outside = any(user not in members for user in node.users)
        name = node.name if names else ""
        writer.add(name, node.op, writer.target(node), node.args, node.kwargs, fake_value(node), outside)
        writer.numbers[node] = len(writer.numbers)
    return writer.hash.hexdigest()


def node_text(node: Node) -> str:
    """What a node computes, whatever its name: operator, arguments, and what the operands and the result are like."""
    writer = _Writer(numbered=False)
    return ",".join([writer.target(node), *map(writer.text, (node.args, node.kwargs, fake_value(node)))])


class _Writer:
    def __init__(self, *, numbered: bool = True) -> None:
        self.hash = hashlib.sha256()
        self.numbers: dict[Node, int] = {}
        self._numbered = numbered

    def add(self, *values: Any) -> None:
        self.hash.update(f"{','.join(map(self.text, values))}\n".encode())

    def target(self, node: Node) -> str:
        if node.op == "placeholder":
            return ""
        if node.op == "get_attr":
            return self._attribute(node)
        return op_name(node)

    def _attribute(self, node: Node) -> str:
        value: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
        if isinstance(value, GraphModule):
            return exact_hash(list(value.graph.nodes))
        return self.text(value)

    def text(self, value: Any) -> str:
        if isinstance(value, Node):
            if not self._numbered:
                return f"%({self.target(value) if value.op == 'get_attr' else self.text(fake_value(value))})"
            known = self.numbers.get(value)
            if known is None:
                known = self.numbers[value] = len(self.numbers)
                inner = self.target(value) if value.op == "get_attr" else self.text(fake_value(value))
                return f"%{known}={inner}"
            return f"%{known}"
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"{type(value).__name__}({expression(value)})"
        if isinstance(value, (list, tuple)):
            return f"[{','.join(map(self.text, value))}]"
        if isinstance(value, slice):
            return f"slice{self.text((value.start, value.stop, value.step))}"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self.text(item)}' for key, item in value.items())}}}"
        return f"{type(value).__name__}:{_ADDRESS.sub('', repr(value))}"


def _tensor(value: torch.Tensor) -> str:
    sizes = [str(size if type(size) is int else expression(size)) for size in value.shape]
    if value.layout != torch.strided or value.is_nested:
        return f"{type(value).__name__}({value.dtype},{sizes},{value.layout},{value.device})"
    strides = [str(stride if type(stride) is int else expression(stride)) for stride in value.stride()]
    return f"Tensor({value.dtype},{sizes},{strides},{expression(value.storage_offset())},{value.device})"


def numbers_and_sizes(module: GraphModule) -> str:
    """Hash of what may differ in graphs of the same operators: numbers among the arguments, and sizes of the inputs.

    Devices and texts, such as the name of a process group, do not count.
    """
    writer = hashlib.sha256()
    for node in all_nodes(module):
        value = fake_value(node)
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            writer.update(f"{list(value.shape)}\n".encode())
        parts = [
            part
            for leaf in tree_leaves((node.args, node.kwargs))
            for part in ((leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,))
        ]
        numbers = [repr(part) for part in parts if isinstance(part, (bool, int, float, complex))]
        if numbers:
            writer.update(f"{op_name(node)} {' '.join(numbers)}\n".encode())
    return writer.hexdigest()[:12]


def stable_identity(nodes: Iterable[Node]) -> str:
    """Hash of the operators of some nodes and of the graphs that they call.

    Args:
        nodes: of a graph before or after autograd, with fake values in their `meta`.

    Returns:
        Twelve hexadecimal digits of a hash of how many of each operator there are with results of which dtypes and
        numbers of dimensions, a hyphen, and eight of a hash that counts the sizes as well: each as 0, 1, the power of
        two below it and whether it is a multiple of 16, or as symbolic.
    """
    return stable_identities(node for own in nodes for node in (own, *_called(own)))


def stable_identities(nodes: Iterable[Node]) -> str:
    """Like `stable_identity`, where the nodes of the graphs that they call are among the nodes."""
    kinds: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for node in nodes:
        if node.op.startswith("call_"):
            name = _ADDRESS.sub("", op_name(node))
            values = tree_leaves(fake_value(node))
            kinds[f"{name}({','.join(map(_kind, values))})"] += 1
            sizes[f"{name}({','.join(map(_sizes, values))})"] += 1
    return f"{_hash(kinds)[:12]}-{_hash(sizes)[:8]}"


def size_class(n: int) -> str:
    """The class of a size that kernels have other code for: 0, 1, or the power of two below; a star: 16 divides it."""
    if n in (0, 1):
        return str(n)
    return f"{'-' if n < 0 else ''}2^{abs(n).bit_length() - 1}{'' if n % 16 else '*'}"


def _called(node: Node) -> Iterator[Node]:
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            value: Any = node.graph.owning_module
            for name in str(source.target).split("."):
                value = getattr(value, name, None)
            if isinstance(value, GraphModule):
                yield from all_nodes(value)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}:{value.dim()}"
    return type(value).__name__.lower().removeprefix("sym")  # a size is a number, symbolic or not


def _sizes(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return "x".join(size_class(size) if type(size) is int else "s" for size in value.shape)


def _hash(counts: Counter[str]) -> str:
    return hashlib.sha256(repr(sorted(counts.items())).encode()).hexdigest()
