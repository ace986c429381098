"""The layout that AOTAutograd expects of the gradients of a graph's results."""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, Final

import torch
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

from omnicomp._torch.repairs.needed import Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/177812")


@contextlib.contextmanager
def tangents_without_overlap() -> Generator[None]:
    """While AOTAutograd traces: expect contiguous gradients for results whose positions share memory.

    It expects the gradient of a result to have the result's strides, and copies one that has others into memory of
    those. If positions of the result share memory, as in `x.sin().unfold(0, 4, 2)`, the gradients of these positions
    are written over each other, and the last one counts for all. torch 2.13 repaired that for expanded
    dimensions alone.
    """
    schema: Any = MemoryFormatMeta
    original = schema.from_tensor

    def from_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        expected = original(tensor, *args, **kwargs)
        if expected is None or expected.stride is None or not may_overlap(tensor.shape, expected.stride):
            return expected
        return MemoryFormatMeta(memory_format=torch.contiguous_format)

    # The compile lock is held, so nothing else is compiled meanwhile.
    schema.from_tensor = staticmethod(from_tensor)
    try:
        yield
    finally:
        schema.from_tensor = staticmethod(original)


def may_overlap(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two positions of a tensor can't be told to have memory of their own.

    They have if each stride, from the smallest on, goes beyond all that the smaller ones reach. Some interleaved
    layouts without overlap don't pass this; nothing is lost but a guess.
    """
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size != 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
