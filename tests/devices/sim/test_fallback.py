from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

HOST = torch.rand(4, 4)
MIXED: dict[str, Callable[[torch.Tensor], Any]] = {
    "mm": lambda x: torch.mm(x, HOST),
    "addmm": lambda x: torch.addmm(x, HOST, x),
    "bmm": lambda x: torch.bmm(x[None], HOST[None]),
    "add": lambda x: x + HOST,
    "where": lambda x: torch.where(x > 0, x, HOST),
    "cdist": lambda x: torch.cdist(x, HOST),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), HOST),
    "searchsorted": lambda x: torch.searchsorted(x, HOST),
    "cat": lambda x: torch.cat([x, HOST]),
    "layer_norm": lambda x: F.layer_norm(x, (4,), HOST[0]),
    "conv1d": lambda x: F.conv1d(x[None], HOST[None]),
    "embedding": lambda x: F.embedding(torch.zeros(2, dtype=torch.long), x),
    "lerp": lambda x: torch.lerp(x, HOST, 0.5),
    "masked_select": lambda x: torch.masked_select(x, HOST > 0.5),
    "out on the host": lambda x: torch.add(x, 1, out=torch.empty(4, 4)),
    "number out on the host": lambda x: torch.sum(x, (0, 1), out=torch.tensor(0.0)),
    "two devices": lambda x: x + x.to("sim:1"),
    "two devices, by fallback": lambda x: torch.atan2(x, x.to("sim:1")),
}
ALLOWED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "number": lambda x, _: x * torch.tensor(2.0) + torch.tensor(1),
    "number, by fallback": lambda x, _: torch.atan2(x, torch.tensor(2.0)),
    "indices": lambda x, rows: x[rows],
    "writing at indices": lambda x, rows: x.index_put((rows,), torch.tensor(1.0)),
    "fill": lambda x, _: torch.empty_like(x).fill_(torch.tensor(3.0)),
    "copy": lambda x, _: torch.empty_like(x).copy_(HOST),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_places_are_refused(sim: Any, name: str) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        MIXED[name](torch.randn(4, 4, device="sim"))


@pytest.mark.parametrize("name", ALLOWED)
def test_numbers_and_indices_of_the_host_are_taken(sim: Any, name: str) -> None:
    x, rows = torch.randn(4, 4), torch.tensor([2, 0])
    assert torch.equal(ALLOWED[name](x.to("sim"), rows).cpu(), ALLOWED[name](x, rows))


def test_each_operator_that_fell_back_is_counted_and_can_be_forgotten(sim: Any) -> None:
    x = torch.ones(4, device="sim")
    torch.atan2(x, x).erfinv()
    torch.atan2(x, x)
    assert sim.fallbacks() == {"aten::atan2.out": 2, "aten::erfinv.out": 1}
    assert sim.counters()["d2h_copies"] > 0
    sim.reset_fallbacks()
    assert sim.fallbacks() == {}
    assert sim.counters()["d2h_copies"] > 0


def test_operators_from_elsewhere_fall_back_too(sim: Any) -> None:
    @torch.library.custom_op("omnicomp_test::twice", mutates_args=(), device_types="cpu")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert torch.equal(twice(torch.ones(2, device="sim")).cpu(), torch.full((2,), 2.0))


@pytest.mark.parametrize("size", [(0,), (5, 5), (2, 2)])
def test_out_is_resized_where_it_has_to_be(sim: Any, size: tuple[int, ...]) -> None:
    x, y = torch.randn(2, 3, device="sim"), torch.randn(3, 2, device="sim")
    for function, operands in ((torch.mm, (x, y)), (torch.atan2, (x[:, :2], y[:2])), (torch.mul, (x[:, :2], y[:2]))):
        out = torch.empty(0, device="sim").resize_(size)
        result = function(*operands, out=out)
        assert result is out
        torch.testing.assert_close(out.cpu(), function(*(o.cpu() for o in operands)))


def test_out_keeps_its_memory_where_it_fits(sim: Any) -> None:
    out = torch.zeros(4, 2, device="sim").t()
    address = out.data_ptr()
    torch.mm(torch.ones(2, 3, device="sim"), torch.ones(3, 4, device="sim"), out=out)
    assert out.data_ptr() == address
    assert out.stride() == (1, 2)
    assert out.tolist() == [[3] * 4] * 2


def test_a_dtype_that_out_can_t_take_is_refused(sim: Any) -> None:
    x = torch.randn(3, device="sim")
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(x, x, out=torch.empty(3, dtype=torch.long, device="sim"))


def test_in_place_and_lists_fall_back(sim: Any) -> None:
    x = torch.randn(4)
    there = x.to("sim")
    assert torch.equal(there.erf_().cpu(), x.erf())
    parts = torch._foreach_sqrt([there.abs(), there.square()])
    assert [p.device.type for p in parts] == ["sim", "sim"]
    values, indices = torch.sort(there)
    assert torch.equal(there[indices].cpu(), values.cpu())


def test_what_the_host_can_t_do_either_is_an_error(sim: Any) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.randn(3, 3, device="sim").to_sparse().coalesce()
    assert torch.ones(2, device="sim").sum().item() == 2
