"""The int8 layer: the operator against float64, the spellings it is found in, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import omnicomp
from omnicomp.lowerings.overrides import int8_linear as package
from omnicomp.lowerings.overrides.int8_linear import check, int8_linear, reference
from omnicomp.timeline import Reason

EAGER = {"lowerings": ["override", "eager"], "on_error": "raise", "check_passes": True}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of any size are taken."""
    monkeypatch.setattr(package, "_MIN_WEIGHTS", dict.fromkeys(package._MIN_WEIGHTS, 0))


class Layer(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (48, 256), dtype=torch.int8))
        self.register_buffer("scale", (torch.rand(48) * 0.01).to(dtype))
        self.register_buffer("bias", torch.randn(48).to(dtype))
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def scaled_product(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(dtype=x.dtype)) * layer.scale


def scale_first(layer: Any, x: Tensor) -> Tensor:
    return layer.scale.unsqueeze(0) * (x @ layer.weight.type_as(x).t())


def scaled_weight(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype) * layer.scale[:, None])


def with_bias(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype) * layer.scale.unsqueeze(1), layer.bias)


def bias_after(layer: Any, x: Tensor) -> Tensor:
    return scaled_product(layer, x) + layer.bias


SPELLINGS = [scaled_product, scale_first, scaled_weight, with_bias, bias_after]


def rewrites() -> list[str]:
    return [rewrite.name for graph in omnicomp.audit().graphs for rewrite in graph.rewrites]


def refusals() -> list[Reason]:
    parts = [part for graph in omnicomp.audit().graphs for part in graph.parts]
    return [reason for part in parts for node in part.declined for reason in node.chain]


def error(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256,), (1, 256), (2, 3, 256), (17, 256)])
def test_the_operator_is_as_close_to_float64_as_eager(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer = Layer(scaled_product, dtype)
    x = torch.randn(shape, dtype=dtype)
    exact = F.linear(x.double(), layer.weight.double()) * layer.scale.double()  # type: ignore[operator]
    got = int8_linear(x, layer.weight, layer.scale)  # type: ignore[arg-type]
    assert got.shape == (*shape[:-1], 48)
    assert got.is_contiguous()
    assert error(got, exact) <= 1.2 * error(reference(x, layer.weight, layer.scale), exact) + 1e-5  # type: ignore[arg-type]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("forward", SPELLINGS)
@torch.no_grad()
def test_every_spelling_is_taken(forward: Callable[..., Tensor], dynamic: bool) -> None:
    layer, x = Layer(forward), torch.randn(2, 3, 256, dtype=torch.bfloat16)
    many = torch.randn(3, 40, 256, dtype=torch.bfloat16)
    eager = [layer(x), layer(many)]
    compiled = torch.compile(layer, backend="omni", options=EAGER, dynamic=dynamic)
    got = [compiled(x)]
    assert rewrites() == ["int8_linear"]
    got.append(compiled(many))
    layer.double()
    for value, own, exact in zip(got, eager, [layer(x.double()), layer(many.double())], strict=True):
        assert value.dtype == own.dtype
        assert error(value, exact) <= 1.5 * error(own, exact)  # beyond 16 rows it is rounded before the bias


def bias_inside(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype), layer.bias) * layer.scale


def one_scale(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype)) * layer.scale[:1]


def other_dtype(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype)) * layer.scale.float()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("forward", [bias_inside, one_scale, other_dtype])
@torch.no_grad()
def test_neighbours_are_left_alone(forward: Callable[..., Tensor]) -> None:
    layer, x = Layer(forward), torch.randn(2, 256, dtype=torch.bfloat16)
    torch.testing.assert_close(torch.compile(layer, backend="omni", options=EAGER)(x), layer(x))
    assert rewrites() == []


@pytest.mark.usefixtures("small")
def test_it_is_for_inference() -> None:
    layer, x = Layer(scaled_product), torch.randn(2, 256, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(layer, backend="omni", options=EAGER)(x).sum().backward()
    assert x.grad is not None
    assert rewrites() == []
    (reason,) = refusals()
    assert reason.needed == "training=True"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        (torch.zeros(17, 256, dtype=torch.bfloat16), torch.zeros(8, 256, dtype=torch.int8), "1 to 16 rows"),
        (torch.zeros(2, 256), torch.zeros(8, 256, dtype=torch.int8), "1 to 1 rows"),
        (torch.zeros(2, 256, dtype=torch.float16), torch.zeros(8, 256, dtype=torch.int8), "float32 on the CPU"),
        (torch.zeros(2, 100, dtype=torch.bfloat16), torch.zeros(8, 100, dtype=torch.int8), "multiple of 256"),
        (torch.zeros(2, 256, dtype=torch.bfloat16), torch.zeros(256, 8, dtype=torch.int8).t(), "contiguous"),
    ],
)
def test_what_its_kernels_do_not_take_is_refused(x: Tensor, weight: Tensor, words: str) -> None:
    reason = check(x, weight, torch.zeros(8, dtype=x.dtype))
    assert reason is not None
    assert words in reason.needed
    assert reason.lever


def test_small_weights_are_refused_and_wrong_types_are_errors() -> None:
    x, weight = torch.zeros(2, 256, dtype=torch.bfloat16), torch.zeros(8, 256, dtype=torch.int8)
    reason = check(x, weight, torch.zeros(8, dtype=torch.bfloat16))
    assert reason is not None
    assert reason.observed == "8 x 256"
    with pytest.raises(TypeError, match="int8"):
        int8_linear(x, weight.int(), torch.zeros(8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="scale"):
        int8_linear(x, weight, torch.zeros(8, 1, dtype=torch.bfloat16))
