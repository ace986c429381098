"""What a budget counts in a report, what it leaves out and why, and what is new beside a baseline."""

import datetime
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnicomp.audit import Audit, build
from omnicomp.audit.gate import judge
from omnicomp.audit.gate.verdict import Fallen, Verdict
from omnicomp.audit.views.jsonform import from_json
from omnicomp.options.acknowledged import Acknowledged, Entry
from omnicomp.options.fallback_limits import FallbackBudget
from omnicomp.options.placement_rules import selects
from omnicomp.timeline import (
    Attempt,
    Candidate,
    Capture,
    Event,
    NodePlacement,
    Placement,
    Ran,
    Reason,
    Retreat,
    Subgraph,
)

Events = list[Event]
NEVER = datetime.date(9999, 1, 1)


def node(name: str, op: str, module: str = "", lowering: str = "eager") -> NodePlacement:
    reason = Reason(code="unsupported_op", by="inductor", sentence=f"no {op}", lever="write an override")
    return NodePlacement(node=name, op=op, lowering=lowering, source="/m.py:3", module=module, chain=(reason,))


def placed(*nodes: NodePlacement, graph: str = "g0", part: str = "inference", **fields: Any) -> Events:
    """A part of one subgraph on Inductor and one on eager, which has half of the work."""
    where: dict[str, Any] = {"graph": graph, "part": part}
    options = fields.pop("options", {})
    ops: dict[str, int] = {}
    for item in nodes:
        ops[item.op] = ops.get(item.op, 0) + 1
    return [
        Capture(graph=graph, function="Model.forward (/m.py:1)", fingerprint="aa-bb", options=options, **fields),
        Placement(**where, nodes={"inductor": 5, "eager": len(nodes)}, declined=nodes),
        Subgraph(**where, subgraph=f"{graph}.{part}.0", lowering="inductor", nodes=5, flops_hint=100),
        Subgraph(
            **where,
            subgraph=f"{graph}.{part}.1",
            lowering="eager",
            nodes=len(nodes),
            ops=ops,
            flops_hint=100,
            refused=tuple(item.node for item in nodes)[:8],
        ),
        # As the record of a part writes it: the reason of a node stands in the attempt, too.
        Attempt(**where, subgraph=f"{graph}.{part}.1", lowering="inductor", ok=False, reason=nodes[0].chain[0]),
        Attempt(**where, subgraph=f"{graph}.{part}.1", lowering="eager", ok=True, selected=True),
        Ran(**where, subgraph=f"{graph}.{part}.0", lowering="inductor"),
        Ran(**where, subgraph=f"{graph}.{part}.1", lowering="eager"),
    ]


TOPK, SORT = node("topk", "aten.topk.default", "layers.0.router"), node("sort", "aten.sort.default", "layers.1")


def judged(events: Iterable[Event], **fields: Any) -> Verdict:
    names = ("max_nodes", "max_flops_share", "allow")
    budget = FallbackBudget(**{name: fields.pop(name) for name in names if name in fields})
    return judge(build(events), budget, **fields)


def states(verdict: Verdict) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in verdict.fallen:
        found[item.state] = found.get(item.state, 0) + item.nodes
    return found


def test_a_refused_node_counts_once_with_the_share_of_its_subgraph() -> None:
    verdict = judged(placed(TOPK, SORT))
    assert (verdict.nodes, verdict.share, verdict.basis, verdict.over) == (2, 0.5, "flops", True)
    assert [(item.node, item.subgraph, item.source) for item in verdict.counted] == [
        ("topk", "g0.inference.1", "/m.py:3"),
        ("sort", "g0.inference.1", "/m.py:3"),
    ]


def test_a_refused_node_without_a_name_counts_too() -> None:
    """A report that another program wrote may lack it."""
    verdict = judged(placed(node("", "aten.foo.default")))
    assert verdict.nodes == 1
    assert verdict.fallen[0].ops == {"aten.foo.default": 1}


@pytest.mark.parametrize(
    ("fields", "over"),
    [
        ({}, True),
        ({"max_nodes": 1}, True),
        ({"max_nodes": 2}, False),
        ({"max_nodes": None}, False),
        ({"max_nodes": None, "max_flops_share": 0.49}, True),
        ({"max_nodes": None, "max_flops_share": 0.5}, False),
        ({"max_nodes": 5, "max_flops_share": 0.1}, True),
    ],
)
def test_each_bound_is_kept(fields: dict[str, Any], over: bool) -> None:
    assert judged(placed(TOPK, SORT), **fields).over == over


