"""With the option `memory`, each call of a subgraph leaves a sample of the device's memory in the timeline."""

from typing import Any

import pytest
import torch
from torch import Tensor

from omnicomp.devices.cpu import CpuDevice
from omnicomp.timeline import Memory, current


def program(x: Tensor) -> Tensor:
    return (x.sin() * 2).cos().sum()


def samples(**options: Any) -> list[Memory]:
    compiled = torch.compile(program, backend="omni", options=options)
    for _ in range(2):
        x = torch.ones(4, requires_grad=True)
        compiled(x).backward()
        torch.testing.assert_close(x.grad, torch.autograd.grad(program(y := x.detach().requires_grad_()), y)[0])
    return [event for event in current() if isinstance(event, Memory)]


@pytest.mark.parametrize(
    "lowerings",
    [["eager"], pytest.param({"*": ["inductor"], "aten.cos": "eager"}, marks=pytest.mark.inductor)],
    ids=["eager", "cut"],
)
def test_every_call_of_every_subgraph_is_sampled(lowerings: Any) -> None:
    events = samples(lowerings=lowerings, memory=True)
    by_subgraph = {event.subgraph: [e.call for e in events if e.subgraph == event.subgraph] for event in events}
    assert {name.split(".")[1] for name in by_subgraph} == {"forward", "backward"}
    assert all(calls == [0, 1] for calls in by_subgraph.values())
    assert all(0 < event.before_bytes <= event.peak_bytes for event in events)


def test_what_the_device_does_not_tell_is_minus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("allocated_bytes", "peak_bytes", "reserved_bytes", "total_bytes")
    monkeypatch.setattr(CpuDevice, "memory_stats", lambda self: dict.fromkeys(keys))
    event = samples(lowerings=["eager"], memory=True)[0]
    assert (event.before_bytes, event.after_bytes, event.peak_bytes, event.device) == (-1, -1, -1, "cpu")


def test_nothing_is_sampled_unasked() -> None:
    assert samples(lowerings=["eager"]) == []
