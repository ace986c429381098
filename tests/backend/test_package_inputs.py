"""Inputs of a package: what its code was made for is taken, and all else is an error that names the input."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from omnicomp._torch.inductor import aoti
from omnicomp.backend.package_inputs import check_inputs, describe_inputs


class Scaled(nn.Module):
    def forward(self, x: Tensor, y: Tensor, image: Tensor, scale: float, note: str | None) -> Tensor:
        return x.sum() * scale + y.sum() + image.sum()


X, Y = torch.ones(3, 4), torch.ones(3)
IMAGE = torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last)


@pytest.fixture(scope="module")
def wanted() -> Any:
    length = Dim("length", min=2, max=9)
    shapes = ({0: length}, {0: length}, None, None, None)
    program = aoti.exported(Scaled(), (X, Y, IMAGE, 2.0, None), {}, shapes)
    _, inputs = aoti.graph_of(program)
    return json.loads(describe_inputs(inputs, aoti.ranges_of(program)))


@pytest.mark.parametrize(
    "given",
    [
        (X, Y, IMAGE, 2.0, None),
        (torch.ones(9, 4), torch.ones(9), IMAGE, 2.0, None),
        (X, Y, IMAGE.contiguous(memory_format=torch.channels_last), 2.0, None),
        (X, Y[:, None].expand(3, 2)[:, 0].contiguous(), IMAGE, 2.0, None),
    ],
)
def test_what_fits_is_taken(wanted: Any, given: tuple[Any, ...]) -> None:
    check_inputs(wanted, given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (X[:2], Y, IMAGE, 2.0, None),
            "input 1 of the package has size 3 in dimension 0, and has to have 2, as another",
        ),
        ((torch.ones(3, 5), Y, IMAGE, 2.0, None), "input 0 .* size 5 in dimension 1, and has to have 4, unless"),
        ((torch.ones(10, 4), torch.ones(10), IMAGE, 2.0, None), "size 10 .* limits to 2 to 9"),
        ((X[0], Y, IMAGE, 2.0, None), "has 1 dimensions, and has to have 2"),
        ((torch.ones(4, 3).t(), Y, IMAGE, 2.0, None), "is not contiguous"),
        ((X, Y, IMAGE.contiguous(), 2.0, None), r"input 2 .* strides \(24, 12, 4, 1\)"),
        ((X.double(), Y, IMAGE, 2.0, None), "is torch.float64 on cpu, and has to be torch.float32 on cpu"),
        ((X.to("meta"), Y, IMAGE, 2.0, None), "on meta"),
        (([1], Y, IMAGE, 2.0, None), "has to be a tensor, and is a list"),
        ((X, Y, IMAGE, 3.0, None), "input 3 .* is not 2.0, which was compiled in"),
        ((X, Y, IMAGE, 2.0, Y), "input 4 .* is not None"),
    ],
)
def test_what_does_not_fit_is_named(wanted: Any, given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_inputs(wanted, given)
