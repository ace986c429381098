"""Errors that the program's own code raises inside a compiled graph: raised once, as in eager; nothing runs again."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from omnicomp._torch import user_code
from omnicomp.timeline import Retreat, current

calls: list[str] = []
raising: set[str] = set()


class Refused(Exception):
    """An error of the program's own, of a type that only it knows."""


def called(name: str) -> None:
    """Note a call; it raises, the first time, if that was asked for."""
    calls.append(name)
    if name in raising:
        raising.discard(name)
        raise Refused(name)


@torch.library.custom_op("their_library::check", mutates_args=())
def check(x: Tensor, name: str) -> Tensor:
    called(name)
    return x * 2


check.register_fake(lambda x, name: torch.empty_like(x))
check.register_autograd(lambda ctx, grad: (check(grad, "backward"), None))


library = torch.library.Library("their_library", "FRAGMENT")
library.define("impl(Tensor x, str name) -> Tensor")
library.impl("impl", lambda x, name: (called(name), x.clone())[1], "CPU")
library.impl("impl", lambda x, name: torch.empty_like(x), "Meta")


@pytest.fixture(autouse=True)
def clean() -> None:
    calls.clear()
    raising.clear()


def retreats() -> list[Any]:
    return [event for event in current() if isinstance(event, Retreat)]


def two_steps(function: Callable[..., Any], fails: str, state: Tensor) -> tuple[list[str], list[str], list[float]]:
    """What two training steps raise and call, and what is left of the state; the first raises."""
    calls.clear()
    raising.add(fails)
    outcomes: list[str] = []
    for _ in range(2):
        x = torch.linspace(0.1, 1, 4).requires_grad_()
        try:
            function(x, state).sum().backward()
            outcomes.append("")
        except Refused as error:
            outcomes.append(str(error))
    return outcomes, list(calls), state.tolist()


def in_forward(x: Tensor, state: Tensor) -> Tensor:
    return check(x.sin(), "forward").exp()


def implemented(x: Tensor, state: Tensor) -> Tensor:
    return torch.ops.their_library.impl(x.detach().sin(), "forward") * x


def in_a_branch(x: Tensor, state: Tensor) -> Tensor:
    y = x.detach()
    return torch.cond(y.sum() > 0, lambda y: check(y, "forward"), lambda y: y.cos(), (y,)) * x


PROGRAMS = [
    (in_forward, "forward"),
    (in_forward, "backward"),
    (implemented, "forward"),
    (in_a_branch, "forward"),
]
NAMES = ["forward", "backward", "library", "branch"]


@pytest.mark.parametrize("options", [{"lowerings": ["eager"]}, pytest.param({}, marks=pytest.mark.inductor)], ids=str)
@pytest.mark.parametrize(("function", "fails"), PROGRAMS, ids=NAMES)
def test_an_error_of_an_operator_is_raised_once(function: Any, fails: str, options: dict[str, Any]) -> None:
    expected = two_steps(function, fails, torch.zeros(3))
    assert expected[0] == [fails, ""]
    compiled = torch.compile(function, backend="omni", options=options)
    assert two_steps(compiled, fails, torch.zeros(3)) == expected
    assert retreats() == []


@pytest.mark.inductor
@pytest.mark.parametrize("on_error", ["retreat", "retry"])
def test_a_cut_part_does_not_run_an_operator_again(on_error: str) -> None:
    options: dict[str, Any] = {"lowerings": {"*": ["inductor", "eager"], "aten.exp": "eager"}, "on_error": on_error}
    expected = two_steps(in_forward, "forward", torch.zeros(3))
    compiled = torch.compile(in_forward, backend="omni", options=options)
    assert two_steps(compiled, "forward", torch.zeros(3)) == expected


