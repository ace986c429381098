"""What differs between two reports, and that nothing does where only numbers, paths and clocks differ."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import omnicomp
from omnicomp.audit import AuditDiff, build, diff
from omnicomp.audit.diff.compare import compare
from omnicomp.audit.diff.report import KINDS, Measure
from omnicomp.timeline import (
    Capture,
    Event,
    Memory,
    NearMiss,
    NodePlacement,
    Option,
    PassRun,
    Placement,
    Ran,
    Reason,
    Retreat,
    Rewrite,
    Stage,
    Subgraph,
    Verification,
)

HOSTILE = "<script>alert(1)</script>"
Events = list[Event]


def changed(events: Events, *kinds: type[Event], keep: Callable[[Any], bool] = lambda _: True, **values: Any) -> Events:
    """The events with fields of some types replaced."""
    return [
        dataclasses.replace(event, **values) if isinstance(event, kinds) and keep(event) else event for event in events
    ]


def kinds(found: AuditDiff) -> dict[str, int]:
    return {kind: sum(change.count for change in found.of_kind(kind)) for kind in KINDS if any(found.of_kind(kind))}


def topk(layer: int) -> NodePlacement:
    reason = Reason(code="unsupported_op", by="inductor", sentence="no", node=f"topk_{layer}", lever="write one")
    return NodePlacement(
        node=f"topk_{layer}",
        op="aten.topk.default",
        lowering="eager",
        module=f"layers.{layer}.attn",
        source=f"/m.py:{layer}",
        chain=(reason,),
    )


def placed(events: Events, *more: NodePlacement) -> Events:
    (placement,) = (event for event in events if isinstance(event, Placement))
    return changed(events, Placement, declined=(*placement.declined, *more))


def with_graph(events: Events, id: str) -> Events:
    """The events as those of a graph of another number."""

    def renamed(event: Event) -> Event:
        values = {
            name: getattr(event, name).replace("g0", id, 1) for name in ("subgraph", "graph") if hasattr(event, name)
        }
        return dataclasses.replace(event, **values)

    return [renamed(event) for event in events]


def test_nothing_differs_from_itself(events: Events) -> None:
    found = diff(events, events)
    assert not found.changes
    assert not found.differs
    assert found.summary() == "omni: nothing differs"
    assert "Differences" not in found.to_text()


def test_numbers_times_paths_and_caches_make_no_difference(make_events: Callable[..., Events]) -> None:
    cold = [Capture(graph="g0", function="other (/x.py:1)"), *with_graph(make_events(cold=True), "g1")]
    warm = [*with_graph(make_events(cold=False), "g0"), Capture(graph="g1", function="other (/y.py:2)")]
    moved = changed(warm, Rewrite, NearMiss, source="/elsewhere/m.py:99", node="renamed")
    assert diff(cold, moved).changes == ()


def test_verdicts_of_overrides_and_processes_make_none(events: Events) -> None:
    def verified(state: str, pid: int) -> Events:
        name = "g0.forward.0/softmax_topk"
        return [
            *changed(events, Capture, pid=pid, rank=pid, compile_id=str(pid)),
            Verification(graph="g0", part="forward", subgraph=name, name="softmax_topk", state=state),
        ]

    assert diff(verified("right", 1), verified("known", 2)).changes == ()
    assert kinds(diff(verified("known", 1), verified("wrong", 1))) == {"wrong": 1}


def test_what_fell_back_is_named_with_its_reason_and_all_its_places(events: Events) -> None:
    found = diff(events, placed(events, *map(topk, range(12))))
    (change,) = found.changes
    assert (change.kind, change.what, change.part, change.count) == ("fell_back", "aten.topk.default", "forward", 12)
    assert change.places[:2] == ("layers.0.attn", "layers.1.attn")
    assert change.reasons[0].lever == "write one"
    assert found.differs
    assert "layers.2.attn and 9 more" in found.to_markdown()
    assert kinds(diff(placed(events, topk(0)), events)) == {"recovered": 1}


def test_one_more_of_several_places_is_one_change(events: Events) -> None:
    one, other = placed(events, topk(1), topk(1)), placed(events, topk(1), topk(1), topk(1))
    assert kinds(diff(one, other)) == {"fell_back": 1}


def test_a_retreat_is_a_fallback_and_not_a_move_as_well(events: Events) -> None:
    def not_retreated(event: Event) -> bool:
        return not isinstance(event, Retreat)

    before = [event for event in events if not_retreated(event)]
    before = changed(before, Ran, keep=lambda e: e.subgraph == "g0.forward.10", lowering="inductor")
    assert kinds(diff(before, events)) == {"fell_back": 1}
    assert kinds(diff(events, before)) == {"recovered": 1}


def test_a_subgraph_on_another_lowering_moved(events: Events) -> None:
    first = "g0.forward.0"
    after = changed(events, Subgraph, Ran, keep=lambda e: e.subgraph == first, lowering="override")
    (change,) = diff(events, after).changes
    assert (change.kind, change.before, change.after) == ("moved", "inductor", "override")


def test_what_did_not_run_as_planned_is_the_most_urgent(events: Events) -> None:
    after = changed(events, Ran, keep=lambda e: e.subgraph == "g0.forward.0", lowering="tensorrt")
    (change,) = diff(events, after).changes
    assert (change.kind, change.sentence) == (
        "mismatch",
        "a subgraph was planned for inductor and ran on tensorrt",
    )


def test_a_part_that_is_cut_otherwise_is_one_change(events: Events) -> None:
    (row,) = (e for e in events if isinstance(e, Subgraph) and e.subgraph == "g0.forward.10")
    more = [dataclasses.replace(row, subgraph=f"g0.forward.{11 + i}", lowering="eager") for i in range(3)]
    (change,) = diff(events, [*events, *more]).changes
    assert (change.kind, change.sentence) == ("cut", "forward of Model.forward is 6 subgraphs, and was 3 subgraphs")
    assert (change.before, change.after) == (
        "inductor, eager, eager",
        "inductor, eager, eager, eager, eager, eager",
    )


def test_what_stayed_where_it_was_did_not_move_when_its_neighbour_is_gone() -> None:
    def run(*rows: tuple[str, str, str]) -> Events:
        found: Events = [Capture(graph="g0", function="f", fingerprint="1-1")]
        for number, (lowering, module, content) in enumerate(rows):
            id = f"g0.inference.{number}"
            plan = {"lowering": lowering, "nodes": 1, "module": module, "fingerprint": content}
            found.append(Subgraph(graph="g0", part="inference", subgraph=id, **plan))
            found.append(Ran(graph="g0", part="inference", subgraph=id, lowering=lowering))
        return found

    before = run(("inductor", "layers.1", "aa-1"), ("override", "layers.2", "bb-1"), ("inductor", "layers.2", "cc-1"))
    after = run(("inductor", "layers.1", "aa-1"), ("inductor", "layers.2", "dd-1"))
    assert kinds(diff(before, after)) == {"cut": 1}
    moved = run(("inductor", "layers.1", "aa-1"), ("inductor", "layers.2", "bb-1"), ("inductor", "layers.2", "cc-1"))
    assert kinds(diff(before, moved)) == {"moved": 1}


def test_an_override_call_that_is_gone_is_named(events: Events) -> None:
    after = [event for event in events if not str(getattr(event, "subgraph", "")).endswith("/softmax_topk")]
    (change,) = diff(events, after).changes
    assert (change.kind, change.what) == ("disappeared", "override call softmax_topk")


def test_graphs_that_appear_bring_their_fallbacks(events: Events) -> None:
    other = changed(with_graph(events, "g1"), Capture, function="other (/m.py:1)")
    other = changed(other, Subgraph, ops={"aten.sort.default": 3})
    found = diff(events, [*events, *other])
    assert kinds(found) == {"fell_back": 2, "appeared": 1}
    assert kinds(diff([*events, *other], events)) == {"disappeared": 1}


def test_other_sizes_and_other_operators_are_told_apart(events: Events) -> None:
    def of(fingerprint: str, ops: dict[str, int]) -> Events:
        found = changed(events, Capture, fingerprint=fingerprint)
        return changed(found, Subgraph, keep=lambda e: e.subgraph == "g0.forward.0", ops=ops)

    mm = {"aten.mm.default": 10}
    sizes = diff(of("aaaaaaaaaaaa-11111111", mm), of("aaaaaaaaaaaa-22222222", mm))
    assert kinds(sizes) == {"sizes": 1}
    edited = diff(of("aaaaaaaaaaaa-11111111", mm), of("bbbbbbbbbbbb-11111111", {"aten.mm.default": 8, "aten.cos": 1}))
    (change,) = edited.of_kind("edited")
    assert change.sentence == "Model.forward was edited: -2 forward aten.mm.default, +1 forward aten.cos"


def test_a_graph_that_shares_nothing_is_another_graph(events: Events) -> None:
    one = changed(events, Capture, fingerprint="aaaaaaaaaaaa-11111111")
    other = changed(events, Capture, fingerprint="bbbbbbbbbbbb-11111111")
    other = changed(other, Subgraph, ops={"aten.cos.default": 500})
    found = kinds(diff(one, other))
    assert found["appeared"] == found["disappeared"] == 1


def test_a_pass_that_stopped_matching(events: Events) -> None:
    def left_alone(event: Event) -> Event | None:
        if isinstance(event, Rewrite):
            reason = Reason(code="match_ended", by=event.name, sentence="it ended", node="mul")
            return NearMiss(graph="g0", name=event.name, kind=event.kind, node="n", module=event.module, reason=reason)
        return event

    after = [new for event in events if (new := left_alone(event)) is not None]
    found = diff(events, after)
    assert kinds(found) == {"pass_stopped": 1, "near_miss": 1}
    (change,) = found.of_kind("pass_stopped")
    assert change.sentence == "fuse_attention: attention to scaled_dot_product_attention is not rewritten any more"
    assert (change.before, change.after, change.places) == ("1 rewrites", "0 rewrites", ("layers.0.attn",))
    assert kinds(diff(after, events)) == {"pass_started": 1, "near_miss_gone": 1}


def test_a_pass_that_tells_only_how_many(events: Events) -> None:
    def counted(count: int) -> Events:
        return [*events, PassRun(graph="g0", name="fold", rewrites=count)]

    (change,) = diff(counted(3), counted(2)).changes
    assert (change.kind, change.sentence) == ("pass_stopped", "fold rewrites 2 places, and rewrote 3")


def test_options_versions_and_modes(events: Events) -> None:
    def of(torch: str, mode: str, **effective: str) -> Events:
        return changed(events, Capture, versions={"torch": torch}, mode=mode, effective=effective)

    found = diff(
        of("2.13", "default", verify="off", timeline="/a", dtype_sample="<f at 0x1>"),
        of("2.14", "max-autotune", verify="first", timeline="/b", dtype_sample="<f at 0x2>", new_option="1"),
    )
    assert {(c.kind, c.what, c.before, c.after) for c in found.changes} == {
        ("version", "torch", "2.13", "2.14"),
        ("option", "mode", "default", "max-autotune"),
        ("option", "verify", "off", "first"),
    }


def test_an_option_that_lost_its_effect_says_why(events: Events) -> None:
    why = Reason(code="option_ineffective", by="dynamo", sentence="too late", lever="set it before")
    before = changed(events, Capture, options={"freezing": True}, effective={"freezing": "True"})
    after = [*before, Option(graph="g0", key="freezing", requested="True", effective="False", reason=why)]
    (change,) = diff(before, after).changes
    assert (change.what, change.before, change.after, change.reasons) == ("freezing", "True", "False", (why,))


def test_the_name_of_a_machine_is_told_and_is_no_difference(events: Events) -> None:
    one, other = (changed(events, Capture, device_name=name) for name in ("EPYC", "Xeon"))
    found = diff(one, other)
    assert [change.kind for change in found.changes] == ["device"]
    assert not found.differs
    assert "for information" in found.to_text()
    assert diff(one, changed(events, Capture, device="cuda")).differs


def test_a_subgraph_that_was_not_called(events: Events) -> None:
    after = [e for e in events if not (isinstance(e, Ran) and e.subgraph == "g0.forward.1")]
    (change,) = diff(events, after).changes
    assert (change.kind, change.before, change.after) == ("not_called", "was called", "was not called")


def test_a_backward_that_is_not_there(events: Events) -> None:
    more = Subgraph(graph="g0", part="backward", subgraph="g0.backward.0", lowering="inductor", nodes=1, flops_hint=1)
    (change,) = diff([*events, more], events).changes
    assert (change.kind, change.sentence) == ("disappeared", "the backward part of Model.forward is not there any more")


def test_a_graph_that_gave_up_its_passes(events: Events) -> None:
    why = Reason(code="capture_failed", by="passes", sentence="a pass raised")
    gave_up = Retreat(
        graph="g0", part="", subgraph="g0", source_lowering="passes", target_lowering="no passes", reason=why
    )
    (change,) = diff(events, [*events, gave_up]).changes
    assert (change.kind, change.reasons) == ("retreat", (why,))


@pytest.mark.parametrize(("threshold", "differs"), [(None, False), (1.5, False), (0.5, True)])
def test_times_and_memory_differ_beyond_a_threshold_only(
    events: Events, threshold: float | None, differs: bool
) -> None:
    def of(seconds: float, peak: int) -> Events:
        memory = Memory(
            graph="g0", part="forward", subgraph="g0.forward.0", device="cpu", call=0, peak_bytes=peak * 2**20
        )
        return [*events, Stage(graph="g0", stage="autograd", seconds=seconds), memory]

    found = diff(of(1.0, 10), of(2.0, 20), time_threshold=threshold, memory_threshold=threshold)
    assert found.differs == differs
    assert kinds(found) == ({"time": 2, "memory": 1} if differs else {})
    assert {(m.name, m.growth) for m in found.measures} >= {("compile: autograd", 1.0), ("peak memory", 1.0)}
    assert not diff(of(2.0, 20), of(1.0, 10), time_threshold=0.0, memory_threshold=0.0).differs
    assert "+100 %" in found.to_text()


def test_json_has_all_of_it(events: Events) -> None:
    data = json.loads(diff(events, placed(events, topk(0)), time_threshold=0.2).to_json())
    assert list(data) == [
        *("schema", "summary", "differs", "before", "after", "changes", "measures"),
        *("time_threshold", "memory_threshold"),
    ]
    (change,) = data["changes"]
    assert (change["kind"], change["reasons"][0]["code"], change["significant"]) == (
        "fell_back",
        "unsupported_op",
        True,
    )
    assert data["measures"][0]["growth"] == 0.0


MARKDOWN = """\
**omni: 1 difference: fell back 1**

