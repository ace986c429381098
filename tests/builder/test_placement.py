"""Placement asks the lowerings in order, and cuts keep the program's order."""

import dataclasses

import fake_engines as fake
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from omnicomp.builder.partition import extract, gather_getitems, stitching
from omnicomp.builder.placement import place, taken_together
from omnicomp.devices import resolve_device
from omnicomp.lowerings import EagerLowering, GraphRecord, LoweringContext, in_order
from omnicomp.lowerings.engines.program import EngineLowering
from omnicomp.options.policy import Policy, parse
from omnicomp.timeline import Reason, Timeline

CUT = Reason(code="cut_out", by="inductor", sentence="planted")


def context(policy: Policy | None = None) -> LoweringContext:
    return LoweringContext(
        graph=GraphRecord(id="g0"),
        part="inference",
        device=resolve_device("cpu"),
        policy=policy or Policy(),
        timeline=Timeline(),
    )


def trace(function, *args) -> GraphModule:
    module = make_fx(function, tracing_mode="fake")(*args)
    output = next(iter(reversed(module.graph.nodes)))
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
        module.recompile()
    return module


def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.sort(x.sin())
    return (values * 2).cos() + 1, indices + x.long()


def test_everything_on_inductor_is_one_whole_run() -> None:
    plan = place(trace(program, torch.rand(4)), in_order(Policy().lowerings, ("inductor", "eager")), context(), {})
    assert plan.whole
    assert set(plan.counts) == {"inductor"}
    assert plan.declined == ()


def test_with_eagers_numerics_a_part_stays_whole_and_tells_what_eager_computes() -> None:
    policy = parse(None, {"numerics": "eager"})
    plan = place(trace(program, torch.rand(4)), in_order(policy.lowerings, ("inductor", "eager")), context(policy), {})
    assert plan.whole
    assert [node.op.split(".")[1] for node in plan.declined] == ["sin", "sort", "cos", "_to_copy"]
    assert {(node.lowering, node.chain[-1].code) for node in plan.declined} == {("eager", "not_exact")}
    assert plan.counts["eager"] == 6  # with the two results of `sort`


def test_a_cut_node_and_its_getitems_leave_together() -> None:
    module = trace(program, torch.rand(4))
    plan = place(module, in_order(Policy().lowerings, ("inductor", "eager")), context(), {"sort": CUT})
    assert [run.lowering for run in plan.runs] == ["inductor", "eager", "inductor"]
    assert {node.name for node in plan.runs[1].nodes} == {"sort", "getitem", "getitem_1"}
    (declined,) = plan.declined
    assert (declined.node, declined.lowering, declined.chain) == ("sort", "eager", (CUT,))


def test_the_policy_decides() -> None:
    module = trace(program, torch.rand(4))
    eager = Policy(lowerings=("eager",))
    plan = place(module, in_order(eager.lowerings, ("inductor", "eager")), context(eager), {})
    assert [run.lowering for run in plan.runs] == ["eager"]
    assert plan.declined == (), "what the user chose is no refusal"


def test_a_boundary_cuts_between_two_nodes() -> None:
    module = trace(program, torch.rand(4))
    lowerings = in_order(Policy().lowerings, ("inductor", "eager"))
    plan = place(module, lowerings, context(), {}, frozenset({"mul"}))
    assert [run.lowering for run in plan.runs] == ["inductor", "inductor"]
    assert plan.runs[1].nodes[0].name == "mul"


def test_stitched_pieces_compute_what_the_graph_computes() -> None:
    x = torch.rand(6)
    module = trace(program, x)
    gather_getitems(module)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    for width in (1, 2, 3, len(nodes)):
        chunks = [nodes[i : i + width] for i in range(0, len(nodes), width)]
        if any(node.name == "sort" for chunk in chunks for node in chunk[-1:]):
            continue  # a getitem must not be parted from its producer
        pieces = [extract(module, chunk) for chunk in chunks]
        calls = [lambda inputs, piece=piece: piece.module(*inputs) for piece in pieces]
        inputs = [x]
        result = stitching(module, pieces).bind(calls)(inputs)
        assert inputs == [], "the boxed convention clears the inputs"
        torch.testing.assert_close(tuple(result), program(x))


def test_mutations_keep_their_place() -> None:
    def mutating(x: torch.Tensor) -> torch.Tensor:
        before = x + 1
        torch.ops.aten.copy_(x, before * 2)
        return before.sin() + x

    module = trace(mutating, torch.rand(3))
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    pieces = [extract(module, [node]) for node in nodes]
    calls = [lambda inputs, piece=piece: piece.module(*inputs) for piece in pieces]
    x = torch.rand(3)
    expected_x = x.clone()
    expected = mutating(expected_x)
    (result,) = stitching(module, pieces).bind(calls)([x])
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(x, expected_x)


def nodes_of(function: object) -> list[torch.fx.Node]:
    module = make_fx(function, tracing_mode="fake")(torch.randn(4, 6))  # type: ignore[arg-type]
    return [node for node in module.graph.nodes if node.op == "call_function"]


def of_fake(**values: object) -> LoweringContext:
    policy = dataclasses.replace(parse(None, {}), engines={"fake": values})
    return LoweringContext(
        graph=GraphRecord(id="g0"),
        part="inference",
        device=resolve_device("cpu"),
        policy=policy,
        timeline=Timeline(),
    )


NODES = nodes_of(lambda x: (x.exp().sin(), x.cos().exp(), (x * 2).sin()))


def test_other_lowerings_take_any_company() -> None:
    assert taken_together(EagerLowering(), NODES, of_fake(strict=True, smallest=100)) == (
        frozenset(),
        None,
    )


def test_an_engine_takes_what_it_accepts() -> None:
    assert taken_together(EngineLowering(fake.Fake()), NODES, of_fake()) == (frozenset(), None)
    boundaries, reason = taken_together(EngineLowering(fake.Fake()), NODES, of_fake(smallest=7))
    assert boundaries == frozenset()
    assert reason is not None
    assert (reason.code, reason.by) == ("cluster_refused", "fake")
    assert reason.sentence == "it has 6 operators, and the smallest subgraph has 7"


def test_strict_cuts_come_before_the_rest() -> None:
    boundaries, reason = taken_together(EngineLowering(fake.Fake()), NODES, of_fake(strict=True, smallest=3))
    assert boundaries == {NODES[2].name, NODES[4].name}
    assert reason is None
    # Each of the parts is asked again, and is too small then.
    _, reason = taken_together(EngineLowering(fake.Fake()), NODES[:2], of_fake(strict=True, smallest=3))
    assert reason is not None


def test_a_value_that_is_read_later_holds_a_run_together() -> None:
    nodes = nodes_of(lambda x: (x.exp() + x.sin()) * x.cos())
    assert [node.name for node in nodes] == ["exp", "sin", "add", "cos", "mul"]
    assert taken_together(EngineLowering(fake.Fake()), nodes, of_fake(strict=True)) == (frozenset(), None)
    assert taken_together(EngineLowering(fake.Fake()), nodes[:2], of_fake(strict=True))[0] == {"sin"}
    assert taken_together(EngineLowering(fake.Fake()), nodes[:1], of_fake(strict=True)) == (
        frozenset(),
        None,
    )
