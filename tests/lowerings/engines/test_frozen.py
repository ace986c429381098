"""Inductor with weights built in: what it takes, that no weight is ever stale, and that its memory is given back."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.codecache import PyCodeCache

import omnicomp
from omnicomp.timeline import Ran, Subgraph

pytestmark = pytest.mark.inductor

OPTIONS: dict[str, Any] = {"lowerings": ["frozen", "eager"]}


class Net(nn.Module):
    """Convolution, normalisation with running statistics, a linear layer, and `tanh`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3))))


def ran(since: int) -> dict[str, str]:
    return {e.lowering: e.evidence for e in omnicomp.timeline.events()[since:] if isinstance(e, Ran)}


def in_place(net: Net) -> None:
    net.head.weight.mul_(2)


def through_data(net: Net) -> None:
    net.conv.weight.data.add_(0.1)


def running_statistics(net: Net) -> None:
    net.norm.running_mean.data.add_(0.5)  # type: ignore[union-attr]


def loaded(net: Net) -> None:
    net.load_state_dict(Net().eval().state_dict())


def exchanged(net: Net) -> None:
    net.head.weight = nn.Parameter(torch.randn_like(net.head.weight))


def optimizer_step(net: Net) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(net.parameters(), lr=0.1, foreach=True).step()


CHANGES: list[Callable[[Net], None]] = [
    *(in_place, through_data, running_statistics, loaded, exchanged, optimizer_step),
]


@torch.no_grad()
def test_weights_are_built_in_and_never_stale() -> None:
    torch._dynamo.reset()
    net, x, since = Net().eval(), torch.randn(2, 3, 8, 8), len(omnicomp.timeline.events())
    run = torch.compile(net, backend="omni", options=OPTIONS)
    torch.testing.assert_close(run(x), net(x))
    assert set(ran(since)) == {"frozen"}
    assert "weights built in" in ran(since)["frozen"]
    assert "cpp.use_decompose_tanh" in ran(since)["frozen"]
    for change in CHANGES:
        change(net)
        torch.testing.assert_close(run(x), net(x), msg=lambda text, name=change.__name__: f"{name}: {text}")
        torch.testing.assert_close(run(x), net(x))


@torch.no_grad()
def test_what_was_built_is_freed_with_the_model() -> None:
    torch._dynamo.reset()
    gc.collect()
    modules = len(PyCodeCache.modules)
    run: Any = torch.compile(nn.Linear(64, 32).eval(), backend="omni", options=OPTIONS)
    run(torch.randn(2, 64))
    held = sum(any(isinstance(v, torch.Tensor) for v in vars(m).values()) for m in PyCodeCache.modules[modules:])
    assert held == 0, "no generated module is listed for good with the constants in it"


def test_a_training_step_is_left_to_others() -> None:
    torch._dynamo.reset()
    model, x, since = nn.Linear(8, 8), torch.randn(2, 8), len(omnicomp.timeline.events())
    expected = torch.autograd.grad(model(x).sum(), model.weight)[0]
    run: Any = torch.compile(model, backend="omni", options=OPTIONS)
    torch.testing.assert_close(torch.autograd.grad(run(x).sum(), model.weight)[0], expected)
    assert "frozen" not in ran(since)


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [lambda x: x + torch.rand_like(x) * 0, lambda x: x.add_(1) * 2],
    ids=["random", "writes"],
)
def test_what_has_effects_is_left_to_others(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch._dynamo.reset()
    x, since = torch.randn(4), len(omnicomp.timeline.events())
    expected = function(x.clone())
    run: Any = torch.compile(function, backend="omni", options={"lowerings": ["frozen", "eager"]})
    torch.testing.assert_close(run(x), expected)
    planned = [e for e in omnicomp.timeline.events()[since:] if isinstance(e, Subgraph) and e.lowering == "eager"]
    assert planned


@torch.no_grad()
def test_tanh_is_near_enough_everywhere() -> None:
    """From the smallest numbers, where its arithmetic form would cancel, to where it is one."""
    torch._dynamo.reset()
    x = torch.cat([torch.logspace(-30, 2, 4096), -torch.logspace(-30, 2, 4096), torch.tensor([0.0, float("inf")])])
    run: Any = torch.compile(lambda x: torch.tanh(x), backend="omni", options={**OPTIONS, "verify": "off"})
    torch.testing.assert_close(run(x), torch.tanh(x), atol=3e-7, rtol=0)
