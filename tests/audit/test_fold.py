"""The report is folded from events, of which none is held on to beyond what the report shows."""

import dataclasses
import gc
import weakref
from collections.abc import Iterator

import pytest

from omnicomp.audit import Audit, fold
from omnicomp.timeline import (
    Boundary,
    Capture,
    Event,
    Memory,
    NearMiss,
    NodePlacement,
    Option,
    Outcome,
    PassRun,
    Placement,
    Ran,
    Reason,
    Retreat,
    Rewrite,
    Stage,
    Subgraph,
    Timing,
    Verification,
)

REFUSED = Reason(code="unsupported_op", by="inductor", sentence="no", lever="write one")


def plan(index: int, lowering: str, **fields: object) -> Subgraph:
    return Subgraph(
        graph="g0",
        part="forward",
        subgraph=f"g0.forward.{index}",
        lowering=lowering,
        nodes=1,
        flops_hint=10,
        bytes_hint=30,
        **fields,  # type: ignore[arg-type]
    )


def boundary(source: int, target: int, hint: int = 8) -> Boundary:
    return Boundary(
        graph="g0",
        part="forward",
        source=f"g0.forward.{source}",
        target=f"g0.forward.{target}",
        tensors=1,
        bytes_hint=hint,
    )


def cut(between: str = "eager", *more: Event) -> Audit:
    declined = (NodePlacement(node="topk", op="aten.topk.default", lowering="eager", chain=(REFUSED,)),)
    return fold(
        [
            Capture(graph="g0"),
            Placement(graph="g0", part="forward", nodes={"inductor": 2, "eager": 1}, declined=declined),
            plan(0, "inductor"),
            plan(1, between, refused=("topk",)),
            plan(2, "inductor"),
            *more,
        ]
    )


def test_a_node_that_keeps_two_neighbours_apart_is_named_with_what_it_costs() -> None:
    found = cut("eager", boundary(0, 1), boundary(1, 2), boundary(0, 2))
    (part,) = found.graphs[0].parts
    (merge,) = part.merges
    assert merge.sentence == "if topk could run on inductor, g0.forward.0 and g0.forward.2 would be one subgraph"
    assert (merge.tensors, merge.bytes_hint, merge.reasons) == (3, 24, (REFUSED,))
    assert len(part.boundaries) == 3


def test_the_bytes_of_a_merge_are_unknown_if_those_of_a_boundary_are() -> None:
    assert cut("eager", boundary(0, 1, -1)).graphs[0].parts[0].merges[0].bytes_hint == -1


def test_neighbours_of_one_lowering_without_a_refused_node_get_no_advice() -> None:
    assert cut("inductor").graphs[0].parts[0].merges == ()


def test_a_part_that_is_placed_again_has_the_boundaries_of_its_last_placement() -> None:
    again = Placement(graph="g0", part="forward", nodes={})
    assert cut("eager", boundary(0, 1), again, boundary(1, 2)).graphs[0].parts[0].boundaries == (boundary(1, 2),)


def test_memory_becomes_one_figure() -> None:
    def sample(call: int, before: int, after: int, peak: int) -> Memory:
        return Memory(
            graph="g0",
            part="forward",
            subgraph="g0.forward.0",
            device="cuda",
            call=call,
            before_bytes=before,
            after_bytes=after,
            peak_bytes=peak,
        )

    row = cut("eager", sample(0, 1, 2, 5), sample(1, 2, 3, 9), sample(2, 3, 4, 6)).subgraphs[0]
    assert row.memory is not None
    assert dataclasses.astuple(row.memory) == ("cuda", 3, 1, 4, 9, 1)


def test_times_of_calls_are_those_of_the_last_event_and_have_shares() -> None:
    def timing(index: int, calls: int, seconds: float) -> Timing:
        name = f"g0.forward.{index}"
        return Timing(
            graph="g0", part="forward", subgraph=name, device="cpu", calls=calls, seconds=seconds, fastest=0.25
        )

    found = cut("eager", timing(0, 1, 1.0), timing(0, 2, 3.0), timing(1, 2, 1.0))
    first, second, third = found.subgraphs
    assert first.timing is not None
    assert (first.timing.calls, first.timing.mean, first.timing.fastest) == (2, 1.5, 0.25)
    assert (first.shares.seconds, second.shares.seconds, third.shares.seconds) == (0.75, 0.25, None)
    assert found.shares_by["seconds"] == {"inductor": 0.75, "eager": 0.25}
    assert found.shares_by["bytes"] == pytest.approx({"inductor": 2 / 3, "eager": 1 / 3})


def test_stages_add_up_and_the_passes_are_among_them() -> None:
    found = fold(
        [
            Stage(graph="g0", stage="lowering", part="forward", seconds=1.0),
            Stage(graph="g0", stage="dynamo", seconds=2.0),
            Stage(graph="g0", stage="lowering", part="backward", seconds=3.0),
            PassRun(graph="g0", name="p", seconds=0.5),
        ]
    )
    assert found.graphs[0].compile_seconds == {"dynamo": 2.0, "passes": 0.5, "lowering": 4.0}
    assert list(found.graphs[0].compile_seconds) == ["dynamo", "passes", "lowering"]


