"""Gradients that a compiled backward can't give: eager's, or an error that names the lever."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import omnicomp
from omnicomp.errors import GradientError
from omnicomp.timeline import Retreat, current

EAGER: dict[str, Any] = {"lowerings": ["eager"]}
Compile = Callable[[Any], Any]


def omni(function: Any) -> Any:
    return torch.compile(function, backend="omni", options=EAGER)


def leaf(*shape: int) -> Tensor:
    return torch.linspace(0.1, 1, torch.Size(shape or (4,)).numel()).reshape(shape or (4,)).requires_grad_()


def grad(result: Tensor, *inputs: Tensor, **options: Any) -> list[Tensor | None]:
    return list(torch.autograd.grad(result.sum(), inputs, allow_unused=True, **options))


def unused(compiled: Compile) -> Any:
    x, y = leaf(), leaf()
    first, second = compiled(lambda x, y: (x.sin(), y.cos() * x))(x, y)
    return [grad(first, x, y, retain_graph=True), grad(second, x, y)]


def detached(compiled: Compile) -> Any:
    x, y = leaf(), leaf()
    results = compiled(lambda x, y: (x.sin(), y.cos() * x.detach(), x.floor() + 1))(x, y)
    return [grad(result, x, y) for result in results[1:]]


def written(compiled: Compile) -> Any:
    def function(x: Tensor, y: Tensor, z: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(y)
        state.add_(z)
        return x * 2, z * 3

    found = []
    for which in range(4):
        x, y, z, state = leaf(), leaf(), leaf(), torch.zeros(4)
        product = x * 1
        results = [*compiled(function)(product, y, z, state), product, state]
        found.append(grad(results[which], x, y, z))
    return found


def separate(compiled: Compile) -> Any:
    x, y = leaf(), leaf()
    first, second = compiled(lambda x, y: (x.sin(), x.cos() * y.exp()))(x, y)
    first.sum().backward()
    second.sum().backward()
    return x.grad, y.grad


def separate_of_one_trunk(compiled: Compile) -> Any:
    """Eager raises: both need what the first backward freed."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        trunk = x.exp()
        return trunk.sin(), trunk * y

    x, y = leaf(), leaf()
    first, second = compiled(function)(x, y)
    first.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        second.sum().backward()


def the_same_twice(compiled: Compile) -> Any:
    x = leaf()
    result = compiled(lambda x: x.sin())(x).sum()
    result.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        result.backward()


def nothing_saved(compiled: Compile) -> Any:
    x = leaf()
    result = compiled(lambda x: x + 1 - x.sum())(x)
    result.backward(torch.ones(4))
    result.backward(torch.ones(4))
    return x.grad


def retained_later(compiled: Compile) -> Any:
    x, function = leaf(), compiled(lambda x: (x.sin().cos() @ x.sin()).exp() * x)
    function(x).sum().backward()
    result = function(x).sum()
    result.backward(retain_graph=True)
    result.backward()
    return x.grad


