import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import decomposition

from omnicomp._torch.repairs.decompositions import decompositions_mended

NUMBERS = (0.0, -0.0, 1.0, 0.3, -7.0, 3.0, 1e-8, -1e-5, 1e10, math.inf, -math.inf, math.nan)


def floor_quotients(a: Tensor, b: Tensor) -> list[Tensor]:
    return [a // b, a // 0.1, torch.div(a, -3.0, rounding_mode="floor"), a.to(torch.int64) // 3, a.half() // b.half()]


def functions(x: Tensor) -> list[Tensor]:
    return [x**-0.5, torch.erf(x), F.gelu(x), F.gelu(x.bfloat16()), F.gelu(x.repeat(2).view(2, -1).T)]


@pytest.mark.inductor
def test_floating_quotients_are_rounded_down_as_in_python() -> None:
    pairs = torch.cartesian_prod(torch.tensor(NUMBERS[:9]), torch.tensor([0.1, -0.1, 3.0, 0.0, -2.0]))
    a, b = pairs.clamp(-6e4, 6e4).unbind(-1)
    found = torch.compile(floor_quotients, backend="omni")(a.contiguous(), b.contiguous())
    torch.testing.assert_close(found, floor_quotients(a, b), rtol=0, atol=0, equal_nan=True)
    assert float(found[0][(a == 1) & (b == 0.1)][0]) == 1.0 // 0.1 == 9


@pytest.mark.inductor
def test_floating_quotients_have_eagers_strides() -> None:
    a, b = torch.ones(6, 5), torch.ones(5, 6)
    pairs = [(a.mT, b), (b, a.mT), (a.mT, b[0]), (b[0], a.mT), (a.mT, b[:, :1]), (a.mT, 2.0)]
    compiled = torch.compile(lambda: [torch.floor_divide(*pair) for pair in pairs], backend="omni")
    assert [found.stride() for found in compiled()] == [torch.floor_divide(*pair).stride() for pair in pairs]


@pytest.mark.inductor
def test_quotients_of_numbers_alone_are_compiled() -> None:
    def halves(x: Tensor) -> Tensor:
        rows = torch.div(x.size(0), 2, rounding_mode="trunc")
        return x.view(rows, -1) + torch.div(-7.5, 2, rounding_mode="floor")

    x = torch.randn(6)
    assert torch.equal(torch.compile(halves, backend="omni", options={"on_error": "raise"})(x), halves(x))


@pytest.mark.inductor
def test_infinities_nans_zeros_and_small_numbers_are_eagers() -> None:
    x = torch.tensor(NUMBERS).repeat(3)
    found, expected = torch.compile(functions, backend="omni")(x), functions(x)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0, equal_nan=True)
    for mine, eagers in zip(found, expected, strict=True):
        zeros = eagers == 0
        assert torch.equal(mine[zeros].signbit(), eagers[zeros].signbit())


def test_the_tables_are_as_they_were_afterwards() -> None:
    before = dict(decomposition.decompositions), dict(decomposition.fast_random_decomps())
    with decompositions_mended():
        assert (
            decomposition.select_decomp_table()[torch.ops.aten.gelu.default]
            is not before[0][torch.ops.aten.gelu.default]
        )
        with decompositions_mended():
            pass
        assert torch.ops.aten.div.Tensor_mode in decomposition.decompositions
    assert before == (decomposition.decompositions, decomposition.fast_random_decomps())
