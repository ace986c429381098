import pytest
import torch

from omnicomp.cli import doctor
from omnicomp.devices import limits
from omnicomp.devices.cuda import CudaDevice
from omnicomp.devices.limits import Limits

CARD = "cuda"


@pytest.fixture(autouse=True)
def card(monkeypatch, tmp_path):
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(limits, "versions", lambda device: ("a card",))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_a_device_is_measured_once(monkeypatch):
    found = Limits(bytes=4.2e12, flops=8.1e14)
    monkeypatch.setattr(limits, "_measured", lambda device: found)
    assert limits.limits(CARD) == found
    monkeypatch.setattr(limits, "_measured", None)
    assert limits.limits(CARD) == found
    assert str(found) == "a copy moves 4.2 TB/s, bfloat16 products 810 TFLOP/s"


def test_another_device_is_measured_by_itself(monkeypatch):
    monkeypatch.setattr(limits, "_measured", lambda device: Limits(bytes=1.0, flops=1.0))
    limits.limits(CARD)
    monkeypatch.setattr(limits, "versions", lambda device: ("another card",))
    monkeypatch.setattr(limits, "_measured", lambda device: Limits(bytes=2.0, flops=1.0))
    assert limits.limits(CARD).bytes == 2.0


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_file_with_no_rate_is_measured_again(rate, monkeypatch):
    monkeypatch.setattr(limits, "_measured", lambda device: Limits(bytes=rate, flops=1.0))
    limits.limits(CARD)
    monkeypatch.setattr(limits, "_measured", lambda device: Limits(bytes=3.0, flops=1.0))
    assert limits.limits(CARD).bytes == 3.0


def test_doctor_says_why_it_could_not_measure(monkeypatch):
    def full(device):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(limits, "_measured", full)
    (check,) = doctor._limits(CudaDevice())
    assert (check.status, check.found) == ("note", "can't be measured (RuntimeError: out of memory)")


def test_a_cpu_is_measured_in_float32(monkeypatch):
    monkeypatch.setitem(limits._WORK, "cpu", (2**20, 64, torch.float32))
    assert limits.known("cpu") is None
    found = limits.limits("cpu")
    assert found.bytes > 0
    assert found.flops > 0
    assert found.dtype == "float32"
    assert limits.known("cpu") == found


def test_nothing_is_known_of_other_devices():
    assert limits.known("sim") is None
