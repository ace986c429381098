"""Small kernels beside each other as one launch: Inductor's combo kernels, for graphs that are bound by launches.

Between two launches of a CUDA graph the device waits, 0.1 to 0.5 µs on H200s, and a kernel takes 1 µs however little it
does. A step of one token has several of them beside each other in each layer: rotary embeddings, and what is written to
the cache.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

from torch._inductor import config
from torch._inductor.scheduler import ForeachKernelSchedulerNode, FusedSchedulerNode, OutputNode, SchedulerNode
from torch.fx import GraphModule

from omnicomp._torch.inductor.triton_ops import REFERENCES

_Groups = list[list[Any]]
_SMALL: Final = 4096  # elements of what may be written at the end instead of where it can first be
_NODES: Final = 16  # of a kernel


@contextlib.contextmanager
def combined(module: GraphModule) -> Generator[None]:
    """Inside, kernels of a graph that calls operators of `triton_ops` are combined; those of others as configured."""
    if config.combo_kernels or not any(node.target in REFERENCES for node in module.graph.nodes):
        yield
        return
    group = functools.partial(grouped, ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels)
    with (
        config.patch(combo_kernels=True, combo_kernels_autotune=0),
        mock.patch.object(ForeachKernelSchedulerNode, "group_algorithm_for_combo_kernels", group),
    ):
        yield


def grouped(groups_of: Callable[[Any], _Groups], scheduler: Any) -> _Groups:
    """The groups of nodes that are to be one kernel: torch's without reductions, and those at the end of the graph.

    Torch groups what has as many nodes in front of it. What nothing reads, as the position of each layer's cache, can
    be written as late as all of its kind. Without autotuning a program of a combined kernel has 1024 rows, so that one
    multiprocessor alone reduced them: a norm of eight rows took 3 ms instead of 2 µs.
    """
    groups, ends = groups_of(scheduler), dict[Any, list[Any]]()
    streams: Mapping[Any, int] = getattr(scheduler, "node_to_stream", {})  # from torch 2.13 on
    for group in groups:
        for node in filter(_is_end, group):
            ends.setdefault((node.get_device(), streams.get(node, 0)), []).append(node)
    kept = [[node for node in group if not node.is_reduction() and not _is_end(node)] for group in groups]
    return [*kept, *(each[at : at + _NODES] for each in ends.values() for at in range(0, len(each), _NODES))]


def _is_end(node: Any) -> bool:
    """Whether a node writes a few elements on a GPU that no other node reads."""
    if not isinstance(node, (SchedulerNode, FusedSchedulerNode)) or isinstance(node, ForeachKernelSchedulerNode):
        return False
    if node.is_reduction() or node.is_template():
        return False
    device, own = node.get_device(), list[Any](node.get_nodes())
    if device is None or device.type != "cuda" or not all(_is_small(each.node.get_size()) for each in own):
        return False
    users = (user.node for output in node.get_outputs() for user in output.users)
    return all(isinstance(user, OutputNode) or user in own for user in users)


def _is_small(size: Sequence[Any]) -> bool:
    fixed = all(isinstance(each, int) or each.is_number for each in size)
    return fixed and math.prod(map(int, size)) <= _SMALL
