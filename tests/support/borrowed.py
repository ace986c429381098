"""A device `gxu` in Python whose memory is another device's: enough to run code that Inductor generated for it.

Each allocation has a guard behind it, so that a write beyond its end is seen. Nothing is freed. A process has room for
one such device, so this is for a subprocess.
"""

import types
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "gxu"
_GUARD = 1 << 20
_FILL = 0xAB

_lender = "cpu"
_owned: dict[int, tuple[torch.Tensor, int]] = {}
_library = torch.library.Library("aten", "IMPL")
_others = torch.library.Library("_", "IMPL")


def _module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")
    functions: dict[str, Any] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "set_device": lambda index: None,
        "synchronize": lambda device=None: torch.cuda.synchronize() if _lender == "cuda" else None,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def enable(lender: str) -> None:
    """Make `gxu` a device type with memory of `lender`: `cpu` or `cuda`."""
    global _lender
    _lender = lender
    _setup_privateuseone_for_python_backend(NAME, _module())
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    for op in ("as_strided", "view", "_reshape_alias"):
        packet = getattr(torch.ops.aten, op)
        _library.impl(op, _on_cpu(packet.default), "PrivateUse1")
    _library.impl("_copy_from", _copy_from, "PrivateUse1")
    _others.fallback(_fall_back, "PrivateUse1")


def _lend(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == NAME:
        return lent(value)
    return torch.device(_lender) if isinstance(value, torch.device) and value.type == NAME else value


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _lend(target).copy_(_lend(source))
    return target


def _fall_back(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The lender's kernel, with results that are new copied to the device."""
    given = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
    lent_args, lent_kwargs = tree_map(_lend, (args, kwargs))
    originals = {_lend(each).data_ptr(): each for each in given.values() if each.device.type == NAME}
    results = op(*lent_args, **lent_kwargs)
    mutates = op._schema.is_mutable
    return tree_map(
        lambda each: (
            (originals[each.data_ptr()] if mutates and each.data_ptr() in originals else borrow(each))
            if isinstance(each, torch.Tensor)
            else each
        ),
        results,
    )


def _on_cpu(op: Any) -> Any:
    """The CPU's kernel, for operators that look at no memory."""
    return lambda *args, **kwargs: op._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


def _empty(size: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
    stride, step = [], 1
    for length in reversed(size):
        stride.insert(0, step)
        step *= max(length, 1)
    return _empty_strided(size, stride, dtype=dtype)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    last = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    count = last * dtype.itemsize
    memory = torch.full((count + _GUARD,), _FILL, dtype=torch.uint8, device=_lender)
    _owned[memory.data_ptr()] = (memory, count)
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device(NAME, 0), max(count, 1))
    made = torch._C._acc.create_empty_tensor((0,), dtype)
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    return set_._op_dk(torch._C.DispatchKey.CPU, made, storage, 0, size, stride)


def lent(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the lender."""
    memory, count = _owned[tensor.untyped_storage().data_ptr()]
    flat = memory[:count].view(tensor.dtype)
    return torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset())


def borrow(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor of the lender's on the device."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=NAME)
    lent(made).copy_(tensor)
    return made


def guards_hold() -> bool:
    """Whether nothing was written beyond the end of an allocation."""
    return all(bool((memory[count:] == _FILL).all()) for memory, count in _owned.values())
