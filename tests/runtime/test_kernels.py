"""What torch's profiler saw of a call: kernels on the device alone; and nothing of it is in the call's way."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from omnicomp.runtime.kernels import kernels_of


class Profile:
    """A profile of two kernels of 3 and 4 us, and a launch on the host."""

    def __init__(self, activities: Any) -> None:
        self.activities = activities

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def events(self) -> list[Any]:
        def event(device: DeviceType, us: float) -> Any:
            return SimpleNamespace(device_type=device, time_range=SimpleNamespace(elapsed_us=lambda: us))

        return [event(DeviceType.CUDA, 3.0), event(DeviceType.CPU, 50.0), event(DeviceType.CUDA, 4.0)]


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", Profile)


def test_kernels_of_the_device_are_counted() -> None:
    assert kernels_of(lambda: 5) == (5, 2, pytest.approx(7e-6))


def test_a_program_that_profiles_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "_profiler_enabled", lambda: True)
    assert kernels_of(lambda: 5) == (5, 0, 0.0)


def test_a_profiler_that_does_not_begin_costs_nothing_but_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(activities: Any) -> Any:
        raise RuntimeError("no permission to read the counters")

    monkeypatch.setattr(torch.profiler, "profile", broken)
    assert kernels_of(lambda: 5) == (5, 0, 0.0)


def test_an_error_of_the_call_is_raised() -> None:
    with pytest.raises(ValueError, match="own"):
        kernels_of(lambda: int("own"))
