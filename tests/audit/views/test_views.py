import json

import pytest

from omnicomp.audit import AUDIT_SCHEMA, build
from omnicomp.timeline import Event, NodePlacement, Placement, Ran, Reason, Subgraph

Events = list[Event]

GOLDEN = """
Subgraphs
+-----------------+----------+-----------+-------+---------+------------------------------------------+--------+
| subgraph        | planned  | ran       | nodes | % FLOPs | what                                     | build  |
+=================+==========+===========+=======+=========+==========================================+========+
| g0.forward.0    | inductor | inductor  |    30 |  80.0 % | aten.add.Tensor x20, aten.mm.default x10 | 12.5 s |
|                 |          |           |       |         | layers.0.attn, <script>alert(1)</script> |        |
|                 |          |           |       |         | kernels: extern_kernels.mm x10           |        |
|                 |          |           |       |         | FLOPs: 2*s0*1000                         |        |
|   /softmax_topk | override | override  |     1 |  10.0 % | aten.topk.default                        |        |
| g0.forward.1    | eager    | eager     |     1 |   5.0 % | aten.foo.default                         |        |
|                 |          |           |       |         | model.py:12                              |        |
|                 |          |           |       |         | FLOPs: s0                                |        |
| g0.forward.10   | inductor | eager     |     8 |   5.0 % | <script>alert(1)</script> x8             |        |
|                 |          | retreated |       |         |                                          |        |
+-----------------+----------+-----------+-------+---------+------------------------------------------+--------+
"""


def test_text_golden(events: Events) -> None:
    text = build(events).to_text()
    assert max(map(len, text.splitlines())) <= 120
    assert "\x1b" not in text
    start = text.index("Subgraphs")
    assert text[start : text.index("\n\n", start)] == GOLDEN.strip()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_printing_is_as_wide_as_the_terminal(events: Events, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    found = build(events)
    assert max(map(len, str(found).splitlines())) <= columns
    assert max(map(len, found.to_text().splitlines())) == 120


def test_the_row_of_another_compiler_has_its_evidence() -> None:
    made = Subgraph(graph="g0", part="forward", subgraph="g0.forward.0", lowering="toy", nodes=1)
    ran = Ran(graph="g0", part="forward", subgraph="g0.forward.0", lowering="toy", evidence="2 results in 1 buffer")
    assert "2 results in 1 buffer" in build([made, ran]).to_text()


@pytest.mark.parametrize("title", ["Reasons", "Attention: 1 of 2 sites fused", "Passes", "Options", "Caches"])
def test_text_has_a_table_for_each_question(events: Events, title: str) -> None:
    assert f"\n{title}\n" in build(events).to_text()


def test_text_shows_markup_and_control_characters() -> None:
    found = build([Subgraph(graph="g0", part="forward", subgraph="g0.forward.0", lowering="[red]x\x1b[2J", nodes=1)])
    text = str(found)
    assert "[red]x" in text
    assert "\x1b" not in text
    assert "\x1b" not in found.to_html()


def test_equal_reasons_are_one_row_with_a_count() -> None:
    declined = tuple(
        NodePlacement(
            node=f"topk_{i}",
            op="aten.topk.default",
            lowering="eager",
            source=f"/m.py:{i}",
            chain=(Reason(code="unsupported_op", by="inductor", sentence="no", node=f"topk_{i}", source=f"/m.py:{i}"),),
        )
        for i in range(40)
    )
    text = build([Placement(graph="g0", part="forward", nodes={"eager": 40}, declined=declined)]).to_text()
    assert text.count("aten.topk.default on eager") == 1
    assert "m.py:0 and 39 more" in text


def test_json(events: Events) -> None:
    found = build(events)
    data = json.loads(found.to_json())
    assert data["schema"] == AUDIT_SCHEMA
    assert data["summary"] == found.summary()
    assert list(data) == [
        "schema",
        "summary",
        "events",
        "skipped",
        "left_out",
        "share_basis",
        "shares",
        "shares_by",
        "environment",
        "attention",
        "mismatches",
        "fallbacks",
        "graphs",
    ]
    (graph,) = data["graphs"]
    assert graph["training"] is True
    assert graph["near_misses"][0]["reason"]["code"] == "match_ended"
    rows = {row["id"]: row for row in graph["parts"][0]["subgraphs"]}
    first = rows["g0.forward.0"]
    assert (first["planned"], first["ran"], first["mismatch"]) == ("inductor", "inductor", False)
    assert first["flops"] == "2*s0*1000"
    assert first["seconds"] == 12.5
    assert rows["g0.forward.10"]["retreats"][0]["target_lowering"] == "eager"
    assert found.to_json() == build(events).to_json()
