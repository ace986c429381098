"""Linear layers in float8: which ones, with which scales, and how far off they are."""

import dataclasses

import pytest
import torch
from float8 import BOTH, FLOAT8, SCALES, needs_row_scales
from lowered import Block, compiled, error, rand
from torch import nn

from omnicomp.devices import resolve_device
from omnicomp.options.dtype_policy import parse_dtype_policy
from omnicomp.timeline import NearMiss, Rewrite


class Device:
    """The CPU, whose `_scaled_mm` is slow but there, as a device that has float8."""

    type = "cpu"
    lowerings = ("eager",)

    def capabilities(self):
        can = resolve_device("cpu").capabilities()
        return dataclasses.replace(can, storage_dtypes=(*can.storage_dtypes, FLOAT8))


def run(function, *args, scales=SCALES, device=None, dynamic=None, **policy):
    given = parse_dtype_policy({"preset": "fp8", "fp8": scales, **policy})
    fn, backend = compiled(function, given, device=device or Device(), dynamic=dynamic)
    with torch.no_grad():
        return fn(*args), backend


@pytest.mark.parametrize("scales", BOTH)
@pytest.mark.parametrize("shape", [(8, 32), (2, 5, 32), (1, 2, 3, 32), (32,)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer(scales, shape, bias):
    layer, x = nn.Linear(32, 48, bias=bias), rand(*shape)
    actual, backend = run(layer, x, scales=scales)
    assert backend.seen["_scaled_mm"] == {FLOAT8, torch.float32}
    assert actual.dtype == torch.float32
    expected = layer.double()(x.double())
    assert actual.shape == expected.shape
    # Each operand is rounded to 4 bits, by at most 2^-4 and evenly spread.
    assert error(actual, expected) < 0.06
    assert error(actual, expected) > 1e-3
    assert [event.target for event in backend.of(Rewrite)] == ["float8_e4m3fn"]


@needs_row_scales
def test_a_scale_for_each_row_keeps_a_large_row_from_costing_the_others():
    layer, x = nn.Linear(32, 32, bias=False), rand(8, 32)
    x[0] *= 1e5
    expected = layer.double()(x.double())
    layer.float()
    by_row, _ = run(layer, x)
    torch.compiler.reset()
    by_tensor, _ = run(layer, x, scales="tensor")
    assert error(by_row[1:], expected[1:]) < 0.06
    assert error(by_tensor[1:], expected[1:]) > 0.2


def test_rows_of_zeros_and_huge_values():
    layer, x = nn.Linear(32, 32, bias=False), rand(4, 32)
    x[0] = 0
    x[1] = 1e30
    actual, _ = run(layer, x)
    assert torch.equal(actual[0], torch.zeros(32))
    assert actual.isfinite().all()


def test_sizes_may_be_symbolic():
    layer = nn.Linear(32, 32)
    given = parse_dtype_policy({"preset": "fp8", "fp8": SCALES})
    fn, backend = compiled(layer, given, device=Device(), dynamic=True)
    with torch.no_grad():
        for length in (3, 5, 9):
            x = rand(2, length, 32)
            assert error(fn(x), layer(x)) < 0.06
    assert len(backend.graphs) == 1


def test_everything_else_computes_in_bfloat16():
    block, x = Block(), rand(2, 8, 32)
    actual, backend = run(block, x)
    assert backend.seen["_scaled_dot_product_flash_attention_for_cpu"] == {torch.bfloat16}
    assert {event.target for event in backend.of(Rewrite)} == {"bfloat16", "float8_e4m3fn"}
    assert error(actual, block(x)) < 0.1


@pytest.mark.parametrize(
    ("function", "rows", "device", "policy", "word"),
    [
        (nn.Linear(32, 24), 4, None, {}, "sizes"),
        (nn.Linear(32, 32), 0, None, {}, "empty"),
        (nn.Linear(32, 32), 4, resolve_device("cpu"), {}, "no float8"),
        (nn.Linear(32, 32), 4, None, {"compute": "fp16"}, "bfloat16"),
    ],
)
def test_another_layer_computes_in_the_low_dtype_and_is_told(function, rows, device, policy, word):
    actual, backend = run(function, rand(rows, 32), device=device, **policy)
    assert actual.shape == (rows, function.out_features)
    (miss,) = backend.of(NearMiss)
    assert word in miss.reason.sentence
    assert miss.reason.lever
    assert [event.target for event in backend.of(Rewrite)] == ["float16" if policy else "bfloat16"]


def test_training_is_in_bfloat16_and_told():
    layer = nn.Linear(32, 32)
    fn, backend = compiled(layer, parse_dtype_policy("fp8"), training=True, device=Device())
    fn(rand(4, 32)).sum().backward()
    assert layer.weight.grad is not None
    assert "inference" in backend.of(NearMiss)[0].reason.sentence
