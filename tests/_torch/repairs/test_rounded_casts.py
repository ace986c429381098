import pytest
import torch
from torch import Tensor


def casts(x: Tensor) -> list[Tensor]:
    halves = x.half()
    return [
        halves.float(),
        x - x.bfloat16().float(),
        x - x.bfloat16().view(4, -1).T.float().T.reshape(-1),
        halves.float().sum(),
        halves,
        halves + 1,
        x.double().half().double(),
    ]


@pytest.mark.inductor
def test_casts_that_a_program_takes_back_are_rounded() -> None:
    x = torch.tensor([10.001, 1e6, -1e-9, 3.14159]).repeat(8)
    x[::2] *= 0.37
    torch.testing.assert_close(torch.compile(casts, backend="omni")(x), casts(x), rtol=0, atol=0)
