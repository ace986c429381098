"""Making a device of torch's `PrivateUse1` key known under a name of its own."""

from types import ModuleType

import torch
from torch.utils import backend_registration


def device_name() -> str:
    """What the key is called in this process: `privateuseone` until someone gave it a name."""
    return torch._C._get_privateuse1_backend_name()


def is_known(name: str) -> bool:
    """Whether torch has a device type of that name."""
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def register(name: str, module: ModuleType) -> None:
    """Give the key a name, once in a process, with `torch.NAME` and `Tensor.NAME()`, `Module.NAME()` and `is_NAME`.

    Args:
        name: the device type from now on.
        module: what becomes `torch.NAME`, with the functions that a device module has by convention.

    Raises:
        RuntimeError: the key has another name already, or `torch` has an attribute of that name.
    """
    backend_registration.rename_privateuse1_backend(name)
    torch._register_device_module(name, module)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)


def register_module(name: str, module: ModuleType) -> None:
    """Make a module `torch.NAME`, for a device type that torch knows already.

    Raises:
        RuntimeError: `torch` has an attribute of that name.
    """
    torch._register_device_module(name, module)
