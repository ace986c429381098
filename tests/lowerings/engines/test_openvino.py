"""OpenVINO: precision, integers in 32 bits, requests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import omnicomp
from omnicomp.lowerings.engines import resolve_engine
from omnicomp.timeline import Placement, Ran, Retreat

pytestmark = pytest.mark.engine
pytest.importorskip("openvino")

from omnicomp.lowerings.engines.openvino.engine import settings  # noqa: E402
from omnicomp.lowerings.engines.openvino.executable import LIMIT, exceeds, overflow  # noqa: E402

aten = torch.ops.aten


def compiled(function: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="omni", options={"lowerings": ["openvino", "eager"]})


def declined() -> list[str]:
    events = [event for event in omnicomp.timeline.events() if isinstance(event, Placement)]
    return [reason.sentence for event in events for node in event.declined for reason in node.chain]


def retreats() -> list[str]:
    return [str(event.reason) for event in omnicomp.timeline.events() if isinstance(event, Retreat)]


def test_float32_is_computed_in_float32() -> None:
    """On processors with bfloat16 OpenVINO would take that by itself."""
    x, w = torch.randn(64, 256), nn.Parameter(torch.randn(256, 64))
    with torch.no_grad():
        error = (compiled(lambda x: x @ w)(x).double() - x.double() @ w.double()).abs().max()
    assert error < 1e-4
    (event,) = (event for event in omnicomp.timeline.events() if isinstance(event, Ran))
    assert "f32" in event.evidence
    assert settings(3)["INFERENCE_NUM_THREADS"] == 3


def test_half_precision_is_rounded_once() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(32, dtype=dtype)
        wanted = (x.float().sin() * 2).to(dtype)
        torch.testing.assert_close(compiled(lambda x: x.sin() * 2)(x), wanted, rtol=1e-2, atol=1e-2)
    assert not retreats()


def test_integers_within_the_limit_are_taken() -> None:
    ids, table = torch.randint(0, 50, (2, 7)), nn.Parameter(torch.randn(64, 8))

    def function(ids: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(ids.shape[1]) + 2
        return table[ids] + table[positions], (ids + positions).cumsum(1)

    with torch.no_grad():
        for actual, expected in zip(compiled(function)(ids), function(ids), strict=True):
            assert torch.equal(actual, expected)
    assert not declined()
    assert not retreats()


def test_larger_integers_are_right_elsewhere() -> None:
    call = compiled(lambda x: x + 1)
    small = torch.tensor([1, 2, 3])
    assert torch.equal(call(small), small + 1)
    large = torch.tensor([2**40, -(2**35), 3])
    assert torch.equal(call(large), large + 1)
    assert any("exact" in reason for reason in retreats())


@pytest.mark.parametrize(
    "function",
    [lambda x: x * x, lambda x: x.float().exp().long(), lambda x: x.sum() * 1000],
    ids=["product", "of floats", "sum"],
)
def test_what_could_overflow_is_not_taken(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.full((2048,), 2**20)
    assert torch.equal(compiled(function)(x), function(x))
    assert any("exact" in sentence for sentence in declined())


def test_bounds_follow_the_operators() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(8, dtype=torch.int64)

    def node(target: Any, *args: Any) -> Any:
        made = graph.call_function(target, args)
        made.meta["val"] = torch.zeros(8, dtype=torch.int64)
        return made

    doubled = node(aten.add.Tensor, x, x)
    assert overflow(doubled) == ""
    assert overflow(node(aten.mul.Tensor, doubled, 4)) == ""
    assert overflow(node(aten.mul.Tensor, doubled, 5))
    assert overflow(node(aten.sum.default, x)) == ""
    assert overflow(node(aten.sum.default, doubled))
    assert exceeds(torch.tensor([LIMIT + 1]))
    assert exceeds(torch.tensor([0, -LIMIT - 1]))
    assert not exceeds(torch.tensor([LIMIT, -LIMIT]))
    assert not exceeds(torch.zeros(0, dtype=torch.int64))


def test_each_session_has_a_request_of_its_own() -> None:
    engine = resolve_engine("openvino")
    made: list[Any] = []
    original = type(engine).compile

    class Spy:
        def __call__(self, engine: Any, subgraph: Any) -> Any:
            made.append(original(engine, subgraph))
            return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine), "compile", lambda self, subgraph: Spy()(self, subgraph))
        x = torch.randn(4)
        compiled(lambda x: x.exp() * 2)(x)
    first, second = made[0].session(), made[0].session()
    assert first is not second
    one, two = torch.randn(4), torch.randn(4)
    (a,), (b,) = first([one]), second([two])
    torch.testing.assert_close(a, one.exp() * 2)
    torch.testing.assert_close(b, two.exp() * 2)
    (c,) = first([two])
    assert c.data_ptr() != a.data_ptr()
    torch.testing.assert_close(a, one.exp() * 2)


def test_the_magnitude_of_constants_is_folded_right() -> None:
    """OpenVINO's own operation for it is left out where its operand is folded."""

    def function(x: Tensor) -> Tensor:
        return x[:, 2 - (2 - torch.arange(-1, 5).abs()).abs()] * (torch.arange(6.0) - 3).abs()

    x = torch.randn(2, 3)
    torch.testing.assert_close(compiled(function)(x), function(x))
    assert not retreats()


def test_what_is_infinite_or_no_number_is_compared_and_reduced_as_in_torch() -> None:
    x = torch.tensor([[torch.nan, 1.0, -1.0], [-torch.inf, -torch.inf, -torch.inf], [2.0, torch.inf, 1e-40]])

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x > 0, x >= 0, x.isfinite(), x[1:].amax(1), (-x[1:]).amin(1), x[1:].logsumexp(1)

    for actual, expected in zip(compiled(function)(x), function(x), strict=True):
        assert torch.equal(actual, expected)
    assert not retreats()


def test_tensors_without_elements_are_refused() -> None:
    """A broadcast to such a shape ends the process while it is compiled."""
    x = torch.randn(1, 0)
    assert compiled(lambda x: x.expand(3, 0) + 1)(x).shape == (3, 0)
    assert any("without elements" in sentence for sentence in declined())


@pytest.mark.parametrize("keepdim", [True, False])
def test_a_sum_is_divided_by_a_number(keepdim: bool) -> None:
    """OpenVINO 2026.4 makes something else of a sum that keeps its dimensions."""
    x = torch.randn(5, 5, 5)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.sum(1, keepdim) / 4, x.var(1, keepdim=keepdim), torch.std(x)

    for actual, expected in zip(compiled(function)(x), function(x), strict=True):
        torch.testing.assert_close(actual, expected)
    assert not retreats()