def test_settings_say_what_was_asked_for_what_took_effect_and_who_changed_it() -> None:
    why = Reason(code="option_ineffective", by="dynamo", sentence="too late")
    found = fold(
        [
            Capture(
                graph="g0",
                options={"freezing": True, "dtype-policy": "bf16"},
                effective={"dtype_policy": "bf16", "verify": "first"},
                origins={"dtype_policy": "options", "verify": "environment OMNICOMP_VERIFY"},
            ),
            Option(graph="g0", key="freezing", requested="True", effective="False", reason=why),
        ]
    )
    settings = {s.key: s for s in found.graphs[0].settings}
    assert list(settings) == ["freezing", "dtype_policy", "verify"]
    freezing, policy, verify = settings.values()
    assert (freezing.requested, freezing.effective, freezing.changed_by, freezing.reason) == (
        "True",
        "False",
        "dynamo",
        why,
    )
    assert (policy.requested, policy.effective, policy.origin, policy.changed_by) == ("bf16", "bf16", "options", "")
    assert (verify.requested, verify.effective, verify.origin) == ("", "first", "environment OMNICOMP_VERIFY")


def test_the_environment_joins_what_the_graphs_say() -> None:
    found = fold(
        Capture(graph=f"g{rank}", rank=rank, pid=7 + rank, device="cuda", device_name=name, versions={"torch": "2.13"})
        for rank, name in ((1, "H200"), (0, "H200"))
    )
    environment = found.environment
    assert (environment.versions, environment.devices) == ({"torch": "2.13"}, {"cuda": "H200"})
    assert (environment.processes, environment.ranks) == (2, (0, 1))


def test_what_passes_found_in_a_graph_that_dynamo_took_back_is_none_of_the_program() -> None:
    def passed(graph: str, state: str) -> list[Event]:
        attention = {"graph": graph, "name": "fusion", "kind": "attention", "node": "matmul"}
        return [
            Capture(graph=graph),
            NearMiss(graph=graph, name="dynamo", kind="graph_break", node="item", reason=REFUSED),
            NearMiss(**attention, reason=REFUSED),  # type: ignore[arg-type]
            Rewrite(**attention, target="sdpa"),  # type: ignore[arg-type]
            Outcome(graph=graph, state=state),
        ]

    first, second = fold([*passed("g0", "taken_back"), *passed("g1", "built")]).graphs
    assert [miss.kind for miss in first.near_misses] == ["graph_break"]
    assert not first.rewrites
    assert len(second.near_misses) == 2
    assert second.rewrites


def test_outcomes_of_verifications_are_kept_once() -> None:
    def verified(state: str) -> Verification:
        return Verification(graph="g0", part="forward", subgraph="g0.forward.0", name="o", state=state)

    row = cut("eager", *map(verified, ("right", "known", "known", "known"))).subgraphs[0]
    assert [v.state for v in row.verifications] == ["right", "known"]


def test_what_repeats_is_counted_and_the_events_are_let_go() -> None:
    seen: list[weakref.ref[Event]] = []

    def events() -> Iterator[Event]:
        yield Capture(graph="g0")
        yield plan(0, "inductor")
        for call in range(5000):
            event: Event = Memory(graph="g0", part="forward", subgraph="g0.forward.0", device="cpu", call=call)
            seen.append(weakref.ref(event))
            yield event
            yield Ran(graph="g0", part="forward", subgraph="g0.forward.0", lowering="inductor", evidence="c.py")
            yield Retreat(
                graph="g0", part="", subgraph="g0", source_lowering="passes", target_lowering="none", reason=REFUSED
            )
            yield Option(graph="g0", key="k", requested="a", effective="b", reason=REFUSED)
            yield Verification(graph="g0", part="forward", subgraph="?", name="o", state="right")

    found = fold(events())
    gc.collect()
    assert sum(reference() is not None for reference in seen) <= 1, "events are held on to"
    assert found.events == 25_002
    (row,) = found.subgraphs
    graph = found.graphs[0]
    assert row.memory is not None
    assert row.memory.calls == 5000
    assert len(row.runs) < 100
    assert row.left_out["runs"] + len(row.runs) == 5000
    assert graph.left_out["retreats"] + len(graph.retreats) == 5000
    assert set(graph.left_out) == {"retreats", "ineffective", "verifications"}
    assert len(found.to_json()) < 100_000


def test_another_executable_is_always_kept_among_the_runs() -> None:
    def ran(lowering: str) -> Ran:
        return Ran(graph="g0", part="forward", subgraph="g0.forward.0", lowering=lowering)

    runs = cut("eager", *[ran("inductor")] * 50, ran("eager")).subgraphs[0].runs
    assert runs[-1].lowering == "eager"
