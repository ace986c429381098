from collections.abc import Iterator
from typing import Any

import pytest
import torch

from omnicomp.devices import Capabilities, resolve_device
from omnicomp.devices.sim.device import SimDevice
from omnicomp.testing.conformance import suite
from omnicomp.testing.conformance.base import CHECKS, Session, run_check

# What compiles, starts a process or takes a model is for the command line.
SLOW = ("contract.never_raises", "contract.compile_subgraph", "framework.device_type_tests")
GROUPS = ("contract", "errors", "module", "tensors")
NAMES = [name for name in suite.check_names(groups=GROUPS) if name not in SLOW]


def run(name: str, device: Any) -> dict[str, Any]:
    return run_check(CHECKS[name], Session(device=device))


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("aten", "IMPL")
    yield library
    library._destroy()


@pytest.mark.parametrize("name", NAMES)
def test_the_simulated_device_passes(sim, name):
    found = run(name, resolve_device("sim"))
    assert found["verdict"] == "passed", found


@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_passes_or_is_not_asked(name):
    found = run(name, resolve_device("cpu"))
    assert found["verdict"] in ("passed", "skipped"), found


class Careless(SimDevice):
    """A device whose contract is broken in one way for each check."""

    def is_available(self) -> bool:
        return 1  # type: ignore[return-value]

    def unavailable_reason(self) -> str:
        return "it rains"

    def capabilities(self) -> Capabilities:
        return Capabilities(compute_dtypes=(torch.float32,), storage_dtypes=(torch.int8,), device_count=1, name="x")

    def memory_stats(self) -> dict[str, int | None]:
        return {"peak_mb": 3, "total_bytes": 5}

    def available_memory(self) -> int:
        return -1

    def to_device(self, value: Any, dtype: torch.dtype | None = None) -> Any:
        return value

    def prepare(self, model: torch.nn.Module, config: Any = None) -> torch.nn.Module:
        return torch.nn.Identity()

    def synchronize(self) -> None:
        return 3  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("contract.available", "is_available() returns 1"),
        ("contract.capabilities", "torch.float32 of compute_dtypes not in storage_dtypes"),
        ("contract.memory", "the keys are peak_mb, total_bytes"),
        ("contract.available_memory", "-1"),
        ("contract.to_device", "devices afterwards"),
        ("contract.prepare", "shape"),
        ("contract.synchronize", "returns something"),
    ],
)
def test_a_broken_contract_is_reported_with_what_to_do(sim, name, found):
    result = run(name, Careless())
    assert result["verdict"] == "failed"
    assert found in result["found"]
    assert result["todo"]


def test_a_device_that_is_not_declared_is_reported(sim):
    class Undeclared(SimDevice):
        type = "gxu"

    found = run("contract.known", Undeclared())
    assert found["verdict"] == "failed"
    assert "entry-point group" in found["todo"]


def test_a_kernel_that_takes_tensors_of_the_host_is_reported(sim, library):
    library.impl("cdist", lambda a, b, p=2.0: a.clone(), "PrivateUse1", allow_override=True)
    library.impl("_cdist_forward", lambda a, b, p, mode: a.clone(), "PrivateUse1", allow_override=True)
    found = run("errors.mixed_devices", resolve_device("sim"))
    assert (found["verdict"], "cdist" in found["found"]) == ("failed", True), found


def test_a_view_that_copies_is_reported(sim, library):
    library.impl("as_strided", lambda x, size, stride, offset=None: x.clone(), "PrivateUse1", allow_override=True)
    assert run("tensors.views", resolve_device("sim"))["verdict"] == "failed"


def test_an_unknown_device_is_an_error_and_torchs_own_is_taken_without_a_contract():
    from omnicomp.errors import DeviceError

    with pytest.raises(DeviceError, match="known devices are"):
        suite.ready("gxu")
    assert suite.ready("cpu") is resolve_device("cpu")
