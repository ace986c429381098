"""What is written in place keeps its values, its dtype and its moment."""

import pytest
import torch
import torch.nn.functional as F
from lowered import check, compiled, error, rand
from torch import nn


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, y: (x @ w).add_(y),
        lambda x, w, y: ((x @ w).view(-1).mul_(2), x @ w)[0] @ y.view(-1),
    ],
)
def test_in_place_on_a_result(function):
    check(function, rand(4, 8), rand(8, 8), rand(4, 8))


def test_in_place_on_results_views_and_operands():
    def function(x, w, y):
        h = x @ w
        view = h.view(-1)
        first = h @ w  # before the write
        view += 1
        second = h @ w  # after it
        x = x.clone()
        third = x @ w
        x[0] = 3
        fourth = x @ w
        fifth = F.relu(x @ w, inplace=True) @ w
        r = x @ w
        dropped = F.dropout(r, 0.5, False)
        dropped += 1
        return first, second, third, fourth, fifth, r @ w, y + first

    check(function, rand(4, 8), rand(8, 8), rand(4, 8))


def test_mutated_input_keeps_its_dtype():
    w = rand(8, 8)

    def function(x):
        before = x @ w
        x.add_(before)
        x.copy_(x @ w)
        return x @ w

    x = rand(4, 8)
    twin = x.clone()
    expected = function(twin)
    fn, _ = compiled(function, training=True)
    actual = fn(x)
    assert x.dtype == torch.float32
    assert error(x, twin) < 2e-2
    assert error(actual, expected) < 2e-2


def test_no_grad_inside_does_not_cut_gradients():
    linear = nn.Linear(8, 8)

    def function(x):
        with torch.no_grad():
            a = linear(x)
        return a + linear(x)

    fn, _ = compiled(function, training=True)
    fn(rand(4, 8)).sum().backward()
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None
