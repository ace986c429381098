import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.codegen.cpp import CppVecOverrides

from omnicomp._torch.repairs.vector_functions import accurate_functions


def functions(x: Tensor, large: Tensor) -> list[Tensor]:
    return [x.expm1(), F.elu(x), F.selu(x), x.atanh(), x.double().expm1(), large.acosh(), large % 3, -large % 3, x % -2]


@pytest.mark.inductor
def test_small_and_large_results_are_eagers_in_vectorised_code() -> None:
    x = torch.tensor([1e-10, -1e-7, 1e-5, -1e-20, -0.0, 0.3, -0.24, 0.26]).repeat(4)
    large = torch.tensor([1.0, 2.5, 1e9, 17039360.0, 1e20, 3e38, 1.8446744e19, 7.0]).repeat(4)
    found, expected = torch.compile(functions, backend="omni")(x, large), functions(x, large)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for mine, eagers in zip(found, expected, strict=True):
        assert torch.equal(mine.signbit(), eagers.signbit())


def integers(x: Tensor) -> list[Tensor]:
    places = torch.arange(x.numel())
    return [
        places * 1_000_000_000,
        places.int() * 3 + x.int(),
        places * 500_000_000 + x,
        places[::2] * 2_000_000_000 - 7,
    ]


@pytest.mark.inductor
@pytest.mark.parametrize("dynamic", [False, True])
def test_integers_of_a_vector_do_not_overflow(dynamic: bool) -> None:
    x = torch.arange(70.0) / 3
    torch.testing.assert_close(torch.compile(integers, backend="omni", dynamic=dynamic)(x), integers(x))


def test_the_functions_are_as_they_were_afterwards() -> None:
    before = vars(CppVecOverrides)["expm1"]
    with accurate_functions():
        assert isinstance(vars(CppVecOverrides)["expm1"], staticmethod)
        assert vars(CppVecOverrides)["expm1"] is not before
    assert vars(CppVecOverrides)["expm1"].__func__ is before.__func__
