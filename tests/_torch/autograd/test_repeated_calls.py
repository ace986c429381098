"""Calls on like tensors are told again as if they had been run."""

from typing import Any

import pytest
import torch
from torch.fx.node import map_aggregate
from traced import capture

from omnicomp._torch.autograd import repeated_calls
from omnicomp._torch.autograd.dispatch_trace import storage_key
from omnicomp.passes.attention import trace as traces
from omnicomp.passes.attention.trace import Trace, Value, trace

X = torch.randn(2, 4, 6, 8)


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ weight).chunk(3, -1)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    weights = (q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf")).softmax(-1)
    return x.float().add(weights.to(x.dtype) @ v.contiguous(), alpha=0.5)


def layers(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return layer(layer(layer(x, first), second), first)


def changed(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        y = x * 1
        view = y.transpose(-1, -2).reshape(2, 4, 8, 6)
        row = y.select(-1, 0)
        y.add_(1)
        row.masked_fill_(row > 0, 3.0)
        x = (x + y).sin() + view.mT + row.unsqueeze(-1)
    return x


def kept(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x.float().contiguous().reshape(x.shape).expand_as(x).to(torch.float32) + x[..., None, 2].double().float()
        x = torch.stack(torch.unbind(x, 1), 1).view_as(x).max(-1, keepdim=True).values.expand(2, 4, 6, 8)
    return x


def complex_numbers(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = torch.view_as_complex(x.reshape(2, 4, 6, 4, 2)).conj().imag.neg().repeat_interleave(2, -1)
    return x


def described(found: Trace) -> list[Any]:
    """All that a trace tells, with numbers for values, for memory and for tensors."""
    numbers: dict[Any, int] = {}

    def number(key: Any) -> int:
        return numbers.setdefault(key, len(numbers))

    def told(item: Any) -> Any:
        if not isinstance(item, Value):
            return item
        fake = item.fake
        about = fake.dtype, fake.device, fake.shape, fake.stride(), fake.storage_offset(), fake.is_conj()
        holders = [node.name for node in item.holders]
        users = [number(op) for op in item.users]
        made = None if item.op is None else (number(item.op), item.index)
        return number(item), about, number(storage_key(fake)), holders, users, made

    return [
        [(op.name, op.target, op.node.name, op.arguments, number(op)) for op in found.ops],
        [map_aggregate((op.args, dict(op.kwargs), op.outputs), told) for op in found.ops],
        {node.name: told(value) for node, value in found.values.items()},
        {node.name: order for node, order in found.order.items()},
        {node.name: when for node, when in found.changed.items()},
        {node.name: why for node, why in found.failed.items()},
    ]


@pytest.mark.parametrize(
    ("program", "arguments"),
    [(layers, (X, torch.randn(8, 24), torch.randn(8, 24))), (changed, (X,)), (kept, (X,)), (complex_numbers, (X,))],
)
def test_a_trace_is_the_same_as_if_all_had_been_run(program, arguments, monkeypatch) -> None:
    backend = capture(program, *arguments)
    found = described(backend.trace)
    monkeypatch.setattr(traces, "sets_state", lambda node: True)
    assert described(trace(backend.module)) == found


def test_only_the_first_of_equal_layers_is_run(monkeypatch) -> None:
    run: list[Any] = []
    original = repeated_calls._known
    monkeypatch.setattr(repeated_calls, "_known", lambda *args: run.append(args) or original(*args))
    weights = torch.randn(8, 24), torch.randn(8, 24)
    capture(lambda x, a, b: layer(x, a), X, *weights)
    once = len(run)
    run.clear()
    capture(layers, X, *weights)
    assert 0 < len(run) == once
