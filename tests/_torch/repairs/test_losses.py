"""Losses that torch's decompositions get wrong equal eager's, also their gradients and shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from omnicomp.timeline import Retreat, current

EAGER: Any = {"lowerings": ["eager"]}

LABELS = {
    "all labels": [[1, 2, 3, 0], [3, 2, 1, 0]],
    "ended": [[1, 2, -1, 0], [3, -1, 3, 0]],
    "none": [[-1, 1, 2, 3], [-1, -1, -1, -1]],
    "twice": [[1, 1, -1, 0], [0, 0, 0, -1]],
}


def check(function: Callable[..., Any], x: Tensor, *rest: Tensor, options: Any = EAGER) -> None:
    """Values, shapes and gradients of a compiled function against eager's."""
    compiled: Any = torch.compile(function, backend="omni", options=options, fullgraph=True)
    actual, expected = compiled(x, *rest), function(x, *rest)
    torch.testing.assert_close(actual, expected)
    assert actual.shape == expected.shape
    given = torch.linspace(1, 2, actual.numel()).reshape(actual.shape)
    gradients = [torch.autograd.grad(result, x, given)[0] for result in (actual, expected)]
    torch.testing.assert_close(*gradients)
    assert [event for event in current() if isinstance(event, Retreat)] == []


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LABELS)
def test_multilabel_margin_loss(name: str, reduction: str, single: bool) -> None:
    labels = torch.tensor(LABELS[name])
    x = torch.randn(2, 4)
    if single:
        x, labels = x[0], labels[0]
    check(lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), x.requires_grad_(), labels)


def test_multilabel_margin_loss_has_no_gradient_where_a_margin_is_met_exactly() -> None:
    check(F.multilabel_margin_loss, torch.tensor([1.0, 0.0, 3.0], requires_grad=True), torch.tensor([0, -1, -1]))


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_the_builtin_and_the_module(reduction: int) -> None:
    labels, x = torch.tensor(LABELS["ended"]), torch.randn(2, 4, requires_grad=True)
    module = torch.nn.MultiLabelMarginLoss(reduction=("none", "mean", "sum")[reduction])
    builtin: Any = torch._C._nn.multilabel_margin_loss  # type: ignore[attr-defined]
    check(lambda x, t: builtin(x, t, reduction) + module(x, t), x, labels)


def test_a_single_class_without_dimensions() -> None:
    check(F.multilabel_margin_loss, torch.tensor(0.3, requires_grad=True), torch.tensor(0))


def test_deprecated_arguments() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    check(lambda x, t: F.multilabel_margin_loss(x, t, None, False), x, torch.tensor(LABELS["ended"]))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_multi_margin_loss_of_a_single_sample(reduction: str) -> None:
    x = torch.randn(4, requires_grad=True)
    check(lambda x, t: F.multi_margin_loss(x, t, reduction=reduction) * 2, x, torch.tensor(2))
    check(lambda x, t: F.multi_margin_loss(x, target=t, reduction=reduction), x, torch.tensor([2]))


@pytest.mark.inductor
def test_under_inductor() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    check(F.multilabel_margin_loss, x, torch.tensor(LABELS["ended"]), options=None)
