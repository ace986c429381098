"""One call of an override and its reference: what is compared, and what can't be."""

from typing import Any

import torch
from torch import Tensor

from omnicomp.lowerings.overrides.declaration import Override
from omnicomp.runtime.override_check import try_backward, try_forward


@torch.library.custom_op("omnicomp_test_trial::scaled", mutates_args=("count",))
def scaled(x: Tensor, count: Tensor, factor: float) -> Tensor:
    count.add_(1)
    return x * factor


@torch.library.custom_op("omnicomp_test_trial::product", mutates_args=())
def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


product.register_fake(lambda x, y: torch.empty_like(x))
product.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[1], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def item(operator: Any, **fields: Any) -> Override:
    return Override(name="o", declared=operator, function=operator, operators=(operator,), module="M", **fields)


SCALED = item(torch.ops.omnicomp_test_trial.scaled.default, mutates=("count",))
PRODUCT = item(torch.ops.omnicomp_test_trial.product.default)


def test_arguments_that_are_changed_are_judged_and_put_right() -> None:
    def truth(x: Tensor, count: Tensor, factor: float) -> Tensor:
        count.add_(2)
        return x * factor

    x, count = torch.randn(3), torch.zeros(())
    found = try_forward(SCALED, truth, scaled, (x, count, 2.0), {}, torch.float64)
    assert found.state == "wrong"
    assert count == 2
    assert torch.equal(found.results, x * 2)


def test_the_references_results_have_the_layout_of_the_overrides() -> None:
    x = torch.randn(3, 4)
    found = try_forward(
        PRODUCT, lambda x, y: x + y, lambda x, y: (x * y).t().contiguous().t(), (x, x), {}, torch.float64
    )
    assert found.state == "wrong"
    assert found.results.stride() == (1, 3)
    assert torch.equal(found.results, x + x)


def test_a_reference_that_raises_or_draws_is_no_verdict() -> None:
    x = torch.randn(3)
    state = torch.get_rng_state()
    drawn = try_forward(PRODUCT, lambda x, y: torch.rand_like(x), product, (x, x), {}, torch.float64)
    assert (drawn.state, drawn.detail) == ("unknown", "the reference draws random numbers")
    assert torch.equal(torch.get_rng_state(), state), "the program's own numbers are not changed"
    raised = try_forward(PRODUCT, lambda x, y: x @ y.view(7), product, (x, x), {}, torch.float64)
    assert raised.state == "unknown"
    assert "RuntimeError" in raised.detail
    assert torch.equal(raised.results, x * x)


def test_another_number_of_results_is_wrong() -> None:
    x = torch.randn(3)
    assert try_forward(PRODUCT, lambda x, y: (x, y), product, (x, x), {}, torch.float64).state == "wrong"


def test_a_gradient_that_is_missing_counts_as_zeros() -> None:
    x, y = torch.randn(3), torch.randn(3)
    truth = torch.mul
    for names, state in ((("x",), "right"), (("x", "y"), "wrong"), (("*",), "right")):
        assert try_backward(names, PRODUCT, truth, product, (x, y), {}, torch.float64).state == state


def test_an_excerpt_is_compared_in_the_place_of_a_large_call() -> None:
    sizes: list[int] = []

    def truth(x: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x))
        return x * y

    declared = item(torch.ops.omnicomp_test_trial.product.default, excerpt=lambda x, y: (x[::10], y[::10]))
    x = torch.randn(100)
    found = try_forward(declared, truth, product, (x, x), {}, torch.float64)
    assert (found.state, sizes) == ("right", [10, 10])
    assert torch.equal(found.results, x * x)
    assert try_backward(["x"], declared, truth, product, (x, x), {}, torch.float64).state == "right"
    assert set(sizes) == {10}

    wrong = try_forward(declared, truth, lambda x, y: x * y + 1, (x, x), {}, torch.float64)
    assert wrong.state == "wrong"
    assert torch.equal(wrong.results, x * x), "the reference's, of the whole call"
