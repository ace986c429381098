"""Named ranges on CUDA: torch's profiler and NVTX, with and without CUDA graphs."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_a_part_is_a_range_of_the_profiler_and_of_nvtx(monkeypatch: pytest.MonkeyPatch, cudagraphs: bool) -> None:
    pushed: list[str] = []
    original = torch.cuda.nvtx.range_push

    def push(name: str) -> int:
        pushed.append(name)
        return original(name)

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    options = {"ranges": True, "triton.cudagraphs": cudagraphs}
    compiled = torch.compile(lambda x: x.sin() * 2 + 1, backend="omni", options=options)
    x = torch.randn(64, device="cuda")
    for _ in range(4):
        compiled(x)
    pushed.clear()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        torch.testing.assert_close(compiled(x), x.sin() * 2 + 1)
    (name,) = pushed
    assert name.startswith("omni g")
    assert name.endswith(".inference.0 (inductor)")
    assert name in {event.name for event in found.events()}
