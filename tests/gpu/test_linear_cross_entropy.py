"""The loss without logits on a CUDA device: values, gradients and memory against eager."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import omnicomp
from omnicomp.lowerings.overrides.linear_cross_entropy import linear_cross_entropy, rows_of_chunk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def relative(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm()).item()


def losses(function: Any, *inputs: Tensor) -> list[Tensor]:
    """The loss and the gradients of the floating-point inputs."""
    fresh = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    loss = function(*fresh)
    (loss * 3).backward()
    return [loss.detach(), *(x.grad for x in fresh if x.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 100, 2500, 9000])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_is_as_close_to_float64_as_eager(rows: int, dtype: torch.dtype, reduction: str) -> None:
    hidden = torch.randn(rows, 256, device="cuda", dtype=dtype)
    weight = torch.randn(5003, 256, device="cuda").mul_(0.1).to(dtype)
    bias = torch.randn(5003, device="cuda", dtype=dtype)
    target = torch.randint(0, 5003, (rows,), device="cuda")
    if rows > 1:
        target[::5] = -100

    def eager(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        logits = F.linear(x, w, b)
        return F.cross_entropy(logits.float() if dtype == torch.bfloat16 else logits, target, reduction=reduction)

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, target, b, reduction=reduction)

    def exact(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w, b), target, reduction=reduction)

    expected = losses(exact, hidden.double(), weight.double(), bias.double())
    for value, other, right in zip(
        losses(ours, hidden, weight, bias), losses(eager, hidden, weight, bias), expected, strict=True
    ):
        factor = 1.1 if rows > 10 else 2.0  # of a few numbers the errors are a matter of luck
        assert relative(value, right) <= factor * relative(other, right) + 4 * torch.finfo(torch.float32).eps
        assert value.dtype == other.dtype


def test_edges() -> None:
    weight = torch.randn(1000, 64, device="cuda")
    hidden = torch.randn(8, 64, device="cuda", requires_grad=True)
    nothing = torch.full((8,), -100, device="cuda")
    loss = linear_cross_entropy(hidden, weight, nothing)
    loss.backward()
    assert loss.isnan()
    assert not hidden.grad.any()
    assert linear_cross_entropy(hidden[:0], weight, nothing[:0], reduction="sum") == 0
    bias = torch.full((1000,), -torch.inf, device="cuda")
    bias[3] = 0
    some = torch.full((8,), 3, device="cuda")
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, some, bias), torch.zeros((), device="cuda"))
    assert linear_cross_entropy(hidden, weight, some + 5000).isnan()


def test_a_training_step_takes_a_fraction_of_the_memory() -> None:
    tokens, classes, features = 16384, 50000, 512
    head = nn.Linear(features, classes, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(4, tokens // 4, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, classes, (4, tokens // 4), device="cuda")

    def step(hidden: Tensor, target: Tensor) -> Tensor:
        logits = head(hidden)
        shifted = logits[..., :-1, :].contiguous().view(-1, classes).float()
        return F.cross_entropy(shifted, target[..., 1:].contiguous().view(-1))

    compiled = torch.compile(step, backend="omni", options={"verify": "off", "on_error": "raise"})
    peaks = []
    gradients = []
    for function in (step, compiled):
        for _ in range(2):
            hidden.grad = head.weight.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            function(hidden, target).backward()
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        gradients.append((hidden.grad, head.weight.grad))
    assert [r.name for g in omnicomp.audit().graphs for r in g.rewrites] == ["linear_cross_entropy"]
    logits = tokens * classes * 2
    assert peaks[0] > 3 * logits
    assert peaks[1] < logits * rows_of_chunk(tokens, "cuda") / tokens + 8 * classes * features + 2**27
    for value, other in zip(*gradients, strict=True):
        assert relative(value, other.double()) < 0.01


def test_it_can_be_captured_in_a_cuda_graph() -> None:
    hidden = torch.randn(3000, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 128, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, 4096, (3000,), device="cuda")
    expected = linear_cross_entropy(hidden, weight, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = linear_cross_entropy(hidden, weight, target)
    loss.zero_()
    graph.replay()
    torch.testing.assert_close(loss, expected)
