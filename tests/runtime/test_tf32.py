"""TF32 is set for the graphs that ask for it, while they are built and called, and for nothing else."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import omnicomp
from omnicomp._torch.devices.precision import allow_tf32, tf32_settings, while_compiling
from omnicomp.devices.cpu import CpuDevice
from omnicomp.timeline import Capture, Option

SEEN: dict[str, list[tuple[str, str]]] = {}


@torch.library.custom_op("omnicomp_test::settings", mutates_args=())
def settings(x: torch.Tensor) -> torch.Tensor:
    """The operator itself, and its gradient, note what torch is set to when they are called."""
    SEEN.setdefault("forward", []).append(tf32_settings())
    return x.clone()


@torch.library.custom_op("omnicomp_test::settings_backward", mutates_args=())
def settings_backward(grad: torch.Tensor) -> torch.Tensor:
    SEEN.setdefault("backward", []).append(tf32_settings())
    return grad.clone()


settings.register_fake(torch.empty_like)
settings_backward.register_fake(torch.empty_like)
settings.register_autograd(lambda ctx, grad: settings_backward(grad))


@pytest.fixture(autouse=True)
def user_settings() -> Iterator[None]:
    """Products in float32 and convolutions in float32, as a careful user sets it; put back afterwards."""
    SEEN.clear()
    kept = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = kept
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.fixture
def device_with_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = CpuDevice.capabilities
    monkeypatch.setattr(CpuDevice, "capabilities", lambda self: dataclasses.replace(capabilities(self), tf32=True))


def function(x: torch.Tensor) -> torch.Tensor:
    return settings(x * 2) + 1


def compiled(policy: Any = "tf32", **options: Any) -> Any:
    return torch.compile(function, backend="omni", options={"dtype_policy": policy, **options})


@pytest.mark.usefixtures("device_with_tf32")
@pytest.mark.parametrize(
    "lowerings", [["eager"], pytest.param(["inductor", "eager"], marks=pytest.mark.inductor)], ids=["eager", "inductor"]
)
def test_it_is_set_in_forward_and_backward_and_put_back(lowerings: list[str]) -> None:
    before = tf32_settings()
    run = compiled(lowerings=lowerings)
    for _ in range(2):
        x = torch.ones(4, requires_grad=True)
        y = run(x)
        assert tf32_settings() == before
        y.sum().backward()
        assert tf32_settings() == before
    assert SEEN == {"forward": [("tf32", "tf32")] * 2, "backward": [("tf32", "tf32")] * 2}
    assert len(captures()) == 1, "Dynamo compiles once"


def captures() -> list[Capture]:
    return [event for event in omnicomp.timeline.events() if isinstance(event, Capture)]


@pytest.mark.usefixtures("device_with_tf32")
@pytest.mark.inductor
def test_it_is_set_while_inductor_generates_code(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, str]] = []
    lower = torch._inductor.graph.GraphLowering.run

    def run(self: Any, *args: Any) -> Any:
        built.append(tf32_settings())
        return lower(self, *args)

    monkeypatch.setattr(torch._inductor.graph.GraphLowering, "run", run)
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled()(torch.ones(5, requires_grad=True)).sum().backward()
    assert built == [("tf32", "tf32")] * 2
    assert tf32_settings() == ("none", "none")


@pytest.mark.usefixtures("device_with_tf32")
@pytest.mark.inductor
def test_it_is_set_for_what_a_cache_restores() -> None:
    for _ in range(2):
        torch.compiler.reset()
        compiled()(torch.ones(6, requires_grad=True)).sum().backward()
    assert SEEN == {"forward": [("tf32", "tf32")] * 2, "backward": [("tf32", "tf32")] * 2}


@pytest.mark.usefixtures("device_with_tf32")
def test_another_graph_of_the_process_has_the_users_settings() -> None:
    compiled(lowerings=["eager"])(torch.ones(3))
    torch.compiler.reset()
    compiled("keep", lowerings=["eager"])(torch.ones(3))
    assert SEEN["forward"] == [("tf32", "tf32"), ("none", "none")]


@pytest.mark.usefixtures("device_with_tf32")
def test_it_is_put_back_after_an_error() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        return settings(x)[torch.tensor([7])]

    run = torch.compile(fails, backend="omni", options={"dtype_policy": "tf32", "lowerings": ["eager"]})
    with pytest.raises(IndexError):
        run(-torch.eye(2))
    assert SEEN["forward"][0] == ("tf32", "tf32")
    assert tf32_settings() == ("none", "none")


def test_a_device_without_it_is_left_alone_and_told() -> None:
    compiled(lowerings=["eager"])(torch.ones(3))
    assert SEEN["forward"] == [("none", "none")]
    (event,) = [e for e in omnicomp.timeline.events() if isinstance(e, Option)]
    assert (event.key, event.requested) == ("dtype_policy", "tf32")
    assert "no TF32" in event.reason.sentence
    assert event.reason.lever


def older() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32


def test_older_settings_follow_and_come_back() -> None:
    before = older()
    with while_compiling():
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.fp32_precision == "tf32"
    assert older() == before
    assert not torch.backends.cudnn.allow_tf32
    assert tf32_settings() == ("none", "none")


@pytest.mark.parametrize("value", ["ieee", "none"])
def test_newer_settings_come_back(value: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = value
    restore = allow_tf32()
    assert restore is not None
    assert tf32_settings() == ("tf32", "tf32")
    restore()
    assert tf32_settings() == (value, "none")


def test_nothing_is_set_where_the_user_allows_it() -> None:
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert allow_tf32() is None
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_contradictory_settings_of_the_user_are_kept() -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        restore = allow_tf32()
        assert restore is not None
        assert tf32_settings()[0] == "tf32"
        restore()
        assert tf32_settings()[0] == "ieee"
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # as the older setting was all the while
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
