"""FLOPs and bytes, as numbers and as expressions of symbolic sizes."""

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import scaled_dot_product_attention

from omnicomp.analysis.costs import cost_of, hint_of_text, known_sizes, read_of, size_of
from omnicomp.analysis.nodes import fake_value


def nodes(function, *args: torch.Tensor, mode: str = "fake") -> list[Node]:
    return [n for n in make_fx(function, tracing_mode=mode)(*args).graph.nodes if n.op == "call_function"]


def test_products_count_two_operations_a_term() -> None:
    cost = cost_of(nodes(torch.mm, torch.rand(3, 5), torch.rand(5, 7)))
    assert cost.flops_hint == 2 * 3 * 5 * 7


def test_pointwise_and_views() -> None:
    assert cost_of(nodes(lambda x: (x + 1).t().sin(), torch.rand(3, 4))).flops_hint == 24


def test_attention_on_the_cpu_is_counted() -> None:
    q = torch.rand(1, 2, 16, 8)
    cost = cost_of(nodes(lambda q: scaled_dot_product_attention(q, q, q), q))
    assert cost.flops_hint == 2 * (2 * 2 * 16 * 16 * 8)


def test_symbolic_sizes_stay_symbols_and_add_no_guards() -> None:
    traced = make_fx(lambda x, y: torch.mm(x, y).relu(), tracing_mode="symbolic")(torch.rand(6, 5), torch.rand(5, 7))
    calls = [n for n in traced.graph.nodes if n.op == "call_function"]
    environment: ShapeEnv = fake_value(calls[-1]).shape[0].node.shape_env
    before = len(environment.guards)
    cost = cost_of(calls)
    assert len(environment.guards) == before
    assert len(cost.flops.free_symbols) == 3
    assert cost.flops_hint == 2 * 6 * 5 * 7 + 6 * 7


def test_a_printed_expression_has_the_hint_of_the_expression() -> None:
    traced = make_fx(lambda x, y: torch.mm(x, y)[:, ::3].relu(), tracing_mode="symbolic")(
        torch.rand(6, 5), torch.rand(5, 7)
    )
    calls = [n for n in traced.graph.nodes if n.op == "call_function"]
    cost = cost_of(calls)
    sizes = known_sizes(s for n in calls for v in [fake_value(n)] if isinstance(v, torch.Tensor) for s in v.shape)
    assert cost.flops_hint > 0
    assert hint_of_text(str(cost.flops), sizes) == cost.flops_hint
    assert hint_of_text("s999 + 1", sizes) == -1
    assert hint_of_text("no expression (", sizes) == -1


def test_bytes() -> None:
    size, hint = size_of([torch.rand(3, 4), torch.ones(2, dtype=torch.int64), 3])
    assert (size, hint) == (sympy.Integer(64), 64)


def test_ragged_sizes_of_nested_tensors_have_no_number() -> None:
    nested = torch.nested.nested_tensor([torch.rand(2, 4), torch.rand(3, 4)], layout=torch.jagged)
    compiled = torch.compile(lambda x: x.sin() * 2, backend="omni", options={"lowerings": ["eager"]})
    torch.testing.assert_close(compiled(nested).values(), nested.values().sin() * 2)


def test_of_a_table_the_rows_that_are_looked_up_are_read() -> None:
    def function(table: torch.Tensor, ids: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.embedding.default(table, ids) + torch.ops.aten.embedding.default(other, ids) + other[0]

    graph = make_fx(function, tracing_mode="fake")(torch.randn(100, 4), torch.arange(3), torch.randn(50, 4)).graph
    table, ids, other = graph.find_nodes(op="placeholder")
    sizes = [size_of(read_of(node, fake_value(node)))[1] for node in (table, ids, other)]
    assert sizes == [3 * 4 * 4, 3 * 8, 50 * 4 * 4]
