"""Devices are found by entry points, say what they can do, and never raise when they are missing."""

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from omnicomp import devices
from omnicomp.devices import Device, get_device, primary_device
from omnicomp.errors import DeviceError


class Toy:
    type = "xla"
    lowerings = ("eager",)

    def is_available(self) -> bool:
        return False

    def unavailable_reason(self) -> str:
        return "it is a toy; buy a real one"

    def capabilities(self) -> devices.Capabilities:
        return devices.Capabilities(compute_dtypes=(torch.float32,), storage_dtypes=(torch.float32,))

    def synchronize(self) -> None:
        pass

    def memory(self) -> dict[str, int]:
        return {}


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
    cpu = get_device("cpu")
    assert isinstance(cpu, Device)
    capabilities = cpu.capabilities()
    assert torch.float32 in capabilities.compute_dtypes
    assert set(capabilities.fast_dtypes) <= set(capabilities.compute_dtypes) <= set(capabilities.storage_dtypes)
    assert capabilities.inductor
    assert cpu.memory()["peak"] > 0
    assert "eager" in cpu.lowerings


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_a_sentence_and_not_an_exception() -> None:
    with pytest.raises(DeviceError, match=r"'cuda:0' is not available: .*(CUDA|GPU)") as caught:
        get_device("cuda:0")
    assert "\n" not in str(caught.value)


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(DeviceError, match='did you mean "cuda"'):
        get_device("cudaa")


def test_a_device_of_another_package(entry_points: list[Any]) -> None:
    entry_points.append(("toy", Toy))
    assert "xla" in devices.device_names()
    with pytest.raises(DeviceError, match="buy a real one"):
        get_device("xla")


def test_a_device_that_does_not_load_is_kept_as_its_reason(entry_points: list[Any]) -> None:
    entry_points.append(("toy", broken))
    entry_points.append(("half", object))
    assert devices.device_names() == ("cpu", "cuda")
    errors = devices.load_errors()
    assert "libtoy.so is missing" in errors["toy (toy:toy)"]
    assert "does not implement" in errors["half (toy:half)"]


def test_a_built_in_name_can_not_be_taken(entry_points: list[Any]) -> None:
    entry_points.append(("cpu", Toy))
    assert get_device("cpu").type == "cpu"
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
