"""Copies of what a recorded CUDA graph returns, out of the memory that its next replay writes to."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch


def copy_out(outputs: list[Any], visible: Iterable[int], owns: Callable[[int], bool]) -> int:
    """Put copies in the place of outputs that lie in the pool; what shares memory goes on sharing it.

    Returns:
        The bytes that were copied.
    """
    pooled: dict[int, list[int]] = {}
    for index in visible:
        value = outputs[index]
        if isinstance(value, torch.Tensor):
            address = value.untyped_storage().data_ptr()
            if owns(address):
                pooled.setdefault(address, []).append(index)
    sources: dict[torch.dtype, list[torch.Tensor]] = {}
    copies: dict[torch.dtype, list[torch.Tensor]] = {}
    copied = 0
    with torch.no_grad() if pooled else contextlib.nullcontext():
        for indices in pooled.values():
            first: torch.Tensor = outputs[indices[0]]
            storage = first.untyped_storage()
            copied += storage.nbytes()
            alone = len(indices) == 1 and first.numel() * first.element_size() == storage.nbytes()
            if alone and (first.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(first)):
                source = first
                copy = torch.empty_strided(first.size(), first.stride(), dtype=first.dtype, device=first.device)
                outputs[indices[0]] = copy
            else:
                source = torch.empty(0, dtype=torch.uint8, device=first.device).set_(
                    storage, 0, (storage.nbytes(),), (1,)
                )
                copy = torch.empty_like(source)
                for index in indices:
                    outputs[index] = _view(copy, outputs[index])
            sources.setdefault(source.dtype, []).append(source)
            copies.setdefault(copy.dtype, []).append(copy)
        for dtype, targets in copies.items():
            torch._foreach_copy_(targets, sources[dtype])
    return copied


def _view(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor laid out in a storage as another is in its own."""
    view = torch.empty(0, dtype=like.dtype, device=like.device)
    return view.set_(memory.untyped_storage(), like.storage_offset(), like.size(), like.stride())
