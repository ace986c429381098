"""What graphs do beside computing values: collectives, and the dtypes, devices and strides of their outputs."""

from collections import Counter
from collections.abc import Collection
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.fx import all_nodes, copy_module, fake_value, submodules
from omnicomp.analysis.certify import certificate as c
from omnicomp.analysis.certify.sizes import base_name
from omnicomp.analysis.certify.structure import is_in_order
from omnicomp.analysis.collectives import collectives_of

_CASTS: Final = ("to", "_to_copy", "convert_element_type", "float", "half", "bfloat16", "double", "type", "type_as")


def compared(before: GraphModule, after: GraphModule, assumed: Collection[str], differences: list[c.Difference]) -> str:
    """What one graph does and the other does not, or an empty text; strides that differ are added to `differences`."""
    names = [[node.name for node in module.graph.find_nodes(op="placeholder")] for module in (before, after)]
    if len(names[0]) != len(names[1]):
        return f"{len(names[0])} placeholders became {len(names[1])}"
    collectives = [collectives_of(module) for module in (before, after)]
    if collectives[0] != collectives[1]:
        return f"the collectives {list(collectives[0])} became {list(collectives[1])}"
    for index, (a, b) in enumerate(zip(*map(_outputs, (before, after)), strict=False)):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            continue
        if a.dtype != b.dtype:
            detail = f"the dtype {a.dtype} of output {index} became {b.dtype}"
            if c.DTYPES not in assumed or _kind(a.dtype) != _kind(b.dtype):
                return detail
            differences.append(c.Difference(kind=c.DTYPES, detail=detail, covered=True))
        if a.device != b.device:
            return f"the device {a.device} of output {index} became {b.device}"
        if a.ndim == b.ndim and any(
            not isinstance(x, torch.SymInt) and not isinstance(y, torch.SymInt) and x != y and size != 1
            for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True)
        ):
            detail = f"the strides {tuple(a.stride())} of output {index} became {tuple(b.stride())}"
            differences.append(c.Difference(kind=c.STRIDES, detail=detail, covered=c.STRIDES in assumed))
    return ""


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "truth"
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "whole"


def _outputs(module: GraphModule) -> list[Any]:
    (output,) = module.graph.find_nodes(op="output")
    return [fake_value(leaf) if isinstance(leaf, Node) else leaf for leaf in tree_leaves(output.args[0])]


def reads_blocks(module: GraphModule) -> bool:
    """Whether a graph calls FlexAttention, whose block mask is not compared with its predicate."""
    return any(getattr(node.target, "__name__", "") == "flex_attention" for node in all_nodes(module))


def without_blocks(module: GraphModule) -> GraphModule:
    """The graph without the lists of blocks that FlexAttention is given, and what only makes them."""
    found = copy_module(module, lazy=True)
    for graph in (found, *submodules(found)):
        for node in graph.graph.nodes:
            if getattr(node.target, "__name__", "") == "flex_attention":
                *lists, predicate = node.args[4]
                lists = [None if isinstance(each, Node) else each for each in lists]
                node.args = (*node.args[:4], (*lists, predicate), *node.args[5:])
        graph.graph.eliminate_dead_code(is_impure_node=_counts)
    return found


def _counts(node: Node) -> bool:
    return node.op in ("placeholder", "output") or is_in_order(node)


def casts(module: GraphModule) -> Counter[str]:
    """How often a graph casts to which dtype."""
    found: Counter[str] = Counter()
    for node in all_nodes(module):
        if base_name(node) in _CASTS:
            value = fake_value(node)
            words = [each for each in (*node.args[1:], *node.kwargs.values()) if isinstance(each, torch.dtype)]
            kind = words[0] if words else value.dtype if isinstance(value, torch.Tensor) else base_name(node)
            found[str(kind)] += 1
    return found
