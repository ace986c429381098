from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_low_and_reductions_are_float32(sim: Any, dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 4, device="sim"), torch.randn(4, 4, device="sim")
    with torch.autocast("sim", dtype=dtype):
        low = F.linear(x, weight)
        found = {
            "mm": low.dtype, "bmm": torch.bmm(x[None], weight[None]).dtype, "softmax": low.softmax(-1).dtype,
            "sum": low.sum().dtype, "norm": low.norm().dtype, "log": low.exp().log().dtype,
            "mse": F.mse_loss(low, x).dtype, "asked": low.softmax(-1, dtype=torch.float64).dtype,
            "promote": torch.addcmul(low, x, low).dtype, "relu": low.relu().dtype,
        }  # fmt: skip
    low_names = {"mm", "bmm", "relu"}
    assert found == {
        name: dtype if name in low_names else torch.float64 if name == "asked" else torch.float32 for name in found
    }
    assert F.linear(x, weight).dtype == torch.float32


def test_values_and_gradients_are_those_of_the_cpu_s_autocast(sim: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
    expected.float().square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.to("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        found = model(x.to("sim"))
    found.float().square().sum().backward()
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(gradients, model.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(theirs.grad.cpu(), mine, rtol=5e-2, atol=5e-2)


def test_what_is_unsafe_in_half_precision_is_refused(sim: Any) -> None:
    x = torch.rand(3, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(x, x)


def test_a_weight_is_cast_once(sim: Any) -> None:
    layer = nn.Linear(4, 4, bias=False).to("sim")
    x = torch.randn(2, 4, device="sim", dtype=torch.bfloat16)
    with torch.autocast("sim", dtype=torch.bfloat16):
        layer(x)
        before = sim.counters()["d2d_copies"]
        layer(x)
        assert sim.counters()["d2d_copies"] == before
