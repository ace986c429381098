"""Kernels of Triton against their references, on a GPU or by Triton's interpreter: drawn shapes, strides and dtypes."""

from typing import Any
from unittest import mock

import interpreted
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnicomp._torch.inductor import triton_ops
from omnicomp.passes import few_rows
from omnicomp.passes.attention import few_queries

DTYPES = st.sampled_from([torch.bfloat16, torch.float16])


@pytest.fixture
def device() -> torch.device:
    return torch.device(interpreted.device())


def made(plan: Any, arguments: tuple[Any, ...], device: torch.device) -> list[torch.Tensor]:
    given = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)
    return [result.cpu() for result in triton_ops._launched(plan(*given), device)]


def near(found: torch.Tensor, exact: torch.Tensor) -> None:
    """No farther off than roundings of the result, and of what is summed."""
    error = (found.double() - exact).abs().max()
    assert error <= 4 * torch.finfo(found.dtype).eps * max(float(exact.abs().max()), 1.0)


@given(st.data())
def test_linear_layers_of_few_rows(device: torch.device, data: st.DataObject) -> None:
    rows, features = data.draw(st.sampled_from([1, 2, 5, 16])), data.draw(st.sampled_from([256, 300, 512, 2049]))
    sizes, dtype = data.draw(st.lists(st.sampled_from([1, 7, 32, 33]), min_size=1, max_size=3)), data.draw(DTYPES)
    x, weights = torch.randn(rows, features).to(dtype), [torch.randn(n, features).to(dtype) / 16 for n in sizes]
    biases = [torch.randn(n).to(dtype) for n in sizes] if data.draw(st.booleans()) else []
    exact = few_rows._reference(*(torch.utils._pytree.tree_map(torch.Tensor.double, v) for v in (x, weights, biases)))
    # Both sizes of blocks, of which the other is for thousands of outputs.
    with mock.patch.object(few_rows, "_MANY_OUTPUTS", data.draw(st.sampled_from([1, few_rows._MANY_OUTPUTS]))):
        found = made(few_rows._plan, (x, weights, biases), device)
    for each, expected in zip(found, exact, strict=True):
        near(each, expected)


@given(st.data())
def test_one_row_with_what_is_around_its_layers(device: torch.device, data: st.DataObject) -> None:
    draw, dtype = data.draw, data.draw(DTYPES)
    features, gate = draw(st.sampled_from([256, 300, 2049])), draw(st.sampled_from(["", "silu", "gelu", "gelu_tanh"]))
    sizes = [33, 33] if gate else draw(st.lists(st.sampled_from([1, 7, 32]), min_size=1, max_size=3))
    x, weights = torch.randn(1, features) * 3, [torch.randn(n, features).to(dtype) / 16 for n in sizes]
    biases = [torch.randn(n).to(dtype) for n in sizes] if draw(st.booleans()) else []
    gain = torch.randn(features).to(draw(st.sampled_from([dtype, torch.float32]))) if draw(st.booleans()) else None
    addend = torch.randn(1, sizes[0]).to(dtype) if (gate or len(sizes) == 1) and draw(st.booleans()) else None
    x = x if gain is not None and draw(st.booleans()) else x.to(dtype)
    numbers = draw(st.sampled_from([0.0, 1.0])), draw(st.sampled_from([1e-6, 0.5]))
    arguments = (x, weights, biases, gain, *numbers, addend, gate)
    exact = few_rows._reference(*torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.double, arguments))
    for found, expected in zip(made(few_rows._plan, arguments, device), exact, strict=True):
        assert found.dtype is dtype
        near(found, expected)


def laid(tensor: torch.Tensor, way: str) -> torch.Tensor:
    """The same values, dense in another order of the dimensions; the last one stays dense."""
    order = {"heads": (0, 2, 1, 3), "cache": (1, 0, 2, 3)}.get(way, (0, 1, 2, 3))
    return tensor.permute(order).contiguous().permute(order)


@given(st.data())
def test_attention_of_few_queries(device: torch.device, data: st.DataObject) -> None:
    draw, dtype = data.draw, data.draw(DTYPES)
    batch, kept, groups, queries = draw(st.sampled_from([(1, 1, 1, 1), (2, 2, 4, 1), (1, 2, 8, 2), (2, 1, 1, 16)]))
    keys, size, width = draw(st.sampled_from([1, 63, 64, 200])), *(draw(st.sampled_from([16, 64, 128])) for _ in "kv")
    last = draw(st.sampled_from([0, 1, keys // 2, keys]))
    query, key, value = (
        laid(torch.randn(batch, heads, n, d).to(dtype), draw(st.sampled_from(["dense", "heads", "cache"])))
        for heads, n, d in ((kept * groups, queries, size), (kept, keys, size), (kept, keys, width))
    )
    shape = [draw(st.sampled_from([1, n])) for n in (batch, kept * groups, queries)]
    seen = (torch.rand(*shape, keys) > draw(st.sampled_from([0.0, 0.5, 1.0]))) & (torch.arange(keys) < last)
    mask = seen if draw(st.booleans()) else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
    arguments = (query, key, value, mask, torch.tensor(last), 0.125)
    assert few_queries.fits(*arguments[:4])
    wide = [tensor.double() for tensor in arguments[:3]]
    exact = few_queries._reference(*wide, mask if mask.dtype is torch.bool else mask.double(), arguments[4], 0.125)
    exact = torch.where(seen.any(-1, keepdim=True), exact, 0.0)
    # What lies behind the last key is not read.
    key[:, :, last:] = value[:, :, last:] = torch.nan
    (found,) = made(few_queries._plan, arguments, device)
    near(found, exact)
