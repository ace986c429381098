"""What a device has for nothing: it goes by its device module, and by what is registered with Inductor."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import omnicomp
from omnicomp.devices import MEMORY_KEYS, Capabilities, Device, resolve_device
from omnicomp.lowerings.overrides import registry


class Plain(Device):
    """A device of which nothing but its type is known."""

    type = "ipu"

    def is_available(self) -> bool:
        return False

    def capabilities(self) -> Capabilities:
        return Capabilities(compute_dtypes=(torch.float32,), storage_dtypes=(torch.float32,))


class WithCompiler(Plain):
    def compile_subgraph(self, module: GraphModule, inputs: Any) -> Any:
        return lambda arguments: module(*arguments)


class Module:
    """A device module as accelerators have it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def memory_allocated(self) -> int:
        return 3

    def max_memory_allocated(self) -> int:
        return 5

    def memory_reserved(self) -> int:
        return 8

    def mem_get_info(self) -> tuple[int, int]:
        return 13, 21

    def reset_peak_memory_stats(self) -> None:
        self.calls.append("reset")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def test_the_memory_of_every_device_has_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Plain()
    monkeypatch.setattr(Plain, "_module", lambda self: None)
    assert plain.memory_stats() == dict.fromkeys(MEMORY_KEYS)
    assert plain.available_memory() is None
    plain.reset_memory_stats()
    plain.synchronize()
    module = Module()
    monkeypatch.setattr(Plain, "_module", lambda self: module)
    assert list(plain.memory_stats().values()) == [3, 5, 8, 21]
    assert plain.available_memory() == 13
    plain.reset_memory_stats()
    plain.synchronize()
    assert module.calls == ["reset", "synchronize"]
    assert tuple(resolve_device("cpu").memory_stats()) == MEMORY_KEYS


def test_the_memory_of_the_cpu_is_that_of_the_process() -> None:
    cpu = resolve_device("cpu")
    gc.collect()  # what other tests left behind must not be freed in between
    before = cpu.memory_stats()
    kept = torch.ones(2**26)
    after = cpu.memory_stats()
    assert before["allocated_bytes"] is not None
    assert after["allocated_bytes"] is not None
    assert after["allocated_bytes"] >= before["allocated_bytes"] + kept.nbytes // 2
    assert 0 < (cpu.available_memory() or 0) <= (after["total_bytes"] or 0)
    cpu.reset_memory_stats()


def test_a_compiler_of_its_own_is_a_lowering_of_its_own() -> None:
    assert Plain().lowerings == ("override", "eager")
    assert WithCompiler().lowerings == ("override", "device", "eager")
    assert resolve_device("cpu").lowerings == ("override", "inductor", "eager")


def identity() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((x,))
    return GraphModule({}, graph)


def test_where_nothing_compiles_it_says_what_to_do() -> None:
    with pytest.raises(NotImplementedError, match="nothing compiles for ipu: register it with Inductor"):
        Plain().compile_subgraph(identity(), [torch.ones(2)])
    assert "install its driver" in Plain().unavailable_reason()


def test_the_former_way_to_declare_an_override_for_a_device() -> None:
    with pytest.warns(DeprecationWarning, match=r"use omnicomp.override\(devices=\('ipu',\)\)"):
        declared = Plain().register_override(op=torch.ops.aten.cumsum.default)

    @declared
    def scan(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.cumsum(x, dim, dtype=dtype)

    try:
        item = next(item for item in registry.registered() if item.name == "scan")
        assert item.devices == ("ipu",)
    finally:
        registry.unregister("scan")
    with pytest.raises(omnicomp.OverrideError), pytest.warns(DeprecationWarning, match="goes in"):
        Plain().register_override()(scan)


def test_values_move_with_their_structure() -> None:
    layer = nn.Linear(2, 2)
    value = {"x": [torch.ones(2), torch.ones(2, dtype=torch.int64)], "layer": layer, "n": 3, "s": "text"}
    moved = resolve_device("cpu").to_device(value, torch.bfloat16)
    assert moved["layer"] is layer
    assert layer.weight.dtype == moved["x"][0].dtype == torch.bfloat16
    assert moved["x"][1].dtype == torch.int64
    assert (moved["n"], moved["s"]) == (3, "text")
    assert resolve_device("cpu").to_device(torch.ones(2, dtype=torch.float64)).dtype == torch.float64


def test_a_model_is_left_as_it_is() -> None:
    model = nn.Linear(2, 2)
    assert resolve_device("cpu").prepare(model) is model
