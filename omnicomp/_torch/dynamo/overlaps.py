"""Inputs that share memory, in graphs that write to inputs.

AOTAutograd makes of such a graph what is right for the inputs that overlap when it is compiled. torch guards on that
only with dynamic sizes, and only among inputs of one storage: a later call whose inputs overlap otherwise, or not at
all, gets wrong values. And where a graph returns views of inputs that overlap, it makes them of the wrong view, and
raises. `tests/backend/test_shared_memory.py` is the reproducer, with torch 2.11 to 2.13.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node

from omnicomp import records

_MOST: Final = 16  # inputs to look at in each call


@records.dataclass(frozen=True)
class Sharing:
    """How the inputs share memory that a graph was compiled for."""

    # Positions of the inputs that might overlap with one that is written to; empty if none might.
    compared: tuple[int, ...]
    overlapping: Mapping[int, Any]  # positions of those that do, and where each begins in its storage
    returned: bool  # whether the graph returns views of those

    def holds(self, arguments: Sequence[Any]) -> bool:
        """Whether the inputs of a call share memory as those did."""
        tensors = [arguments[i] for i in self.compared]
        if not self.overlapping and len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors):
            return True
        found = _overlapping(dict(zip(self.compared, tensors, strict=True)))
        return found == self.overlapping


def sharing_of(gm: GraphModule) -> Sharing:
    """How the inputs of a graph share memory, as far as the graph writes to it.

    Weights and buffers of a module are taken not to be among the other inputs, and inputs of another dtype or device
    than all that is written to not to overlap with that. More than a few inputs, as of an optimizer, are not compared.
    """
    nodes = gm.graph.find_nodes(op="placeholder")
    values = {i: node.meta["example_value"] for i, node in enumerate(nodes) if _plain(node)}
    # Dynamo ran the graph's writes on these.
    written = [i for i, value in values.items() if value._version]
    kinds = {(values[i].dtype, values[i].device) for i in written if not _is_state(nodes[i])}
    compared = tuple(
        i for i, value in values.items() if (value.dtype, value.device) in kinds and not _is_state(nodes[i])
    )
    if not 2 <= len(compared) <= _MOST:
        return Sharing((), {}, False)
    changing = {_storage(values[i]) for i in written}
    overlapping = _overlapping({i: values[i] for i in compared if _storage(values[i]) in changing})
    shared = {_storage(values[i]) for i in overlapping}
    results = [_storage(n.meta["example_value"]) for n in gm.graph.output_node().all_input_nodes if _plain(n)]
    return Sharing(compared, overlapping, bool(shared.intersection(results)))


def _overlapping(tensors: Mapping[int, Any]) -> dict[int, Any]:
    """Those of some tensors that overlap with another one, and where each begins in its storage."""
    groups: dict[int, list[int]] = {}
    for i, tensor in tensors.items():
        groups.setdefault(_storage(tensor), []).append(i)
    found: dict[int, Any] = {}
    for group in groups.values():
        if len(group) > 1:
            members = [tensors[i] for i in group]
            with _unguarded(members[0]):
                sizes = (s for t in members for s in (*t.shape, *t.stride(), t.storage_offset()))
                symbolic = any(isinstance(size, torch.SymInt) for size in sizes)
                indices = compute_overlapping_tensors(members, symbolic=symbolic)
                found.update((group[i], int(members[i].storage_offset())) for i in indices)
    return found


def _unguarded(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    shapes = tensor.fake_mode.shape_env if isinstance(tensor, FakeTensor) else None
    return contextlib.nullcontext() if shapes is None else shapes.suppress_guards()


def _plain(node: Node) -> bool:
    value = node.meta.get("example_value")
    return type(value) is FakeTensor and value.layout is torch.strided


def _is_state(node: Node) -> bool:
    source = getattr(node.meta.get("grapharg"), "source", None)
    return source is not None and source.guard_source.is_unspecialized_nn_module()


def _storage(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata
