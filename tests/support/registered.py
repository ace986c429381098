"""Device types of torch's that have no code behind them, for tests of registration alone."""

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import device_interface
from torch._inductor.codegen import common

from omnicomp._torch.devices import registry as device_registry

NAME = "maia"
OTHER = "hpu"
REGISTRIES: tuple[Any, ...] = (
    common.device_codegens,
    common.device_op_overrides_dict,
    common.custom_backend_passes,
    common.custom_backend_codegen_configs,
    device_interface.device_interfaces,
    device_registry._configs,
)


def device_module(**others: Any) -> types.ModuleType:
    """A device module with what registration asks for."""
    module = types.ModuleType(f"torch.{NAME}")
    functions: dict[str, Any] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "set_device": lambda index: None,
        "synchronize": lambda device=None: None,
    }
    for name, value in {**functions, **others}.items():
        setattr(module, name, value)
    return module


@pytest.fixture
def clean() -> Iterator[None]:
    """What a test registers is gone after it."""
    common.init_backend_registration()
    common.get_device_op_overrides("cpu")
    device_interface.get_interface_for_device("cpu")
    before = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, kept in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(kept)
    for name in (NAME, OTHER):
        if hasattr(torch, name):
            delattr(torch, name)
