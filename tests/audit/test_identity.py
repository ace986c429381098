import dataclasses
from collections.abc import Callable

import pytest

from omnicomp.audit import Audit, build
from omnicomp.audit.identity import operators_of, without_number
from omnicomp.timeline import Capture, Event, Subgraph
from omnicomp.timeline.reasons import common_path, text_of

Events = list[Event]


def graph(id: str, module: str = "model", fingerprint: str = "aaaaaaaaaaaa-11111111", **fields: object) -> Events:
    def row(index: int, module: str, fingerprint: str) -> Subgraph:
        return Subgraph(
            graph=id,
            part="inference",
            subgraph=f"{id}.inference.{index}",
            lowering="inductor",
            nodes=1,
            module=module,
            fingerprint=fingerprint,
        )

    return [
        Capture(graph=id, module=module, fingerprint=fingerprint, function="forward (/home/me/model.py:3)", **fields),  # type: ignore[arg-type]
        row(0, f"{module}.first", "bbbbbbbbbbbb-22222222"),
        row(1, "", "cccccccccccc-33333333"),
    ]


def identities(found: Audit) -> dict[str, str]:
    return {row.identity: row.lowering for row in found.subgraphs}


def test_an_identity_says_where_what_and_which_part() -> None:
    found = build(graph("g0"))
    assert [g.identity for g in found.graphs] == ["model/inference/aaaaaaaaaaaa-11111111"]
    assert list(identities(found)) == [
        "model.first/inference/bbbbbbbbbbbb-22222222",
        "model/inference/cccccccccccc-33333333",
    ]


def test_without_modules_the_function_is_the_place_without_its_file() -> None:
    found = build(graph("g0", module=""))
    assert found.graphs[0].identity.startswith("forward/inference/")


def test_the_order_of_capture_is_not_in_it() -> None:
    one, other = graph("g0", "left"), graph("g1", "right", "dddddddddddd-44444444")
    again, more = graph("g1", "left"), graph("g0", "right", "dddddddddddd-44444444")
    found, turned = build([*one, *other]), build([*more, *again])
    assert identities(found) == identities(turned)
    assert {g.identity for g in found.graphs} == {g.identity for g in turned.graphs}


def test_equal_rows_of_different_graphs_are_told_apart_by_their_graphs() -> None:
    one, other = graph("g0", fingerprint="aaaaaaaaaaaa-11111111"), graph("g1", fingerprint="ffffffffffff-11111111")
    again = graph("g0", fingerprint="ffffffffffff-11111111"), graph("g1", fingerprint="aaaaaaaaaaaa-11111111")

    def by_graph(events: Events) -> dict[str, list[str]]:
        return {g.identity: [row.identity for row in g.subgraphs] for g in build(events).graphs}

    found = by_graph([*one, *other])
    assert found == by_graph([*again[0], *again[1]])
    assert sorted(row for rows in found.values() for row in rows)[1].endswith("~2")


def test_variants_and_override_calls_have_identities_of_their_own(make_events: Callable[..., Events]) -> None:
    general = [dataclasses.replace(event, graph="g0:general") for event in graph("g0", variant="general")[:1]]
    found = build([*make_events(), *general])
    assert any("/forward/softmax_topk/" in row.identity for row in found.subgraphs)
    assert found.graphs[1].identity.startswith("model/inference:general/")
    assert len({row.identity for row in found.subgraphs}) == len(found.subgraphs)


def test_a_timeline_of_an_older_version_has_identities_too(events: Events) -> None:
    found = build(events)
    assert all(row.identity.endswith("-00000000") for row in found.subgraphs)
    assert identities(found) == identities(build(events))


def test_parts_of_an_identity() -> None:
    assert without_number("a/forward/ab-cd~12") == "a/forward/ab-cd"
    assert operators_of("a/forward/ab-cd~12") == operators_of("a/forward/ab-ef") == "a/forward/ab"


@pytest.mark.parametrize(
    ("paths", "common"),
    [
        ([], ""),
        (["a.b"], "a.b"),
        (["layers.1.attn", "layers.1.mlp"], "layers.1"),
        (["layers.1", "layers.10"], "layers"),
        (["a.b", "a"], "a"),
        (["a", "a.b"], "a"),
        (["a", "b"], ""),
    ],
)
def test_common_path(paths: list[str], common: str) -> None:
    assert common_path(paths) == common


def test_text_of_a_value_is_the_same_in_every_process() -> None:
    assert text_of(["eager", 1, None]) == "eager, 1, None"
    assert text_of({"aten.topk": ["eager"]}) == "aten.topk: eager"
    assert text_of({"b", "a"}) == "a, b"
    assert text_of(test_common_path) == "test_common_path"
