"""Values that a first call with small numbers would not show to be wrong: quotients, large integers, constants."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_tables import calls, refusal, subgraph_of
from recorded import ran
from tiers import fast
from torch import Tensor
from torch.nn import functional

import omnicomp
from omnicomp.lowerings.engines import resolve_engine
from omnicomp.timeline import Retreat

pytestmark = pytest.mark.engine


def compiled(name: str, function: Any) -> Callable[..., Any]:
    pytest.importorskip(name)
    return torch.compile(function, backend="omni", options={"lowerings": [name, "eager"]})


def retreats() -> list[str]:
    return [str(event.reason) for event in omnicomp.timeline.events() if isinstance(event, Retreat)]


QUOTIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "remainder": lambda x, y: torch.remainder(x, y),
    "remainder by a number": lambda x, y: x % 0.1,
    "fmod": lambda x, y: torch.fmod(x, y),
    "floor division": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "floor division by a number": lambda x, y: torch.div(x, 0.1, rounding_mode="floor"),
    "//": lambda x, y: x // y,
}


@pytest.mark.parametrize("operation", QUOTIENTS)
@pytest.mark.parametrize("name", ["openvino", "onnxruntime", "tvm"])
def test_quotients_and_remainders_are_not_those_of_a_rounded_division(name: str, operation: str) -> None:
    function = QUOTIENTS[operation]
    call = compiled(name, function)
    call(torch.full((6,), 0.75), torch.full((6,), 0.5))
    x = torch.tensor([1.0, -1.0, 0.3, 1e9, -1e9, 2.5])
    y = torch.tensor([0.1, 0.1, -0.1, 3.0, 7.0, 0.001])
    torch.testing.assert_close(call(x, y), function(x, y), rtol=0, atol=0)


LARGE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum of a dimension": lambda x: x.sum(1),
    "sums kept": lambda x: x.sum((0, 1), keepdim=True),
    "product": lambda x: x.prod(1),
    "fmod": lambda x: torch.fmod(x, 7),
    "remainder": lambda x: x % -7,
    "floor division": lambda x: x // 7,
    "rounded down": lambda x: torch.div(x, -7, rounding_mode="floor"),
    "rounded towards zero": lambda x: torch.div(x, 7, rounding_mode="trunc"),
}


@pytest.mark.parametrize("operation", LARGE)
def test_integers_of_64_bits_are_not_computed_in_floating_point(operation: str) -> None:
    function = LARGE[operation]
    call = compiled("onnxruntime", function)
    small = torch.tensor([[3, -7, 1], [1, 2, -3]])
    large = torch.tensor([[2**53 + 1, 2**60 + 1, -(2**33) - 5], [2**24 + 1, 1, 2**62]])
    for x in (small, large):
        assert torch.equal(call(x), function(x))


def test_what_is_small_next_to_one_is_kept() -> None:
    x = torch.tensor([1e-7, -1e-7, 15.0, -30.0])

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return torch.expm1(x), torch.log1p(x.abs()), functional.logsigmoid(x)

    call = compiled("onnxruntime", function)
    call(torch.rand(4))
    torch.testing.assert_close(call(x), function(x), rtol=1e-5, atol=0)


def test_an_angle_on_the_negative_axis_is_pi() -> None:
    call = compiled("onnxruntime", lambda y, x: torch.atan2(y, x))
    call(torch.rand(3), torch.rand(3))
    y, x = torch.zeros(3), torch.tensor([-1.0, 1.0, -0.5])
    torch.testing.assert_close(call(y, x), torch.atan2(y, x))


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_constants_of_the_graph_are_taken(name: str) -> None:
    """Small ones and large ones, as operands, as indices, and as what is returned."""
    large = list(range(600))

    def function(x: Tensor) -> tuple[Tensor, ...]:
        known = torch.tensor([2, 0])
        return x[:, torch.tensor([1, 0])] + torch.tensor([0.5, 2.0]), known, x.sum() * torch.tensor(large)

    x = torch.randn(3, 4)
    for actual, expected in zip(compiled(name, function)(x), function(x), strict=True):
        torch.testing.assert_close(actual, expected)
    assert ran() == {name}
    assert not retreats()


SLICES = [(0, 0, 2, 1), (1, 1, 5, 2), (1, 0, 99, 3), (0, -2, 4, 1), (1, -5, -1, 3), (0, 0, 4, 1)]


@pytest.mark.parametrize("given", SLICES, ids=str)
def test_a_slice_is_written(given: tuple[int, int, int, int]) -> None:
    dim, start, end, step = given
    x = torch.randn(4, 6)
    source = torch.randn_like(x[start:end:step] if dim == 0 else x[:, start:end:step])

    def function(x: Tensor, source: Tensor) -> Tensor:
        return torch.slice_scatter(x * 2, source + 1, dim, start, end, step)

    torch.testing.assert_close(compiled("openvino", function)(x, source), function(x, source))
    assert ran() == {"openvino"}
    assert not retreats()


def test_attention_with_fewer_heads_of_keys_is_left_before_anything_is_built() -> None:
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)

    def function(q: Tensor, k: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, k, enable_gqa=True) + 1

    for name in ("openvino", "onnxruntime"):
        torch.compiler.reset()
        torch.testing.assert_close(compiled(name, function)(q, k), function(q, k))
    assert not retreats()


SAMPLED = (
    "nn.functional.celu", "nn.functional.logsigmoid", "nan_to_num", "slice_scatter", "select_scatter", "sinc", "logit",
    "nn.functional.glu", "nn.functional.huber_loss", "nn.functional.hardshrink", "aminmax", "addr", "addmv", "rot90",
    "nn.functional.pixel_shuffle", "std_mean", "linspace", "linspace.tensor_overload", "eye", "lerp", "diagonal_copy",
    "index_add", "index_copy", "count_nonzero", "nn.functional.softshrink", "nn.functional.smooth_l1_loss",
)  # fmt: skip


@pytest.mark.parametrize("samples", fast([2, 6], (2).__eq__))
@pytest.mark.parametrize("name", ["openvino", "tvm"])
def test_an_engine_has_a_form_of_what_its_decompositions_are_made_of(name: str, samples: int) -> None:
    """What it lacks would be found out by building, one operator after the other."""
    pytest.importorskip(name)
    engine, seen, wrong = resolve_engine(name), set[Any](), set[str]()
    wanted = set(engine.decompositions)
    for entry in SAMPLED:
        for call in calls(entry, wanted, torch.float32, samples=samples):
            subgraph, _, node = subgraph_of(call, engine)
            sentence = refusal(engine, subgraph, node)
            seen.add(call.target)
            if "no form of the operator" in sentence:
                wrong.add(f"{call.target}: {sentence}")
    assert not wrong, "\n".join(sorted(wrong))
    assert seen
