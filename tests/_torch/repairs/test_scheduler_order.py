import pytest
import torch
from torch._inductor.scheduler import SchedulerNode

from omnicomp._torch.repairs.scheduler_order import NEEDED, written_before_read
from omnicomp.timeline import Ran, current


def rows_and_a_sum(
    x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, added: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    a = x[rows] * 2.0 + 1
    return a, a + torch.zeros(5, 4).index_put((places,), added, accumulate=True)


@pytest.mark.inductor
@pytest.mark.parametrize("lowering", ["inductor", "frozen"])
@torch.no_grad()
def test_a_buffer_is_written_to_before_it_is_read(lowering: str) -> None:
    inputs = torch.randn(5, 4), torch.tensor([4, 3, 2, 1, 0]), torch.tensor([0, 2, 4]), torch.randn(3, 4)
    found = torch.compile(rows_and_a_sum, backend="omni", options={"lowerings": [lowering, "eager"]})(*inputs)
    torch.testing.assert_close(found, rows_and_a_sum(*inputs))
    assert {event.lowering for event in current() if isinstance(event, Ran)} == {lowering}


def test_the_scheduler_is_as_it_was_afterwards() -> None:
    before = SchedulerNode.recompute_size_and_body
    with written_before_read():
        assert (SchedulerNode.recompute_size_and_body is not before) == NEEDED.here
    assert SchedulerNode.recompute_size_and_body is before
