"""What a graph computes on the CPU from constants, and reads on a GPU, such as the indices of a table.

Inductor has it computed on the GPU. Where CUDA graphs are recorded, torch 2.11 takes an operator on the CPU that reads
scalars alone for one that runs on the GPU, so that what reads it stays on the CPU: each call waits for copies, and
nothing is recorded.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from torch._inductor.fx_passes.post_grad import ConstructorMoverPass
from torch.fx import Node

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11", fixed="2.12", issue="https://github.com/pytorch/pytorch/pull/176164")


def _on_the_device(original: Callable[[Any, Node], bool]) -> Callable[[Any, Node], bool]:
    """Whether an operator reads scalars and what is on the GPU alone, asked of operators on the GPU; of others, no."""

    def asked(self: Any, node: Node) -> bool:
        return self.is_on_target_device(node) and original(self, node)

    return asked


_READS: Final = Exchange(ConstructorMoverPass, "all_inputs_are_cpu_scalar_or_on_target_device", _on_the_device)


def constructors_moved() -> AbstractContextManager[None]:
    """Inside, what Inductor can move to the GPU is moved there."""
    return NEEDED.exchanging(_READS)
