"""What the tests of overrides of blocks share: a model with a block, an override of it, and what was recorded."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import omnicomp
from omnicomp.timeline import Placement, Reason, current

EAGER = {"lowerings": ["override", "eager"], "on_error": "raise"}


class MLP(nn.Module):
    def __init__(self, bias: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10, bias=bias)
        self.down = nn.Linear(10, 6, bias=bias)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.silu(self.up(x))))


class Model(nn.Module):
    def __init__(self, make: Any = MLP, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": make()}) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](x)
        return x


def plain(
    x: Tensor, up_weight: Tensor, down_weight: Tensor, up_bias: Tensor | None = None, down_bias: Tensor | None = None
) -> Tensor:
    return F.linear(F.silu(F.linear(x, up_weight, up_bias)), down_weight, down_bias)


def declare(calls: list[tuple[Any, ...]], name: str = "block_mlp", **options: Any) -> Any:
    options = {"module": MLP, "reference": plain, "name": name, **options}

    @omnicomp.override(**options)
    def fused(
        x: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        calls.append((x, up_weight, down_weight, up_bias, down_bias))
        return plain(x, up_weight, down_weight, up_bias, down_bias)

    return fused


def events(kind: type) -> list[Any]:
    return [event for event in current() if isinstance(event, kind)]


def refusals() -> list[Reason]:
    return [reason for e in events(Placement) for node in e.declined for reason in node.chain]


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="omni", options={**EAGER, **options})


def backward(ctx: Any, grad: Tensor) -> Any:
    saved = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
    with torch.enable_grad():
        out = plain(*saved)
    found = iter(torch.autograd.grad(out, [t for t in saved if t is not None], grad))
    return tuple(None if t is None else next(found) for t in saved)


def keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def train(model: Any, run: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
