"""On a CUDA device: modes with CUDA graphs, mixed graphs, attention kernels, warm starts."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from recorded import events
from torch import nn

import omnicomp
from omnicomp.devices import MEMORY_KEYS, resolve_device
from omnicomp.testing.models import build
from omnicomp.timeline import Capture, Option, Placement, Ran, Rewrite

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.digamma(torch.tanh(self.first(x)) + 3))


@contextlib.contextmanager
def inductor_fails_on(operator: Any) -> Iterator[None]:
    from torch._inductor import lowering

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted failure")

    saved = lowering.lowerings[operator]
    lowering.lowerings[operator] = fail
    try:
        with torch.compiler.config.patch(force_disable_caches=True):
            yield
    finally:
        lowering.lowerings[operator] = saved


def train(model: nn.Module, run: Any, steps: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        loss = run(torch.randn(32, 64, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_training_in_every_mode(mode: str) -> None:
    torch.manual_seed(0)
    model = Block().cuda()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    expected = train(model, model)
    model.load_state_dict(start)
    actual = train(model, torch.compile(model, backend="omni", mode=mode))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    assert events(Capture)[0].device == "cuda"
    assert not omnicomp.audit().fallbacks
    assert events(Option) == []


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_cut_graph_runs_without_cuda_graphs_and_says_so(mode: str) -> None:
    torch.manual_seed(0)
    model = Block().cuda()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    expected = train(model, model)
    model.load_state_dict(start)
    with inductor_fails_on(torch.ops.aten.digamma.default):
        actual = train(model, torch.compile(model, backend="omni", mode=mode))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    assert events(Placement)[0].nodes["eager"] == 1
    options = events(Option)
    assert [o.key for o in options] == (["triton.cudagraphs"] if mode == "reduce-overhead" else [])
    assert [e.lowering for e in events(Ran) if e.part == "forward"] == ["inductor", "eager", "inductor"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_runs_on_a_fused_kernel(dtype: torch.dtype) -> None:
    case = build("llama").to("cuda", dtype)
    reference = build("llama").to("cuda", torch.float64)
    with torch.no_grad():
        exact = reference.output(reference.model(**reference.inputs))
        eager = case.output(case.model(**case.inputs)).double()
        actual = case.output(torch.compile(case.model, backend="omni")(**case.inputs)).double()
    # Judged against float64, and by eager's own error.
    assert (actual - exact).norm() <= 1.5 * (eager - exact).norm() + 1e-6 * exact.norm()
    assert len(events(Rewrite)) == 2
    kernels = {kernel for ran in events(Ran) for kernel in ran.kernels}
    assert any("_scaled_dot_product" in kernel for kernel in kernels), kernels


def test_bf16_policy() -> None:
    case = build("bert").to("cuda", torch.float32)
    with torch.no_grad():
        expected = case.output(case.model(**case.inputs))
        compiled = torch.compile(case.model, backend="omni", options={"dtype_policy": "bf16"})
        actual = case.output(compiled(**case.inputs))
    assert actual.dtype == torch.float32
    assert ((actual - expected).norm() / expected.norm()).item() < 2e-2


def test_the_router_of_experts_is_one_kernel() -> None:
    def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.topk(torch.softmax(logits, dim=-1), 2, dim=-1)

    logits = torch.randn(65536, 64, device="cuda")
    with torch.no_grad():
        actual = torch.compile(route, backend="omni")(logits)
    torch.testing.assert_close(actual, route(logits))
    assert [e.lowering for e in events(Ran)] == ["inductor", "override"]


def test_the_device_says_what_it_can_do() -> None:
    device = resolve_device("cuda")
    capabilities = device.capabilities()
    assert torch.float16 in capabilities.fast_dtypes
    assert capabilities.triton
    assert capabilities.graph_mode
    assert capabilities.attention_kernels
    device.synchronize()
    assert set(device.memory_stats()) == set(MEMORY_KEYS)
    assert None not in device.memory_stats().values()
    assert device.available_memory()
