import dataclasses
from collections.abc import Callable

import pytest

from omnicomp.audit import audit, build
from omnicomp.timeline import (
    Attempt,
    Capture,
    Event,
    NearMiss,
    NodePlacement,
    Placement,
    Ran,
    Reason,
    Retreat,
    Subgraph,
    Timeline,
)

FAILED = Reason(code="build_failed", sentence="it does not build")
Events = list[Event]


def subgraph(id: str = "g0.forward.0", lowering: str = "inductor", **fields: object) -> Subgraph:
    return Subgraph(graph="g0", part="forward", subgraph=id, lowering=lowering, **{"nodes": 1, **fields})  # type: ignore[arg-type]


def ran(lowering: str, id: str = "g0.forward.0") -> Ran:
    return Ran(graph="g0", part="forward", subgraph=id, lowering=lowering)


def retreat(
    id: str = "g0.forward.0", source: str = "inductor", target: str = "eager", part: str = "forward"
) -> Retreat:
    return Retreat(graph="g0", part=part, subgraph=id, source_lowering=source, target_lowering=target, reason=FAILED)


def test_summary_of_a_program_with_everything(events: Events) -> None:
    assert build(events).summary() == (
        "omni: 1 graph, 3 subgraphs: inductor 80.0 % of FLOPs, override 10.0 %, eager 10.0 % "
        "(aten.foo.default at model.py:12 and 1 more); attention 1 of 2 sites fused; "
        "1 option not as requested (triton.cudagraphs); 1 retreat; nothing that ran differs from the plan"
    )


def test_nothing_compiled_yet() -> None:
    found = build([])
    assert repr(found) == "omni: nothing was compiled yet; call the compiled function first"
    assert "nothing was compiled yet" in found.to_text()
    assert "nothing was compiled yet" in found.to_html()
    assert found.shares == {}


def test_captured_but_not_built() -> None:
    assert build([Capture(graph="g0")]).summary() == "omni: 1 graph, 0 subgraphs: nothing was built"


def test_nothing_built_between_graph_breaks() -> None:
    reason = Reason(code="graph_break", sentence="a generator")
    broken = [
        NearMiss(graph="g0", name="dynamo", kind="graph_break", node="x", source=f"/m.py:{line}", reason=reason)
        for line in (3, 3, 7)
    ]
    found = build([Capture(graph="g0"), *broken]).summary()
    assert found == "omni: 1 graph, 0 subgraphs: nothing was built; 2 graph breaks (m.py:3 and 1 more)"


def test_planned_but_not_called() -> None:
    found = build([Capture(graph="g0"), subgraph(flops_hint=10)])
    assert found.subgraphs[0].ran is None
    assert found.summary().endswith("nothing ran yet")


def test_shares_add_up_and_a_parent_leaves_out_its_override(events: Events) -> None:
    found = build(events)
    assert sum(found.shares.values()) == pytest.approx(1)
    shares = {row.id: row.share for row in found.subgraphs}
    assert shares["g0.forward.0"] == pytest.approx(0.8)
    assert shares["g0.forward.0/softmax_topk"] == pytest.approx(0.1)
    assert next(row for row in found.subgraphs if row.parent).parent == "g0.forward.0"


@pytest.mark.parametrize("hints", [(0, 0), (-1, 100)])
def test_shares_count_operators_where_flops_are_zero_or_unknown(hints: tuple[int, int]) -> None:
    found = build(
        [
            subgraph(flops_hint=hints[0], nodes=3),
            subgraph("g0.forward.1", "eager", flops_hint=hints[1], nodes=1),
            ran("inductor"),
        ]
    )
    assert found.share_basis == "nodes"
    assert found.shares == {"inductor": 0.75, "eager": 0.25}
    assert "75.0 % of operators" in found.summary()
    assert "Shares count operators" in found.to_text()


def test_a_silent_difference_is_an_error() -> None:
    found = build([subgraph(flops_hint=1), ran("eager")])
    assert found.mismatches == found.subgraphs
    assert found.subgraphs[0].difference == "planned for inductor and ran on eager"
    assert "ERROR: g0.forward.0 was planned for inductor and ran on eager" in found.summary()
    assert "ERROR: differs from the plan" in found.to_text()
    assert 'class="pill bad"' in found.to_html()


def test_a_recorded_retreat_explains_the_difference() -> None:
    found = build([subgraph(flops_hint=1), ran("inductor"), retreat(), ran("eager")])
    (row,) = found.subgraphs
    assert (row.planned, row.expected, row.ran, row.mismatch) == ("inductor", "eager", "eager", False)
    assert found.fallbacks[0].reasons == (FAILED,)


