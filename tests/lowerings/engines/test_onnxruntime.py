"""ONNX Runtime: the model that is written, where weights are, and what is promoted before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import ran
from torch import Tensor, nn

import omnicomp
from omnicomp.lowerings.engines import resolve_engine
from omnicomp.timeline import Placement, Retreat

pytestmark = pytest.mark.engine
pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

from omnicomp._torch.onnx import registered  # noqa: E402
from omnicomp.lowerings.engines.onnxruntime.model import OPSET  # noqa: E402


def compiled(function: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="omni", options={"lowerings": ["onnxruntime", "eager"]})


def retreats() -> list[str]:
    return [str(event.reason) for event in omnicomp.timeline.events() if isinstance(event, Retreat)]


def declined() -> list[str]:
    events = [event for event in omnicomp.timeline.events() if isinstance(event, Placement)]
    return [reason.sentence for event in events for node in event.declined for reason in node.chain]


@pytest.fixture
def subgraphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine is asked to compile."""
    engine, seen = type(resolve_engine("onnxruntime")), list[Any]()
    original = engine.compile

    def spy(self: Any, subgraph: Any) -> Any:
        seen.append(original(self, subgraph))
        return seen[-1]

    monkeypatch.setattr(engine, "compile", spy)
    return seen


def test_what_is_declared_has_a_form() -> None:
    engine = resolve_engine("onnxruntime")
    decomposed = set(engine.decompositions)
    # Views are written as reshapes before the exporter sees them.
    rewritten = {torch.ops.aten.squeeze.dims}
    without = [
        str(entry.target)
        for entry in engine.operators
        if entry.target not in decomposed | rewritten and not registered(entry.target, OPSET)
    ]
    assert not without
    assert len(engine.operators) > 150


def test_large_weights_are_not_part_of_the_model(subgraphs: list[Any]) -> None:
    model, x = nn.Linear(64, 64), torch.randn(2, 64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-4, atol=1e-5)
    (executable,) = subgraphs
    assert len(executable.dumps()) < 64 * 64 * 4
    held = executable._held
    assert [value.shape() for value in held] == [[64, 64]]
    assert held[0].data_ptr() == model.weight.data_ptr()


def test_a_model_says_nothing_of_the_users_files(subgraphs: list[Any]) -> None:
    compiled(lambda x: x.exp() + 1)(torch.randn(3))
    assert __file__.encode() not in subgraphs[0].dumps()


def test_int64_keeps_its_64_bits() -> None:
    x = torch.tensor([2**40, -(2**35), 3])
    assert torch.equal(compiled(lambda x: x * 3 + 1)(x), x * 3 + 1)
    assert ran() == {"onnxruntime"}
    assert not retreats()


MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "float and int": lambda x, i: x * i + i,
    "int and number": lambda x, i: i * 0.5 - 1,
    "comparison": lambda x, i: x > i,
    "where": lambda x, i: torch.where(i > 1, x, i),
    "function of an int": lambda x, i: torch.sin(i) + i.sqrt(),
    "mean of an int": lambda x, i: (i / 3).mean(),
    "sum of booleans": lambda x, i: (x > 0).sum() + i,
    "joined": lambda x, i: torch.cat([x, i]),
    "half": lambda x, i: x.half() + 1.5,
}


@pytest.mark.parametrize("name", MIXED)
def test_dtypes_are_promoted_as_torch_promotes_them(name: str) -> None:
    x, i = torch.randn(6), torch.arange(6)
    actual, expected = compiled(MIXED[name])(x, i), MIXED[name](x, i)
    assert actual.dtype == expected.dtype
    tolerance = 2e-3 if expected.dtype is torch.float16 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert ran() == {"onnxruntime"}
    assert not retreats()


def test_integers_are_not_divided_by_what_may_be_zero() -> None:
    """The process would end."""
    x, y = torch.arange(1, 7), torch.arange(1, 7)
    assert torch.equal(compiled(lambda x, y: x // y + x // 2)(x, y), x // y + x // 2)
    assert any("known numbers" in sentence for sentence in declined())


def test_attention_is_taken_with_a_mask() -> None:
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    mask = torch.zeros(2, 1, 9, 9).masked_fill(torch.rand(2, 1, 9, 9) > 0.7, -torch.inf)
    mask[..., 0] = 0

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return causal + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    torch.testing.assert_close(compiled(function)(q, k, v), function(q, k, v), rtol=1e-4, atol=1e-5)
    assert ran() == {"onnxruntime"}


def test_the_model_is_valid_onnx(subgraphs: list[Any]) -> None:
    compiled(lambda x: torch.softmax(x @ x, -1))(torch.randn(4, 4))
    _, _, body = subgraphs[0].dumps().partition(b"\n")
    model = onnx.load_from_string(body)
    onnx.checker.check_model(model)
    assert {entry.version for entry in model.opset_import if not entry.domain} == {OPSET}
