from collections.abc import Callable
from typing import Any

import pytest
import torch

View = Callable[[torch.Tensor], torch.Tensor]
VIEWS: dict[str, View] = {
    "transpose": lambda x: x.transpose(0, 1),
    "slice": lambda x: x[1:, ::2],
    "select": lambda x: x[1],
    "view": lambda x: x.view(2, 2, 6),
    "reshape": lambda x: x.t().reshape(-1)[:4],
    "expand": lambda x: x[:, :1].expand(4, 5),
    "permute": lambda x: x.view(2, 2, 6).permute(2, 0, 1),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "diagonal": lambda x: x.diagonal(1),
    "as_strided": lambda x: x.as_strided((2, 3), (1, 2), 3),
    "split": lambda x: x.split(2, 1)[1],
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "dtype": lambda x: x.view(torch.int32),
    "view_as_complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2))),
    "real": lambda x: torch.view_as_complex(x.view(4, 3, 2)).real,
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_sees_what_the_host_s_does_and_shares_memory(sim: Any, name: str) -> None:
    view = VIEWS[name]
    x = torch.randn(4, 6)
    there = x.to("sim")
    sim.reset_counters()
    seen = view(there)
    assert seen.stride() == view(x).stride()
    assert sim.counters()["d2h_copies"] == 0
    assert torch.equal(seen.cpu(), view(x))
    if name != "reshape":
        assert seen.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["transpose", "slice", "expand", "unfold"])
def test_arithmetic_takes_strides_as_they_are(sim: Any, name: str) -> None:
    view = VIEWS[name]
    x = torch.randn(4, 6)
    assert torch.equal((view(x.to("sim")) * 2 + view(x.to("sim"))).cpu(), view(x) * 2 + view(x))


def test_writing_through_a_view_changes_its_base(sim: Any) -> None:
    x = torch.zeros(3, 3, device="sim")
    x.t()[1, 1:].add_(5)
    assert x.tolist() == [[0, 0, 0], [0, 5, 0], [0, 5, 0]]


def test_set_makes_a_tensor_look_at_another_memory(sim: Any) -> None:
    base = torch.arange(6.0, device="sim")
    x = torch.empty(0, device="sim").set_(base.untyped_storage(), 2, (2, 2), (1, 2))
    assert x.tolist() == [[2, 4], [3, 5]]
    y = torch.empty(0, device="sim").set_(base)
    y[0] = 9
    assert base[0].item() == 9


def test_channels_last_is_a_layout(sim: Any) -> None:
    x = torch.randn(2, 3, 4, 5).to("sim").to(memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.empty_like(x).stride() == x.stride()
