import operator

import pytest
import torch
from torch.fx import GraphModule, symbolic_trace
from torch.nn.attention.flex_attention import flex_attention

from omnicomp._torch.fx import copy_module, describe
from omnicomp.analysis.nodes import SAME_VALUE, insert_call
from omnicomp.passes.changes import Change, UncutError, changes


def graphs(function, *inputs: torch.Tensor) -> tuple[GraphModule, GraphModule]:
    """A graph with fake values, and a copy of it to be changed."""
    module = symbolic_trace(function)
    describe(module, inputs)
    return module, copy_module(module)


def doubled(module: GraphModule) -> None:
    """Products with 2 become sums."""
    for node in list(module.graph.find_nodes(op="call_function", target=operator.mul)):
        if node.args[1] == 2:
            node.replace_all_uses_with(insert_call(node, torch.add, (node.args[0], node.args[0])))
            module.graph.erase_node(node)
    module.recompile()


def inputs_of(change: Change) -> list[str]:
    names = [[node.name for node in side.graph.find_nodes(op="placeholder")] for side in (change.before, change.after)]
    assert names[0] == names[1]
    return names[0]


def same(change: Change) -> bool:
    values = [
        torch.randn(node.meta["example_value"].shape) for node in change.before.graph.find_nodes(op="placeholder")
    ]
    return all(map(torch.equal, change.before(*values), change.after(*values)))


def test_nothing_changed_is_no_change():
    before, after = graphs(lambda x: (x * 2).sin(), torch.ones(3))
    assert not list(changes(before, after))


def test_each_place_is_a_change_of_its_own_with_what_it_reads():
    before, after = graphs(lambda x: ((x.exp() * 2).sin() * 2).cos(), torch.ones(3))
    doubled(after)
    found = list(changes(before, after))
    assert [inputs_of(change) for change in found] == [["exp"], ["sin"]]
    assert all(map(same, found))
    assert [len(change.before.graph.nodes) for change in found] == [3, 3]


def test_a_mask_that_one_side_reads_alone_is_a_part_of_that_side():
    def attention(x, seen):
        mask = torch.where(seen[:, None] & (torch.arange(4) <= torch.arange(4)[:, None]), 0.0, -1e9)
        y = x.cos()
        return torch.softmax(x.sin() @ y.mT + mask, -1) @ y, mask

    before, after = graphs(attention, torch.ones(1, 4, 4), torch.ones(1, 4, dtype=torch.bool))
    (softmax,) = after.graph.find_nodes(op="call_function", target=torch.softmax)
    (product,) = (node for node in softmax.users if node.target is operator.matmul)
    nodes = {node.name: node for node in after.graph.nodes}
    sine, cosine = nodes["sin"], nodes["cos"]
    fused = insert_call(product, torch.nn.functional.scaled_dot_product_attention, (sine, cosine, cosine))
    fused.kwargs = {"is_causal": True, "scale": 1.0}
    product.replace_all_uses_with(fused)
    after.graph.eliminate_dead_code()
    (change,) = changes(before, after)
    assert inputs_of(change) == ["seen", "cos", "sin"]
    assert sorted(inputs_of(change.wider())) == ["seen", "x"]


def test_what_a_node_reads_elsewhere_now_is_claimed_to_be_equal():
    before, after = graphs(lambda x: x.sin() + x.cos(), torch.ones(3))
    nodes = {node.name: node for node in after.graph.nodes}
    nodes["add"].replace_input_with(nodes["cos"], nodes["sin"])
    (change,) = changes(before, after)
    assert inputs_of(change) == ["x"]
    assert not same(change)
    assert change.wider() is None


