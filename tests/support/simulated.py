"""The simulated device for tests: built once, in the folder that all runs share, and what a test compares with."""

import subprocess
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from processes import python

import omnicomp.devices.sim
from omnicomp.devices.sim.build import build_folder


@pytest.fixture(scope="session")
def shared_sim() -> tuple[ModuleType, str]:
    """`torch.sim`, and the cache folder that the driver is in. Before any test has a folder of its own."""
    module = omnicomp.devices.sim.enable()
    return module, str(build_folder().parents[1])


@pytest.fixture
def sim(shared_sim: tuple[ModuleType, str]) -> Iterator[Any]:
    """`torch.sim` with its counters at zero, device 0 current, and no fault or restriction left behind."""
    module: Any = shared_sim[0]
    module.reset_counters()
    yield module
    module.clear_faults()
    module.set_dtypes(None)
    module.set_device(0)


@pytest.fixture
def in_process(shared_sim: tuple[ModuleType, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in a process of its own, with variables in its environment and the driver that is built."""

    def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run_with(shared_sim[1], program, *arguments, **environment)

    return run


def run_with(cache: str, program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own, which finds the driver in that cache folder."""
    return python("-c", program, *arguments, environment={"OMNICOMP_CACHE_DIR": cache, **environment})


def alike(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, grad: bool = False, **tolerance: float) -> None:
    """Asserts that the function gives on sim what it gives on the CPU, and the same gradients of its squares' sum."""
    results = []
    for device in ("cpu", "sim"):
        own = [x.detach().clone().to(device).requires_grad_(grad and x.is_floating_point()) for x in inputs]
        result = function(*own)
        assert result.device.type == device
        if grad:
            result.square().sum().backward()
        results.append([result, *(x.grad for x in own if x.grad is not None)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found.cpu(), expected, **tolerance)
