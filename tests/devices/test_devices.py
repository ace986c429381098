"""Devices are found by entry points, say what they can do, and never raise when they are missing."""

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from omnicomp import devices
from omnicomp.devices import Device, primary_device, resolve_device
from omnicomp.errors import DeviceError


class Toy(Device):
    type = "xla"

    def is_available(self) -> bool:
        return False

    def unavailable_reason(self) -> str:
        return "it is a toy; buy a real one"

    def capabilities(self) -> devices.Capabilities:
        return devices.Capabilities(compute_dtypes=(torch.float32,), storage_dtypes=(torch.float32,))


def broken() -> Any:
    raise OSError("libtoy.so is missing")


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    entries: list[Any] = []

    class Entry:
        def __init__(self, name: str, target: Any) -> None:
            self.name, self.value, self.target = name, f"toy:{name}", target

        def load(self) -> Any:
            return self.target

    real = importlib.metadata.entry_points

    def fake(**kwargs: Any) -> Any:
        return [Entry(*e) for e in entries] if kwargs.get("group") == devices.GROUP else real(**kwargs)

    monkeypatch.setattr(importlib.metadata, "entry_points", fake)
    devices._discover.cache_clear()
    yield entries
    monkeypatch.undo()
    devices._discover.cache_clear()


def test_cpu_is_there() -> None:
    cpu = resolve_device("cpu")
    assert isinstance(cpu, Device)
    capabilities = cpu.capabilities()
    assert torch.float32 in capabilities.compute_dtypes
    assert set(capabilities.fast_dtypes) <= set(capabilities.compute_dtypes) <= set(capabilities.storage_dtypes)
    assert capabilities.inductor
    assert "eager" in cpu.lowerings


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_a_sentence_and_not_an_exception() -> None:
    with pytest.raises(DeviceError, match=r"'cuda:0' is not available: .*(CUDA|GPU)") as caught:
        resolve_device("cuda:0")
    assert "\n" not in str(caught.value)


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(DeviceError, match=r'known devices are cpu, cuda, .*did you mean "cuda"'):
        resolve_device("cudaa")


def test_a_device_of_another_package(entry_points: list[Any]) -> None:
    entry_points.append(("toy", Toy))
    assert "xla" in devices.device_names()
    with pytest.raises(DeviceError, match="buy a real one"):
        resolve_device("xla")


def test_a_device_that_does_not_load_is_kept_as_its_reason(entry_points: list[Any]) -> None:
    entry_points.append(("toy", broken))
    entry_points.append(("half", object))
    assert devices.device_names() == ("cpu", "cuda", "xpu", "mps", "npu", "sim")
    errors = devices.load_errors()
    assert "libtoy.so is missing" in errors["toy (toy:toy)"]
    assert "no subclass" in errors["half (toy:half)"]


def test_a_built_in_name_can_not_be_taken(entry_points: list[Any]) -> None:
    entry_points.append(("cpu", Toy))
    assert resolve_device("cpu").type == "cpu"
    assert "built into omnicomp" in devices.load_errors()["cpu (toy:cpu)"]


def test_the_first_accelerator_is_the_graphs_device() -> None:
    assert primary_device(["cpu", "cuda", "cpu"]).type == "cuda"
    assert primary_device(["meta", "cpu"]).type == "cpu"
    assert primary_device([]).type == "cpu"


def test_a_type_without_a_device_file_runs_on_what_torch_offers() -> None:
    device = primary_device(["mtia"])
    assert device.type == "mtia"
    assert isinstance(device, Device)
    assert "eager" in device.lowerings


def test_auto_is_the_accelerator_that_is_there_or_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for accelerator in (devices.CudaDevice, devices.XpuDevice, devices.MpsDevice, devices.NpuDevice, devices.SimDevice):
        monkeypatch.setattr(accelerator, "is_available", lambda self: False)
    assert resolve_device().type == "cpu"
    monkeypatch.setattr(devices.XpuDevice, "is_available", lambda self: True)
    assert resolve_device("auto").type == "xpu"


def test_an_entry_point_that_does_not_load_is_named_when_it_is_asked_for(entry_points: list[Any]) -> None:
    entry_points.append(("toy", broken))
    with pytest.raises(DeviceError, match=r"unknown device 'toy'; toy .* can't be loaded: OSError: libtoy"):
        resolve_device("toy")


def test_an_availability_that_raises_is_a_reason(entry_points: list[Any]) -> None:
    class Rash(Toy):
        def is_available(self) -> bool:
            raise OSError("libtoy.so is missing")

    entry_points.append(("toy", Rash))
    with pytest.raises(DeviceError, match=r"Rash\.is_available\(\) raises OSError: libtoy.so is missing, and has to"):
        devices.resolve_device("xla")
    assert devices.resolve_device("auto").type != "xla"