def test_equal_changes_are_cut_equally_wherever_their_nodes_and_inputs_were_made():
    def layers(x):
        early = x.cos()
        first = (x.sin() * 2) * early.exp()
        late = (x + 1).sin()
        return first + (late * 2) * (first.cos()).exp()

    before, after = graphs(layers, torch.ones(3))
    for node in list(after.graph.find_nodes(op="call_function", target=operator.mul)):
        if node.args[1] != 2:
            new = insert_call(
                node, torch.mul, (insert_call(node, torch.add, (node.args[0].args[0],) * 2), node.args[1])
            )
            node.replace_all_uses_with(new)
    after.graph.eliminate_dead_code()
    (first, second) = changes(before, after)
    assert all(map(same, (first, second)))

    def told(module: GraphModule) -> list[tuple[str, str, list[int]]]:
        places = {node: place for place, node in enumerate(module.graph.nodes)}
        called = [node for node in module.graph.nodes if node.op != "placeholder"]
        return [(node.op, str(node.target), [places[read] for read in node.all_input_nodes]) for node in called]

    assert told(first.before) == told(second.before)
    assert told(first.after) == told(second.after)


def test_another_operator_of_the_same_name_is_a_change():
    before, after = graphs(lambda x: torch.sin(x) + 1, torch.ones(3))
    (node,) = after.graph.find_nodes(op="call_function", target=torch.sin)
    node.target = torch.cos
    after.recompile()
    (change,) = changes(before, after)
    assert inputs_of(change) == ["x"]
    assert not same(change)


def become(node, target, *args) -> None:
    """Give a node another operator, as a pass that says that its value stays."""
    node.target, node.args, node.meta = target, args, {**node.meta, SAME_VALUE: True}


def chained() -> tuple[GraphModule, GraphModule]:
    """Two operators in a row that a pass replaced where they are."""
    before, after = graphs(lambda x: ((x.exp() * 2).mul(3)).cos(), torch.ones(3))
    doubled, tripled = (
        after.graph.find_nodes(op=op, target=t)[0]
        for op, t in (("call_function", operator.mul), ("call_method", "mul"))
    )
    become(doubled, torch.add, doubled.args[0], doubled.args[0])
    tripled.op = "call_function"
    become(tripled, torch.mul, 3, doubled)
    after.recompile()
    return before, after


def test_nodes_that_keep_their_value_are_compared_one_by_one():
    found = list(changes(*chained()))
    assert [(inputs_of(change), change.at.name) for change in found] == [(["exp"], "mul"), (["mul"], "mul_1")]
    assert all(map(same, found))
    wider = found[1].wider()
    assert wider is not None
    assert inputs_of(wider) == ["exp"]
    assert same(wider)


def test_a_node_that_did_not_keep_its_value_is_undone_alone():
    before, after = chained()
    node = next(node for node in after.graph.nodes if node.target is torch.add)
    node.args = (node.args[0], 1)
    after.recompile()
    wrong = [change for change in changes(before, after) if not same(change)]
    assert [change.at.name for change in wrong] == ["mul"]
    wrong[0].undo()
    after.graph.lint()
    after.recompile()
    x = torch.randn(3)
    assert torch.equal(after(x), before(x))
    assert [node.target for node in after.graph.nodes if node.name == "mul"] == [operator.mul]


def test_tuples_are_no_inputs():
    def function(x):
        left, right = torch.unbind(x)
        return (left * 2) + right

    before, after = graphs(function, torch.ones(2, 3))
    doubled(after)
    (change,) = changes(before, after)
    assert inputs_of(change) == ["getitem"]


def test_a_change_beside_a_write_to_what_it_reads_is_the_whole_graph():
    def function(x):
        y = x * 2
        x.add_(1)
        return y

    before, after = graphs(function, torch.ones(3))
    doubled(after)
    (change,) = changes(before, after)
    assert change.whole
    assert change.before is before


def test_a_write_to_other_memory_is_no_obstacle():
    def function(x, y):
        z = x * 2
        y.add_(1)
        return z

    before, after = graphs(function, torch.ones(3), torch.ones(3))
    doubled(after)
    (change,) = changes(before, after)
    assert not change.whole


