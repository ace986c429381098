"""Each cause is told once, with all its places, the most urgent first."""

from collections.abc import Callable
from typing import Any

from omnicomp.audit import build
from omnicomp.audit.views.findings import KINDS, counted, findings
from omnicomp.timeline import Attempt, Event, NearMiss, NodePlacement, Placement, Ran, Reason, Retreat, Subgraph


def miss(layer: int, *, code: str = "match_ended", seen: str = "used by mean", kind: str = "attention") -> NearMiss:
    reason = Reason(
        code=code,
        by="attention_fusion",
        sentence=f"softmax_{layer} is also used by mean_{layer}",
        observed=f"{seen}, matmul_{2 * layer + 1}",
        lever="do not use it twice",
        node=f"softmax_{layer} (torch.softmax)",
    )
    module = f"layers.{layer}.attn"
    source = f"/home/me/model.py:{layer}"
    return NearMiss(
        graph="g0",
        name="attention_fusion",
        kind=kind,
        node=f"softmax_{layer}",
        source=source,
        module=module,
        reason=reason,
    )


def test_the_most_urgent_is_first(make_events: Callable[..., list[Event]]) -> None:
    found = findings(build(make_events()))
    assert [one.kind for one in found] == ["fallback", "fallback", "near_miss", "option"]
    assert next(iter(KINDS)) == "mismatch"
    assert counted(found) == "2 fallbacks, 1 near miss, 1 option not as requested"


def test_layers_with_one_cause_are_one() -> None:
    (one,) = findings(build([miss(layer) for layer in range(40)]))
    assert len(one.ids) == 40
    assert one.title == (
        "near miss: attention at model.py:0, model.py:1, model.py:2 and 37 more "
        "in layers.0.attn, layers.1.attn, layers.2.attn and 37 more (40 places)"
    )


def test_causes_that_differ_in_what_was_seen_are_two() -> None:
    assert len(findings(build([miss(0, seen="stride 16"), miss(1, seen="stride 32")]))) == 2


def test_breaks_at_many_lines_are_one() -> None:
    (one,) = findings(build([miss(layer, code="graph_break", kind="graph_break") for layer in range(30)]))
    assert one.title.startswith("graph break at model.py:0, model.py:1, model.py:2 and 27 more")


def test_a_failed_build_is_said_once_as_the_fallback_that_it_led_to() -> None:
    reason = Reason(code="cut_out", by="inductor", sentence="Inductor can't build it", lever="write an override")
    node = NodePlacement(node="digamma", op="aten.digamma.default", lowering="eager", chain=(reason,))
    row: dict[str, Any] = {"graph": "g0", "part": "inference", "subgraph": "g0.inference.1"}
    where: dict[str, Any] = {"graph": "g0", "part": "inference", "subgraph": "g0.inference"}
    events: list[Event] = [
        Retreat(**where, source_lowering="inductor", target_lowering="eager", reason=reason),
        Placement(graph="g0", part="inference", nodes={"eager": 1}, declined=(node,)),
        Subgraph(**row, lowering="eager", nodes=1, refused=("digamma",)),
        Attempt(**row, lowering="inductor", ok=False, reason=reason),
        Ran(**row, lowering="eager"),
    ]
    (one,) = findings(build(events))
    assert one.title == "fallback: aten.digamma.default on eager"


def test_an_operator_that_an_override_refused_is_a_refusal() -> None:
    reason = Reason(
        code="override_refused", by="row_cumsum", sentence="row_cumsum reads rows", lever="call .contiguous()"
    )
    node = NodePlacement(node="cumsum", op="aten.cumsum.default", lowering="inductor", chain=(reason,))
    (one,) = findings(build([Placement(graph="g0", part="inference", nodes={"inductor": 1}, declined=(node,))]))
    assert one.title == "refusal: aten.cumsum.default on inductor"


def test_a_mismatch_is_first_and_never_left_out() -> None:
    row: dict[str, Any] = {"graph": "g0", "part": "inference", "subgraph": "g0.inference.0"}
    made = [Subgraph(**row, lowering="inductor", nodes=1), Ran(**row, lowering="eager"), miss(0)]
    found = findings(build(made))
    assert found[0].title == "not as planned: g0.inference.0 was planned for inductor and ran on eager"
    assert [one.kind for one in found] == ["mismatch", "fallback", "near_miss"]
