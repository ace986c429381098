from collections.abc import Callable
from typing import Any

import pytest
import torch


def _product(device: str = "sim") -> torch.Tensor:
    return torch.ones(2, 3, device=device).mm(torch.ones(3, 2, device=device))


FAULTS: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "allocate": (torch.OutOfMemoryError, lambda: torch.empty(3, device="sim")),
    "copy": (torch.AcceleratorError, lambda: torch.ones(2).to("sim")),
    "kernel": (torch.AcceleratorError, _product),
    "synchronize": (torch.AcceleratorError, lambda: torch.accelerator.synchronize()),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_the_driver_is_an_exception_once(sim: Any, kind: str) -> None:
    error, work = FAULTS[kind]
    sim.inject_fault(kind)
    with pytest.raises(error, match=f"injected fault in {kind}"):
        work()
    work()
    sim.synchronize()
    assert _product().cpu().tolist() == [[3, 3], [3, 3]]


@pytest.mark.parametrize("kind", FAULTS)
def test_it_can_be_a_later_operation(sim: Any, kind: str) -> None:
    error, work = FAULTS[kind]
    sim.inject_fault(kind, after=4 if kind == "kernel" else 2)
    done: list[Any] = []
    with pytest.raises(error):
        done.extend(work() for _ in range(5))
    # A product is three kernels: two fills and itself.
    assert len(done) == (1 if kind == "kernel" else 2)


@pytest.mark.parametrize("kind", ["allocate", "kernel"])
def test_a_fault_in_a_backward_reaches_the_caller(sim: Any, kind: str) -> None:
    x = torch.randn(3, 3, device="sim", requires_grad=True)
    loss = (x @ x).sum()
    sim.inject_fault(kind, after=1)
    with pytest.raises(RuntimeError, match="injected fault"):
        loss.backward()
    x.grad = None
    (x @ x).sum().backward()
    assert x.grad is not None


def test_an_operation_that_failed_left_its_operands_alone(sim: Any) -> None:
    x = torch.ones(4, device="sim")
    sim.inject_fault("kernel")
    with pytest.raises(torch.AcceleratorError):
        x.add_(1)
    assert x.tolist() == [1, 1, 1, 1]


def test_a_launch_from_outside_fails_before_it_runs(sim: Any) -> None:
    called: list[int] = []
    sim.inject_fault("kernel")
    with pytest.raises(torch.AcceleratorError):
        sim.launch(called.append, 1)
    assert called == []


def test_faults_are_known_by_name_and_can_be_disarmed(sim: Any) -> None:
    with pytest.raises(ValueError, match="one of allocate, copy, kernel, synchronize"):
        sim.inject_fault("printer")
    with pytest.raises(ValueError, match="number of operations"):
        sim.inject_fault("copy", after=-1)
    for kind in FAULTS:
        sim.inject_fault(kind)
    sim.clear_faults()
    assert _product().cpu()[0, 0].item() == 3
