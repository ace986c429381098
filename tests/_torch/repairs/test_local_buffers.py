import pytest
import torch
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode

from omnicomp._torch.repairs.local_buffers import row_of_its_own
from omnicomp.timeline import Ran, current


def softmax_backward(gradients: torch.Tensor, scores: torch.Tensor, largest: torch.Tensor, total: torch.Tensor):
    weights = (scores - largest).exp() / total
    weighted = gradients[..., 0] * weights
    return weighted - weights * weighted.sum(-1, keepdim=True)


@pytest.mark.inductor
@pytest.mark.parametrize("lowering", ["inductor", "frozen"])
@torch.no_grad()
def test_each_row_has_a_local_buffer_of_its_own_where_rows_are_vectorised(lowering: str) -> None:
    inputs = torch.randn(2, 8, 8, 2), torch.randn(2, 8, 8), torch.randn(2, 8, 1), torch.rand(2, 8, 1) + 1
    compiled = torch.compile(softmax_backward, backend="omni", options={"lowerings": [lowering, "eager"]})
    torch.testing.assert_close(compiled(*inputs), softmax_backward(*inputs))
    assert {event.lowering for event in current() if isinstance(event, Ran)} == {lowering}


def test_the_fusion_is_as_it_was_afterwards() -> None:
    before = OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr
    with row_of_its_own():
        assert OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr is not before
    assert OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr is before
