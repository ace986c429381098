"""Fused attention with gradients of its own equals the unfused program: outputs, gradients, and whatever traces it."""

import copy
import functools
import itertools
import json
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import python
from tiers import fast
from torch.func import functional_call, grad, vmap
from torch.fx import GraphModule, symbolic_trace
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from omnicomp._torch.autograd import sdpa
from omnicomp.analysis.nodes import op_name
from omnicomp.passes.attention.differentiable import (
    ATTENTION_WITH_BIAS,
    ATTENTION_WITH_SINK,
    attention_with_bias,
    attention_with_sink,
    bias_pays,
    head_sizes_pay,
    sink_kernel,
)

BATCH, HEADS, SIZE, SCALE = 2, 6, 8, 0.3
MASKS = [(9, 9), (1, HEADS, 9, 9), (BATCH, 1, 9, 9), (BATCH, HEADS, 9, 9), (HEADS, 9, 9), (1, HEADS, 1, 9)]


def operands(
    queries: int = 9, keys: int = 9, *, shared: int = HEADS, width: int = SIZE, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Queries, keys and values that require grad, in the layout of a projection whose heads were split."""
    torch.manual_seed(0)
    sizes = [(queries, HEADS, SIZE), (keys, shared, SIZE), (keys, shared, width)]
    made = [torch.randn(BATCH, n, h, d, dtype=dtype).transpose(1, 2) for n, h, d in sizes]
    return [tensor.requires_grad_() for tensor in made]


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * SCALE
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    if sink is None:
        return scores.softmax(-1) @ value
    column = sink.reshape(1, -1, 1, 1) if sink.dim() == 1 else sink
    column = column.expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column.to(scores.dtype)), -1).softmax(-1)[..., :-1] @ value


def results(function: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of the leaves for a fixed gradient of the output."""
    out = function(*leaves)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out.dtype))]


def same(
    fused: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor]
) -> None:
    for found, wanted in zip(results(fused, leaves), results(plain, leaves), strict=True):
        assert_close(found, wanted)


def with_bias(*leaves: torch.Tensor, is_causal: bool = False, enable_gqa: bool = False) -> torch.Tensor:
    return attention_with_bias(*leaves, scale=SCALE, is_causal=is_causal, enable_gqa=enable_gqa)


def with_sink(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sink: torch.Tensor, mask: Any = None, **how: Any
) -> torch.Tensor:
    return attention_with_sink(query, key, value, sink, mask, scale=SCALE, **how)


def plain_with_sink(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sink: torch.Tensor, mask: Any = None, **how: Any
) -> torch.Tensor:
    return unfused(query, key, value, mask, sink, **how)


def rows_hidden(mask: torch.Tensor, fill: float) -> torch.Tensor:
    return torch.cat((torch.full_like(mask[..., :2, :], fill), mask[..., 2:, :]), -2)


# -- a mask that requires grad -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_bias_of_every_broadcast_shape_gets_its_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    same(with_bias, unfused, [*operands(dtype=dtype), leaf(*shape, dtype=dtype)])


@pytest.mark.parametrize(("queries", "keys"), [(5, 17), (17, 5), (1, 7), (40, 600)])
def test_bias_with_other_numbers_of_keys_than_queries(queries: int, keys: int) -> None:
    same(with_bias, unfused, [*operands(queries, keys), leaf(1, HEADS, queries, keys)])