def third_derivative(compiled: Compile) -> Any:
    x = leaf()
    result = compiled(lambda x: (x**3).sin())(x).sum()
    for _ in range(2):
        (result,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    return grad(result, x)


def gradient_penalty(compiled: Compile) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    critic, noise = compiled(model), leaf(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        between = noise * 2
        (found,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = ((found.norm(dim=1) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
    return [*model.state_dict().values(), noise.grad]


def views(compiled: Compile) -> Any:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        return y[0], y[1], y.t()

    x = leaf(4, 4)
    first, second, turned = compiled(function)(x)
    (found,) = torch.autograd.grad((first * turned[0]).sum(), x, create_graph=True)
    return grad(found * second, x)


def autocast(compiled: Compile) -> Any:
    x = leaf(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = compiled(lambda x: (x @ x).tanh())(x)
    (found,) = torch.autograd.grad(result.float().sum(), x, create_graph=True)
    return [result, *grad(found, x)]


def hessian(compiled: Compile) -> Any:
    return torch.autograd.functional.hessian(compiled(lambda x: (x**3).sum()), torch.ones(3))


def create_graph_alone(compiled: Compile) -> Any:
    """Not an error, as no second derivative is asked for."""
    x = leaf()
    (found,) = torch.autograd.grad(compiled(lambda x: dropout(x, 0.5) * x)(x).sum(), x, create_graph=True)
    return found.shape, found.requires_grad


PROGRAMS = (
    unused,
    detached,
    written,
    separate,
    separate_of_one_trunk,
    the_same_twice,
    nothing_saved,
    retained_later,
    third_derivative,
    gradient_penalty,
    views,
    autocast,
    hessian,
    create_graph_alone,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_eagers(program: Callable[[Compile], Any]) -> None:
    expected = program(lambda function: function)
    torch.testing.assert_close(program(omni), expected)
    assert omnicomp.audit().mismatches == ()


@pytest.mark.inductor
@pytest.mark.parametrize("program", [separate, retained_later, gradient_penalty], ids=lambda program: program.__name__)
def test_gradients_are_eagers_beside_generated_code(program: Callable[[Compile], Any]) -> None:
    expected = program(lambda function: function)
    torch.testing.assert_close(program(lambda f: torch.compile(f, backend="omni")), expected, rtol=1e-4, atol=1e-5)
    assert omnicomp.audit().mismatches == ()


def test_the_timeline_says_once_that_eagers_autograd_took_over() -> None:
    third_derivative(omni)
    (event,) = [event for event in current() if isinstance(event, Retreat)]
    assert (event.reason.code, event.target_lowering) == ("eager_autograd", "eager")
    assert "create_graph=True" in event.reason.sentence


counted: list[int] = []


@torch.library.custom_op("omnicomp_tests::counted_sine", mutates_args=())
def counted_sine(x: Tensor) -> Tensor:
    counted.append(1)
    return x.sin()


counted_sine.register_fake(lambda x: torch.empty_like(x))
counted_sine.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def drops(x: Tensor) -> Tensor:
    return dropout(x.exp(), 0.5)


def calls(x: Tensor) -> Tensor:
    return counted_sine(x.exp())


def writes(x: Tensor) -> Tensor:
    y = x * 1
    y.add_(state)
    state.add_(1)
    return y.exp()


state = torch.zeros(4)


@pytest.mark.parametrize(
    ("function", "why"),
    [(drops, "random numbers"), (calls, "counted_sine"), (writes, "writes to an input")],
    ids=["random", "operator", "write"],
)
def test_what_can_not_be_run_again_is_an_error_with_a_lever(function: Any, why: str) -> None:
    counted.clear()
    x = leaf()
    (found,) = torch.autograd.grad(omni(function)(x).sum(), x, create_graph=True)
    with pytest.raises(GradientError, match=why) as caught:
        torch.autograd.grad(found.sum(), x)
    assert "options={'autograd': 'eager'}" in str(caught.value)
    assert len(counted) == (function is calls)
    compiled = torch.compile(function, backend="omni", options={**EAGER, "autograd": "eager"})
    (found,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    assert torch.autograd.grad(found.sum(), x)[0].shape == x.shape


def test_an_input_that_was_written_to_since_is_an_error() -> None:
    x, bias = leaf(), leaf()
    result = omni(lambda x, bias: (x + bias).exp())(x, bias)
    with torch.no_grad():
        bias.add_(1)
    (found,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    with pytest.raises(GradientError, match="written to since"):
        torch.autograd.grad(found.sum(), x)


def test_inputs_too_large_to_be_held_are_used_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnicomp.runtime.eager_gradients._HELD_BYTES", 8)
    third_derivative(omni)
    x = leaf()
    result = omni(lambda x, y: (x + y).sin())(x, x.detach() * 2)
    (found,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    with pytest.raises(GradientError, match="is gone"):
        torch.autograd.grad(found.sum(), x)


def test_nothing_of_a_call_lives_longer_than_its_results() -> None:
    compiled = omni(lambda x, y: (x.sin(), y.cos() * x))
    x, y = leaf(), leaf() * 1
    seen = weakref.ref(y)
    results = compiled(x, y)
    results[0].sum().backward()
    del y, results
    gc.collect()
    assert seen() is None
