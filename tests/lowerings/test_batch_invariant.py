"""`numerics="batch-invariant"`: a row has the same bits alone, in a part of a batch and in the whole of it."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import omnicomp
from omnicomp.errors import OptionError
from omnicomp.lowerings.batch_invariant import put_forms, refusal
from omnicomp.options.policy import parse

ROWS = 70
OPTIONS: dict[str, Any] = {"numerics": "batch-invariant", "summary": False}
Made = tuple[Tensor, Callable[[Tensor], Any]]


def width() -> int:
    return random.choice([1, 3, 8, 16, 17, 33, 64, 100, 257, 511, 768])


def product(draw: Callable[..., Tensor]) -> Made:
    k, n = width(), width()
    weight = draw(k, n) if random.random() < 0.5 else draw(n, k).t()
    return draw(ROWS, k), lambda x: x @ weight


def linear(draw: Callable[..., Tensor]) -> Made:
    k, n = width(), width()
    weight, bias = draw(n, k), draw(n)
    return draw(ROWS, 3, k), lambda x: F.linear(x, weight, bias)


def batched(draw: Callable[..., Tensor]) -> Made:
    return draw(ROWS, random.choice([1, 3, 20]), width()), lambda x: x @ x.transpose(-1, -2)


def attention(draw: Callable[..., Tensor]) -> Made:
    length, mask = random.choice([1, 9, 40]), draw(1, 1, 1, 40)
    x = draw(ROWS, 2, 40, random.choice([8, 17, 32]))
    return x, lambda x: F.scaled_dot_product_attention(x[:, :, :length], x, x, attn_mask=mask)


def convolution(draw: Callable[..., Tensor]) -> Made:
    groups = random.choice([1, 3])
    weight, bias = draw(6, 3 // groups, 3, 3), draw(6)
    return draw(ROWS, 3, 11, 11), lambda x: F.conv2d(x, weight, bias, padding=1, groups=groups)


def transposed(draw: Callable[..., Tensor]) -> Made:
    weight = draw(4, 3, 3)
    return draw(ROWS, 4, 9), lambda x: F.conv_transpose1d(x, weight, stride=2)


def layer_norm(draw: Callable[..., Tensor]) -> Made:
    size = width()
    weight, bias = draw(size), draw(size)
    return draw(ROWS, 3, size), lambda x: F.layer_norm(x, (size,), weight, bias)


def group_norm(draw: Callable[..., Tensor]) -> Made:
    return draw(ROWS, 6, 5, 7), lambda x: F.group_norm(x, 3)


def batch_norm(draw: Callable[..., Tensor]) -> Made:
    mean, var = draw(6), draw(6).abs() + 0.1
    return draw(ROWS, 6, 5, 7), lambda x: F.batch_norm(x, mean, var)


def of(function: Callable[[Tensor], Any]) -> Callable[[Callable[..., Tensor]], Made]:
    return lambda draw: (draw(ROWS, random.choice([1, 5]), width()), function)


def strided(function: Callable[[Tensor], Any]) -> Callable[[Callable[..., Tensor]], Made]:
    return lambda draw: (draw(width(), ROWS).t(), function)


OPERATORS: dict[str, Callable[[Callable[..., Tensor]], Made]] = {
    **{made.__name__: made for made in (product, linear, batched, attention, convolution, transposed)},
    **{made.__name__: made for made in (layer_norm, group_norm, batch_norm)},
    "softmax": of(lambda x: x.softmax(-1)),
    "softmax of a dimension inside": of(lambda x: x.softmax(1)),
    "log_softmax": of(lambda x: x.log_softmax(-1)),
    "sum": of(lambda x: (x.sum(-1), x.sum((1, 2)), x.sum(1, keepdim=True))),
    "mean": strided(lambda x: x.mean(-1)),
    "var": of(lambda x: (x.var(-1), torch.var_mean(x, 2, keepdim=True))),
    "norms": of(lambda x: (x.norm(dim=-1), x.logsumexp(-1), x.amax(-1))),
    "scans": of(lambda x: x.cumsum(-1)),
    "pooling": lambda draw: (draw(ROWS, 4, 6, 6), lambda x: (F.adaptive_avg_pool2d(x, 1), F.max_pool2d(x, 2))),
    "resizing": lambda draw: (draw(ROWS, 2, 5, 5), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "sigmoid": of(lambda x: (x.sigmoid(), F.silu(x), x.tanh(), x.exp(), x.sin(), x.erf())),
    "gelu": of(lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.mish(x), F.softplus(x), F.elu(x))),
    "powers": of(lambda x: (x.abs() ** 2.3, x**2, x.abs().rsqrt(), x.abs().log(), x.abs().sqrt())),
    "sums": of(lambda x: (x + 0.1, x * 0.3 - x, x / 3, x / (x + 2), torch.add(x, x, alpha=0.3), 1 - x)),
    "strided pointwise": strided(lambda x: (x.sigmoid() * x, torch.where(x > 0, x, x.exp()))),
}


def traced(function: Callable[[Tensor], Any], batch: Tensor) -> torch.fx.GraphModule:
    return make_fx(lambda x: tree_leaves(function(x)), tracing_mode="symbolic", _allow_non_fake_inputs=True)(batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_row_alone_is_that_row_in_a_batch(name: str, dtype: torch.dtype) -> None:
    random.seed(f"{name} {dtype}")
    torch.manual_seed(0)
    for _ in range(2):
        batch, function = OPERATORS[name](lambda *shape: torch.randn(*shape).to(dtype))
        module = traced(function, batch)
        assert not [reason for node in module.graph.nodes if (reason := refusal(node, "cpu", "eager"))]
        put_forms(module)
        module.recompile()
        whole, expected = module(batch), tree_leaves(function(batch))
        for found, right in zip(whole, expected, strict=True):
            assert [step for step, size in zip(found.stride(), found.shape, strict=True) if size > 1] == [
                step for step, size in zip(right.stride(), right.shape, strict=True) if size > 1
            ]
            difference = (found.double() - right.double()).nan_to_num().norm()
            assert difference <= 4 * torch.finfo(dtype).eps * right.double().nan_to_num().norm()
            assert torch.equal(found.isnan(), right.isnan())
        for count in (1, 1, 2, 3, 5, 16, 33, 69):
            start = random.randrange(ROWS - count + 1)
            rows = batch[start : start + count]
            for found, right in zip(module(rows if random.random() < 0.5 else rows.clone()), whole, strict=True):
                assert torch.equal(bits(found), bits(right[start : start + count]))


def bits(value: Tensor) -> Tensor:
    return value.contiguous().flatten().view(torch.uint8)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(34), nn.Linear(34, 102), nn.Linear(34, 34)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 17)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + F.gelu(self.out(attended), approximate="tanh")


@torch.no_grad()
def test_a_compiled_model_gives_a_row_alone_the_bits_that_it_has_in_a_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer()).eval()
    call, batch = torch.compile(model, backend="omni", options=OPTIONS), torch.randn(19, 7, 34)
    whole = call(batch)
    torch.testing.assert_close(whole, model(batch))
    for start, count in ((0, 1), (7, 1), (18, 1), (3, 2), (2, 16)):
        assert torch.equal(bits(call(batch[start : start + count])), bits(whole[start : start + count]))
    assert {row.lowering for row in omnicomp.audit().subgraphs} == {"eager"}


def test_a_batch_may_be_empty() -> None:
    module = traced(lambda x: (x.softmax(-1), x.sum(-1), x.sigmoid(), F.layer_norm(x, (5,))), torch.randn(4, 5))
    put_forms(module)
    module.recompile()
    assert [value.shape for value in module(torch.randn(0, 5))] == [(0, 5), (0,), (0, 5), (0, 5)]


@pytest.mark.parametrize("function", [lambda x: F.dropout(x), lambda x: torch.linalg.inv(x)])
def test_what_has_no_such_form_is_an_error(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(BackendCompilerFailed, match="batch-invariant"):
        torch.compile(function, backend="omni", options=OPTIONS)(torch.randn(4, 4))


def test_other_devices_are_refused() -> None:
    graph = make_fx(lambda x: x.sigmoid(), tracing_mode="fake")(torch.randn(4)).graph
    reasons = [reason for node in graph.nodes if (reason := refusal(node, "cuda", "eager"))]
    assert reasons
    assert reasons[0].code == "not_batch_invariant"
    assert "CPU" in reasons[0].sentence


@pytest.mark.parametrize("beside", [{"lowerings": ["inductor"]}, {"on_error": "retreat"}, {"dtype_policy": "bf16"}])
def test_what_would_give_other_values_is_refused_beside_it(beside: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="leave one of them out"):
        parse(None, {"numerics": "batch-invariant", **beside})
