"""A result comes into the layout that was predicted, and is copied only if it has another one."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from omnicomp.analysis.layouts import Layout, depends_on_data, layout_of, restride


def test_a_result_of_the_predicted_layout_is_itself() -> None:
    x = torch.rand(3, 4)
    assert restride(x, layout_of(x)) is x
    assert restride(x, None) is x
    assert restride(3, layout_of(x)) == 3


def test_the_stride_of_a_dimension_of_size_one_says_nothing() -> None:
    x = torch.rand(1).expand(3, 1)
    assert x.stride() == (0, 0) or x.stride() == (0, 1)
    assert restride(x, Layout(strides=(0, 7))) is x


def test_other_strides_are_copied() -> None:
    x = torch.rand(4, 3).t()
    result = restride(x, Layout(strides=(4, 1)))
    assert result.stride() == (4, 1)
    assert torch.equal(result, x)


def test_an_expanded_result_can_be_made() -> None:
    x = torch.rand(3).expand(4, 3).contiguous()
    result = restride(x, Layout(strides=(0, 1)))
    assert result.stride() == (0, 1)
    assert torch.equal(result, x)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_symbolic_strides_are_kept_as_an_order(order: tuple[int, ...]) -> None:
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        sizes = [environment.create_unbacked_symint() for _ in range(3)]
        inverse = [order.index(dim) for dim in range(3)]
        value = torch.empty(*(sizes[dim] for dim in order)).permute(inverse)
        layout = layout_of(value)
    assert layout == Layout(order=order)
    assert depends_on_data(value)
    x = torch.rand(2, 3, 4)
    result = restride(x, layout)
    assert torch.equal(result, x)
    assert result.permute(order).is_contiguous()
    assert restride(result, layout) is result


def test_symbolic_strides_with_gaps_are_not_known() -> None:
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        size = environment.create_unbacked_symint()
        assert layout_of(torch.empty(4, size)[::2]) is None
