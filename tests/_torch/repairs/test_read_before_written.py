"""What reads a tensor before a custom operator changes it is computed from what it held, in training under Inductor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


@torch.library.custom_op("omnicomp_test_written::increase", mutates_args=("x",))
def increase(x: Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("omnicomp_test_written::increase_all", mutates_args=("tensors", "last"))
def increase_all(tensors: list[Tensor], last: Tensor) -> Tensor:
    for x in (*tensors, last):
        x.add_(1)
    return last * 3


increase_all.register_fake(lambda tensors, last: torch.empty_like(last))


def read_and_changed_twice(w: Tensor, b: Tensor) -> Any:
    a = b + 0
    increase(b)
    c = b * 3
    increase(b)
    return (a * w).sum() + (c * w.sin()).sum() + b.sum() * w


def a_list_of_tensors(w: Tensor, b: Tensor) -> Any:
    other = b.flip(0).clone()
    a, c = b * 2, other * 5
    d = increase_all([other], b)
    return (a * w).sum() + (c * w).sum() + (d * other * b * w).sum()


@pytest.mark.inductor
@pytest.mark.parametrize("program", [read_and_changed_twice, a_list_of_tensors])
@pytest.mark.parametrize("training", [True, False])
def test_values_gradients_and_the_tensor_itself_are_eagers(program: Callable[..., Any], training: bool) -> None:
    found: list[list[Tensor]] = []
    for run in (program, torch.compile(program, backend="omni", options={"on_error": "raise"})):
        w, b = torch.full((3,), 2.0, requires_grad=training), torch.arange(3.0)
        out = run(w, b)
        gradients = torch.autograd.grad(out.sum(), w) if training else ()
        found.append([out.detach(), b, *gradients])
    for got, want in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, want)
