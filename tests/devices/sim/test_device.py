"""The contract of the simulated device; what it does is in tests/sim."""

import copy
from typing import Any

import pytest
import torch
from simulated import in_process as in_process
from simulated import shared_sim as shared_sim
from simulated import sim as sim

from omnicomp.backend.wrap_module import wrap_module
from omnicomp.devices import MEMORY_KEYS, Device, device_names, resolve_device
from omnicomp.devices.sim.device import SimDevice
from omnicomp.errors import DeviceError


def test_it_is_discovered_and_there_once_enabled(sim: Any) -> None:
    assert "sim" in device_names()
    device = resolve_device("sim:1")
    assert isinstance(device, SimDevice)
    assert isinstance(device, Device)
    assert device.is_available()
    assert device.unavailable_reason() == ""


def test_it_is_away_without_an_error_before(in_process: Any) -> None:
    program = (
        "from omnicomp.devices import resolve_device\nfrom omnicomp.devices.sim.device import SimDevice\n"
        "print(SimDevice().is_available())\ntry: resolve_device('sim')\nexcept Exception as e: print(repr(e))"
    )
    result = in_process(program)
    assert result.stdout.startswith("False\nDeviceError"), result.stderr
    assert "omnicomp.devices.sim.enable()" in result.stdout


def test_its_memory_has_the_keys_of_every_device(sim: Any) -> None:
    device = SimDevice()
    device.reset_memory_stats()
    before = device.memory_stats()
    x = torch.empty(2**20, dtype=torch.uint8, device="sim")
    after = device.memory_stats()
    assert tuple(after) == MEMORY_KEYS
    for key in ("allocated_bytes", "peak_bytes"):
        assert (after[key] or 0) - (before[key] or 0) == x.numel()
    assert device.available_memory() == sim.mem_get_info()[0]


def test_it_has_all_dtypes_unless_some_are_declared(sim: Any) -> None:
    can = SimDevice().capabilities()
    assert not can.exhaustive
    assert set(can.compute_dtypes) <= set(can.storage_dtypes)
    assert (can.device_count, can.memory_bytes) == (2, sim.mem_get_info()[1])
    declared = SimDevice([torch.float32], [torch.float16, torch.int32]).capabilities()
    assert declared.exhaustive
    assert declared.compute_dtypes == (torch.float32,)
    assert declared.storage_dtypes == (torch.float32, torch.float16, torch.int32, torch.bool)


def test_dtypes_can_be_declared_in_the_environment(in_process: Any) -> None:
    program = (
        "import torch, omnicomp.devices.sim; omnicomp.devices.sim.enable(inductor=False); from "
        "omnicomp.devices.sim.device import SimDevice\n"
        "c = SimDevice().capabilities(); print(c.compute_dtypes, c.storage_dtypes, c.exhaustive)\n"
        "try: torch.ones(2, dtype=torch.float64, device='sim')\nexcept TypeError as error: print('refused')"
    )
    result = in_process(program, OMNICOMP_SIM_DTYPES="float32, bfloat16/int32")
    kept = "(torch.float32, torch.bfloat16), (torch.float32, torch.bfloat16, torch.int32, torch.bool) True"
    assert result.stdout.splitlines() == [kept.replace("), (", ") ("), "refused"], result.stderr


def test_a_dtype_that_is_none_is_named(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICOMP_SIM_DTYPES", "float33")
    with pytest.raises(DeviceError, match="no dtype 'float33'"):
        SimDevice().capabilities()


def test_tensors_and_modules_move_to_it(sim: Any) -> None:
    moved = SimDevice().to_device({"x": torch.ones(2), "m": torch.nn.Linear(2, 2)}, torch.bfloat16)
    assert (moved["x"].device.type, moved["x"].dtype) == ("sim", torch.bfloat16)
    assert moved["m"].weight.device.type == "sim"


def test_what_a_module_shares_is_shared_afterwards(sim: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    wrapped = wrap_module(copy.deepcopy(model), "model", device="sim:1")
    moved = SimDevice().to_device(model)
    assert moved is model
    assert model[0].weight is model[1].weight
    assert wrapped.wrapped[0].weight is wrapped.wrapped[1].weight  # pyright: ignore[reportIndexIssue]
    assert [str(parameter.device) for parameter in wrapped.parameters()] == ["sim:1"]
