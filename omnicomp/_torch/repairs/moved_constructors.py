"""What a graph computes on the CPU from constants, and reads on a GPU, such as the indices of a table.

Inductor has it computed on the GPU, and where CUDA graphs are recorded, also numbers on the CPU that come in. There:

- torch 2.11 takes an operator on the CPU that reads numbers alone for one that runs on the GPU, so that what reads it
  stays on the CPU: each call waits for copies, and nothing is recorded.
- What a program returns, or its backward reads, is moved, too: it gets a tensor on another device than in eager.

And wherever it is moved: random numbers are those of the GPU's generator, also with `fallback_random`.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.fx_passes.post_grad import ConstructorMoverPass
from torch._inductor.utils import get_gpu_type
from torch.fx import Graph, Node
from torch.utils._ordered_set import OrderedSet

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11", fixed="2.12", issue="https://github.com/pytorch/pytorch/pull/176164")
OUTPUTS_NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/197088")
DRAWN_NEEDED: Final = Needed(first="2.11", fixed="2.13", issue="https://github.com/pytorch/pytorch/issues/151734")

_Find = Callable[[Any, Graph, list[Node]], OrderedSet[Node]]


def _on_the_device(original: Callable[[Any, Node], bool]) -> Callable[[Any, Node], bool]:
    """Whether an operator reads scalars and what is on the GPU alone, asked of operators on the GPU; of others, no."""

    def asked(self: Any, node: Node) -> bool:
        return self.is_on_target_device(node) and original(self, node)

    return asked


def _not_an_output(original: Callable[[Any, Node], bool]) -> Callable[[Any, Node], bool]:
    """Whether what a node reads cannot be moved, also where the node returns a tensor on the CPU.

    An input may be returned, as torch moves a copy of it; but torch 2.11 returns the copy.
    """

    def stays(self: Any, node: Node) -> bool:
        return original(self, node) or (node.op == "output" and any(map(returned, node.all_input_nodes)))

    def returned(value: Node) -> bool:
        tensor = value.meta.get("val")
        on_cpu = getattr(getattr(tensor, "device", None), "type", "") == "cpu"
        return on_cpu and (NEEDED.here or value.op != "placeholder")  # torch 2.11 returns the copy

    return stays


def _but_random(original: _Find) -> _Find:
    """The constructors that can be moved, of those that give the same numbers on each device."""

    def find(self: Any, graph: Graph, constructors: list[Node]) -> OrderedSet[Node]:
        return original(self, graph, _same_everywhere(constructors) if config.fallback_random else constructors)

    return find


def _same_everywhere(constructors: list[Node]) -> list[Node]:
    drawn = torch.Tag.nondeterministic_seeded
    return [node for node in constructors if drawn not in getattr(node.target, "tags", ())]


_READS: Final = Exchange(ConstructorMoverPass, "all_inputs_are_cpu_scalar_or_on_target_device", _on_the_device)
_STAYS: Final = Exchange(ConstructorMoverPass, "cannot_be_moved", _not_an_output)
_DRAWN: Final = Exchange(ConstructorMoverPass, "find_movable_constructors", _but_random)


@contextmanager
def constructors_moved() -> Generator[None]:
    """Inside, what Inductor can move to the GPU is moved there, and nothing else."""
    with NEEDED.exchanging(_READS), OUTPUTS_NEEDED.exchanging(_STAYS), DRAWN_NEEDED.exchanging(_DRAWN):
        yield


class _JointGraphMover(ConstructorMoverPass):
    """Torch's pass for a joint graph, whose outputs stay, and whose operators may name the CPU."""

    def cannot_be_moved(self, node: Node) -> bool:
        """Whether what a node reads stays; also where the node names the CPU itself."""
        named = not self.is_on_target_device(node) and node.kwargs.get("device") is not None
        return named or super().cannot_be_moved(node)

    def find_movable_constructors(self, graph: Graph, constructors: list[Node]) -> OrderedSet[Node]:
        """Those that give the same numbers on each device."""
        return super().find_movable_constructors(graph, _same_everywhere(constructors))


def move_constructors(graph: Graph, target: str | None = None) -> None:
    """Have a joint graph compute on the GPU what it computes from constants on the CPU and reads only on the GPU.

    Inductor does so in the forward and in the backward, once the devices of what is saved between them are settled.

    Args:
        graph: a joint graph of ATen's operators, with fake tensors; it is changed.
        target: the type of the device; None is Inductor's GPU.
    """
    before = {node: node.kwargs.get("device") for node in graph.nodes}
    _JointGraphMover(target or get_gpu_type())(graph)
    moved = {node: node.kwargs["device"] for node in graph.nodes if node.kwargs.get("device") != before[node]}
    for node in graph.nodes if moved else ():
        value = node.meta.get("val")
        device = moved.get(node) or next((moved[read] for read in node.all_input_nodes if read in moved), None)
        if device is not None and isinstance(value, Tensor) and value.device.type == "cpu":
            moved[node] = device
            with getattr(value, "fake_mode", None) or nullcontext():
                node.meta["val"] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
