"""Copies of what a recorded CUDA graph returns, out of the memory that its next replay writes to."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._C._dynamo import guards

_guards: Final[Any] = guards  # whose functions are in no stub
# What generated code allocates by: a third of the time of `torch.empty_strided`.
_ALLOCATE: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "cuda": _guards._empty_strided_cuda,
    "cpu": _guards._empty_strided_cpu,
}

_PLANS: Final = 128


class PoolCopies:
    """Makes the copies for the calls of one graph with one combination of sizes.

    What lies where it did in an earlier call has the same layout, and it is known what to copy. Layers that share a
    graph have a recording each, whose outputs lie elsewhere.
    """

    def __init__(self) -> None:
        """Begin without any knowledge of the outputs."""
        self._plans: dict[tuple[int, ...], _Plan] = {}

    def copy_out(self, outputs: list[Any], visible: Iterable[int], owns: Callable[[int], bool]) -> int:
        """Put copies in the place of outputs that lie in the pool; what shares memory goes on sharing it.

        Args:
            outputs: of a call; they are changed.
            visible: the indices of those to copy.
            owns: whether memory belongs to the pool, by the address where its storage begins.

        Returns:
            The bytes that were copied.
        """
        tensors = [(index, outputs[index]) for index in visible if isinstance(outputs[index], torch.Tensor)]
        places = tuple(value.data_ptr() for _, value in tensors)
        plan = self._plans.get(places)
        if plan is None or any(owns(outputs[index].untyped_storage().data_ptr()) for index in plan.outside):
            if len(self._plans) >= _PLANS:  # what is not in the pool may lie elsewhere in each call
                self._plans.clear()
            plan = self._plans[places] = _Plan(tensors, owns)
        with torch.no_grad():
            return plan.copy(outputs)


class _Plan:
    """What of some outputs is copied, and how."""

    def __init__(self, tensors: Sequence[tuple[int, torch.Tensor]], owns: Callable[[int], bool]) -> None:
        self.outside: list[int] = []  # outputs that are not in the pool
        pooled: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for index, value in tensors:
            address = value.untyped_storage().data_ptr()
            if owns(address):
                pooled.setdefault(address, []).append((index, value))
            else:
                self.outside.append(index)
        self._size = 0
        self._shared: list[list[int]] = []  # outputs that are parts of one storage each
        # By dtype: outputs that are all of their storage, and the layouts of their copies.
        self._alone: dict[torch.dtype, tuple[list[int], list[tuple[Any, ...]]]] = {}
        for given in pooled.values():
            index, value = given[0]
            size = value.untyped_storage().nbytes()
            self._size += size
            whole = len(given) == 1 and value.numel() * value.element_size() == size
            if whole and torch.ops.aten.is_non_overlapping_and_dense(value):
                indices, layouts = self._alone.setdefault(value.dtype, ([], []))
                indices.append(index)
                layouts.append((tuple(value.shape), value.stride(), value.dtype))
            else:
                self._shared.append([index for index, _ in given])

    def copy(self, outputs: list[Any]) -> int:
        for indices, layouts in self._alone.values():
            allocate = _ALLOCATE[outputs[indices[0]].device.type]
            copies = [allocate(*layout) for layout in layouts]
            torch._foreach_copy_(copies, [outputs[index] for index in indices])
            for index, copy in zip(indices, copies, strict=True):
                outputs[index] = copy
        for indices in self._shared:
            storage = outputs[indices[0]].untyped_storage()
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
                storage, 0, (storage.nbytes(),), (1,)
            )
            copy = source.clone()
            for index in indices:
                outputs[index] = _view(copy, outputs[index])
        return self._size


def _view(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor laid out in a storage as another is in its own."""
    view = torch.empty(0, dtype=like.dtype, device=like.device)
    return view.set_(memory.untyped_storage(), like.storage_offset(), like.size(), like.stride())
