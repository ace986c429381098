"""Gradients of what several graphs read are eager's in each bit under `numerics="eager"`."""

import pytest
import torch
import torch.nn.functional as F

from omnicomp.backend.gradient_order import SplitUses, split_uses
from omnicomp.backend.saved import State, put_state, state_of

SIZE = 4096


def differing(function, *shapes, calls=2, **options):
    """How many elements of the gradients differ from eager's."""
    options = {"numerics": "eager", "on_error": "raise", **options}
    compiled = torch.compile(function, backend="omni", options=options)
    count = 0
    for _ in range(calls):
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        results = function(*inputs), compiled(*inputs)
        given = torch.randn_like(results[0])
        eager, found = (torch.autograd.grad(result, inputs, given) for result in results)
        assert torch.equal(*results)
        count += sum(int((a != b).sum()) for a, b in zip(eager, found, strict=True))
    return count


def two_graphs(w):
    y = w.sin() + w.cos()
    torch._dynamo.graph_break()
    return y * w.tanh() + w.exp()


def twice_by_one_operator(w):
    y = w * w + w.sin()
    torch._dynamo.graph_break()
    return y * w


def by_a_list(w, v):
    y = torch.cat([w, v, w.sin(), w])[:SIZE] + torch.stack([w, w], 0).sum(0)
    torch._dynamo.graph_break()
    return y * w.cos() + v.sum()


def not_differentiated(w):
    y = w.sin() * w.detach() + (w > 0) * w.cos()
    torch._dynamo.graph_break()
    return y + w.tanh() * w.shape[0]


def returned(w):
    y, same = w.sin() + w.cos(), w.view(-1)
    torch._dynamo.graph_break()
    return y * same.exp()


def three_graphs(w):
    y = w.sin() + w.cos()
    torch._dynamo.graph_break()
    z = y * w.tanh() + w.exp() * y
    torch._dynamo.graph_break()
    return z * y + w.sigmoid() * w


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (two_graphs, [SIZE]),
        (twice_by_one_operator, [SIZE]),
        (by_a_list, [SIZE, SIZE]),
        (not_differentiated, [SIZE]),
        (three_graphs, [SIZE]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_gradients_are_added_as_in_eager(function, shapes, lowering):
    assert differing(function, *shapes, lowerings=[lowering]) == 0


def test_without_views_they_are_not(monkeypatch):
    monkeypatch.setattr("omnicomp.backend.gradient_order._used_several_times", lambda node: False)
    assert differing(two_graphs, SIZE, lowerings=["eager"])


def test_an_input_that_is_returned_stays_what_it_is():
    w = torch.randn(8, requires_grad=True)
    compiled = torch.compile(lambda w: (w, w.sin() + w.cos()), backend="omni", options={"numerics": "eager"})
    assert compiled(w)[0] is w
    # Its gradient comes from outside, for which autograd has another place than eager: the graph runs eager.
    assert differing(returned, SIZE, lowerings=["eager"], on_error="retreat") == 0


def test_a_shared_layer_of_two_graphs():
    layer = torch.nn.Linear(64, 64)

    def function(x):
        x = layer(F.gelu(layer(x)))
        torch._dynamo.graph_break()
        return layer(x)

    compiled = torch.compile(function, backend="omni", options={"numerics": "eager", "lowerings": ["eager"]})
    x = torch.randn(32, 64)
    found = [torch.autograd.grad(each(x).square().sum(), list(layer.parameters())) for each in (function, compiled)]
    assert all(map(torch.equal, *found))


def test_inputs_that_are_written_to_stay():
    def function(x, w):
        x.mul_(2)
        return x * w + x.sin() * w.cos()

    x, w = torch.randn(64), torch.randn(64, requires_grad=True)
    copies = x.clone(), x.clone()
    compiled = torch.compile(function, backend="omni", options={"numerics": "eager", "lowerings": ["eager"]})
    results = function(copies[0], w), compiled(copies[1], w)
    assert torch.equal(*results)
    assert torch.equal(*copies)
    assert torch.equal(*(torch.autograd.grad(each.sum(), w)[0] for each in results))


def test_the_latest_reader_reads_the_input_itself():
    module = torch.fx.symbolic_trace(lambda w: (w.sin() + w * w).exp())
    w = torch.randn(4, requires_grad=True)
    module.graph.find_nodes(op="placeholder")[0].meta["example_value"] = w
    for node in module.graph.nodes:
        node.meta.setdefault("example_value", w * 1)
    found = split_uses(module, [w])
    assert found.sources == (0, 0)
    code = found.module.code
    assert "w * w_use_1" in code
    assert "w_use_0.sin()" in code
    assert "_use_" not in module.code
    assert torch.equal(found.followed(found.module)(w), module(w))


class _Doubling(State):
    def restore(self, id):
        return lambda w, *views: sum(views, w)


def test_a_function_that_is_saved_is_restored_with_its_views():
    compiled = _Doubling().restore("g0")
    put_state(compiled, _Doubling)
    call = SplitUses(module=torch.fx.symbolic_trace(lambda w: w), inputs=[], sources=(0, 0)).followed(compiled)
    for each in (call, state_of(call).restore("g0")):
        assert torch.equal(each(torch.ones(2)), torch.full((2,), 3.0))
