"""Outputs that are views of an input that the graph writes to."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def second_half(x: Tensor) -> Tensor:
    half = x.chunk(2, 0)[1]
    x[0].add_(1)
    return half


def second_columns(x: Tensor) -> Tensor:
    columns = x.chunk(2, -2)[1]
    x[0].add_(1)
    return columns


@pytest.mark.inductor
@pytest.mark.parametrize("function", [second_half, second_columns])
def test_a_view_of_a_written_input_keeps_its_place_and_its_strides(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 2, 1)
    mine = x.clone()
    found, expected = torch.compile(function, backend="omni", dynamic=True)(mine), function(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(mine, x, rtol=0, atol=0)
    assert (found.stride(), found.storage_offset()) == (expected.stride(), expected.storage_offset())
    assert found._base is mine
