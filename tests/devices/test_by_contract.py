"""Devices that are not here: absent without an exception, and right with a stand-in of their module."""

import sys
import types
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from omnicomp.devices import MEMORY_KEYS, resolve_device
from omnicomp.devices.mps import MpsDevice
from omnicomp.devices.npu import NpuDevice
from omnicomp.devices.xpu import XpuDevice
from omnicomp.errors import DeviceError
from omnicomp.passes.legal.dtypes import Legal

DEVICES = (XpuDevice, MpsDevice, NpuDevice)


@pytest.mark.parametrize("device", DEVICES)
def test_absent_it_is_a_sentence(device: Any) -> None:
    if device().is_available():
        assert device().unavailable_reason() == ""
        return
    reason = device().unavailable_reason()
    assert reason
    assert "\n" not in reason
    with pytest.raises(DeviceError, match=f"'{device.type}' is not available"):
        resolve_device(device.type)


def test_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = types.SimpleNamespace(has_fp64=False, sub_group_sizes=[16, 32], total_memory=2**30, name="a card")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda: card)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    device = resolve_device("xpu:1")
    can = device.capabilities()
    assert torch.float64 not in can.compute_dtypes
    assert (can.warp_sizes, can.memory_bytes, can.device_count, can.name) == ((16, 32), 2**30, 2, "a card")
    assert set(can.fast_dtypes) <= set(can.compute_dtypes) <= set(can.storage_dtypes)
    assert device.unavailable_reason() == ""
    card.has_fp64 = True
    assert torch.float64 in device.capabilities().compute_dtypes


def test_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    sizes = {"current_allocated_memory": 3, "driver_allocated_memory": 5, "recommended_max_memory": 8}
    for name, size in sizes.items():
        monkeypatch.setattr(torch.mps, name, lambda size=size: size)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    device = resolve_device("mps")
    can = device.capabilities()
    legal = Legal.of(can)
    assert legal is not None, "a graph in float64 is legalised"
    assert torch.float64 not in can.storage_dtypes
    assert device.memory_stats() == dict(zip(MEMORY_KEYS, (3, None, 5, 8), strict=True))
    assert device.available_memory() == 3


class Npu(types.ModuleType):
    """`torch.npu` as torch_npu makes it."""

    available = True

    def is_available(self) -> bool:
        return self.available

    def is_bf16_supported(self) -> bool:
        return False

    def mem_get_info(self) -> tuple[int, int]:
        return 1, 2

    def device_count(self) -> int:
        return 8

    def get_device_name(self) -> str:
        return "Ascend"


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Npu:
    module = Npu("torch.npu")
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", module, raising=False)
    return module


def test_npu(npu: Npu) -> None:
    device = resolve_device("npu")
    can = device.capabilities()
    assert can.fast_dtypes == (torch.float16,)
    assert (can.memory_bytes, can.device_count, can.name) == (2, 8, "Ascend")
    assert device.lowerings == ("override", "device", "eager")
    npu.available = False
    assert "npu-smi" in device.unavailable_reason()


def test_npu_whose_package_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(types.ModuleType):
        def is_available(self) -> bool:
            raise OSError("libascendcl.so: cannot open shared object file\nand more")

    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", Broken("torch.npu"), raising=False)
    reason = NpuDevice().unavailable_reason()
    assert "OSError: libascendcl.so" in reason
    assert "set_env.sh" in reason
    assert "\n" not in reason


def doubled() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, 2)),))
    return GraphModule({}, graph)


def test_npu_compiles_with_torchair(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    torchair: Any = types.ModuleType("torchair")
    torchair.CompilerConfig = dict
    torchair.get_compiler = lambda config: lambda module, inputs: module.forward
    monkeypatch.setitem(sys.modules, "torchair", torchair)
    arguments = [torch.ones(2)]
    (result,) = NpuDevice().compile_subgraph(doubled(), [torch.ones(2)])(arguments)
    assert result.tolist() == [2, 2]
    assert arguments == []
    monkeypatch.delitem(sys.modules, "torchair")
    with pytest.raises(NotImplementedError, match="without torchair"):
        NpuDevice().compile_subgraph(doubled(), [torch.ones(2)])
