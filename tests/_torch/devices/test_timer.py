"""Timing on a device that other programs use as well; the device is a script of times."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from omnicomp._torch.devices.timer import DeviceTimer


@pytest.mark.parametrize(
    ("rounds", "found", "taken"),
    [
        ([1.0, 1.01, 1.3], 1.0, 3),
        ([4.0, 3.0, 1.0, 2.5, 1.02, 0.5], 1.0, 5),  # it was shared until then
        ([4.0, 4.01, 1.0, 1.01], 1.0, 4),
        ([float(2**i) for i in range(20, 0, -1)], float(2**9), 12),  # rounds end at some time
    ],
)
def test_the_shortest_round_counts_once_another_one_agrees(
    rounds: list[float], found: float, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Iterator[float] = iter(rounds)
    calls: list[int] = []

    class Event:
        def __init__(self, **options: Any) -> None:
            pass

        def record(self) -> None:
            pass

        def elapsed_time(self, end: Any) -> float:
            calls.append(0)
            return next(script)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr("omnicomp._torch.devices.timer._CALLS", range(1, 2))
    assert DeviceTimer(torch.device("cpu")).timed(lambda: None) == found
    assert len(calls) == taken
