import io
import json
from typing import Any

import pytest
from rich.console import Console

from omnicomp.audit import AUDIT_SCHEMA, build
from omnicomp.timeline import Capture, Event, NodePlacement, Placement, Ran, Reason, Rewrite, Subgraph

Events = list[Event]

GOLDEN = """
omni: 1 graph, 3 subgraphs: inductor 80.0 % of FLOPs, override 10.0 %, eager
10.0 % (aten.foo.default at model.py:12 and 1 more); attention 1 of 2 sites
fused; 1 option not as requested (triton.cudagraphs); 1 retreat; nothing that
ran differs from the plan

fallback: aten.foo.default on eager at model.py:12 in <script>alert(1)</script>
  why        override: no override is registered for aten.foo.default
  why        Inductor has no lowering for aten.foo.default (observed
             op=aten.foo.default)
  to change  write an override for it

fallback: g0.forward.10 (<script>alert(1)</script>) on eager
  why  inductor: /tmp/torchinductor_me/ab/c1.cpp does not compile

near miss: attention at model.py:9 in <script>alert(1)</script>
  why        fuse_attention: the weights are returned too; the match ended at
             output
  to change  do not return the attention weights

option not as requested: triton.cudagraphs is False, not True
  why        the CPU has no CUDA graphs
  to change  leave the option out on this device

subgraph        | planned  | ran       | nodes | % FLOPs |  build
----------------+----------+-----------+-------+---------+-------
g0.forward.0    | inductor | inductor  |    30 |  80.0 % | 12.5 s
  /softmax_topk | override | override  |     1 |  10.0 % |
g0.forward.1    | eager    | eager     |     1 |   5.0 % |
g0.forward.10   | inductor | eager     |     8 |   5.0 % |
                |          | retreated |       |         |
"""


def test_what_is_printed(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = build(events)
    assert str(found) == GOLDEN.lstrip("\n")
    rendered = io.StringIO()
    Console(file=rendered, width=80).print(found)
    assert [line.rstrip() for line in rendered.getvalue().splitlines()] == str(found).splitlines()


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_printing_is_as_wide_as_the_terminal(events: Events, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    found = build(events)
    assert max(map(len, str(found).splitlines())) <= columns
    assert max(map(len, found.to_text().splitlines())) <= 120
    assert "\x1b" not in str(found)


@pytest.mark.parametrize("columns", [80, 200])
def test_a_healthy_model_is_at_most_twelve_lines(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    made: Events = []
    for graph in range(6):
        made.append(Capture(graph=f"g{graph}", function=f"forward /home/me/model.py:{graph}", nodes=400))
        for layer in range(32):
            attention: dict[str, Any] = {
                "kind": "attention",
                "node": f"softmax_{layer}",
                "source": "/home/me/model.py:9",
            }
            made.append(Rewrite(graph=f"g{graph}", name="attention_fusion", target="sdpa", **attention))
        for number, part in enumerate(("forward", "backward")):
            row: dict[str, Any] = {"graph": f"g{graph}", "part": part, "subgraph": f"g{graph}.{part}.0"}
            ops = {"aten.mm.default": graph + 1, "aten.add.Tensor": number + 1}
            made += [
                Subgraph(**row, lowering="inductor", nodes=9, flops_hint=9, ops=ops),
                Ran(**row, lowering="inductor"),
            ]
    text = str(build(made))
    assert len(text.splitlines()) <= 12
    assert "and 7 more subgraphs, 58.3 % of FLOPs" in text
    assert "g5.backward.0" in build(made).to_text()


def test_equal_subgraphs_are_one_row_with_a_count() -> None:
    made: Events = []
    for layer in range(500):
        row: dict[str, Any] = {"graph": "g0", "part": "forward", "subgraph": f"g0.forward.{layer}"}
        ops = {"aten.mm.default" if layer % 2 else "aten.topk.default": 1}
        made += [Subgraph(**row, lowering="toy", nodes=3, flops_hint=1, ops=ops), Ran(**row, lowering="toy")]
    lines = str(build(made)).splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("g0.forward.")]
    assert rows == [[f"g0.forward.{n}", "250", "toy", "toy", "3", "50.0 %"] for n in (0, 1)]


def test_the_row_of_another_compiler_has_its_evidence() -> None:
    made = Subgraph(graph="g0", part="forward", subgraph="g0.forward.0", lowering="toy", nodes=1)
    ran = Ran(graph="g0", part="forward", subgraph="g0.forward.0", lowering="toy", evidence="2 results in 1 buffer")
    assert "2 results in 1 buffer" in build([made, ran]).to_text()


@pytest.mark.parametrize("title", ["Attention: 1 of 2 sites fused", "Passes", "Options", "Caches"])
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
    assert "m.py:0, m.py:1, m.py:2 and 37 more (40 places)" in text


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
        "unread",
        "unfinished",
        "processes",
        "artefacts",
        "share_basis",
        "shares",
        "shares_by",
        "environment",
        "attention",
        "mismatches",
        "fallbacks",
        "backend_timeline",
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