@pytest.mark.parametrize("shared", [1, 2, 3])
def test_bias_with_heads_that_share_keys_and_values(shared: int) -> None:
    leaves = [*operands(7, 11, shared=shared), leaf(1, HEADS, 7, 11)]
    same(functools.partial(with_bias, enable_gqa=True), unfused, leaves)


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 12), (12, 5)])
def test_bias_beside_a_causal_mask(queries: int, keys: int) -> None:
    leaves = [*operands(queries, keys), leaf(HEADS, queries, keys)]
    causal = functools.partial(unfused, is_causal=True)
    same(functools.partial(with_bias, is_causal=True), causal, leaves)
    with torch.no_grad():
        assert_close(with_bias(*leaves, is_causal=True), causal(*leaves))


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e9, -1e6, -1e4])
def test_a_row_hidden_as_a_whole_has_the_gradients_of_eager(fill: float) -> None:
    leaves = [*operands(dtype=torch.float32), leaf(1, HEADS, 9, 9, dtype=torch.float32)]
    fused = results(lambda q, k, v, m: with_bias(q, k, v, rows_hidden(m, fill)), leaves)
    plain = results(lambda q, k, v, m: unfused(q, k, v, rows_hidden(m, fill)), leaves)
    for found, wanted in zip(fused, plain, strict=True):
        # At -1e4 scores are rounded to 1e-3, in another order than eager's.
        assert_close(found, wanted, atol=2e-3 if fill == -1e4 else 1e-5, rtol=1e-5)


def test_a_row_of_minus_infinity_is_zero_and_gives_no_gradient() -> None:
    leaves = [*operands(), leaf(1, HEADS, 9, 9)]
    out, *grads = results(lambda q, k, v, m: with_bias(q, k, v, rows_hidden(m, -torch.inf)), leaves)
    assert not out[:, :, :2].any()
    assert not grads[0][:, :, :2].any()
    assert all(grad.isfinite().all() for grad in grads)


def test_half_precision_bias_is_as_near_to_float64_as_eager() -> None:
    exact = [*operands(64, 64), leaf(1, HEADS, 64, 64)]
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    exact = [tensor.detach().double().requires_grad_() for tensor in half]
    wanted = results(unfused, exact)
    for found, eager, true in zip(results(with_bias, half), results(unfused, half), wanted, strict=True):
        assert (found - true).norm() <= 1.1 * (eager - true).norm()


def test_gradients_of_sharp_weights_in_half_precision_are_as_near_as_those_of_eager() -> None:
    """The rounding of the output is much in the gradient of a row with little weight beside its first key."""
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in (*operands(), leaf(1, HEADS, 9, 9))]
    exact = [tensor.detach().double().requires_grad_() for tensor in half]
    sharp: Any = functools.partial(attention_with_bias, scale=5 * SCALE)
    plain: Any = lambda q, k, v, m: (5 * SCALE * q @ k.mT + m).float().softmax(-1).to(q.dtype) @ v  # noqa: E731
    own, wanted = results(plain, half), results(lambda q, k, v, m: (5 * SCALE * q @ k.mT + m).softmax(-1) @ v, exact)
    for found, eager, true in zip(results(sharp, half), own, wanted, strict=True):
        assert (found - true).norm() <= 1.1 * (eager - true).norm()


def test_a_float32_bias_of_half_precision_queries_keeps_its_dtype() -> None:
    leaves = [*operands(dtype=torch.bfloat16), leaf(1, HEADS, 9, 9, dtype=torch.float32)]
    _, *grads = results(with_bias, leaves)
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 3 + [torch.float32]
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    assert_close(grads[3].double(), results(unfused, exact)[4], atol=2e-2, rtol=5e-2)


def test_transposed_keys_and_a_transposed_bias() -> None:
    query, key, value = operands()
    leaves = [query, key.detach().transpose(2, 3).contiguous().requires_grad_(), value, leaf(1, HEADS, 9, 9)]
    same(
        lambda q, k, v, m: with_bias(q, k.mT, v, m.mT),
        lambda q, k, v, m: unfused(q, k.mT, v, m.mT),
        leaves,
    )


