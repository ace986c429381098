import ctypes
from typing import Any

import pytest
import torch
from concurrency import in_threads


def test_a_kernel_from_outside_works_on_the_device_s_memory(sim: Any) -> None:
    x = torch.arange(6.0, device="sim")
    y = torch.empty_like(x)
    sim.reset_counters()
    sim.launch(ctypes.memmove, y, x, 24, raw=True)
    found = sim.counters()
    assert (found["launches"], found["h2d_copies"], found["d2h_copies"]) == (1, 0, 0)
    assert y.tolist() == x.tolist()


def test_tensors_are_handed_on_as_they_are(sim: Any) -> None:
    x = torch.ones(2, device="sim")
    assert sim.launch(lambda *arguments: arguments, x, 3) == (x, 3)


def test_an_address_of_the_host_is_refused(sim: Any) -> None:
    with pytest.raises(RuntimeError, match="given a tensor on cpu"):
        sim.launch(ctypes.memmove, torch.ones(2), torch.ones(2, device="sim"), 8, raw=True)
    assert sim.counters()["launches"] == 0


def test_the_bracket_is_closed_when_the_kernel_raises(sim: Any) -> None:
    with pytest.raises(ZeroDivisionError), sim.kernel("broken"):
        1 / 0  # noqa: B018
    with sim.kernel("fine"):
        pass
    assert sim.counters()["launches"] == 2


def test_threads_launch_at_once(sim: Any) -> None:
    def work(_: int) -> None:
        for _ in range(50):
            x = torch.ones(100, device="sim")
            sim.launch(ctypes.memset, x, 0, 400, raw=True)
            assert x.sum().item() == 0

    in_threads(work, 4)
    assert sim.counters()["launches"] == 200
