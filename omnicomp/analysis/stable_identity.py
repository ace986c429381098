"""A hash of a subgraph that is stable across runs and machines.

`omnicomp.analysis.exact_hash` tells whether generated code may be shared. This hash leaves out the order of nodes,
numbers among the arguments, strides and the device's number; of a size it has the class for which kernels have code of
their own. So it is equal in other processes, on other machines and on other ranks.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from omnicomp.analysis.nodes import all_nodes, fake_value, op_name

__all__ = ["size_class", "stable_identities", "stable_identity"]

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


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
