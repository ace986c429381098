"""Bodies in Dynamo graphs: how often AOTAutograd traces one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch._higher_order_ops import utils as higher_order
from torch.fx import GraphModule

from omnicomp._torch.dynamo import regions
from omnicomp._torch.fx import boxed


@torch.compiler.nested_compile_region
def _layer(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + x


def _model(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = _layer(x)
    return x


def test_a_body_is_not_traced_for_each_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[str] = []
    trace = higher_order.materialize_as_graph

    def counted(*args: Any, **kwargs: Any) -> Any:
        traces.append("traced")
        return trace(*args, **kwargs)

    monkeypatch.setattr(higher_order, "materialize_as_graph", counted)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        traces.clear()
        with regions.traced_anew():
            return aot_autograd(fw_compiler=lambda part, _: boxed(part))(gm, inputs)

    x = torch.randn(4)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(_model, backend=backend)(x), _model(x))
    assert 1 <= len(traces) <= 2  # once for what it writes to, once for the graph


def test_what_a_body_writes_to_is_asked_once_for_each_body_and_kind_of_operand() -> None:
    asked: list[Any] = []

    def original(_: Any, body: Any, name: str, *operands: Any) -> str:
        asked.append((body, name, operands))
        return f"schema {len(asked)}"

    gen_schema = regions._asked_once(original)
    op = torch.ops.higher_order.invoke_subgraph
    one, two = (torch.fx.symbolic_trace(lambda x: x + 1) for _ in range(2))
    x, weight = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    assert gen_schema(op, one, "name", x) == "schema 1"
    assert gen_schema(op, one, "name", x) == "schema 2"  # nothing is kept outside of a compilation
    with torch._guards.tracing(TracingContext(None)):
        answers = [gen_schema(op, *call) for call in ((one, "name", x), (one, "name", torch.zeros(2)))]
        assert answers == ["schema 3"] * 2
        assert gen_schema(op, two, "name", x) == "schema 4"
        assert gen_schema(op, one, "name", weight) == "schema 5"
        with regions.traced_anew():
            assert gen_schema(op, one, "name", x) == "schema 6"
        assert gen_schema(op, one, "name", x) == "schema 3"
