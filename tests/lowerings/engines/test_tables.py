"""Operator tables of XLA and TVM: each operator on the arguments that samples of PyTorch's database call it with."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from engine_tables import Call, calls, difference
from torch import Tensor
from torch.utils._pytree import tree_leaves

from omnicomp.lowerings.engines import Engine, resolve_engine

pytestmark = pytest.mark.engine

aten = torch.ops.aten
ENGINES = {"xla": "jax", "tvm": "tvm"}

# Entries of the database that together call nearly all operators of the tables.
FLOATS = (
    "nn.functional.multi_head_attention_forward", "renorm", "masked.cumprod", "corrcoef", "nn.functional.cross_entropy",
    "__getitem__", "clamp", "nanquantile", "signal.windows.hamming", "all", "any", "max_pool2d_with_indices_backward",
    "nn.functional.binary_cross_entropy", "asinh", "acosh", "atanh", "index_reduce.prod", "eye", "count_nonzero",
    "native_layer_norm", "nn.functional.adaptive_avg_pool2d", "nn.functional.relu", "nn.functional.group_norm",
    "nn.functional.hardswish", "nn.functional.upsample_nearest", "nn.functional.leaky_relu", "nn.functional.avg_pool2d",
    "nn.functional.glu", "nn.functional.elu", "nn.functional.silu", "nn.functional.hardsigmoid", "nn.functional.mish",
    "nn.functional.hardtanh", "nn.functional.gelu", "tanh", "sigmoid", "nn.functional.smooth_l1_loss",
    "nn.functional.embedding", "nn.functional.softplus", "nn.functional.mse_loss", "nn.functional.huber_loss",
    "nn.functional.pixel_shuffle", "cosh", "nn.functional.prelu", "lgamma", "lu_unpack", "trace", "addr", "logaddexp2",
    "nn.functional.conv_transpose1d", "nn.functional.conv2d", "nn.functional.conv_transpose2d", "logsumexp", "fmod",
    "nn.functional.instance_norm", "nanmean", "lerp", "sinc", "stft", "pow", "frac", "logical_xor", "heaviside",
    "signbit", "isinf", "new_full", "argmax", "argmin", "nn.functional.unfold", "nn.functional.interpolate.bilinear",
    "nn.functional.softshrink", "nn.functional.hardshrink", "argsort", "nn.functional.celu", "logit", "hypot",
    "scatter_reduce.sum", "nn.functional.binary_cross_entropy_with_logits", "var.unbiased", "addcdiv", "std.unbiased",
    "masked.logaddexp", "var_mean.unbiased", "std_mean.unbiased", "linalg.matrix_rank.hermitian", "linalg.vector_norm",
    "nn.functional.multilabel_soft_margin_loss", "diagonal", "scatter", "scatter_add", "gather", "sort", "cumsum",
    "sum", "mean", "std", "var", "amax", "dot", "mv", "bmm", "baddbmm", "addmm", "linspace.tensor_overload", "digamma",
)  # fmt: skip
INTEGERS = (
    "unravel_index", "prod", "inner", "nn.functional.triplet_margin_loss", "acos", "acosh", "clamp_max", "clamp_min",
    "addmv", "addcmul", "asin", "atan", "atan2", "atanh", "bitwise_left_shift", "bitwise_right_shift", "ceil", "diag",
    "copysign", "deg2rad", "fmax", "fmin", "floor", "log1p", "log10", "log2", "max.reduction_no_dim",
    "max.reduction_with_dim", "min.reduction_with_dim", "min.reduction_no_dim", "bitwise_or", "bitwise_and",
    "bitwise_xor", "bitwise_not", "aminmax", "nn.functional.pad.replicate", "nn.functional.pad.replicate_negative",
    "torch.ops.aten._safe_softmax.default", "nn.functional.threshold", "topk", "rad2deg", "roll", "rot90", "round",
    "sign", "split.list_args", "__rsub__", "select_scatter", "slice_scatter", "tan", "trunc", "exp2", "expm1",
    "nan_to_num", "index_copy", "index_add", "stack", "unfold", "squeeze.multiple", "xlogy", "triu_indices", "erf",
    "tril_indices", "erfc", "erfinv", "amin", "masked_fill", "take_along_dim", "digamma", "div.floor_rounding",
    "div.trunc_rounding", "remainder", "floor_divide", "where", "logical_and", "logical_or",
)  # fmt: skip
# Of other dtypes: how they are promoted, computed in another dtype, and rounded.
SHORT = (
    "add", "sub", "mul", "div.no_rounding_mode", "exp", "sqrt", "eq", "lt", "logical_and", "bitwise_and", "where",
    "clamp", "maximum", "sum", "mean", "prod", "amax", "argmax", "any", "all", "cumsum", "sort", "topk", "cat", "flip",
    "nn.functional.gelu", "nn.functional.layer_norm", "softmax", "log_softmax", "mm", "addmm", "index_add", "sign",
    "scatter_add", "masked_fill", "nn.functional.conv2d", "nn.functional.max_pool2d", "nn.functional.relu", "rsub",
)  # fmt: skip


def of(name: str) -> Engine:
    pytest.importorskip(ENGINES[name])
    return resolve_engine(name)


def made(target: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(target, args, kwargs, target(*args, **kwargs))


def direct() -> Iterator[Call]:
    """Calls that no entry of the database makes outside of a compiled graph."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    i, j = torch.randint(0, 9, (3, 4)), torch.randint(1, 4, (3, 4))
    for operator in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor):
        yield made(operator.Scalar, i, 3)
        yield made(operator.Scalar_Tensor, 5, i)
    for operator in (aten.bitwise_left_shift, aten.bitwise_right_shift):
        yield made(operator.Tensor_Scalar, i, 2)
        yield made(operator.Scalar_Tensor, 64, j)
    for operator in (aten.copysign, aten.fmod, aten.xlogy):
        yield made(getattr(operator, "Scalar_Other" if operator is aten.xlogy else "Scalar"), x.abs(), 1.5)
    yield made(aten.xlogy.Scalar_Self, 2.0, x.abs())
    yield made(aten.remainder.Scalar_Tensor, 7, j)
    yield made(aten.remainder.Scalar_Tensor, 7.0, x)
    yield made(aten.remainder.Scalar, x, -1.5)
    yield made(aten.div.Scalar_mode, x, 0.3, rounding_mode="floor")
    yield made(aten.div.Scalar_mode, i, -2, rounding_mode="trunc")
    yield made(aten.floor_divide.Scalar, x, 0.3)
    yield made(aten.clamp_max.default, x, 0.3)
    yield made(aten.clamp_min.default, x, 0.3)
    yield made(aten.clamp.default, x, -0.5, 1)
    yield made(aten.square.default, x)
    yield made(aten.max.other, x, y)
    yield made(aten.min.other, x, y)
    yield made(aten.lift_fresh_copy.default, x)
    yield made(aten.reshape.default, x, [2, -1])
    yield made(aten.argsort.default, i.float() + torch.rand(3, 4), -1, True)
    yield made(aten.repeat.default, x, [2, 1, 2])
    yield made(aten.avg_pool2d.default, torch.randn(2, 3, 8, 7), [3, 2], [2, 1], [1, 0])
    plane, cube = torch.randn(2, 3, 5, 5), torch.randn(1, 2, 4, 4, 4)
    yield made(aten.reflection_pad2d.default, plane, [1, 2, 1, 0])
    yield made(aten.reflection_pad3d.default, cube, [1] * 6)
    yield made(aten.replication_pad3d.default, cube, [1] * 6)
    yield made(aten._fused_rms_norm.default, x, [4], torch.rand(4), 1e-5)
    moments = [torch.rand(3) for _ in range(4)]
    yield made(aten._native_batch_norm_legit_functional.default, plane, *moments, True, 0.1, 1e-5)
    yield made(aten.avg_pool2d.default, torch.randn(3, 8, 7), [3, 2], [], [1, 1], False, False)
    yield made(aten.remainder.Scalar, i, 4)
    yield made(aten.fmod.Scalar, i, -4)
    yield made(aten.any.dims, i > 4, [0, 1])
    yield made(aten.all.dims, i > 0, [1], True)
    yield made(aten._unsafe_index.Tensor, x, [torch.tensor([2, -1])])
    yield made(aten._unsafe_index_put.default, x, [None, torch.tensor([3, 0])], y[:, :2])
    for args in ((4, 8), (1, 4, 8)):
        norm = [torch.randn(args[-1]) for _ in range(3)]
        yield made(aten.native_layer_norm.default, torch.randn(args), [8], *norm[:2], 1e-5)
    image, channel = torch.randn(2, 3, 5, 4), [torch.rand(3) + 0.1 for _ in range(4)]
    yield made(aten._native_batch_norm_legit_no_training.default, image, *channel, 0.1, 1e-5)
    q, k, v = (torch.randn(2, 3, length, 8) for length in (5, 7, 7))
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    mask = torch.randn(2, 1, 5, 7).where(torch.rand(2, 1, 5, 7) > 0.3, -torch.inf)
    mask[1, :, 3] = -torch.inf  # a row that sees nothing
    yield made(attention.default, q, k, v)
    yield made(attention.default, q, k[:, :, :5], v[:, :, :5], 0.0, True)
    yield made(attention.default, q, k, v, attn_mask=mask, scale=0.7)
    grad = torch.randn(2, 3, 5, 8)
    for causal, extra in ((True, {}), (False, {"attn_mask": mask[..., :5].contiguous(), "scale": 0.7})):
        q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
        out, total = attention.default(q, k, v, 0.0, causal, **extra)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        yield made(backward, grad, q, k, v, out, total, 0.0, causal, **extra)


