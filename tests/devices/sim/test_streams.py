import threading
from typing import Any

import pytest
import torch


def test_it_is_torch_s_accelerator(sim: Any) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == sim.device_count() == 2
    assert torch.get_device_module("sim") is sim is torch.sim  # pyright: ignore[reportAttributeAccessIssue]


def test_the_current_device_is_what_sim_means(sim: Any) -> None:
    with sim.device(1):
        assert sim.current_device() == torch.accelerator.current_device_index() == 1
        assert torch.empty(2, device="sim").device.index == 1
        assert torch.ones(2).to("sim").device.index == 1
    assert sim.current_device() == 0
    with torch.accelerator.device_index(1), sim.device(None), sim.device(-1):
        assert sim.current_device() == 1
    with sim.device_of(torch.empty(0, device="sim:1")):
        assert sim.current_device() == 1


def test_the_current_device_belongs_to_a_thread(sim: Any) -> None:
    seen: list[int] = []
    sim.set_device(1)
    thread = threading.Thread(target=lambda: seen.append(sim.current_device()))
    thread.start()
    thread.join()
    assert (seen, sim.current_device()) == ([0], 1)


def test_a_device_that_is_not_there_is_refused(sim: Any) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.empty(1, device="sim:2")
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        sim.set_device(7)
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        sim.get_device_properties(2)
    with pytest.raises(ValueError, match="expected a sim device"):
        sim.memory_allocated("cpu")


def test_properties(sim: Any) -> None:
    properties = sim.get_device_properties(1)
    assert properties.name == sim.get_device_name("sim:1") == "simulated accelerator 1"
    assert properties.total_memory == sim.mem_get_info(1)[1]


def test_a_stream_is_current_within_its_context(sim: Any) -> None:
    stream = sim.Stream(device=1)
    assert stream.device == torch.device("sim", 1)
    with sim.stream(stream):
        assert sim.current_stream(1) == stream
        assert sim.current_device() == 1
        torch.ones(3, device="sim").add_(1)
    assert sim.current_stream(1) == sim.default_stream(1) != stream
    assert sim.current_device() == 0
    with torch.Stream(device="sim:0") as other:
        assert torch.accelerator.current_stream() == other


def test_events_order_and_time_streams(sim: Any) -> None:
    first, second = (sim.Event(enable_timing=True) for _ in range(2))
    stream = sim.Stream()
    first.record()
    torch.ones(100, device="sim").sum()
    stream.record_event(second)
    stream.wait_event(first)
    second.wait(sim.current_stream())
    second.synchronize()
    stream.wait_stream(sim.default_stream())
    assert first.query()
    assert stream.query()
    assert 0 < first.elapsed_time(second) < 60_000
    assert isinstance(first, sim.Event)
    assert not isinstance(torch.Event("cpu"), sim.Event)


def test_synchronizing_is_counted(sim: Any) -> None:
    torch.empty(1, device="sim")  # before there is anything, torch.accelerator has nothing to wait for
    sim.synchronize()
    sim.synchronize(1)
    torch.accelerator.synchronize()
    sim.current_stream().synchronize()
    assert sim.counters()["synchronizations"] == 4


def test_a_tensor_may_be_used_on_another_stream(sim: Any) -> None:
    x = torch.ones(3, device="sim")
    x.record_stream(sim.Stream())
    assert x.sum().item() == 3
