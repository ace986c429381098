from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor


def found(x: Tensor) -> Tensor:
    places = x.nonzero()
    torch._check(places.shape[0] == 2)
    return places.sum() + 1


def chosen(x: Tensor) -> Tensor:
    chosen = torch.masked_select(x, x > 0)
    torch._check(chosen.shape[0] == 2)
    return chosen * 2


@pytest.fixture(autouse=True)
def _sizes_of_data() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


@pytest.mark.parametrize("function", [found, chosen])
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_size_that_depends_on_data_is_checked(function: Any, lowering: str) -> None:
    options: Any = {"lowerings": [lowering, "eager"] if lowering != "eager" else ["eager"]}
    compiled = torch.compile(function, backend="omni", fullgraph=True, options=options)
    for right in ([3, 1], [2, 0, 1]):
        torch.testing.assert_close(compiled(torch.tensor(right)), function(torch.tensor(right)))
    for wrong in ([4, 0], [1, 1, 1]):
        with pytest.raises((RuntimeError, AssertionError), match=r"[Aa]ssertion failed|expected size|Eq"):
            compiled(torch.tensor(wrong))
