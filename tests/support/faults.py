"""Faults that tests plant where something can fail, and a program that must not notice them."""

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import omnicomp
from omnicomp.lowerings.eager import EagerLowering

EAGER = {"lowerings": ["eager"]}
WHOLE: dict[str, Any] = {}
CUT = {"lowerings": {"aten.cos": "eager"}}
# The program is called with the first size twice, and compiled anew for the second.
SIZES = (3, 3, 5)
MESSAGE = "planted failure"


@dataclasses.dataclass(frozen=True)
class Place:
    """A function that a test makes raise.

    Attributes:
        module: where it is looked up by those who call it.
        name: its name there, dotted for a method.
        parts: whether it is called for each part, so that it can raise for a backward.
    """

    module: str
    name: str
    parts: bool = True

    @property
    def moments(self) -> tuple[str, ...]:
        """When it can raise."""
        return ("first", "later", "always", "backward") if self.parts else ("first", "later", "always")


def program(x: Tensor, w: Tensor) -> Tensor:
    return (torch.sin(x) @ w).cos() * x.exp()


def step(function: Callable[..., Tensor], size: int = 3) -> tuple[Tensor, ...]:
    """Result and gradients of one call."""
    made = torch.Generator().manual_seed(3)
    x, w = (torch.randn(size, size, generator=made).requires_grad_() for _ in range(2))
    result = function(x, w)
    result.sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return result.detach(), x.grad, w.grad


@contextlib.contextmanager
def planted(place: Place, when: str) -> Iterator[list[int]]:
    """Make a function raise; the list counts how often it did.

    Args:
        place: the function.
        when: at its `first` call, at all `later` ones, `always`, or while a `backward` is built.
    """
    owner: Any = importlib.import_module(place.module)
    *path, name = place.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    static = vars(owner)[name]
    original = getattr(static, "__func__", static)
    calls, raised, parts = [0], [0], [""]

    def due() -> bool:
        if when == "backward":
            return parts[-1] == "backward"
        return when == "always" or (calls[0] == 1) == (when == "first")

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if due():
            raised[0] += 1
            raise RuntimeError(MESSAGE)
        return original(*args, **kwargs)

    with _parts_in(parts):
        setattr(owner, name, type(static)(fail) if isinstance(static, classmethod | staticmethod) else fail)
        try:
            yield raised
        finally:
            setattr(owner, name, static)


@contextlib.contextmanager
def _parts_in(parts: list[str]) -> Iterator[None]:
    """Keep the part that is being built at the end of a list."""
    from omnicomp.backend import autograd

    original = autograd.build_part

    def build_part(module: Any, inputs: Any, context: Any, *rest: Any) -> Any:
        parts.append(context.part)
        try:
            return original(module, inputs, context, *rest)
        finally:
            parts.pop()

    autograd.build_part = build_part
    try:
        yield
    finally:
        autograd.build_part = original


def said(log: str = "") -> bool:
    """Whether the timeline, or the log, tells of the planted failure."""
    return MESSAGE in log or any(
        MESSAGE in json.dumps(event.to_dict(), default=str) for event in omnicomp.timeline.events()
    )


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """No graph comes from a cache, while generated code that is the same is compiled once."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def check(place: Place, when: str, options: dict[str, Any], *, starts: int = 1) -> int:
    """Values and gradients are eager's with a failure planted; returns how often it raised.

    Args:
        place: where.
        when: see `planted`.
        options: of the compilation.
        starts: how often everything that the process compiled is forgotten.
    """
    expected = [step(program, size) for size in SIZES]
    with planted(place, when) as raised:
        for _ in range(starts):
            torch.compiler.reset()
            compiled = torch.compile(program, backend="omni", options=options, dynamic=False)
            for size, wanted in zip(SIZES, expected, strict=True):
                for got, want in zip(step(compiled, size), wanted, strict=True):
                    torch.testing.assert_close(got, want)
    return raised[0]


@contextlib.contextmanager
def pretended(fails: Callable[[str, set[str]], bool]) -> Iterator[None]:
    """An Inductor that makes every piece of eager, or raises without naming a node; never a whole part.

    Args:
        fails: whether it can't build the nodes of these names of a part (`forward`, …) together.
    """

    def lower(_: Any, module: Any, inputs: Sequence[Any], context: Any) -> Any:
        if fails(context.part, {node.name for node in module.graph.nodes if node.op == "call_function"}):
            raise RuntimeError(MESSAGE)
        built = EagerLowering().lower(module, inputs, context)
        built.lowering = "inductor"
        return built

    def whole(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(MESSAGE)

    with (
        mock.patch("omnicomp.lowerings.inductor.InductorLowering.lower", lower),
        mock.patch("omnicomp._torch.inductor.compile_fx.compile_part", whole),
    ):
        yield