def test_a_retreat_that_did_not_happen_is_an_error() -> None:
    assert build([subgraph(), retreat(), ran("inductor")]).subgraphs[0].mismatch


def test_a_graph_that_retreats_as_a_whole_supersedes_its_subgraphs() -> None:
    found = build(
        [
            Capture(graph="g0", nodes=12),
            subgraph(flops_hint=1000, nodes=12),
            retreat("g0", part=""),
            Attempt(graph="g0", part="", subgraph="g0", lowering="inductor", ok=False, reason=FAILED),
            Ran(graph="g0", part="", subgraph="g0", lowering="eager"),
        ]
    )
    rows = {row.id: row for row in found.subgraphs}
    assert rows["g0.forward.0"].superseded
    assert rows["g0.forward.0"].share is None
    assert found.shares == {"eager": 1.0}
    assert [fallback.subgraph for fallback in found.fallbacks] == ["g0"]
    assert "eager 100.0 % of operators" in found.summary()


def test_a_retreat_from_the_passes_or_of_a_part_is_no_row() -> None:
    found = build(
        [
            Capture(graph="g0"),
            retreat("g0", "passes", "no passes", part=""),
            retreat("g0.forward", "inductor", "inductor"),
            subgraph(flops_hint=1),
            ran("inductor"),
        ]
    )
    assert [row.id for row in found.subgraphs] == ["g0.forward.0"]
    assert not found.subgraphs[0].superseded
    assert "2 retreats" in found.summary()
    assert "passes retreated to no passes" in found.to_text()
    assert "inductor builds it in pieces only" in found.to_text()


def test_rows_are_in_the_order_of_their_numbers(events: Events) -> None:
    assert [row.id for row in build(events).subgraphs] == [
        "g0.forward.0",
        "g0.forward.0/softmax_topk",
        "g0.forward.1",
        "g0.forward.10",
    ]


def test_fallbacks(events: Events) -> None:
    node, row = build(events).fallbacks
    assert (node.node, node.op, node.source, node.ran) == ("foo", "aten.foo.default", "/home/me/model.py:12", None)
    assert [reason.code for reason in node.reasons] == ["no_override", "unsupported_op"]
    assert (row.subgraph, row.ran, row.reasons[0].code) == ("g0.forward.10", True, "build_failed")


def test_a_subgraph_that_was_planned_on_eager_is_not_counted_beside_its_nodes() -> None:
    node = NodePlacement(node="n", op="aten.foo.default", lowering="eager", chain=(FAILED,))
    asked = Attempt(graph="g0", part="forward", subgraph="g0.forward.0", lowering="inductor", ok=False, reason=FAILED)
    placed = Placement(graph="g0", part="forward", nodes={"eager": 1}, declined=(node,))
    found = build([placed, subgraph(lowering="eager"), asked, ran("eager")])
    assert [(fallback.node, fallback.subgraph) for fallback in found.fallbacks] == [("n", "")]


def test_eager_by_choice_is_no_fallback(events: Events) -> None:
    capture = dataclasses.replace(events[0], options={"lowerings": ["eager"]})
    assert build([capture, *events[1:]]).fallbacks == ()


def test_sites(events: Events) -> None:
    sites = build(events).sites
    assert (len(sites.fused), len(sites.near_misses), sites.total) == (1, 1, 2)


def test_little_is_not_shown_as_nothing() -> None:
    found = build([subgraph(flops_hint=10**9), subgraph("g0.forward.1", "eager", flops_hint=1), ran("inductor")])
    assert "inductor > 99.9 % of FLOPs, eager < 0.1 %" in found.summary()


def test_stable_is_equal_for_a_cold_and_a_warm_run(make_events: Callable[..., Events]) -> None:
    cold, warm = build(make_events(cold=True)), build(make_events(cold=False))
    assert cold.stable() == warm.stable()
    assert cold.to_json() != warm.to_json()
    assert "torchinductor_" not in str(cold.stable())


def test_the_same_plan_recorded_again_is_one_row() -> None:
    placement = Placement(graph="g0", part="forward", nodes={"inductor": 1})
    found = build([placement, subgraph(nodes=5), placement, subgraph(nodes=2), ran("inductor")])
    assert [row.nodes for row in found.subgraphs] == [2]


def test_audit_takes_events_and_timelines(events: Events) -> None:
    timeline = Timeline()
    for event in events:
        timeline.append(event)
    assert audit(timeline).summary() == audit(events).summary()
