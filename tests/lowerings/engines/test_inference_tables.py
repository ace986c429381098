"""Operator tables of OpenVINO and ONNX Runtime: operators on what samples of PyTorch's database call them with."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from engine_tables import Call, calls, difference
from torch import Tensor

from omnicomp.lowerings.engines import Engine, resolve_engine

pytestmark = pytest.mark.engine

aten = torch.ops.aten
ENGINES = ("openvino", "onnxruntime")

# Entries of the database that together call nearly all operators of the tables.
NAMES = (
    "__getitem__", "__rsub__", "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "addmm", "addmv", "addr", "all",
    "amax", "amin", "aminmax", "any", "argmax", "argmin", "as_strided", "asin", "asinh", "atan", "atan2", "atanh",
    "baddbmm", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bmm", "cat", "ceil", "clamp", "clamp_max",
    "clamp_min", "clone", "constant_pad_nd", "cos", "cosh", "cumsum", "deg2rad", "diagonal", "div.floor_rounding",
    "div.no_rounding_mode", "div.trunc_rounding", "dot", "eq", "erf", "erfc", "exp", "exp2", "expand", "expm1",
    "flip", "floor", "floor_divide", "fmod", "frac", "full_like", "gather", "ge", "gt", "heaviside", "index_add",
    "index_copy", "index_put", "index_select", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "le", "lerp",
    "linalg.vector_norm", "log", "log10", "log1p", "log2", "log_softmax", "logaddexp", "logaddexp2", "logical_and",
    "logical_not", "logical_or", "logical_xor", "logit", "logsumexp", "lt", "masked_fill", "max.binary",
    "max.reduction_no_dim", "max.reduction_with_dim", "maximum", "mean", "min.reduction_no_dim", "minimum",
    "min.reduction_with_dim", "mm", "mul", "mv", "nan_to_num", "native_layer_norm", "ne", "neg", "new_full",
    "nn.functional.adaptive_avg_pool2d", "nn.functional.avg_pool2d", "nn.functional.avg_pool3d", "nn.functional.celu",
    "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv3d", "nn.functional.conv_transpose1d",
    "nn.functional.conv_transpose2d", "nn.functional.elu", "nn.functional.embedding", "nn.functional.gelu",
    "nn.functional.glu", "nn.functional.group_norm", "nn.functional.hardshrink", "nn.functional.hardsigmoid",
    "nn.functional.hardswish", "nn.functional.hardtanh", "nn.functional.huber_loss", "nn.functional.layer_norm",
    "nn.functional.interpolate.bilinear", "nn.functional.interpolate.nearest", "nn.functional.leaky_relu",
    "nn.functional.logsigmoid", "nn.functional.max_pool2d", "nn.functional.max_pool3d", "nn.functional.mish",
    "nn.functional.mse_loss", "nn.functional.pad.constant", "nn.functional.pad.reflect", "nn.functional.relu",
    "nn.functional.pad.replicate", "nn.functional.pixel_shuffle", "nn.functional.pixel_unshuffle", "permute", "pow",
    "nn.functional.prelu", "nn.functional.rms_norm", "nn.functional.scaled_dot_product_attention", "prod", "rad2deg",
    "nn.functional.selu", "nn.functional.silu", "nn.functional.softplus", "nn.functional.softshrink", "reciprocal",
    "nn.functional.smooth_l1_loss", "remainder", "repeat", "reshape", "roll", "rot90", "round", "rsqrt", "scatter",
    "scatter_add", "scatter_reduce.amax", "scatter_reduce.sum", "select", "select_scatter", "sigmoid", "sign", "sin",
    "sinc", "sinh", "slice_scatter", "softmax", "sort", "split", "split_with_sizes", "sqrt", "square", "squeeze",
    "squeeze.multiple", "stack", "std", "std_mean", "sub", "sum", "t", "tan", "tanh", "topk", "transpose", "tril",
    "triu", "trunc", "unbind", "unfold", "unsqueeze", "var", "var_mean", "where", "xlogy", "zeros_like", "ones_like",
)  # fmt: skip
SHORT = (
    "add", "sub", "mul", "div.no_rounding_mode", "exp", "sqrt", "eq", "lt", "logical_and", "where", "clamp", "maximum",
    "sum", "mean", "amax", "argmax", "any", "all", "cumsum", "sort", "cat", "tril", "flip", "softmax", "mm", "gather",
    "nn.functional.gelu", "nn.functional.layer_norm", "scatter", "masked_fill", "nn.functional.relu", "index_select",
)  # fmt: skip


def of(name: str) -> Engine:
    pytest.importorskip(name)
    return resolve_engine(name)


def made(target: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(target, args, kwargs, target(*args, **kwargs))


def direct() -> Iterator[Call]:
    """Calls that no entry of the database makes outside of a compiled graph."""
    x = torch.randn(3, 4)
    i, j = torch.randint(0, 9, (3, 4)), torch.randint(1, 4, (3, 4))
    yield made(aten.remainder.Scalar, x, -1.5)
    yield made(aten.remainder.Scalar, i, 3)
    yield made(aten.fmod.Scalar, x, 1.5)
    yield made(aten.div.Scalar_mode, x, 0.3, rounding_mode="floor")
    yield made(aten.clamp.default, x, -0.5, 1)
    yield made(aten.clamp_max.default, x, 0.3)
    yield made(aten.clamp_min.default, i, 3)
    yield made(aten.any.dims, i > 4, [0, 1])
    yield made(aten.all.dims, i > 0, [1], True)
    yield made(aten._unsafe_index.Tensor, x, [torch.tensor([2, -1])])
    yield made(aten.index.Tensor, torch.randn(2, 3, 4, 5), [None, j[0, :3] % 3, j[1, :3]])
    yield made(aten.index.Tensor, torch.randn(4, 3, 4, 5), [j[0, :3], None, j[1, :3]])
    yield made(aten.gather.default, torch.randn(4, 5), 0, j)
    yield made(aten.scatter.src, torch.randn(4, 5), 0, j, torch.randn(4, 5))
    yield made(aten.as_strided.default, torch.randn(24), [2, 3], [3, 1], 5)
    for size in ((4, 8), (1, 4, 8)):
        yield made(aten.native_layer_norm.default, torch.randn(size), [8], torch.randn(8), torch.randn(8), 1e-5)
    image, channel = torch.randn(2, 3, 5, 4), [torch.rand(3) + 0.1 for _ in range(4)]
    yield made(aten._native_batch_norm_legit_no_training.default, image, *channel, 0.1, 1e-5)
    yield made(aten._native_batch_norm_legit_no_training.default, image, None, None, *channel[:2], 0.1, 1e-5)
    yield made(aten.max_pool2d_with_indices.default, torch.randn(1, 2, 7, 8), [3, 3], [2, 2], [1, 1], [1, 1], True)
    yield made(aten.convolution.default, image, torch.randn(6, 1, 3, 3), None, [1], [1], [2], False, [0], 3)
    transposed = torch.randn(6, 2, 3, 3), torch.randn(4), [2, 2], [1, 1], [1, 1], True, [1, 0], 2
    yield made(aten.convolution.default, torch.randn(2, 6, 4, 5), *transposed)
    q, k, v = (torch.randn(2, 3, length, 8) for length in (5, 7, 7))
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    mask = torch.randn(2, 1, 5, 7).where(torch.rand(2, 1, 5, 7) > 0.3, -torch.inf)
    yield made(attention, q, k, v)
    yield made(attention, q, k[:, :, :5], v[:, :, :5], 0.0, True)
    yield made(attention, q, k, v, attn_mask=mask, scale=0.7)


def compare(engine: Engine, given: Iterator[Call], most: int) -> tuple[set[Any], list[str]]:
    """The operators that were compared, and what is wrong."""
    compared: dict[Any, int] = {}
    wrong: list[str] = []
    for call in given:
        if compared.get(call.target, 0) >= most:
            continue
        try:
            sentence = difference(engine, call)
        except Exception as error:
            sentence = f"{type(error).__name__}: {error}"[-400:]
        if sentence is not None:
            compared[call.target] = compared.get(call.target, 0) + 1
        if sentence:
            wrong.append(f"{call.target} {[tuple(a.shape) for a in call.args if isinstance(a, Tensor)]}: {sentence}")
    return set(compared), wrong


def reads(call: Call, dtype: torch.dtype) -> bool:
    return any(isinstance(each, Tensor) and each.dtype is dtype for each in call.args)


def sampled(engine: Engine, names: Sequence[str], dtype: torch.dtype, samples: int) -> Iterator[Call]:
    wanted = {entry.target for entry in engine.operators} | set(engine.decompositions)
    for name in names:
        yield from calls(name, wanted, dtype, samples=samples)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_operators_compute_what_eager_computes(name: str) -> None:
    engine = of(name)
    table = {entry.target for entry in engine.operators}
    compared, wrong = compare(engine, (call for call in direct() if call.target in table), 4)
    found, sentences = compare(engine, sampled(engine, NAMES, torch.float32, 4), 1)
    compared |= found
    assert not wrong + sentences, "\n".join(wrong + sentences)
    assert len(compared & table) > 0.75 * len(table), sorted(map(str, table - compared))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.slow
def test_other_dtypes_are_computed_as_in_eager_or_refused(name: str, dtype: torch.dtype) -> None:
    engine = of(name)
    given = (call for call in sampled(engine, SHORT, dtype, 3) if reads(call, dtype))
    compared, wrong = compare(engine, given, 1)
    assert not wrong, "\n".join(wrong)
    taken = dtype in (engine.clustering.dtypes or ())
    assert len(compared) > 10 if taken else not compared
