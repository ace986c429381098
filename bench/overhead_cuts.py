"""What a cut costs in a call: a graph with one eager node in the middle, over the two Inductor halves alone.

Dynamo's guards and AOTAutograd's wrappers are left out on both sides: they would be paid once by the cut graph and
twice by the halves, and hide what is between the pieces.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from harness import interleave
from torch import Tensor
from torch._inductor.output_code import CompiledFxGraph

import omnicomp.backend.autograd

HEADER = ["graph", "halves µs", "eager node µs", "cut µs", "cut - halves µs", "without the node µs"]


def bench_cuts(arguments: argparse.Namespace) -> list[list[str]]:
    """Microseconds a call; the differences are medians of those within each round."""
    x, y = torch.randn(8, 8, device=arguments.device), torch.randn(8, 8, device=arguments.device)
    middle = torch.ops.aten.erfinv.default

    def first(a: Tensor, b: Tensor) -> Tensor:
        return (a.sin() + b).tanh() * 0.5

    def second(a: Tensor, b: Tensor) -> Tensor:
        return (a.cos() + 1) * b

    def whole(a: Tensor, b: Tensor) -> Tensor:
        return second(torch.erfinv(first(a, b)), b)

    with torch.no_grad():
        halves = [_inductor(first, x, y), _inductor(second, x, y)]
        cut = _cut(whole, x, y)
        (inner,) = halves[0]([x, y])
        (result,) = cut([x, y])
        torch.testing.assert_close(result, whole(x, y))
        candidates: dict[str, Callable[[], Any]] = {
            "halves": lambda: (halves[0]([x, y]), halves[1]([inner, y])),
            "node": lambda: middle(inner),
            "cut": lambda: cut([x, y]),
        }
        for function in candidates.values():
            for _ in range(20):
                function()
        rounds = arguments.rounds or (41 if arguments.quick else 201)
        times = interleave(candidates, rounds=rounds, seconds=0.005, device=arguments.device)
    alone = _difference(times["cut"].rounds, times["halves"].rounds)
    without = _difference(times["cut"].rounds, times["halves"].rounds, times["node"].rounds)
    cells = [f"{times[name].median * 1e6:.2f}" for name in ("halves", "node", "cut")]
    return [["pointwise 8x8, one node eager", *cells, f"{alone * 1e6:.2f}", f"{without * 1e6:.2f}"]]


def _difference(first: Sequence[float], *others: Sequence[float]) -> float:
    differences = sorted(values[0] - sum(values[1:]) for values in zip(first, *others, strict=True))
    return differences[len(differences) // 2]


def _inductor(function: Callable[..., Tensor], *inputs: Tensor) -> CompiledFxGraph:
    """What Inductor compiles a function to, without what calls it."""
    built: list[CompiledFxGraph] = []
    original = CompiledFxGraph.post_compile

    def post_compile(self: CompiledFxGraph, *args: Any) -> None:
        original(self, *args)
        built.append(self)

    with mock.patch.object(CompiledFxGraph, "post_compile", post_compile):
        torch.compile(function, backend="inductor")(*inputs)
    return built[-1]


def _cut(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[list[Any]], Sequence[Any]]:
    """What omni makes of a function of which one operator is placed on eager, without what calls it."""
    built: list[Any] = []
    build_part = omnicomp.backend.autograd.build_part

    def build(*args: Any) -> Any:
        built.append(build_part(*args))
        return built[-1]

    options = {"lowerings": {"aten.erfinv": "eager"}, "summary": False}
    with mock.patch.object(omnicomp.backend.autograd, "build_part", build):
        torch.compile(function, backend="omni", options=options)(*inputs)
    return built[-1]