def test_gradients_are_those_of_finite_differences() -> None:
    leaves = [*operands(3, 5, shared=2), leaf(1, HEADS, 3, 5)]
    assert torch.autograd.gradcheck(functools.partial(with_bias, enable_gqa=True), leaves)
    leaves = [*operands(3, 5), leaf(HEADS), leaf(HEADS, 3, 5)]
    assert torch.autograd.gradcheck(with_sink, leaves)


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    leaves = [*operands(), leaf(1, HEADS, 9, 9)]
    (first,) = torch.autograd.grad(with_bias(*leaves).square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_bias_pays_where_the_scores_are_large() -> None:
    assert bias_pays((4, 8, 512, 64), 512, torch.float32)
    assert not bias_pays((4, 8, 256, 64), 256, torch.float32)
    assert not bias_pays((64, 3, 49, 32), 49, torch.float32)
    assert not bias_pays((4, 8, 1024, 64), 1024, torch.bfloat16)


# -- a sink --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shared", [1, HEADS])
def test_sink_and_its_gradients(shared: int, is_causal: bool, dtype: torch.dtype) -> None:
    leaves = [*operands(shared=shared, dtype=dtype), leaf(HEADS, dtype=dtype)]
    how = functools.partial(with_sink, is_causal=is_causal, enable_gqa=shared != HEADS)
    same(how, functools.partial(plain_with_sink, is_causal=is_causal), leaves)
    with torch.inference_mode():
        assert_close(how(*leaves), plain_with_sink(*leaves, is_causal=is_causal))


@pytest.mark.parametrize("shape", [(1, HEADS, 1, 1), (BATCH, HEADS, 9, 1), (BATCH, 1, 9, 1), (1, 1, 1, 1)], ids=str)
def test_a_sink_of_four_dimensions(shape: tuple[int, ...]) -> None:
    same(with_sink, plain_with_sink, [*operands(), leaf(*shape)])


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_sink_with_a_mask_that_requires_grad(shape: tuple[int, ...]) -> None:
    same(with_sink, plain_with_sink, [*operands(), leaf(HEADS), leaf(*shape)])


@pytest.mark.parametrize("sink", [-200.0, -5.0, 5.0, 200.0])
def test_a_sink_far_from_the_scores(sink: float) -> None:
    leaves = [*operands(dtype=torch.float32), torch.full((HEADS,), sink, requires_grad=True)]
    same(with_sink, plain_with_sink, leaves)


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e9, -torch.inf])
@pytest.mark.parametrize("learned", [False, True])
def test_a_row_hidden_as_a_whole_looks_only_at_the_sink(fill: float, learned: bool) -> None:
    leaves = [*operands(dtype=torch.float32), leaf(HEADS, dtype=torch.float32)]
    mask = rows_hidden(torch.randn(1, HEADS, 9, 9), fill).requires_grad_(learned)
    leaves += [mask] if learned else []
    fused = functools.partial(with_sink, **({} if learned else {"mask": mask}))
    plain = functools.partial(plain_with_sink, **({} if learned else {"mask": mask}))
    same(fused, plain, leaves)
    assert not fused(*leaves)[:, :, :2].any()