def writing(function) -> tuple[GraphModule, GraphModule]:
    """The graphs of a function of two vectors, in which the first difference is a write in place."""
    module = symbolic_trace(function)
    module.graph.find_nodes(op="call_function", target=operator.sub)[0].target = operator.isub
    module.recompile()
    describe(module, (torch.ones(3), torch.ones(3)))
    return module, copy_module(module)


@pytest.mark.parametrize("read", ["sub", "cos"])
def test_a_write_to_a_value_of_the_graphs_own_is_a_value_of_its_own(read: str):
    """As DeBERTa writes to its scores; a pass that reads them as they were before is seen."""
    before, after = writing(lambda x, y: ((x.cos() - y.exp()) * 2).sin())
    nodes = {node.name: node for node in after.graph.nodes}
    early = insert_call(nodes["sub"], torch.add, (nodes["cos"], nodes["cos"]))
    if read == "cos":
        nodes["sin"].replace_input_with(nodes["mul"], early)
    else:
        after.graph.erase_node(early)
        doubled(after)
    (change,) = changes(before, after)
    assert not change.whole
    assert sorted(inputs_of(change)) == (["sub"] if read == "sub" else ["cos", "y"])
    assert same(change) is (read == "sub")


@pytest.mark.parametrize("how", ["input", "view", "read behind", "dtype"])
def test_a_write_to_what_others_read_is_an_obstacle(how: str):
    def function(x, y):
        score = x if how == "input" else x.cos()
        other = score.view(3, 1) if how == "view" else score
        left = ((score - (y.double() if how == "dtype" else y)) * 2).sin()
        return left + other.sum() if how in ("view", "read behind") else left

    before, after = writing(function)
    doubled(after)
    (change,) = changes(before, after)
    assert change.whole


def test_what_one_side_reads_alone_is_followed_to_what_both_read():
    """As scores that stay in the graph for their shape."""

    def function(x, y):
        scores = x.sin() @ y.cos()
        return scores.softmax(-1), y.exp().reshape_as(scores)

    before, after = graphs(function, torch.ones(3, 3), torch.ones(3, 3))
    nodes = {node.name: node for node in after.graph.nodes}
    fused = insert_call(nodes["softmax"], torch.matmul, (nodes["sin"], nodes["cos"]))
    nodes["softmax"].replace_input_with(nodes["matmul"], fused)
    (change,) = changes(before, after)
    assert sorted(inputs_of(change)) == ["cos", "sin"]
    assert same(change)


def test_random_draws_are_compared_with_all_that_is_drawn():
    before, after = graphs(lambda x: torch.rand_like(x) * 2, torch.ones(3))
    (node,) = after.graph.find_nodes(op="call_function", target=torch.rand_like)
    node.replace_all_uses_with(insert_call(node, torch.randn_like, node.args))
    after.graph.erase_node(node)
    (change,) = changes(before, after)
    assert change.whole


def test_flex_attention_is_cut_as_what_has_no_effect():
    found: list[GraphModule] = []
    call = torch.compile(lambda x: flex_attention(x, x, x) * 2, backend=lambda gm, _: found.append(gm) or gm)
    call(torch.randn(1, 1, 4, 16))
    before, after = found[0], copy_module(found[0])
    (node,) = after.graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention)
    node.replace_all_uses_with(insert_call(node, node.target, (*node.args[:5], 0.5, *node.args[6:]), node.kwargs))
    after.graph.erase_node(node)
    (change,) = changes(before, after)
    assert not change.whole


def test_another_number_of_outputs_is_not_cut():
    before, after = graphs(lambda x: (x.sin(), x.cos()), torch.ones(3))
    output = next(iter(reversed(after.graph.nodes)))
    output.args = (output.args[0][:1],)
    with pytest.raises(UncutError, match="how many values"):
        list(changes(before, after))
