"""Copies of arguments on another device, with their strides and shared tensors."""

from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["Transfer", "host", "kept"]


def kept(tensor: torch.Tensor, device: str | torch.device | None = None, *, whole: bool = False) -> torch.Tensor:
    """A detached copy with the same sizes and strides, also where elements overlap.

    Args:
        tensor: of any layout; a sparse one is copied by torch.
        device: where to; None is where it is.
        whole: whether the whole storage is copied, which a view of a view may look into, or what the tensor spans.
    """
    source = tensor.detach()
    target = source.device if device is None else torch.device(device)
    if source.layout is not torch.strided or type(source) is not torch.Tensor:
        return source.to(target) if source.device != target else source.clone()
    if source.is_conj() or source.is_neg():
        plain = kept(source._conj() if source.is_conj() else source._neg_view(), target, whole=whole)
        return plain._conj() if source.is_conj() else plain._neg_view()
    sizes, strides, offset = source.size(), source.stride(), source.storage_offset()
    if source.numel() == 0:
        return torch.empty_strided(sizes, strides, dtype=source.dtype, device=target)
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    first, count = offset, span
    if whole:
        first, count = 0, source.untyped_storage().nbytes() // source.element_size()
    flat = source.as_strided((count,), (1,), first)
    flat = flat.to(target) if source.device != target else flat.clone()
    return flat.as_strided(sizes, strides, offset - first)


def host(value: Any) -> Any:
    """The same structure with every tensor on the CPU, detached."""
    return tree_map(lambda item: item.detach().cpu() if isinstance(item, torch.Tensor) else item, value)


class Transfer:
    """Copies structures to a device: a tensor that occurs twice is copied once, and device arguments change."""

    def __init__(self, device: str, *, source: str = "cpu", whole: bool = False) -> None:
        """Bring to a device.

        Args:
            device: where to, for example `cuda:0`.
            source: the device type that is replaced where a device is named.
            whole: as of `kept`.
        """
        self._device, self._source, self._whole = device, source, whole
        self._memo: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []

    def __call__(self, value: Any) -> Any:
        """The structure on the device; `requires_grad` is kept."""
        return tree_map(self._one, value)

    def _one(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._memo:
                copy = kept(value, self._device, whole=self._whole)
                self._memo[id(value)] = copy.requires_grad_(value.requires_grad)
                self._alive.append(value)  # an id is only unique among what lives
            return self._memo[id(value)]
        if isinstance(value, torch.device) and value.type == self._source:
            return torch.device(self._device)
        if isinstance(value, str) and value == self._source:
            return self._device
        return value
