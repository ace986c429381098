"""Where Inductor's C++ kernels keep an intermediate of many rows in a buffer that has room for one.

Of loops over rows that follow each other, as in a softmax or its gradient, Inductor makes one loop with the inner loops
inside, and what only these use becomes a local buffer with the size of a row. If the loop over rows is vectorised, as
where a tensor is read with a stride, one step of it computes many rows, and each overwrites the one before.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.virtualized import V

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/185702")


def _without_tiles(original: Callable[..., bool]) -> Callable[..., bool]:
    """The method, which refuses to fuse loops where a local buffer would have to hold several rows."""

    def may_fuse(self: Any, kernels: Sequence[Any], depth: int) -> bool:
        if getattr(V.local_buffer_context, "local_buffers", None):
            outer = (loop for kernel in kernels for loop in kernel.loop_nest.loops[:depth])
            if any(loop.steps != 1 for loop in outer):
                return False
        return original(self, kernels, depth)

    return may_fuse


_FUSED: Final = Exchange(OuterLoopFusedSchedulerNode, "check_outer_fusion_loop_level_attr", _without_tiles)


def row_of_its_own() -> AbstractContextManager[None]:
    """Inside, loops are not fused where several rows would share a local buffer."""
    return NEEDED.exchanging(_FUSED)
