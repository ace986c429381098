"""The way down that travels in an artefact: one line for each start, and the graph for a call that raised."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from omnicomp._torch.inductor import graph_text as sources
from omnicomp.builder import eager_artefact as fallbacks
from omnicomp.devices import resolve_device
from omnicomp.errors import LoweringError
from omnicomp.lowerings import GraphRecord, LoweringContext
from omnicomp.options.policy import parse
from omnicomp.timeline import Retreat, current


def part(*, random: bool = False, constant: bool = False) -> GraphModule:
    root = torch.nn.Module()
    root.constant = torch.full((3, 4), 2.0)
    graph = Graph()
    x = graph.placeholder("arg0_1")
    x.meta["val"] = torch.ones(3, 4)
    node = graph.call_function(torch.ops.aten.bernoulli.default if random else torch.ops.aten.sin.default, (x,))
    node.meta["val"] = torch.ones(3, 4)
    if constant:
        node = graph.call_function(torch.ops.aten.mul.Tensor, (node, graph.get_attr("constant")))
        node.meta["val"] = torch.ones(3, 4)
    # Code behind it was built for a transposed result, which eager does not return by itself.
    node.meta["val"] = torch.ones(4, 3).t()
    graph.output((node,))
    return GraphModule(root, graph)


def context(name: str = "inference", **options: Any) -> LoweringContext:
    return LoweringContext(
        graph=GraphRecord(id="g0"),
        part=name,
        device=resolve_device("cpu"),
        policy=parse(None, options),
        timeline=current(),
    )


def restored(kept: bytes, name: str = "inference", *, recorded: bool = False) -> Any:
    def call(inputs: list[Any]) -> Any:
        raise RuntimeError("planted")

    compiled = SimpleNamespace(current_callable=call, source_code="")
    return fallbacks.guard(kept, context(name), compiled, recorded=recorded)


def test_a_call_that_raises_runs_the_graph_that_travelled() -> None:
    kept = fallbacks.dumps(part(constant=True), [torch.ones(3, 4)])
    assert kept == fallbacks.dumps(part(constant=True), [torch.ones(3, 4)])
    guard = restored(kept)
    x = torch.randn(3, 4)
    for _ in range(2):
        (result,) = guard.boxed()([x])
        torch.testing.assert_close(result, x.sin() * 2)
        assert result.stride() == (1, 3)
    assert [event.target_lowering for event in current() if isinstance(event, Retreat)] == ["eager"]


def test_the_graph_is_not_changed_and_not_read_before_a_failure() -> None:
    module = part()
    before = module.code
    kept = fallbacks.dumps(module, [torch.ones(3, 4)])
    assert module.code == before
    head, _, body = kept.partition(b"\n")
    assert json.loads(head) == {
        "announced": [["float32", "cpu", [3, 4], [4, 1]]],
        "bytes": "48",
        "inputs": ["arg0_1"],
        "obstacle": None,
        "operators": [],
    }
    assert b"aten.sin" in body
    fallbacks.guard(head + b"\nnothing to read", context(), SimpleNamespace(current_callable=len), recorded=False)


def test_what_cannot_be_repeated_is_raised_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = fallbacks.dumps(part(random=True), [torch.ones(3, 4)])
    assert kept.endswith(b"\n"), "a graph that can't be repeated need not travel"
    with pytest.raises(RuntimeError, match="planted") as raised:
        restored(kept).boxed()([torch.ones(3, 4)])
    assert "draws random numbers" in "".join(vars(raised.value)["__notes__"])

    with pytest.raises(LoweringError, match=r"came without it, as .*draws random numbers"):
        restored(kept).refuse("input 0 is on cpu")

    monkeypatch.setattr(sources, "MAX_CONSTANT_BYTES", 8)
    kept = fallbacks.dumps(part(constant=True), [torch.ones(3, 4)])
    with pytest.raises(RuntimeError, match="planted") as raised:
        restored(kept).boxed()([torch.ones(3, 4)])
    assert "the constant constant has 48 bytes" in "".join(vars(raised.value)["__notes__"])

    with pytest.raises(RuntimeError, match="planted") as raised:
        restored(fallbacks.dumps(part(), [torch.ones(3, 4)]), recorded=True).boxed()([torch.ones(3, 4)])
    assert "CUDA graph" in "".join(vars(raised.value)["__notes__"])


def test_a_backward_holds_what_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = fallbacks.dumps(part(), [torch.ones(3, 4)])
    assert restored(kept, "backward").keep_inputs
    monkeypatch.setattr(fallbacks, "HELD_BYTES", 47)
    assert not restored(kept, "backward").keep_inputs
    assert restored(kept, "forward").keep_inputs
