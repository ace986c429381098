"""Which operators `numerics="eager"` lets Inductor have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from omnicomp.lowerings.exact import inexact

FLOATS = torch.randn(4, 4)
HALVES = FLOATS.bfloat16()


def last_of(function: Callable[..., Any], *inputs: Tensor) -> Any:
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return [node for node in graph.nodes if node.op == "call_function"][-1]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + x,
        lambda x: x * 0.1,
        lambda x: x.t(),
        lambda x: torch.cat([x, x]),
        lambda x: x.where(x > 0, 0.0),
        lambda x: x.bfloat16(),
    ],
)
def test_moves_and_what_was_never_seen_to_differ_may_be_fused(function: Callable[..., Any]) -> None:
    assert inexact(last_of(function, FLOATS), "inductor") is None


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x @ x, FLOATS),
        (lambda x: x.sum(-1), FLOATS),
        (lambda x: x.softmax(-1), FLOATS),
        (lambda x: x.exp(), FLOATS),
        (lambda x: torch.rand_like(x), FLOATS),
        (lambda x: torch.sub(x, x, alpha=0.3), FLOATS),
        (lambda x: torch.erf(x), HALVES),
        (lambda x: x.int(), FLOATS),
        (lambda x: x + x, FLOATS.to(torch.complex64)),
    ],
)
def test_all_else_is_eagers(function: Callable[..., Any], x: Tensor) -> None:
    reason = inexact(last_of(function, x), "inductor")
    assert reason is not None
    assert reason.code == "not_exact"