@pytest.mark.parametrize(
    ("allow", "left"),
    [
        (["aten.topk"], 1),
        (["aten.topk.default"], 1),
        (["aten.*"], 0),
        (["layers.0"], 1),
        (["layers.*"], 0),
        (["layers.0.*"], 1),
        (["router"], 1),
        (["sort"], 1),
        (["g0.inference.1"], 0),
        (["g0.inference"], 0),
        (["Model.forward"], 0),
        (["*"], 0),
        (["aten.top"], 2),
        (["layers"], 0),
        (["layer"], 2),
        (["g1"], 2),
    ],
)
def test_selectors(allow: list[str], left: int) -> None:
    verdict = judged(placed(TOPK, SORT), allow=tuple(allow))
    assert verdict.nodes == left
    assert {item.why for item in verdict.fallen if item.state == "allowed"} == (set(allow) if left < 2 else set())


def test_all_modules_of_a_subgraph_must_be_within_what_is_selected() -> None:
    assert selects("layers.0", "", modules=("layers.0.a", "m.layers.0"))
    assert not selects("layers.0", "", modules=("layers.0", "layers.1"))
    assert not selects("layers.0", "", modules=())


def moved(**fields: Any) -> Events:
    """A subgraph of two operators that was planned on Inductor and moved to eager."""
    where: dict[str, Any] = {"graph": "g0", "part": "inference", "subgraph": "g0.inference.0"}
    reason = Reason(code="call_failed", by="inductor", sentence="a call raised", source="/m.py:7")
    ops = {"aten.mm.default": 2, "aten.topk.default": 1}
    return [
        Capture(graph="g0", fingerprint="aa-bb"),
        Placement(graph="g0", part="inference", nodes={"inductor": 3}),
        Subgraph(**where, lowering="inductor", nodes=3, ops=ops, flops_hint=100, **fields),
        Retreat(**where, source_lowering="inductor", target_lowering="eager", reason=reason),
        Ran(**where, lowering="eager"),
    ]


def test_a_subgraph_that_moved_counts_with_all_of_its_operators() -> None:
    verdict = judged(moved())
    assert (verdict.nodes, verdict.share) == (3, 1.0)
    (item,) = verdict.counted
    assert (item.subgraph, item.name, item.source) == ("g0.inference.0", "aten.mm.default", "/m.py:7")


def test_of_a_subgraph_only_the_operators_that_are_allowed_are_left_out() -> None:
    verdict = judged(moved(), allow=("aten.mm",))
    assert [(item.state, item.ops, item.nodes) for item in verdict.fallen] == [
        ("counts", {"aten.topk.default": 1}, 1),
        ("allowed", {"aten.mm.default": 2}, 2),
    ]
    assert verdict.share == 1.0
    assert judged(moved(), allow=("aten.mm", "aten.topk")).share == 0.0


def test_a_graph_that_retreats_as_a_whole_counts_in_place_of_its_parts() -> None:
    reason = Reason(code="capture_failed", sentence="the compiler raised")
    retreat = Retreat(
        graph="g0", part="", subgraph="g0", source_lowering="inductor", target_lowering="eager", reason=reason
    )
    verdict = judged([*placed(TOPK, nodes=7), retreat])
    assert [(item.subgraph, item.nodes) for item in verdict.counted] == [("g0", 7)]
    assert verdict.share == 1.0


@pytest.mark.parametrize("lowerings", [["eager"], ["override", "eager"]])
def test_a_policy_without_a_compiler_is_a_choice(lowerings: list[str]) -> None:
    events = [event for event in placed(TOPK, options={"lowerings": lowerings}) if not isinstance(event, Attempt)]
    events = [Placement(graph="g0", part="inference", nodes={}) if isinstance(e, Placement) else e for e in events]
    verdict = judged(events)
    assert verdict.nodes == 0
    assert set(states(verdict)) <= {"chosen"}


def test_eager_that_was_measured_to_be_the_fastest_is_a_choice() -> None:
    events = [event for event in placed(TOPK) if not isinstance(event, (Attempt, Placement))]
    assert judged(events).nodes == 1
    chosen = Candidate(graph="g0", candidate="eager", lowerings=("eager",), selected=True)
    assert states(judged([*events, chosen])) == {"chosen": 1}


def test_what_is_acknowledged_does_not_count_and_what_is_about_nothing_is_told() -> None:
    entries = (
        Entry(selector="aten.topk", reason="no kernel", expires=NEVER),
        Entry(selector="aten.gone", reason="long ago", expires=NEVER),
    )
    verdict = judged(placed(TOPK, SORT), acknowledged=Acknowledged(entries=entries, problems=("expired",)))
    assert states(verdict) == {"counts": 1, "acknowledged": 1}
    assert verdict.fallen[1].why == "no kernel (until 9999-01-01)"
    assert verdict.notes == ("expired", "the acknowledgement of aten.gone is about nothing in this report")


