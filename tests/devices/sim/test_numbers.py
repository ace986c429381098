from typing import Any

import pytest
import torch
from simulated import alike


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_number_is_not_rounded_to_16_bits_first(sim: Any, dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 1001).to(dtype)
    for function in (lambda x: x * 0.1, lambda x: x / 0.3, lambda x: x * torch.tensor(0.1), lambda x: 0.3 / (x + 4)):
        alike(function, x, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers_are_counted(sim: Any, dtype: torch.dtype) -> None:
    x = torch.tensor([1, 2, 2, 5], dtype=dtype, device="sim")
    found = torch.histc(x, bins=3, min=0, max=2)
    assert (found.dtype, found.tolist()) == (dtype, [0, 1, 2])
    assert torch.histc(x, bins=3, out=torch.empty(0, dtype=dtype, device="sim")).tolist() == [3, 0, 1]
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.histc(x, bins=3, out=torch.empty(0, device="sim"))


@pytest.mark.parametrize("index", [2, 256, 257, 2**40 + 1])
def test_an_index_that_is_too_large_is_no_other_device(sim: Any, index: int) -> None:
    with pytest.raises(RuntimeError, match=f"invalid device ordinal {index}, there are 2 devices"):
        sim.set_device(index)
    assert sim.current_device() == 0