def compare(engine: Engine, given: Iterator[Call], compared: set[Any]) -> list[str]:
    """What is wrong with the first call of each operator that is not refused; such operators are `compared` then."""
    wrong: list[str] = []
    for call in given:
        if call.target in compared:
            continue
        try:
            sentence = difference(engine, call)
        except Exception as error:
            sentence = f"{type(error).__name__}: {error}"[:400]
        if sentence is not None:
            compared.add(call.target)
        if sentence:
            wrong.append(f"{call.target} {[tuple(a.shape) for a in call.args if isinstance(a, Tensor)]}: {sentence}")
    return wrong


def sampled(engine: Engine, names: Sequence[str], dtype: torch.dtype, samples: int, done: set[Any]) -> Iterator[Call]:
    """The calls of samples, of operators that are not done yet."""
    wanted = {entry.target for entry in engine.operators} | set(engine.decompositions)
    for name in names:
        yield from calls(name, wanted - done, dtype, samples=samples)


def dtypes_of(call: Call) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_leaves((call.args, call.kwargs, call.result)) if isinstance(leaf, Tensor)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_every_operator_of_the_table_computes_what_eager_computes(name: str) -> None:
    engine = of(name)
    table = {entry.target for entry in engine.operators}
    assert len(table) >= 100
    wrong: list[str] = []
    for call in direct():
        if call.target in table:
            wrong += compare(engine, iter([call]), set())
    compared = {call.target for call in direct()} & table
    for names, dtype, samples in ((FLOATS, torch.float32, 6), (INTEGERS, torch.int64, 6), (INTEGERS, torch.float32, 2)):
        wrong += compare(engine, sampled(engine, names, dtype, samples, compared), compared)
    assert not wrong, "\n".join(wrong)
    assert not {str(target) for target in table - compared}


DTYPES = [("xla", dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool)]
DTYPES += [("tvm", dtype) for dtype in (torch.float64, torch.int32, torch.bool)]


@pytest.mark.parametrize(("name", "dtype"), DTYPES, ids=str)
@pytest.mark.slow
def test_other_dtypes_are_promoted_and_rounded_as_in_eager(name: str, dtype: torch.dtype) -> None:
    engine, compared = of(name), set[Any]()
    given = (call for call in sampled(engine, SHORT, dtype, 3, compared) if dtype in dtypes_of(call))
    wrong = compare(engine, given, compared)
    assert not wrong, "\n".join(wrong)
    assert len(compared) > 20


def test_half_precision_is_refused_by_tvm() -> None:
    engine, compared = of("tvm"), set[Any]()
    given = (
        call for call in sampled(engine, SHORT[:8], torch.bfloat16, 2, compared) if torch.bfloat16 in dtypes_of(call)
    )
    assert not compare(engine, given, compared)
    assert not compared