def test_an_acknowledgement_of_what_does_not_count_anyway_is_about_something() -> None:
    acknowledged = Acknowledged(entries=(Entry(selector="aten.topk", reason="no kernel", expires=NEVER),))
    for fields in ({"baseline": [build(placed(TOPK))]}, {"allow": ("layers.0",)}):
        verdict = judged(placed(TOPK), acknowledged=acknowledged, **fields)
        assert verdict.notes == ()
        assert "acknowledged" not in states(verdict)


def test_with_a_baseline_only_what_is_new_counts() -> None:
    before = build(placed(TOPK))
    verdict = judged(placed(TOPK, SORT), baseline=[before])
    assert states(verdict) == {"counts": 1, "known": 1}
    assert [item.name for item in verdict.counted] == ["aten.sort.default"]
    assert not judged(placed(TOPK), baseline=[before]).over


def test_one_more_of_the_same_is_new() -> None:
    before = build(placed(TOPK))
    again = node("topk_1", "aten.topk.default", "layers.0.router")
    assert states(judged(placed(TOPK, again), baseline=[before])) == {"counts": 1, "known": 1}


def test_a_baseline_is_recognised_whatever_the_number_of_the_graph() -> None:
    before = build(placed(TOPK, graph="g5"))
    assert not judged(placed(TOPK), baseline=[before]).over
    # The same program once more, for other sizes.
    twice = [*placed(TOPK), *placed(TOPK, graph="g1")]
    assert not judged(twice, baseline=[before]).over


def test_a_fallback_in_a_graph_that_the_baseline_does_not_have_is_new() -> None:
    events = [Capture(graph="g0", function="Other.forward (/m.py:9)"), *placed(TOPK)[1:]]
    assert judged(events, baseline=[build(placed(TOPK))]).nodes == 1


def test_several_baselines_do_not_add_up() -> None:
    before = build(placed(TOPK))
    again = node("topk_1", "aten.topk.default", "layers.0.router")
    assert judged(placed(TOPK, again), baseline=[before, before]).nodes == 1


def test_a_report_read_from_json_is_judged_alike(make_events: Callable[..., Events]) -> None:
    audit = build(make_events())
    again = from_json(audit.to_json(), "r.json")
    assert judge(again).to_dict() == judge(audit).to_dict()
    assert json.loads(json.dumps(judge(audit).to_dict()))["over"] is True


def test_the_sample_counts_what_the_model_calls_a_fallback(make_events: Callable[..., Events]) -> None:
    audit = build(make_events())
    verdict = judge(audit)
    assert {(item.node or item.subgraph) for item in verdict.fallen} == {"foo", "g0.forward.10"}
    assert verdict.nodes == 1 + 8
    assert verdict.share == pytest.approx(0.1)


OPS = st.sampled_from(["aten.a.default", "aten.b.default", "aten.c.x"])
NODES = st.lists(
    st.builds(node, st.text("xyz", min_size=1, max_size=3), OPS, st.sampled_from(["", "l.0", "l.1"])),
    min_size=1,
    max_size=12,
    unique_by=lambda item: item.node,
)


@given(nodes=NODES, allow=st.lists(st.sampled_from(["aten.a", "l.0", "l", "aten.*", "x"]), max_size=2))
def test_everything_that_fell_back_has_one_state_and_allowing_more_counts_less(
    nodes: list[NodePlacement], allow: list[str]
) -> None:
    audit = build(placed(*nodes))
    free, bound = judge(audit), judge(audit, FallbackBudget(allow=tuple(allow)))
    assert free.nodes == len(nodes) == len(audit.fallbacks) - sum(bool(f.subgraph) for f in audit.fallbacks)
    assert sum(item.nodes for item in bound.fallen) == len(nodes)
    assert bound.nodes <= free.nodes
    assert 0 <= bound.share <= free.share <= 1
    assert (bound.share == 0) == (bound.nodes == 0)
    # Beside itself nothing is new.
    assert judge(audit, baseline=[audit]).nodes == 0


def test_an_empty_report_is_within_any_budget() -> None:
    verdict = judge(Audit())
    assert not verdict.over
    assert "no graph was compiled" in verdict.summary()


def test_names() -> None:
    assert Fallen(state="counts", graph="g0", part="", subgraph="g0.forward.1").name == "g0.forward.1"
    assert Fallen(state="counts", graph="g0", part="").name == "g0"
