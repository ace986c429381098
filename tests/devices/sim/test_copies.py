from typing import Any

import pytest
import torch

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.bool,
    torch.float8_e4m3fn,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_round_trip_keeps_every_bit(sim: Any, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5).to(dtype)
    there = x.to("sim")
    assert there.dtype == dtype
    assert there.device == torch.device("sim", 0)
    assert torch.equal(there.cpu().view(torch.uint8), x.view(torch.uint8))


def test_each_direction_is_counted_in_bytes(sim: Any) -> None:
    x = torch.ones(10).to("sim")
    y = x.to("sim:1")
    y.cpu()
    found = sim.counters()
    assert {key: found[key] for key in found if "bytes" in key} == {"h2d_bytes": 40, "d2d_bytes": 40, "d2h_bytes": 40}
    assert (found["h2d_copies"], found["d2d_copies"], found["d2h_copies"]) == (1, 1, 1)


def test_a_copy_casts_broadcasts_and_follows_strides(sim: Any) -> None:
    target = torch.zeros(3, 4, dtype=torch.float64, device="sim").t()
    target.copy_(torch.arange(3))
    assert target.tolist() == [[0, 1, 2]] * 4
    host = torch.zeros(4, 3)
    host.t()[1:].copy_(target.t()[1:])
    assert host.tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize("lazy", ["conj", "imag", "_neg_view"])
def test_lazily_conjugated_and_negated_views_are_copied(sim: Any, lazy: str) -> None:
    x = torch.randn(3, dtype=torch.complex64)
    there = x.to("sim")

    def view(z: torch.Tensor) -> torch.Tensor:
        return z.conj().imag if lazy == "imag" else z.conj() if lazy == "conj" else torch._neg_view(z)

    assert torch.equal(view(there).cpu(), view(x))
    assert torch.equal(view(there).clone().cpu(), view(x))
    assert torch.equal(torch.empty_like(there).copy_(view(x)).cpu(), torch.empty_like(x).copy_(view(x)))


def test_an_item_comes_to_the_host(sim: Any) -> None:
    assert torch.full((2, 2), 7, device="sim")[1, 0].item() == 7
    assert bool(torch.ones((), dtype=torch.bool, device="sim"))


def test_the_host_can_t_read_it_as_its_own(sim: Any) -> None:
    with pytest.raises(TypeError, match="host memory"):
        torch.ones(2, device="sim").numpy()


def test_a_capsule_shares_the_memory(sim: Any) -> None:
    x = torch.zeros(3, device="sim:1")
    y = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    y.fill_(2)
    assert y.device == x.device
    assert x.tolist() == [2, 2, 2]


def test_methods_carry_the_device_s_name(sim: Any) -> None:
    x = torch.ones(2).sim()  # pyright: ignore[reportAttributeAccessIssue]
    assert x.is_sim  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.nn.Linear(1, 1).sim().weight.device.type == "sim"  # pyright: ignore[reportCallIssue]
    assert torch.ones(2).sim(1).device.index == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_copy_onto_a_part_of_itself_is_refused(sim: Any) -> None:
    x = torch.arange(8.0, device="sim")
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        x[1:].copy_(x[:-1])
    assert x.tolist() == list(range(8))
    assert x[:4].copy_(x[4:]).tolist() == [4, 5, 6, 7]
    assert x[::2].copy_(x[1::2]).tolist() == [5, 7, 5, 7]
