"""What a program does when it is called twice, and a comparison that looks at more than values."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Make = Callable[[], tuple[Callable[..., Any], list[Any]]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program: `make` gives a new function or module and its inputs, the same at each call.

    Attributes:
        name: of the function that makes it.
        make: that function.
        tolerance: relative and absolute, of what it computes; more where it computes in half precision.
        traced: whether Dynamo itself, whatever the backend, can trace it.
        draws: whether it draws from the process' generator, so that under threads eager is no standard either.
        keeps: whether calls change what the function itself holds, so that threads can't share it in eager either.
    """

    name: str
    make: Make
    tolerance: float
    traced: bool
    draws: bool
    keeps: bool


PROGRAMS: list[Program] = []


def program(
    make: Make | None = None,
    *,
    tolerance: float = 1e-3,
    traced: bool = True,
    draws: bool = False,
    keeps: bool = False,
) -> Any:
    """Register the maker of a program."""

    def register(make: Make) -> Make:
        PROGRAMS.append(Program(make.__name__, make, tolerance, traced, draws, keeps))
        return make

    return register if make is None else register(make)


@dataclasses.dataclass
class Outcome:
    """What two calls gave: results, gradients, what was written to, who shares memory, or the error."""

    results: list[Any]
    gradients: list[Any]
    state: list[Any]
    sharing: list[Any]
    error: str = ""


def prepared(program: Program) -> tuple[Callable[..., Any], list[Any]]:
    """A program's function and inputs; the same numbers each time."""
    torch.manual_seed(0)
    return program.make()


def outcome(program: Program, compile: Callable[[Any], Any], calls: int = 2) -> Outcome:
    """Run a program on inputs of its own; `compile` is what is done to the function first."""
    function, inputs = prepared(program)
    return run(compile(function), function, inputs, calls)


def run(compiled: Callable[..., Any], function: Callable[..., Any], inputs: list[Any], calls: int = 2) -> Outcome:
    """Call what was made of a function, on inputs that `prepared` made."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    held = list(function.parameters()) + list(function.buffers()) if isinstance(function, nn.Module) else []
    results: list[Any] = []
    sharing: list[Any] = []
    gradients: list[Any] = []
    for _ in range(calls):
        torch.manual_seed(1)
        try:
            found = [leaf for leaf in tree_leaves(compiled(*inputs))]
        except Exception as error:
            return Outcome(results, gradients, _values(leaves + held), sharing, type(error).__name__)
        results += [f.detach().clone() if isinstance(f, Tensor) else f for f in found]
        sharing.append(_sharing(found, leaves + held))
        sharing.append([_layout(f) for f in found])
        differentiable = [f for f in found if isinstance(f, Tensor) and f.requires_grad]
        if differentiable:
            sum(
                (f.to_dense() if f.layout != torch.strided else f).abs().pow(2).sum() for f in differentiable
            ).backward()
    for tensor in leaves + held:
        gradients.append(tensor.grad if tensor.is_leaf else None)
    return Outcome(results, gradients, _values(leaves + held), sharing)


def _values(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def _layout(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value if isinstance(value, int | bool) else type(value).__name__
    sizes = () if value.layout != torch.strided or value.is_nested else (value.stride(), value.storage_offset())
    return (type(value).__name__, value.dtype, tuple(value.shape), sizes, value.requires_grad, value.is_conj())


def _sharing(found: Sequence[Any], known: Sequence[Tensor]) -> list[int]:
    """For each result the first tensor among inputs, state and results whose memory it has."""
    tensors = [*known, *(f for f in found if isinstance(f, Tensor))]
    tensors = [t for t in tensors if t.layout == torch.strided and type(t) in (Tensor, nn.Parameter) and t.numel()]
    places = [t.untyped_storage().data_ptr() for t in tensors]
    return [places.index(place) for place in places]


def compare(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Raise if a compiled program did something else than eager."""
    assert found.error == expected.error
    for name in ("results", "gradients", "state"):
        got, want = getattr(found, name), getattr(expected, name)
        assert len(got) == len(want), name
        for index, (g, w) in enumerate(zip(got, want, strict=True)):
            assert type(g) is type(w), (name, index, g, w)
            if isinstance(g, Tensor):
                if g.is_nested:
                    g, w = torch.nested.to_padded_tensor(g, 0.0), torch.nested.to_padded_tensor(w, 0.0)
                torch.testing.assert_close(
                    g, w, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, n=name, i=index: f"{n} {i}: {m}"
                )
            else:
                assert g == w, (name, index)
    assert found.sharing == expected.sharing


def leaf(*shape: int, **kwargs: Any) -> Tensor:
    """Normal numbers that require a gradient."""
    return torch.randn(shape, **kwargs).requires_grad_()


warnings.filterwarnings("ignore", message=".*prototype stage.*")
