"""What is known of overrides from comparing them with their references, in this process and in earlier ones.

A verdict holds for an override's source, the dtypes and shape class of the arguments, the device and torch's version.
An override that was found wrong once is not used on that device any more, whatever it is called with, until it is
edited.
"""

import platform
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from omnicomp._torch.inductor.store import JsonStore, key_of
from omnicomp.analysis.hashes import size_class
from omnicomp.lowerings.overrides.declaration import Override
from omnicomp.safety.forks import new_lock
from omnicomp.timeline import Reason

# A class of arguments is as good as the text that names it; the reason is for a person.
_RIGHT: Final = JsonStore[str]("overrides/trusted", str, str)
_WRONG: Final = JsonStore[Reason]("overrides/distrusted", Reason.to_dict, Reason.from_dict)
_lock: Final = new_lock()
_trusted: Final[set[str]] = set()
_distrusted: Final[dict[str, Reason | None]] = {}


def classify(values: Sequence[Any]) -> str:
    """The dtypes and the shape class of an override's arguments, as text.

    Of a tensor: its dtype; each size as 0, 1, or the power of two below it and whether it is a multiple of 16;
    whether it is contiguous, in channels-last order, expanded or strided otherwise; and whether it is aligned to 16
    bytes. These are what kernels have other code for. A number counts by its size in the same way, if it is a whole
    one, and by its value if it is not.
    """
    return ",".join(map(_describe, tree_leaves(list(values))))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = "x".join(map(size_class, value.shape))
        aligned = "" if value.data_ptr() % 16 == 0 else "!"
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]{_layout(value)}{aligned}"
    return size_class(value) if type(value) is int and abs(value) > 64 else repr(value)


def _layout(value: torch.Tensor) -> str:
    if value.is_contiguous():
        return "c"
    if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
        return "e"
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
        return "l"
    return "s"


def is_trusted(item: Override, case: str, device: torch.device, *, stored: bool) -> bool:
    """Whether an override was found right for a class of arguments."""
    key = _key(item, device, case)
    if key in _trusted:
        return True
    if not stored or _RIGHT.read(key)[0] != case:
        return False
    with _lock:
        _trusted.add(key)
    return True


def trust(item: Override, case: str, device: torch.device, *, stored: bool) -> str:
    """Keep that an override was found right; returns why that could not be written, or an empty text."""
    key = _key(item, device, case)
    with _lock:
        _trusted.add(key)
    return _kept(item, _RIGHT.write(key, case)) if stored else ""


def distrust(item: Override, device: torch.device, reason: Reason, *, stored: bool) -> str:
    """Keep that an override was found wrong; returns why that could not be written, or an empty text."""
    key = _key(item, device)
    with _lock:
        _distrusted[key] = reason
    return _kept(item, _WRONG.write(key, reason)) if stored else ""


def distrusted(item: Override, device: torch.device, *, stored: bool = True) -> Reason | None:
    """Why an override is not used on a device any more; None if nothing was found against it."""
    key = _key(item, device)
    if stored and key not in _distrusted:
        reason, _ = _WRONG.read(key)
        with _lock:
            _distrusted.setdefault(key, reason)
    return _distrusted.get(key)


def _kept(item: Override, problem: str) -> str:
    return f"the verdict on the override {item.name} is not kept: {problem}" if problem else ""


def forget() -> None:
    """Forget what this process knows; files stay."""
    with _lock:
        _trusted.clear()
        _distrusted.clear()


def _key(item: Override, device: torch.device, case: str = "") -> str:
    return key_of(item.name, item.digest, torch.__version__, _device_name(device), case)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return device.type
