"""Which operators `numerics="eager"` lets Inductor have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from omnicomp.analysis.accuracy import differences
from omnicomp.lowerings.exact import called_by_code, has_external_kernel, inexact

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
        lambda x: torch.ops.aten.copy_(torch.zeros_like(x), x),
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
        (lambda x: torch.ops.aten.copy_(torch.zeros_like(x), x.half()), FLOATS),
    ],
)
def test_all_else_is_eagers(function: Callable[..., Any], x: Tensor) -> None:
    reason = inexact(last_of(function, x), "inductor")
    assert reason is not None
    assert reason.code == "not_exact"


@torch.library.custom_op("test_exact::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("function", "x", "can"),
    [
        (lambda x: x @ x, FLOATS, True),
        (lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0], FLOATS, True),
        (lambda x: x.topk(2)[1], FLOATS, True),
        (lambda x: torch.ops.aten.exp_(x), FLOATS, False),
        (twice, FLOATS, False),
        (torch.fft.rfft, FLOATS, False),
    ],
)
def test_generated_code_calls_operators_of_torchs_own_without_effects(
    function: Callable[..., Any], x: Tensor, *, can: bool
) -> None:
    graph = make_fx(function, tracing_mode="fake")(x).graph
    node = next(node for node in graph.nodes if node.op == "call_function")
    assert has_external_kernel(node) is can
    assert (called_by_code(node, "inductor") is not None) is can


def test_sizes_of_sizes_are_no_reason_to_leave_the_graph() -> None:
    graph = make_fx(lambda x: x.new_zeros(x.shape[0] * 2), tracing_mode="symbolic")(FLOATS).graph
    assert all(inexact(node, "inductor") is None for node in graph.nodes if node.op == "call_function")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_and_nan_keep_eagers_bits_beside_vectors(dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), float("nan")], dtype=dtype)
    pairs = torch.cartesian_prod(special, special).unbind(-1)

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        both = [torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.clamp_min, torch.clamp_max, torch.copysign]
        return [*(f(x, y) for f in both), torch.relu(x), x.abs() * y, x.clamp_min(0), -x + y, x.where(x > y, y)]

    for x, y in (pairs, tuple(each.repeat(16) for each in pairs)):
        torch.compiler.reset()
        found = torch.compile(function, backend="omni", options={"numerics": "eager", "verify": "off"})(x, y)
        assert not differences(found, function(x, y))
