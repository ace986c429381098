"""Weights in float8: numbers and scales are computed once, and never stale."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from float8 import BOTH, SCALES
from low_weights import Model, compiled, renewals
from torch import Tensor, nn

from omnicomp import weights
from omnicomp.devices.cpu import CpuDevice
from omnicomp.timeline import Retreat, Rewrite, Weights, current
from omnicomp.weights.cast_copies import FLOAT8

SIZE = 16
POLICY = {"preset": "fp8", "fp8": SCALES}
ONCE = {"lowerings": ["eager"], "dtype_policy": POLICY}


@pytest.fixture(autouse=True)
def float8_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU as a device that has float8: its `_scaled_mm` is slow, but there."""
    can = CpuDevice().capabilities()
    can = dataclasses.replace(can, storage_dtypes=(*can.storage_dtypes, FLOAT8))
    monkeypatch.setattr(CpuDevice, "capabilities", lambda self: can)
    weights.clear()
    yield
    weights.clear()


def scaled(value: Tensor) -> Tensor:
    """A tensor as rounded by E4M3 with a scale for each row, or for the whole."""
    low = value.bfloat16().float()
    largest = low.abs().amax(-1, keepdim=True) if SCALES == "row" else low.abs().amax()
    scale = largest.clamp_min(1e-12) / 448
    return (low / scale).to(FLOAT8).float() * scale


def expected(model: Model, x: Tensor) -> Tensor:
    """What the policy computes with the weights that there are now, but for the order of sums."""
    first, second = model.first, model.second
    between = (scaled(x) @ scaled(first.weight).t()).bfloat16() + first.bias.bfloat16()
    return (scaled(between.relu()) @ scaled(second.weight).t()).bfloat16().float()


def off(actual: Tensor, right: Tensor) -> float:
    """The distance, relative to what is right; a few hundredths are roundings to float8 that fell differently."""
    return float((actual - right).norm() / right.norm())


def in_place(model: Model) -> None:
    model.second.weight.mul_(torch.linspace(-2, 3, SIZE))


def through_data(model: Model) -> None:
    model.second.weight.data.mul_(torch.linspace(-2, 3, SIZE))


def other_data(model: Model) -> None:
    model.second.weight.data = torch.randn(SIZE, SIZE)


def other_parameter(model: Model) -> None:
    model.second.weight = nn.Parameter(torch.randn(SIZE, SIZE))


def loaded(model: Model) -> None:
    model.load_state_dict(Model(SIZE).state_dict())


def assigned(model: Model) -> None:
    model.load_state_dict(Model(SIZE).state_dict(), assign=True)


def optimised(model: Model, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, **options)
    with torch.enable_grad():
        model(torch.randn(2, SIZE)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def optimised_fused(model: Model) -> None:
    optimised(model, fused=True)


def scale_alone(model: Model) -> None:
    """The numbers stay the same, the scales do not."""
    model.second.weight.mul_(2)


CHANGES = [
    *(in_place, through_data, other_data, other_parameter, loaded, assigned, optimised, optimised_fused, scale_alone),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_change_of_a_weight_is_missed(change: Callable[[Model], None]) -> None:
    model, x = Model(SIZE), torch.randn(5, SIZE)
    call = compiled(model, ONCE)
    for _ in range(3):
        with torch.no_grad():
            kept = call(x)
            assert off(kept, expected(model, x)) < 0.02
            change(model)
            assert off(kept, expected(model, x)) > 0.2, "the change must be one that shows"
            assert off(call(x), expected(model, x)) < 0.02
            assert off(call(x), expected(model, x)) < 0.02
    assert not [event for event in current() if isinstance(event, Retreat)]


@pytest.mark.parametrize("scales", BOTH)
def test_once_gives_the_bits_of_each_call(scales: str) -> None:
    model, x = Model(SIZE), torch.randn(5, SIZE)
    policy = {"preset": "fp8", "fp8": scales}
    once = compiled(model, ONCE | {"dtype_policy": policy})
    with torch.no_grad():
        result = once(x)
        assert {event.target for event in current() if isinstance(event, Rewrite)} == {"float8_e4m3fn"}
        torch.compiler.reset()
        in_call = compiled(model, ONCE | {"dtype_policy": policy | {"weights": "call"}})
        assert torch.equal(result, in_call(x))
        assert weights.count() == 0


def test_they_are_computed_once_and_counted() -> None:
    model, x = Model(SIZE), torch.randn(5, SIZE)
    call = compiled(model, ONCE)
    with torch.no_grad():
        call(x)
        for rows in (5, 5, 7):
            call(torch.randn(rows, SIZE))
        kept = sorted((str(low.dtype), tuple(low.shape)) for _, low in weights.copies())
        numbers, scales = ("torch.float8_e4m3fn", (SIZE, SIZE)), ("torch.float32", (SIZE, 1) if SCALES == "row" else ())
        assert kept == sorted([("torch.bfloat16", (SIZE,)), numbers, numbers, scales, scales])
        assert renewals() == [1] * 5
        size = 2 * SIZE + 2 * (SIZE * SIZE + 4 * (SIZE if SCALES == "row" else 1))
        event = next(event for event in current() if isinstance(event, Weights))
        assert (event.copies, event.bytes, weights.bytes()) == (5, size, size)

        addresses = {low.data_ptr() for _, low in weights.copies()}
        model.second.weight.mul_(2)
        call(x)
        call(x)
        assert {low.data_ptr() for _, low in weights.copies()} == addresses, "renewed in place"
    assert renewals() == [1, 1, 1, 2, 2], "the numbers and the scales of the weight that changed, once"


def test_tied_weights_are_kept_once() -> None:
    model, x = Model(SIZE), torch.randn(5, SIZE)
    model.second.weight = model.first.weight
    call = compiled(model, ONCE)
    with torch.no_grad():
        assert off(call(x), expected(model, x)) < 0.02
    assert weights.count() == 3


def test_a_weight_that_is_read_in_bfloat16_as_well() -> None:
    class Tied(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ self.first.weight

    model, x = Tied(SIZE), torch.randn(5, SIZE)
    call = compiled(model, ONCE)
    with torch.no_grad():
        low = expected(model, x).bfloat16()
        for _ in range(2):
            assert off(call(x), (low @ model.first.weight.bfloat16()).float()) < 0.03
    assert weights.count() == 6


def test_training_beside_it_keeps_nothing() -> None:
    model, x = Model(SIZE), torch.randn(5, SIZE)
    call = compiled(model, ONCE)
    call(x).sum().backward()
    assert weights.count() == 0


@pytest.mark.inductor
def test_inductor_reads_what_is_kept() -> None:
    model, x = Model(SIZE), torch.randn(5, SIZE)
    call = compiled(model, {"dtype_policy": POLICY})
    with torch.no_grad():
        for change in (in_place, through_data, other_data):
            assert off(call(x), expected(model, x)) < 0.05
            change(model)
            assert off(call(x), expected(model, x)) < 0.05
    assert weights.count() == 5
    assert not [event for event in current() if isinstance(event, Retreat)]
