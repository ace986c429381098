"""Under `numerics="eager"` a part stays one subgraph of Inductor, which calls eager's kernels on eager's memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import omnicomp
from omnicomp.audit import Audit

pytestmark = pytest.mark.inductor

OPTIONS: dict[str, Any] = {"numerics": "eager", "summary": False}


def compiled(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="omni", options=OPTIONS, **more)


def results(function: Callable[..., Any], *inputs: Tensor, seed: int = 0) -> list[Any]:
    """What a call returns, the gradients of its inputs, what it wrote to them, and the state of the generator."""
    own = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
    torch.manual_seed(seed)
    found = [value for value in tree_leaves(function(*own)) if isinstance(value, Tensor)]
    state = torch.get_rng_state()
    ends = [value for value in found if value.requires_grad]
    wanted = [value for value in own if value.requires_grad]
    gradients = torch.autograd.grad(ends, wanted, [value.cos() for value in ends]) if ends else ()
    return [*found, *gradients, *own, state]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    """Values, bits and strides."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def one_subgraph(parts: int) -> Audit:
    """The audit, in which each of the parts is one subgraph, and none was replaced."""
    audit = omnicomp.audit()
    found = [part for graph in audit.graphs for part in graph.parts]
    assert [[subgraph.ran for subgraph in part.subgraphs] for part in found] == [["inductor"]] * parts
    assert not audit.retreats
    return audit


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        split = (value.unflatten(-1, (4, 8)).transpose(1, 2) for value in self.qkv(self.first(x)).chunk(3, -1))
        query, key, value = (each * 0.5 + 1 for each in split)
        weights = functional.dropout((query @ key.transpose(-1, -2)).softmax(-1), 0.1, self.training)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2)) * 0.5
        return x + functional.dropout(self.down(functional.gelu(self.up(self.second(x)))), 0.1, self.training)


def test_a_block_is_one_subgraph_that_names_eagers_kernels() -> None:
    block = Block().train()
    call, x = compiled(block), torch.randn(2, 9, 32, requires_grad=True)
    for seed in range(3):
        assert_equal(results(call, x, seed=seed), results(block, x, seed=seed))
        made: list[list[Any]] = []
        for function in (call, block):
            block.zero_grad()
            torch.manual_seed(seed)
            function(x).square().mean().backward()
            made.append([parameter.grad for parameter in block.parameters()])
        assert_equal(*made)
    audit = one_subgraph(parts=2)
    forward, backward = audit.graphs[0].parts
    (subgraph,) = forward.subgraphs
    assert subgraph.kernels["torch.ops.aten.addmm.default"] == 4
    assert subgraph.kernels["torch.ops.aten.native_dropout.default"] == 2
    assert subgraph.kernels["torch.ops.aten._softmax.default"] == 1
    assert "verified" in subgraph.evidence
    # `gelu_backward` has no function of torch's by which to call it.
    assert backward.subgraphs[0].kernels["torch.ops.aten.gelu_backward.default"] == 1
    assert forward.placement["eager"] == sum(subgraph.kernels.values()) + 2 * 3 + 2 * 2  # with parts of their results
    assert {declined.chain[-1].code for declined in forward.declined} == {"not_exact"}


def reads(x: Tensor) -> tuple[Tensor, ...]:
    y = (x * 2 + 1).t()
    return y.sum(-1), y.softmax(-1), functional.layer_norm(y, (len(x),)), y


def slices(x: Tensor) -> tuple[Tensor, ...]:
    first, second = (x * 3)[:, 1:].split(48, -1)
    return first.sum(-1), second @ first.t(), (x + 1).permute(1, 0).contiguous().sum(-1), first[2:]


def joins(x: Tensor) -> tuple[Tensor, ...]:
    half = x * 2
    both = torch.cat([half, x + 1], -1)
    return half.sum(-1), both.sum(-1), both.t().logsumexp(-1), half[:, None].expand(-1, 3, -1).sum(-1)


@pytest.mark.parametrize("program", [reads, slices, joins])
def test_kernels_read_memory_as_it_is_in_eager(program: Callable[..., Any]) -> None:
    x = torch.randn(130, 97)
    assert_equal(results(compiled(program), x), results(program, x))
    one_subgraph(parts=1)


def test_the_order_in_memory_is_seen_in_the_bits() -> None:
    y = torch.randn(130, 97).t()
    assert not torch.equal(y.sum(-1), y.contiguous().sum(-1))


def test_several_results_and_writes() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        y[:, 3] = 0
        y.add_(1).t().exp_()
        x.mul_(3)
        values, indices = (y + 1).topk(5, -1)
        return values * 2, indices + 1, *torch.std_mean(y * 2, -1), y, x.sum(0)

    call = compiled(program)
    for _ in range(3):
        x = torch.randn(8, 96)
        assert_equal(results(call, x), results(program, x))
    one_subgraph(parts=1)


def test_random_numbers_are_drawn_in_the_order_of_the_program() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        first = functional.dropout(x * 2, 0.3)
        second = functional.dropout(x + 1, 0.5)
        torch.rand(3)  # of no use, but drawn
        third = torch.rand_like(x.t())
        return first * 3, functional.dropout(second * third.t() + 1, 0.1), (first + second) * third.t()

    call, x = compiled(program), torch.randn(8, 96, requires_grad=True)
    for seed in range(3):
        assert_equal(results(call, x, seed=seed), results(program, x, seed=seed))
    one_subgraph(parts=2)


def test_sizes_may_change() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = x * x.shape[0] + 1
        return (y @ y.t()).softmax(-1).sum(0), y.view(-1, 4).sum(-1), x.new_zeros(x.shape[0] * 2) + 1

    call = compiled(program, dynamic=True)
    for size in (5, 8, 13):
        x = torch.randn(size, 96, requires_grad=True)
        assert_equal(results(call, x), results(program, x))
    one_subgraph(parts=2)


def test_what_code_can_not_call_is_cut_as_before() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.fft.rfft(x * 2 + 1).abs() * 2 + x.softmax(-1)[:, :49]

    x = torch.randn(8, 96)
    assert_equal(results(compiled(program), x), results(program, x))
    audit = omnicomp.audit()
    assert [each.ran for each in audit.graphs[0].parts[0].subgraphs] == ["inductor", "eager", "inductor"]
    assert not audit.retreats
