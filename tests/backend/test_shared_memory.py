"""Inputs that share memory in a graph that writes to them, the same in each call or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import fast
from torch import Tensor

import omnicomp
from omnicomp.timeline import Retreat

EAGER = {"lowerings": ["eager"]}


def read(x: Tensor, y: Tensor) -> Tensor:
    x *= -0.5
    return y.sin()


def written_both(x: Tensor, y: Tensor) -> Tensor:
    x *= -0.5
    y += 1
    return x.sin()


def viewed(x: Tensor, y: Tensor) -> Tensor:
    x *= -0.5
    return y.t()


def reshaped(x: Tensor, y: Tensor) -> Tensor:
    x *= -0.5
    return y.reshape(y.shape[0], -1)


def differentiable(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(-0.5)
    return (y * y).sum() + x.sum()


FUNCTIONS = (read, written_both, viewed, reshaped, differentiable)
PLACES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: torch.ones(1, 6),
    lambda x: x[:1],
    lambda x: x[2:3],
    lambda x: torch.ones(1, 6),
    lambda x: x[:1],
)


def outcome(function: Any, places: Any, training: bool = False) -> list[Any]:
    found: list[Any] = []
    for place in places:
        torch.manual_seed(0)
        start = torch.randn(4, 6, requires_grad=training)
        x = start * 1
        y = place(x)
        result = function(x, y)
        if training:
            result.sum().backward()
        shares = result.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        found.append((result.detach().clone(), x.detach().clone(), start.grad, result.stride(), shares))
    return found


@pytest.mark.parametrize("function", fast(FUNCTIONS, (read, viewed, differentiable).__contains__))
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("first", [0, 1])
def test_results_are_eagers_however_memory_is_shared(function: Any, dynamic: bool | None, first: int) -> None:
    training = function is differentiable
    expected = outcome(function, PLACES[first:], training)
    compiled = torch.compile(function, backend="omni", dynamic=dynamic, options=EAGER)
    for got, want in zip(outcome(compiled, PLACES[first:], training), expected, strict=True):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)


def reasons() -> list[str]:
    events = omnicomp.timeline.current().events()
    return [event.reason.code for event in events if isinstance(event, Retreat) and event.reason]


def test_calls_that_run_eager_are_recorded_once() -> None:
    compiled = torch.compile(read, backend="omni", options=EAGER)
    outcome(compiled, PLACES[:1])
    assert reasons() == []
    outcome(compiled, PLACES)
    assert reasons() == ["shared_memory"]


def test_an_error_instead_of_eager_where_it_is_asked_for() -> None:
    compiled = torch.compile(viewed, backend="omni", options={**EAGER, "on_error": "raise"})
    with pytest.raises(Exception, match="share memory, and returns views"):
        outcome(compiled, PLACES[1:2])


def test_graphs_that_write_to_no_input_are_not_looked_at() -> None:
    compiled = torch.compile(lambda x, y: x * 2 + y, backend="omni", options=EAGER)
    outcome(compiled, PLACES)
    assert reasons() == []
