"""The trace of a graph: one vocabulary for every spelling, and what each node holds at which moment."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from traced import capture

from omnicomp.passes.attention.trace import trace

X = torch.randn(2, 4, 6, 8)


@pytest.mark.parametrize(
    "product",
    [
        lambda x: x @ x.mT,
        lambda x: torch.matmul(x, x.transpose(-1, -2)),
        lambda x: x.matmul(x.swapaxes(-2, -1)),
        lambda x: torch.einsum("bhqd,bhkd->bhqk", x, x),
        lambda x: torch.bmm(x.flatten(0, 1), x.flatten(0, 1).mT).unflatten(0, (2, 4)),
        lambda x: torch.baddbmm(x.new_zeros(1), x.flatten(0, 1), x.flatten(0, 1).mT),
        lambda x: x.__matmul__(x.mT),
    ],
)
def test_every_product_is_bmm(product):
    assert capture(product, X).names().count("bmm") == 1


def test_functions_methods_and_operators_are_the_same():
    functions = [lambda x: F.softmax(x * 2, -1), lambda x: x.mul(2).softmax(-1), lambda x: torch.softmax(2 * x, 3)]
    assert {tuple(capture(f, X).names()) for f in functions} == {("mul", "_softmax")}


def test_an_operator_that_has_the_name_of_one_of_torchs_is_another():
    @torch.library.custom_op("omnicomp_test::clone", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(torch.empty_like)
    assert capture(lambda x: double(x).sin(), X).names() == ["omnicomp_test::clone", "sin"]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return double((q @ k.mT).softmax(-1)) @ v

    compiled = torch.compile(attention, backend="omni", options={"lowerings": ["eager"]}, fullgraph=True)
    torch.testing.assert_close(compiled(X, X, X), attention(X, X, X))


def test_changes_in_place_become_new_values():
    def function(x):
        y = x * 1
        y += 1
        y.masked_fill_(y > 0, 3.0)
        return y.sin()

    backend = capture(function, X)
    assert backend.names() == ["mul", "add", "gt", "masked_fill", "sin"]
    value = backend.output().op.args[0]
    assert value.op.name == "masked_fill"
    assert value.op.args[0].op.name == "add"


def test_values_keep_their_sizes_when_those_are_changed_in_place():
    made = capture(lambda x: x.mul(2).add_(1).unsqueeze_(0), X)
    shapes = [tuple(op.outputs[0].fake.shape) for op in made.trace.ops]
    assert shapes == [(2, 4, 6, 8), (2, 4, 6, 8), (1, 2, 4, 6, 8)]


def test_a_node_does_not_hold_what_it_held_before_a_change():
    def function(x, y):
        z = x * 2
        w = z.view(-1)
        s = z + y
        w.add_(1)
        return s, z, x.sin()

    backend = capture(function, X, X)
    last = backend.node("sin")
    product = next(op.outputs[0] for op in backend.trace.ops if op.name == "mul")
    assert backend.trace.holder(product, backend.node("s")) is backend.node("z")
    assert backend.trace.holder(product, last) is None
    assert backend.trace.values[backend.node("s")].op.args[0] is product


def test_a_write_through_another_view_hides_what_is_there():
    def function(x):
        y = x.clone()
        y[:, 0] = 1.0
        return y.sin()

    assert capture(function, X).output().op.args[0].op.name == "overwritten"


def test_an_active_dropout_is_one_operator_and_an_inactive_one_is_none():
    names = capture(lambda x: F.dropout(F.dropout(x, 0.25, True), 0.5, False), X).names()
    assert names == ["dropout"]
    (op,) = capture(lambda x: F.dropout(x, 0.25, True), X).trace.ops
    assert op.args[1] == 0.25


def test_autocast_and_no_grad_regions_are_followed():
    def function(x):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return x @ x.mT

    (op,) = [op for op in capture(function, X).trace.ops if op.name == "bmm"]
    assert {value.fake.dtype for value in op.inputs} == {torch.bfloat16}


def test_a_region_that_is_called_once_is_followed_with_its_arguments():
    def inner(x, y):
        return torch.softmax(x @ y.mT, -1)

    backend = capture(lambda x: torch.utils.checkpoint.checkpoint(inner, x * 2, x, use_reentrant=False), X)
    (op,) = [op for op in backend.trace.ops if op.name == "_softmax"]
    assert op.node.graph is not backend.module.graph
    assert "mul" in backend.names()


def test_what_does_not_run_is_opaque_and_said():
    backend = capture(lambda x: (x * 2).cos(), X)
    node = backend.node("mul")

    def fail(*arguments):
        raise RuntimeError("planted failure\nwith a second line")

    node.target = fail
    again = trace(backend.module)
    assert again.failed == {node: "RuntimeError: planted failure"}
    assert again.values[node].op is None
    (op,) = again.ops
    assert op.name == "cos"
    assert op.args[0] is again.values[node]


def test_symbolic_sizes_stay_symbols_and_no_guard_is_added():
    def function(x, scale):
        return (x * scale.item()).view(x.size(0), -1)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        backend = capture(function, X, torch.tensor(0.5), dynamic=True)
    environment = next(
        v.fake_mode.shape_env for n in backend.module.graph.nodes if hasattr(v := n.meta["example_value"], "fake_mode")
    )
    (op,) = [op for op in backend.trace.ops if op.name == "mul"]
    item = backend.node("item").meta["example_value"]
    assert op.args[1] is item, "the symbol of the node, and no new one"
    assert not environment.pending_fresh_unbacked_symbols
    before = len(environment.guards)
    trace(backend.module)
    assert len(environment.guards) == before


def test_arguments_are_found_by_name_wherever_they_are():
    backend = capture(lambda x: torch.softmax(x, dim=-1) + torch.add(x, x, alpha=3), X)
    ops = {op.name: op for op in backend.trace.ops}
    softmax, add = ops["_softmax"], backend.trace.ops[1]
    assert softmax.argument("dim") == -1
    assert add.argument("alpha") == 3
    assert add.argument("nothing", 5) == 5
