"""What each pass makes of small programs: the graph before and after, as code.

`EXPECTTEST_ACCEPT=1` writes what is found into this file. Repairs of torch have theirs in `test_repairs.py`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from graph_code import captured, code
from lacking import Lacking
from torch import Tensor

from omnicomp.options.dtype_policy import parse_dtype_policy
from omnicomp.passes import AttentionFusion, DtypePass, Legalise, Pass
from omnicomp.timeline import NearMiss, Rewrite

QUERY, KEY, VALUE = (torch.ones(1, 2, 16, 64) for _ in range(3))


def applied(item: Pass, function: Callable[..., Any], *inputs: Any, **options: Any) -> str:
    """The graph before and after a pass, and what the pass reported."""
    graph = captured(function, *inputs)
    before = code(graph)
    found = item.apply(graph, **options)
    told = [f"rewrote {e.target}" for e in found.events if isinstance(e, Rewrite)]
    told += [f"near miss: {e.reason.sentence}" for e in found.events if isinstance(e, NearMiss)]
    return "\n".join(
        (before, f"--- {item.name}: {'; '.join(told) or 'nothing'}", *([code(graph)] if found.modified else []))
    )


def test_attention_that_is_written_out_becomes_one_operator() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(64), -1) @ v

    assert_expected_inline(
        applied(AttentionFusion(), attention, QUERY, KEY, VALUE),
        """\
transpose = k.transpose(-1, -2)
matmul = q @ transpose
truediv = matmul / 8.0
softmax = torch.softmax(truediv, -1)
matmul_1 = softmax @ v
return (matmul_1,)
--- attention_fusion: rewrote scaled_dot_product_attention
transpose = k.transpose(-1, -2)
expand = q.expand(1, -1, -1, -1)
permute = torch.permute(transpose, (0, 1, 3, 2))
expand_1 = permute.expand(1, -1, -1, -1)
expand_2 = v.expand(1, -1, -1, -1)
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention(expand, expand_1, expand_2, scale = 0.125)
return (scaled_dot_product_attention,)""",
    )


def test_a_graph_that_was_traced_by_fx_alone_is_rewritten_too() -> None:
    graph = torch.fx.symbolic_trace(lambda q, k, v: torch.softmax(torch.matmul(q, k.mT), -1) @ v)
    found = AttentionFusion().apply(graph, (QUERY, KEY, VALUE))
    assert found.modified
    torch.testing.assert_close(graph(QUERY, KEY, VALUE), torch.softmax(QUERY @ KEY.mT, -1) @ VALUE)
    assert "scaled_dot_product_attention" in code(graph)


def test_a_causal_mask_becomes_a_flag() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT) * 0.125
        future = torch.ones(16, 16, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, float("-inf")).softmax(-1) @ v

    assert_expected_inline(
        applied(AttentionFusion(), attention, QUERY, KEY, VALUE),
        """\
getattr_1 = k.mT
matmul = q @ getattr_1
scores = matmul * 0.125
ones = torch.ones(16, 16, dtype = torch.bool)
future = ones.triu(1)
masked_fill = scores.masked_fill(future, -inf)
softmax = masked_fill.softmax(-1)
matmul_1 = softmax @ v
return (matmul_1,)
--- attention_fusion: rewrote scaled_dot_product_attention
getattr_1 = k.mT
expand = q.expand(1, -1, -1, -1)
permute = torch.permute(getattr_1, (0, 1, 3, 2))
expand_1 = permute.expand(1, -1, -1, -1)
expand_2 = v.expand(1, -1, -1, -1)
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention(expand, expand_1, expand_2, scale = 0.125,
    is_causal = True)
return (scaled_dot_product_attention,)""",
    )


def test_scores_that_something_else_reads_are_left_alone() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(q @ k.mT, -1)
        return weights @ v, weights

    assert_expected_inline(
        applied(AttentionFusion(), attention, QUERY, KEY, VALUE),
        """\
getattr_1 = k.mT
matmul = q @ getattr_1
weights = torch.softmax(matmul, -1)
matmul_1 = weights @ v
return (matmul_1, weights)
--- attention_fusion: near miss: weights is returned, and a fused kernel does not make it""",
    )


def test_a_linear_layer_computes_in_low_precision_and_gives_its_dtype_back() -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias).relu()

    item = DtypePass(policy=parse_dtype_policy("bf16"))
    assert_expected_inline(
        applied(item, layer, torch.ones(4, 8), torch.ones(16, 8), torch.ones(16)),
        """\
linear = torch._C._nn.linear(x, weight, bias)
relu = linear.relu()
return (relu,)
--- dtype_policy: rewrote bfloat16
to_dtype = torch.ops.aten.to.dtype(x, torch.bfloat16)
to_dtype_1 = torch.ops.aten.to.dtype(weight, torch.bfloat16)
to_dtype_2 = torch.ops.aten.to.dtype(bias, torch.bfloat16)
linear_bfloat16 = torch._C._nn.linear(to_dtype, to_dtype_1, to_dtype_2)
to_dtype_3 = torch.ops.aten.to.dtype(linear_bfloat16, torch.float32)
relu = to_dtype_3.relu()
return (relu,)""",
    )


def test_softmax_keeps_its_dtype_between_products() -> None:
    item = DtypePass(policy=parse_dtype_policy("bf16"))

    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).softmax(-1) @ y

    assert_expected_inline(
        applied(item, function, torch.ones(8, 8), torch.ones(8, 8)),
        """\
matmul = x @ y
softmax = matmul.softmax(-1)
matmul_1 = softmax @ y
return (matmul_1,)
--- dtype_policy: rewrote bfloat16; rewrote bfloat16
to_dtype = torch.ops.aten.to.dtype(x, torch.bfloat16)
to_dtype_1 = torch.ops.aten.to.dtype(y, torch.bfloat16)
matmul_bfloat16 = to_dtype @ to_dtype_1
to_dtype_2 = torch.ops.aten.to.dtype(matmul_bfloat16, torch.float32)
softmax = to_dtype_2.softmax(-1)
to_dtype_3 = torch.ops.aten.to.dtype(softmax, torch.bfloat16)
matmul_1_bfloat16 = to_dtype_3 @ to_dtype_1
to_dtype_4 = torch.ops.aten.to.dtype(matmul_1_bfloat16, torch.float32)
return (to_dtype_4,)""",
    )


def test_the_policy_that_keeps_dtypes_changes_nothing() -> None:
    assert_expected_inline(
        applied(DtypePass(), lambda x: x @ x, torch.ones(8, 8)),
        """\
matmul = x @ x
return (matmul,)
--- dtype_policy: nothing""",
    )


def test_what_a_device_lacks_becomes_the_nearest_that_it_has() -> None:
    device = Lacking(unstored=(torch.float64,))

    def function(x: Tensor) -> Tensor:
        return (x * 2.5).sum()

    found = applied(Legalise(log=False), function, torch.ones(4, dtype=torch.float64), device=device)
    assert_expected_inline(
        found,
        """\
mul = x * 2.5
sum_1 = mul.sum()
return (sum_1,)
--- legalise: rewrote float32; rewrote float32; rewrote float32
to_dtype = torch.ops.aten.to.dtype(x, torch.float32)
mul = to_dtype * 2.5
sum_1 = mul.sum(dtype = torch.float32)
return (sum_1,)""",
    )


def test_a_device_that_has_all_dtypes_changes_nothing() -> None:
    assert_expected_inline(
        applied(Legalise(), lambda x: x * 2, torch.ones(4, dtype=torch.float64)),
        """\
mul = x * 2
return (mul,)
--- legalise: nothing""",
    )
