"""One module behind the ladder: it works as before, and the timeline tells of it under its tag."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import omnicomp
from omnicomp.devices import Device
from omnicomp.devices.cpu import CpuDevice
from omnicomp.errors import DeviceError, OptionError
from omnicomp.lowerings.overrides import registry
from omnicomp.timeline import Capture, Placement, current

EAGER = {"lowerings": ["override", "eager"]}


class Block(nn.Module):
    """A module with parameters, a buffer, a method and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("scale", torch.tensor(3.0))
        self.width = 8

    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        return self.second(self.first(x).relu()) * self.scale + shift

    def freeze(self) -> str:
        return "frozen"


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block()


def test_values_and_gradients_are_those_of_the_module(block: Block) -> None:
    wrapped = omnicomp.wrap_module(block, "block", options=EAGER)
    x = torch.randn(3, 4)
    expected = block(x, shift=1.0)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), block.first.weight)
    got = wrapped(x, shift=1.0)
    (gradient,) = torch.autograd.grad(got.sum(), block.first.weight)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    (capture,) = (event for event in current().events() if isinstance(event, Capture))
    assert capture.training
    assert any("block.first" in str(event.to_dict()) for event in current().events())


def test_nothing_is_said_before_it_ran(block: Block) -> None:
    omnicomp.wrap_module(block, options=EAGER)
    assert current().events() == ()


def test_state_and_attributes_are_those_of_the_module(block: Block) -> None:
    wrapped = omnicomp.wrap_module(block, options=EAGER)
    assert list(wrapped.state_dict()) == list(block.state_dict())
    other = Block()
    wrapped.load_state_dict(other.state_dict())
    torch.testing.assert_close(block.second.weight, other.second.weight)
    assert {id(p) for p in wrapped.parameters()} == {id(p) for p in block.parameters()}
    assert (wrapped.width, wrapped.freeze(), wrapped.wrapped) == (8, "frozen", block)
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapped.nothing
    inside = nn.Sequential(wrapped, nn.ReLU())
    assert list(inside.state_dict()) == [f"0.{key}" for key in block.state_dict()]
    inside.load_state_dict(inside.state_dict())
    block.eval()
    assert not omnicomp.wrap_module(block, options=EAGER).training


CALLS: list[int] = []


@pytest.fixture
def handwritten() -> Iterator[None]:
    def reference(x: Tensor) -> Tensor:
        return torch.sin(x) + 1

    @omnicomp.override(module="unet", name="handwritten_unet", reference=reference)
    def kernel(x: Tensor) -> Tensor:
        CALLS.append(1)
        return torch.sin(x).add_(1)

    CALLS.clear()
    yield
    registry.unregister("handwritten_unet")


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) + 1


@pytest.mark.usefixtures("handwritten")
@pytest.mark.parametrize("tag", ["unet", "other"])
def test_the_tag_is_what_an_override_matches(tag: str) -> None:
    x = torch.randn(4)
    with torch.no_grad():
        wrapped = omnicomp.wrap_module(Plain(), tag, options=EAGER)
        torch.testing.assert_close(wrapped(x), torch.sin(x) + 1)
    (placement,) = (event for event in current().events() if isinstance(event, Placement))
    assert ("override" in placement.nodes) == (tag == "unet") == bool(CALLS)


def test_a_name_that_is_none_is_refused(block: Block) -> None:
    for tag in ("", "a.b", "forward"):
        with pytest.raises(OptionError, match="can't be the name of a module"):
            omnicomp.wrap_module(block, tag)


def test_a_device_that_is_not_there_is_refused(block: Block) -> None:
    with pytest.raises(DeviceError, match="not available"):
        omnicomp.wrap_module(block, device="npu")
    assert omnicomp.wrap_module(block, device="cpu", options=EAGER)(torch.ones(1, 4)).shape == (1, 2)


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.relu()
        torch._dynamo.graph_break()
        return y * 2


def test_every_graph_of_it_has_its_tag() -> None:
    wrapped = omnicomp.wrap_module(nn.Sequential(Broken()), "unet", options=EAGER)
    wrapped(torch.ones(2, requires_grad=True)).sum().backward()
    entries = omnicomp.timeline.backend_timeline()
    assert len(entries) == 4  # two graphs, forward and backward
    assert {entry["module"] for entry in entries} == {"unet"}
    assert [each["level"] for each in entries[0]["attempts"]] == ["compile", "kernel_override", "eager"]
    told = json.loads(omnicomp.audit().to_json())["backend_timeline"]
    assert sorted(told, key=str) == sorted(entries, key=str)


class Prepares(CpuDevice):
    def prepare(self, model: nn.Module, config: Mapping[str, Any] | None = None) -> nn.Module:
        return model if (config or {}).get("attention") == "plain" else nn.Sequential(model, nn.ReLU())


class PreparesByTheOldContract(CpuDevice):
    def prepare(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        return nn.Sequential(model, nn.ReLU())


@pytest.fixture
def stands_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], None]:
    return lambda device: monkeypatch.setattr("omnicomp.backend.wrap_module.resolve_device", lambda name: device)


def test_the_device_gets_the_config(stands_in: Callable[[Device], None]) -> None:
    stands_in(Prepares())
    given = nn.Linear(2, 2)
    assert omnicomp.wrap_module(given, "unet", config={"attention": "plain"}).wrapped is given
    assert len(list(omnicomp.wrap_module(given, "unet").wrapped.children())) == 2


def test_a_device_that_takes_no_config(stands_in: Callable[[Device], None]) -> None:
    stands_in(PreparesByTheOldContract())
    with pytest.warns(DeprecationWarning, match=r"prepare\(self, model, config\)"):
        assert isinstance(omnicomp.wrap_module(nn.Linear(2, 2), "unet").wrapped, nn.Sequential)
    with pytest.raises(DeviceError, match="takes no config"):
        omnicomp.wrap_module(nn.Linear(2, 2), "unet", config={"a": 1})
