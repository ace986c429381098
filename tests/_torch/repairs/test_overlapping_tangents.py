"""Results whose positions share memory get the gradient that eager gives them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

from omnicomp._torch.repairs.overlapping_tangents import may_overlap, tangents_without_overlap

EAGER = {"lowerings": ["eager"]}

PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "windows": lambda x: x.sin().unfold(0, 4, 2),
    "expanded": lambda x: x.sin()[:3].unsqueeze(0).expand(4, 3),
    "restrided": lambda x: x.sin().as_strided((2, 1, 1, 2), (1, 7, 7, 1)),
    "restrided in place": lambda x: x.clone().as_strided_((2, 2, 2, 2), (1, 1, 1, 1)),
    "used before": lambda x: (lambda y: (y.unfold(0, 3, 1), y * 2))(x.sin()),
    "windows of the input": lambda x: x.unfold(0, 4, 2),
    "images": lambda x: x.sin().view(1, 4, 4).unfold(1, 2, 1).unfold(2, 2, 1),
    "diagonal of windows": lambda x: x.sin().unfold(0, 4, 1).diagonal(),
}


def gradient(function: Callable[[Tensor], Any]) -> Tensor:
    x = torch.linspace(-2, 2, 16, requires_grad=True)
    results = function(x)
    results = results if isinstance(results, tuple) else (results,)
    made = torch.Generator().manual_seed(3)
    given = [torch.randn(result.shape, generator=made) for result in results]
    return torch.autograd.grad(results, x, given)[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_gradient_is_eagers(name: str) -> None:
    compiled: Any = torch.compile(PROGRAMS[name], backend="omni", options=EAGER)
    torch.testing.assert_close(gradient(compiled), gradient(PROGRAMS[name]))


@pytest.mark.inductor
def test_the_gradient_is_eagers_under_inductor() -> None:
    compiled: Any = torch.compile(PROGRAMS["windows"], backend="omni")
    torch.testing.assert_close(gradient(compiled), gradient(PROGRAMS["windows"]))


@pytest.mark.parametrize(
    ("sizes", "strides", "overlap"),
    [
        ((2, 3), (3, 1), False),
        ((2, 3), (1, 2), False),
        ((2, 1, 3), (3, 1, 1), False),
        ((7, 4), (2, 1), True),
        ((4,), (0,), True),
        ((1,), (0,), False),
        ((), (), False),
        ((2, 2), (4, 2), False),
    ],
)
def test_which_layouts_overlap(sizes: tuple[int, ...], strides: tuple[int, ...], overlap: bool) -> None:
    assert may_overlap(sizes, strides) is overlap


def test_other_results_keep_the_layout_that_torch_expects() -> None:
    original = MemoryFormatMeta.from_tensor
    transposed = torch.rand(3, 4).t()
    with tangents_without_overlap():
        assert MemoryFormatMeta.from_tensor(transposed) == original(transposed)
        windows = MemoryFormatMeta.from_tensor(torch.rand(8).unfold(0, 4, 2))
        assert windows is not None
        assert windows.memory_format is torch.contiguous_format
    assert MemoryFormatMeta.from_tensor is original
