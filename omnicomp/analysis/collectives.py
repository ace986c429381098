"""The collectives of a graph: what the ranks of a process group have to do alike."""

from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from omnicomp.analysis.nodes import all_nodes, fake_value

_NAMESPACES: Final = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d",
    "c10d_functional",
    "_dtensor",
    "symm_mem",
)
_GROUPS: Final = ("group_name", "group", "pg_name", "pg", "process_group")
_ALONE: Final = ("wait_tensor", "_wrap_tensor_autograd", "isend", "irecv", "batch_p2p_ops")


def communicates(operator: Any) -> bool:
    """Whether an operator communicates: one of torch's collectives, or one that is told a process group by its name.

    The latter are custom operators that call collectives, such as those of torch's own context parallel.
    """
    schema = getattr(getattr(operator, "default", operator), "_schema", None)
    if schema is None:
        return False
    return schema.name.partition("::")[0] in _NAMESPACES or any(
        argument.name in _GROUPS and str(argument.type) in ("str", "Optional[str]") for argument in schema.arguments
    )


def collectives_of(module: GraphModule) -> tuple[str, ...]:
    """The collectives of a graph in program order, as `operator group arguments dtype[elements]`.

    The text has what the ranks of a group must have in common. Sizes that a rank may have of its own are left out, and
    so is what one rank sends to another.
    """
    return tuple(filter(None, map(_collective, all_nodes(module))))


def group_of(collective: str) -> str:
    """The name of the process group of a collective."""
    return collective.split(" ")[1]


def in_group(collective: str, group: str) -> str:
    """A collective with another word for its process group."""
    operator, _, rest = collective.split(" ", 2)
    return f"{operator} {group} {rest}"


def without_sizes(collective: str) -> str:
    """A collective without the number of elements."""
    return collective.partition("[")[0]


def groups_in(module: GraphModule) -> tuple[str, ...]:
    """The names of the process groups that a Dynamo graph communicates in."""
    return tuple(dict.fromkeys(map(group_of, collectives_of(module))))


def _collective(node: Node) -> str:
    target = getattr(node.target, "default", node.target)  # a Dynamo graph calls the packet
    schema = getattr(target, "_schema", None)
    name = str(target) if node.op == "call_function" else ""
    if not name or schema is None or not communicates(target) or name.split(".")[1] in _ALONE:
        return ""
    given = {**dict(zip((each.name for each in schema.arguments), node.args, strict=False)), **node.kwargs}
    group = next((value for key, value in given.items() if key in _GROUPS), None)
    group = getattr(group, "group_name", group)
    if not isinstance(group, str) or not group:
        return ""
    words = [str(value) for value in given.values() if isinstance(value, (str, int, float)) and value != group]
    tensors = [v for v in tree_leaves([fake_value(n) for n in node.all_input_nodes]) if isinstance(v, torch.Tensor)]
    sizes = ["" if isinstance(t.numel(), torch.SymInt) else str(t.numel()) for t in tensors]
    even = "all_to_all" not in name and all(sizes)
    kinds = ",".join(str(t.dtype).removeprefix("torch.") for t in tensors)
    return " ".join([name.split(".")[1], group, *words, f"{kinds}[{','.join(sizes) if even else ''}]"])
