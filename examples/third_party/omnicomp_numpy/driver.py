"""The device `npy` for torch: a tensor of it is a NumPy array. It has float32 alone, and a few operators."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import backend_registration

from omnicomp_numpy.functions import FUNCTIONS

NAME = "npy"
_library: list[torch.library.Library] = []


def is_enabled() -> bool:
    """Whether torch knows the device."""
    return bool(_library)


def enable() -> None:
    """Register the device with torch, once; torch calls it by the entry point `torch.backends`."""
    if is_enabled():
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL")
    for target, function in FUNCTIONS.items():
        library.impl(target, _on_arrays(function), "PrivateUse1")
    library.impl("empty.memory_format", lambda size, **options: _empty(size, **options), "PrivateUse1")
    library.impl("empty_strided", lambda size, stride, **options: _empty(size, **options), "PrivateUse1")
    library.impl("_copy_from", _copy, "PrivateUse1")
    _library.append(library)


def tensor_of(array: Any) -> Tensor:
    """The tensor of an array."""
    array = np.ascontiguousarray(array, np.float32)
    result: Any = torch._C._acc.create_empty_tensor(array.shape, torch.float32)
    result.array = array
    return result


def array_of(value: Any) -> Any:
    """The array of a tensor; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return value.array if value.device.type == NAME else value.detach().numpy()  # type: ignore[attr-defined]


def _on_arrays(function: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        return tensor_of(function(*map(array_of, args), **{key: array_of(value) for key, value in kwargs.items()}))

    return run


def _empty(size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    if dtype not in (None, torch.float32):
        raise TypeError(f"{NAME} has float32 alone, and no {dtype}")
    return tensor_of(np.empty(size, np.float32))


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if target.device.type == NAME:
        target.array = array_of(source).astype(np.float32)  # type: ignore[attr-defined]
    else:
        target.copy_(torch.from_numpy(array_of(source)))
    return target
