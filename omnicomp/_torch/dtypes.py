"""What the dtype policy needs of torch's internals: the storage behind a fake tensor, and the writes to it."""

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

__all__ = ["storage_key", "was_written"]


def storage_key(value: torch.Tensor) -> int | None:
    """The identity of the storage, shared by all views of a tensor; None for a tensor without one (sparse, vmap's)."""
    if value.layout is not torch.strided or is_functorch_wrapped_tensor(value):
        return None
    return value.untyped_storage()._cdata


def was_written(value: torch.Tensor) -> bool:
    """Whether a fake tensor, or a view of it, was changed in place while Dynamo traced; True where nobody counted."""
    return value.is_inference() or value._version > 0
