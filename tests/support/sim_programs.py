"""A program for a process of its own: models on `sim` through backends, compared with the CPU. Prints JSON.

Arguments: the backends. Of each case it prints the largest difference from the CPU, and what the device counted in a
second call, in which nothing is compiled any more.
"""

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import omnicomp
import omnicomp.devices.sim

sim: Any = omnicomp.devices.sim.enable()
assert sim.get_device_properties().protected


class Attention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.inner(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5).softmax(-1)
        return x + self.outer((weights @ v).transpose(1, 2).reshape(batch, length, width)).relu()


def pointwise(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b + 1).relu().sin().mean(-1)


def indexed(x: torch.Tensor, places: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """What needs the C++ generator to know that its kernels are not Triton's."""
    found = nn.functional.embedding(places, table)
    return found.softmax(-1).sum(-1) + torch.arange(x.shape[0], device=x.device) + x.logsumexp(-1)


def dynamic(x: torch.Tensor) -> torch.Tensor:
    return (x.softmax(-1) + x.var(0)).logsumexp(0)


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() * 2, (x,))


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found.detach().cpu() - expected.detach()).abs().max().item()


def main(backend: str) -> dict[str, Any]:
    torch.manual_seed(0)
    report: dict[str, Any] = {}

    def case(name: str, function: Callable[..., Any], *inputs: torch.Tensor, device: str = "sim") -> None:
        torch.compiler.reset()
        there = [x.to(device) for x in inputs]
        compiled = torch.compile(function, backend=backend)
        compiled(*there)
        sim.reset_counters()
        found = compiled(*there)
        counters = {key: value for key, value in sim.counters().items() if value}
        report[name] = {
            "error": difference(found, function(*inputs)),
            "device": str(found.device),
            "counters": counters,
        }

    case("pointwise", pointwise, torch.randn(64, 128), torch.randn(128))
    case("indexed", indexed, torch.randn(6, 5), torch.randint(0, 10, (6,)), torch.randn(10, 4))
    case("second", pointwise, torch.randn(8, 16), torch.randn(16), device="sim:1")
    case("branches", branches, torch.randn(8, 8), device="sim:1")

    torch.compiler.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(dynamic, backend=frames, dynamic=True)
    sizes = [torch.randn(size, size + 1) for size in (4, 7, 33)]
    errors = [difference(compiled(x.to("sim")), dynamic(x)) for x in sizes]
    report["dynamic"] = {"error": max(errors), "frames": frames.frame_count}

    torch.compiler.reset()
    model, x = Attention(), torch.randn(2, 16, 32)
    there = copy.deepcopy(model).to("sim")
    compiled, x_there = torch.compile(there, backend=backend), x.to("sim")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, there)]
    for step in range(3):
        if step == 2:
            sim.reset_counters()
        losses = [model(x).square().mean(), compiled(x_there).square().mean()]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    pairs = zip(there.parameters(), model.parameters(), strict=True)
    report["training"] = {"error": max(difference(a, b) for a, b in pairs), "counters": sim.counters()}
    if backend == "omni":
        report["ran"] = [row.ran for row in omnicomp.audit().subgraphs]
    return report


if __name__ == "__main__":
    json.dump({backend: main(backend) for backend in sys.argv[1:]}, sys.stdout)
