"""An exact hash of a run of nodes: operators, arguments, dtypes, shapes, strides and devices, but no names.

A symbolic size matches all sizes, as its generated code does; any other size matches itself.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.symbols import expression
from omnicomp.analysis.nodes import fake_value, op_name

__all__ = ["exact_hash"]

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


class _Writer:
    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.numbers: dict[Node, int] = {}

    def add(self, *values: Any) -> None:
        self.hash.update(f"{','.join(map(self._text, values))}\n".encode())

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
        return self._text(value)

    def _text(self, value: Any) -> str:
        if isinstance(value, Node):
            known = self.numbers.get(value)
            if known is None:
                known = self.numbers[value] = len(self.numbers)
                inner = self.target(value) if value.op == "get_attr" else self._text(fake_value(value))
                return f"%{known}={inner}"
            return f"%{known}"
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"{type(value).__name__}({expression(value)})"
        if isinstance(value, (list, tuple)):
            return f"[{','.join(map(self._text, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self._text(item)}' for key, item in value.items())}}}"
        return f"{type(value).__name__}:{_ADDRESS.sub('', repr(value))}"


def _tensor(value: torch.Tensor) -> str:
    sizes = [str(expression(size)) for size in value.shape]
    if value.layout != torch.strided or value.is_nested:
        return f"{type(value).__name__}({value.dtype},{sizes},{value.layout},{value.device})"
    strides = [str(expression(stride)) for stride in value.stride()]
    return f"Tensor({value.dtype},{sizes},{strides},{expression(value.storage_offset())},{value.device})"
