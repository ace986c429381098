"""What Inductor computes has eager's dtypes, and wraps as in eager."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering

from omnicomp._torch.repairs.lowered_dtypes import NEEDED, dtypes_of_the_graph
from omnicomp.timeline import Ran, current


@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_products_of_integers_keep_their_dtype(dtype: torch.dtype) -> None:
    def products(a: Tensor, b: Tensor) -> list[Tensor]:
        row = torch.bmm(a[:, :1], b)
        return [row, row * 3 // 2, torch.einsum("bi,bij->bj", a[:, 0], b), torch.bmm(a, b), row.float() + 0.5]

    a, b = (torch.arange(12).view(2, 3, 2) * 30).to(dtype), (torch.arange(8).view(2, 2, 2) * 50).to(dtype)
    found: Any = torch.compile(products, backend="omni")(a, b)
    torch.testing.assert_close(found, products(a, b), rtol=0, atol=0)
    assert "inductor" in {event.lowering for event in current() if isinstance(event, Ran)}


@pytest.mark.inductor
def test_any_of_bytes_is_a_byte() -> None:
    def anywhere(x: Tensor) -> list[Tensor]:
        found = [torch.any(x), torch.any(x, 0), torch.any(x, 1, keepdim=True), torch.any(x, (0, 1)), torch.all(x, 0)]
        return [byte * 200 + 100 for byte in found]

    x = torch.tensor([[0, 3, 0], [0, 255, 1]], dtype=torch.uint8)
    for kind in (x, x > 1):
        torch.testing.assert_close(torch.compile(anywhere, backend="omni")(kind), anywhere(kind))


@pytest.mark.inductor
def test_ldexp_has_eagers_dtypes() -> None:
    def scaled(x: Tensor, n: Tensor, m: Tensor) -> list[Tensor]:
        return [torch.ldexp(*pair) for pair in ((x, n), (x.double(), n), (x > 0, m), (n, n), (n, m))]

    x, n = torch.tensor([1e-30, -3.5, 0.0, 7.0]), torch.tensor([130, -3, 2, 9])
    for m in ((n / 9).half(), (n / 3).bfloat16()):
        torch.testing.assert_close(torch.compile(scaled, backend="omni")(x, n, m), scaled(x, n, m))


def test_inductor_is_as_it_was_afterwards() -> None:
    before = GraphLowering.call_function
    with dtypes_of_the_graph():
        assert (GraphLowering.call_function is not before) == NEEDED.here
    assert GraphLowering.call_function is before