def test_sink_with_a_boolean_mask_and_smaller_values() -> None:
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    leaves = [*operands(width=SIZE // 2), leaf(HEADS)]
    same(functools.partial(with_sink, mask=mask), functools.partial(plain_with_sink, mask=mask), leaves)


def test_half_precision_sink_is_as_near_to_float64_as_eager() -> None:
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in (*operands(64, 64), leaf(HEADS))]
    exact = [tensor.detach().double().requires_grad_() for tensor in half]
    wanted = results(plain_with_sink, exact)
    for found, eager, true in zip(results(with_sink, half), results(plain_with_sink, half), wanted, strict=True):
        # The sink's gradient is one number a head, so its rounding varies more.
        assert (found - true).norm() <= (1.1 if true.dim() == 4 else 1.5) * (eager - true).norm()


def test_a_kernel_that_does_not_take_the_attention_is_named() -> None:
    query, key, value = operands()
    with pytest.raises(ValueError, match="no attention kernel is named 'quick'"):
        with_sink(query, key, value, leaf(HEADS), kernel="quick")
    with pytest.raises(ValueError, match="takes no mask"):
        with_sink(query, key, value, leaf(HEADS), torch.zeros(9, 9), kernel="flash")


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_kernels_of_cuda_are_called_as_they_are_declared(kernel: str) -> None:
    """The shapes alone, on tensors without data: head sizes and the log-sum-exp are padded, heads are shared."""
    empty = functools.partial(torch.empty, device="meta", dtype=torch.bfloat16, requires_grad=True)
    leaves = [empty(2, 8, 77, 20), *(empty(2, 2, 77, 20) for _ in range(2)), empty(8)]
    if kernel == "efficient":
        leaves.append(empty(1, 8, 77, 77))
    out = with_sink(*leaves, is_causal=True, enable_gqa=True, kernel=kernel)
    assert (out.shape, out.dtype) == (leaves[0].shape, torch.bfloat16)
    for found, wanted in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


def test_the_kernel_is_chosen_by_the_device() -> None:
    one = torch.empty(1, 4, 8, 64)
    choose = functools.partial(sink_kernel, masked=False, trained=False, is_causal=False)
    assert choose(one, one) == "flash_cpu"
    assert choose(one.to("meta"), one.to("meta")) == "", "a device of which nothing is known"


# -- head sizes ----------------------------------------------------------------------------------------------------


def test_padding_pays_where_the_scores_are_large() -> None:
    assert head_sizes_pay((4, 8, 512, 16), 512, 32, torch.float32, train=True)
    assert head_sizes_pay((4, 8, 512, 192), 512, 128, torch.float32, train=False)
    assert not head_sizes_pay((4, 8, 512, 192), 512, 128, torch.float32, train=True)
    assert not head_sizes_pay((2, 8, 512, 192), 512, 128, torch.float32, train=False)
    assert not head_sizes_pay((16, 4, 196, 32), 196, 64, torch.float32, train=False)


# -- as operators in a graph ---------------------------------------------------------------------------------------


class Fused:
    """A backend that puts `operator` where the program calls `scaled_dot_product_attention`."""

    def __init__(self, operator: Any) -> None:
        self.operator, self.parts = operator, list[set[str]]()

    def insert(self, module: GraphModule) -> GraphModule:
        for part in [m for m in module.modules() if isinstance(m, GraphModule)]:
            for node in part.graph.nodes:
                if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
                    node.target = self.operator
            part.recompile()
        return copy.deepcopy(module)

    def compile(self, module: GraphModule, example: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        def keep(part: GraphModule, inputs: Any) -> Any:
            calls = [node for node in part.graph.nodes if node.op == "call_function"]
            # Within a checkpoint, an operator that could draw random numbers is the argument of another.
            self.parts.append({op_name(node) for node in calls} | {str(node.args[0]) for node in calls if node.args})
            return make_boxed_func(part.forward)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(self.insert(module), example)

    def interpret(self, module: GraphModule, example: Any) -> Any:
        return torch.fx.Interpreter(self.insert(module)).run


def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, m, scale=SCALE).sin()


def sunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    # Its mask stands for the sink until the operator is put in its place.
    return F.scaled_dot_product_attention(q, k, v, s, scale=SCALE).sin()


CASES: dict[str, Any] = {
    "bias": (ATTENTION_WITH_BIAS, biased, lambda *x: unfused(*x).sin(), lambda n: leaf(1, HEADS, n, n)),
    "sink": (ATTENTION_WITH_SINK, sunk, lambda *x: plain_with_sink(*x).sin(), lambda n: leaf(BATCH, HEADS, n, 1)),
}


@pytest.mark.parametrize(
    ("case", "checkpointed"),
    fast(itertools.product(CASES, [False, True]), [("bias", True), ("sink", False)].__contains__),
)
def test_a_compiled_graph_has_only_aten_operators(case: str, checkpointed: bool) -> None:
    operator, program, plain, last = CASES[case]
    backend = Fused(operator)
    again = functools.partial(checkpoint, program, use_reentrant=False) if checkpointed else program
    compiled = torch.compile(again, backend=backend.compile, dynamic=True, fullgraph=True)
    for size in (9, 14, 21):
        same(compiled, plain, [*operands(size, size), last(size)])
    assert len(backend.parts) == 2, "a forward and a backward graph for all sizes"
    names = set().union(*backend.parts)
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in names, names
    assert not any("omnicomp" in name for name in names), names
    with torch.no_grad():
        leaves = [*operands(), last(9)]
        assert_close(compiled(*leaves), plain(*leaves))


@pytest.mark.parametrize("case", CASES)
def test_an_interpreter_gets_real_autograd(case: str) -> None:
    operator, program, plain, last = CASES[case]
    compiled = torch.compile(program, backend=Fused(operator).interpret, fullgraph=True)
    same(compiled, plain, [*operands(), last(9)])


@pytest.mark.parametrize("case", CASES)
def test_autocast_around_the_backward_pass_changes_nothing(case: str) -> None:
    operator, _, _, last = CASES[case]
    leaves = [tensor.detach().float().requires_grad_() for tensor in (*operands(), last(9))]
    out = operator(*leaves, scale=SCALE)
    wanted = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    with torch.autocast("cpu"):
        found = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_transforms_of_torch_func_are_computed_unfused(case: str) -> None:
    operator, _, _, last = CASES[case]
    plain = unfused if case == "bias" else plain_with_sink
    leaves = [tensor.detach() for tensor in (*operands(), last(9))]
    derivatives = [grad(lambda *x, f=f: f(*x).sin().sum(), (0, 1, 2, 3)) for f in (call(operator), plain)]
    assert_close(derivatives[0](*leaves), derivatives[1](*leaves))
    stacked = [torch.stack((tensor, 2 * tensor)) for tensor in leaves]
    assert_close(vmap(call(operator))(*stacked), vmap(plain)(*stacked))


def call(operator: Any) -> Callable[..., torch.Tensor]:
    return functools.partial(operator, scale=SCALE)


def test_the_operators_survive_a_copy_of_their_graph() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
            return ATTENTION_WITH_SINK(q, k, v, sink, scale=SCALE)

    module = copy.deepcopy(symbolic_trace(Model()))
    leaves = (*operands(), torch.randn(HEADS, dtype=torch.float64))
    assert_close(functional_call(module, {}, leaves), plain_with_sink(*leaves))
    assert "omnicomp.attention_with_sink.default" in {op_name(node) for node in module.graph.nodes}


def test_a_transform_is_seen_only_inside_of_it() -> None:
    seen = [sdpa.in_transform()]
    vmap(lambda x: seen.append(sdpa.in_transform()) or x)(torch.ones(2))
    assert seen == [False, True]


WARM = """
import json, sys, torch
from torch._inductor.compile_fx import compile_fx
from torch.nn.functional import scaled_dot_product_attention
from omnicomp.passes.attention.differentiable import ATTENTION_WITH_BIAS, ATTENTION_WITH_SINK

def backend(module, example):
    for node in module.graph.nodes:
        if node.target is scaled_dot_product_attention:
            node.target = ATTENTION_WITH_BIAS if "bias" in str(node.args[3]) else ATTENTION_WITH_SINK
    module.recompile()
    return compile_fx(module, example)

torch.compiler.config.cache_key_tag = sys.argv[1]

def program(q, k, v, bias, sink):
    return scaled_dot_product_attention(scaled_dot_product_attention(q, k, v, bias, scale=0.3), k, v, sink, scale=0.3)

torch.manual_seed(0)
leaves = [torch.randn(2, 6, 9, 8) for _ in range(3)] + [torch.randn(1, 6, 9, 9), torch.randn(1, 6, 1, 1)]
leaves = [leaf.requires_grad_() for leaf in leaves]
torch.compile(program, backend=backend)(*leaves).square().sum().backward()
plain = [leaf.detach().clone().requires_grad_() for leaf in leaves]
first = ATTENTION_WITH_BIAS(*plain[:4], scale=0.3)
ATTENTION_WITH_SINK(first, *plain[1:3], plain[4], scale=0.3).square().sum().backward()
for a, b in zip(leaves, plain):
    torch.testing.assert_close(a.grad, b.grad)
counters = torch._dynamo.utils.counters["aot_autograd"]
print(json.dumps([counters[f"autograd_cache_{what}"] for what in ("miss", "hit", "bypass")]))
"""


@pytest.mark.inductor
@pytest.mark.slow
def test_a_second_process_takes_the_compiled_graph_from_the_cache(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WARM)
    tag = uuid.uuid4().hex
    for counts, fresh in (([1, 0, 0], False), ([0, 1, 0], True)):
        ran = python(program, tag, fresh=fresh, check=True)
        assert json.loads(ran.stdout.splitlines()[-1]) == counts
