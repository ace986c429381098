"""Wherever nodes can't be built, those alone are in eager: several at once, forward and backward, chosen at random."""

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn import examples, generator
from faults import pretended
from torch import Tensor

import omnicomp
from omnicomp.backend import autograd

# Each of several nodes is found by a search of its own.
OPTIONS = {"summary": False, "verify": "off", "max_builds": 200, "verdicts": "off"}


def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = F.layer_norm(F.gelu(x @ w), (6,)) + x.sin()
    scores = F.softmax(h @ h.mT, -1) @ (v.exp() * 2)
    first, second = scores.chunk(2, -1)
    values, _ = torch.sort(first * second.cos(), -1)
    return (values.cumsum(0) / (1 + second.abs())).sum(-1)


def run(training: bool) -> None:
    """Compile, and compare with eager."""
    torch.compiler.reset()
    omnicomp.timeline.clear()
    made = torch.Generator().manual_seed(0)
    sizes = ((4, 6), (6, 6), (4, 6))
    x, w, v = (torch.randn(s, dtype=torch.float64, generator=made, requires_grad=training) for s in sizes)
    compiled = torch.compile(program, backend="omni", options=OPTIONS)
    torch.testing.assert_close(compiled(x, w, v), program(x, w, v))
    if training:
        grads = [torch.autograd.grad(f(x, w, v).sum(), (x, w, v)) for f in (compiled, program)]
        torch.testing.assert_close(*grads)


def operators(training: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The operators of each part; a `getitem` goes where the operator goes that it takes apart."""
    found: dict[str, list[str]] = {}
    original = autograd.build_part

    def build_part(module: Any, inputs: Sequence[Any], context: Any, *rest: Any) -> Any:
        nodes = (node for node in module.graph.nodes if node.op == "call_function")
        found[context.part] = [node.name for node in nodes if node.target is not operator.getitem]
        return original(module, inputs, context, *rest)

    with monkeypatch.context() as patched, pretended(lambda part, names: False):
        patched.setattr(autograd, "build_part", build_part)
        run(training)
    return found


@pytest.mark.drawn
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_exactly_the_nodes_that_fail_are_in_eager(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = operators(training, monkeypatch)
    assert set(parts) == ({"forward", "backward"} if training else {"inference"})
    assert all(len(names) > 15 for names in parts.values())
    numbers = generator("failing nodes")
    for _ in range(examples(4)):
        bad = {part: set(numbers.sample(names, numbers.randint(1, 6))) for part, names in parts.items()}
        with pretended(lambda part, names, bad=bad: bool(names & bad[part])):
            run(training)
        eager = {
            event.part: {node.node for node in event.declined}
            for event in omnicomp.timeline.events()
            if event.type == "placement"
        }
        assert eager == bad