before: omni: 1 graph\\*\\*<br>
after: omni: &lt;b&gt;

| | what differs | where | why |
|---|---|---|---|
| fell back | aten.topk.default runs eager now | forward: layers.0.attn | no. To change this: write one |
"""


def test_markdown_golden(events: Events) -> None:
    found = diff(events, placed(events, topk(0)))
    shown = dataclasses.replace(found, before="omni: 1 graph**", after="omni: <b>", measures=())
    assert shown.to_markdown() == MARKDOWN


def test_names_from_a_model_are_shown_and_not_obeyed(events: Events) -> None:
    node = dataclasses.replace(topk(0), op="[x](http://evil) | `y` @you", module=HOSTILE + "\x1b[2J\nz")
    found = diff(events, placed(events, node))
    text, markdown = found.to_text(), found.to_markdown()
    assert "\x1b" not in text + markdown
    assert "<script>" not in markdown
    assert "[x](" not in markdown.replace("\\[x\\](", "")
    assert "@you" not in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("| fell back")]
    assert [row.count(" | ") for row in rows] == [3]


def test_what_was_measured_is_shown_and_not_obeyed(events: Events) -> None:
    measure = Measure(name="compile: ![x](http://e) @you |\n# head <img>", unit="s", before=1.0, after=2.0)
    found = dataclasses.replace(diff(events, events), measures=(measure,))
    (row,) = [line for line in found.to_markdown().splitlines() if "head" in line]
    assert row.count("|") == 5
    assert not [piece for piece in ("<img", "@you", "[x](", "http://") if piece in row]


def test_text_is_as_wide_as_a_terminal(events: Events) -> None:
    text = str(diff(events, placed(events, *map(topk, range(12)))))
    assert max(map(len, text.splitlines())) <= 120
    (row,) = (line for line in text.splitlines() if line.startswith("fell back "))
    assert [cell.strip() for cell in row.split("|")] == [
        "fell back",
        "aten.topk.default runs eager now",
        "forward: layers.0.attn, layers.1.attn,",
        "no. To change this: write one",
    ]


def test_reports_and_timelines_may_be_mixed(tmp_path: Path, events: Events) -> None:
    found = build(events)
    (tmp_path / "a.json").write_text(found.to_json())
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(event.to_dict()) + "\n" for event in events))
    assert not diff(tmp_path / "a.json", str(tmp_path / "b.jsonl")).changes
    assert compare(found, build(events)).changes == ()
    assert omnicomp.audit.diff is diff  # type: ignore[attr-defined]


def test_every_kind_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "audit.md").read_text()
    assert all(f"`{kind}`" in text for kind in KINDS)
