"""The int8 layer on a CUDA device: values against float64, over rows, shapes and spellings."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import omnicomp
from omnicomp.lowerings.overrides.int8_linear import int8_linear, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make(n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = torch.randint(-128, 128, (n, k), device="cuda", dtype=torch.int8)
    return weight, (torch.rand(n, device="cuda") * 0.01).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1000, 256), (9001, 768)])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 32, 33, 64, 65])
def test_it_is_as_close_to_float64_as_eager(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    weight, scale = make(n, k, dtype)
    x = torch.randn(rows, k, device="cuda", dtype=dtype)
    exact = F.linear(x.double(), weight.double()) * scale.double()
    errors = [
        (value.double() - exact).norm() / exact.norm()
        for value in (int8_linear(x, weight, scale), reference(x, weight, scale))
    ]
    assert errors[0] <= 1.05 * errors[1]


@torch.no_grad()
def test_strided_activations_and_leading_dimensions() -> None:
    weight, scale = make(512, 512, torch.bfloat16)
    x = torch.randn(3, 512, 2, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    got = int8_linear(x, weight, scale)
    assert got.shape == (3, 2, 512)
    torch.testing.assert_close(got, reference(x, weight, scale), rtol=0.02, atol=0.05)


@torch.no_grad()
def test_a_compiled_layer_is_taken_and_runs_in_cuda_graphs() -> None:
    weight, scale = make(10240, 4096, torch.bfloat16)
    x = torch.randn(1, 1, 4096, device="cuda", dtype=torch.bfloat16)

    def layer(x: Tensor) -> Tensor:
        return F.linear(x, weight.to(dtype=x.dtype)) * scale

    function = torch.compile(layer, backend="omni", mode="reduce-overhead")
    for _ in range(4):
        got = function(x).clone()
    assert [r.name for g in omnicomp.audit().graphs for r in g.rewrites] == ["int8_linear"]
    torch.testing.assert_close(got, layer(x), rtol=0.02, atol=0.05)