class Counting(TorchDispatchMode):
    """A dispatch mode of the user's that refuses an operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            called("mode")
        return func(*args, **(kwargs or {}))


@pytest.mark.inductor
@torch.no_grad()
def test_an_error_of_a_dispatch_mode_is_raised_once() -> None:
    x = torch.ones(3, 3)
    compiled = torch.compile(lambda x: (x @ x).sin(), backend="omni")
    compiled(x)
    raising.add("mode")
    with contextlib.suppress(Refused), Counting():
        compiled(x)
    assert calls in (["mode"], [])  # Dynamo may run the code eager under a mode
    assert retreats() == []


@pytest.mark.inductor
@torch.no_grad()
def test_code_that_fails_behind_an_operator_of_the_program_is_not_repeated() -> None:
    """What the operator did would be done twice; the error says so."""

    def function(x: Tensor, index: Tensor) -> Tensor:
        return check(x.sin(), "forward")[index]

    x = torch.ones(3)
    compiled = torch.compile(function, backend="omni")
    compiled(x, torch.tensor([1]))
    calls.clear()
    with pytest.raises(RuntimeError, match="out of bounds") as caught:
        compiled(x, torch.tensor([7]))
    assert calls == ["forward"]
    assert any("their_library.check" in note for note in getattr(caught.value, "__notes__", ()))


@pytest.mark.inductor
@torch.no_grad()
def test_code_that_fails_in_front_of_an_operator_of_the_program_is_repeated() -> None:
    def function(x: Tensor, index: Tensor) -> Tensor:
        return check(x[index], "forward")

    compiled = torch.compile(function, backend="omni")
    compiled(torch.ones(3), torch.tensor([1]))
    calls.clear()
    with pytest.raises(IndexError) as caught:
        compiled(torch.ones(3), torch.tensor([7]))
    assert calls == []
    assert not getattr(caught.value, "__notes__", ())


@pytest.mark.parametrize("options", [{"verify": "first"}, {"dtype_policy": "bf16", "dtype_error": 0.5}], ids=str)
@pytest.mark.inductor
@torch.no_grad()
def test_nothing_that_compares_results_runs_an_operator_again(options: dict[str, Any]) -> None:
    compiled = torch.compile(lambda x: check(x @ x, "forward"), backend="omni", options=options)
    compiled(torch.ones(3, 3))
    assert calls == ["forward"]


@pytest.mark.inductor
def test_an_error_of_a_hook_is_raised_once() -> None:
    """Hooks of leaves run in eager, behind the compiled backward."""

    def hook(grad: Tensor) -> Tensor:
        called("hook")
        return grad * 2

    x = torch.ones(3, requires_grad=True)
    x.register_hook(hook)
    compiled = torch.compile(lambda x: x.sin(), backend="omni")
    raising.add("hook")
    with pytest.raises(Refused):
        compiled(x).sum().backward()
    assert calls == ["hook"]
    assert x.grad is None
    assert retreats() == []


@pytest.mark.inductor
def test_an_error_of_saved_tensors_hooks_is_raised_once() -> None:
    def unpack(value: Any) -> Any:
        called("unpack")
        return value

    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(lambda x: x.sin(), backend="omni")
    raising.add("unpack")
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, unpack):
        result = compiled(x).sum()
    with pytest.raises(Refused):
        result.backward()
    assert calls == ["unpack"]
    assert retreats() == []


def test_operators_of_the_program_are_found_wherever_a_graph_holds_them() -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            return in_a_branch(x, state) + torch.ops.their_library.impl(x, "")

    found: list[tuple[str, ...]] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        found.append(user_code.user_operators(module))
        return module

    torch.compile(Branches(), backend=backend)(torch.ones(2), torch.ones(2))
    assert [set(names) for names in found] == [{"their_library.check", "their_library.impl"}]


@pytest.mark.inductor
def test_what_the_program_asserts_of_a_scalar_is_raised_and_not_repeated() -> None:
    def function(x: Tensor) -> Tensor:
        size = x.sum().item()
        torch._check(size >= 2)
        return torch.ones(size) * 2

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        call = torch.compile(function, backend="omni")
        assert call(torch.tensor([1, 2])).shape == (3,)
        with pytest.raises(RuntimeError, match="u0 >= 2"):
            call(torch.tensor([1, 0]))
    assert not retreats()
