"""The page's text: what is in it, that nothing from a model becomes markup, and that it needs nothing else."""

import base64
import hashlib
import html.parser
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from made_timelines import large_timeline

from omnicomp.audit import build
from omnicomp.audit.views.html import page_data, to_html, to_script
from omnicomp.timeline import Candidate, Capture, Event, NearMiss, NodePlacement, Placement, Reason, Subgraph

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "]]>",
    "\u2028x",
    "\x1b[2J",
]


class Page(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.scripts: dict[str, str] = {}
        self.styles: list[str] = []
        self.metas: dict[str, str] = {}
        self.data: list[str] = []
        self._kind = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        if tag == "meta":
            self.metas[found.get("http-equiv") or found.get("name") or ""] = found.get("content") or ""
        else:
            self.open.append(tag)
        self._kind = found.get("type") or "" if tag == "script" else ""
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") or name == "style" for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            self.scripts[self._kind] = self.scripts.get(self._kind, "") + data
        elif inside == "style":
            self.styles.append(data)
        else:
            self.data.append(data)

    @property
    def json(self) -> Any:
        return json.loads(self.scripts["application/json"])


def test_one_file_with_one_script_and_its_data(events: list[Event]) -> None:
    page = Page(build(events).to_html())
    assert page.open == []
    assert set(page.scripts) == {"", "application/json"}
    assert page.tags.count("script") == 2
    assert all(link.startswith("#") for link in page.links)


def test_it_needs_no_network(events: list[Event]) -> None:
    text = build(events).to_html()
    # The namespace of SVG is a name, and nothing that is fetched.
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme" in text


def test_the_policy_allows_this_very_script_and_style_and_nothing_else(events: list[Event]) -> None:
    page = Page(build(events).to_html())

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    policy = page.metas["Content-Security-Policy"]
    expected = f"default-src 'none'; style-src {hashed(page.styles[0])}; script-src {hashed(page.scripts[''])}"
    assert policy == expected


@pytest.mark.parametrize("name", HOSTILE)
def test_names_can_become_no_markup(name: str) -> None:
    reason = Reason(code="unsupported_op", sentence=name, by=name, observed=name, lever=name)
    node = NodePlacement(node=name, op=name, lowering=name, source=name, module=name, chain=(reason,))
    found = build(
        [
            Capture(graph="g0", function=name, options={name: name}, versions={name: name}),
            Placement(graph="g0", part="forward", nodes={name: 1}, declined=(node,), note=name),
            Subgraph(
                graph="g0",
                part="forward",
                subgraph=f"g0.{name}",
                lowering=name,
                nodes=1,
                ops={name: 1},
                modules=(name,),
            ),
        ]
    )
    text = found.to_html()
    page = Page(text)
    assert page.tags.count("script") == 2
    assert "\x1b" not in text
    assert "\u2028" not in text
    shown = name.replace("\u2028", "\ufffd").replace("\x1b", "\ufffd")
    assert page.json["nodes"][0][2] == shown
    assert page.json["rows"][0]["ops"] == [[shown, 1]]
    assert "<" not in page.scripts["application/json"]


def test_the_data_reads_back() -> None:
    data = {"a": ["<", "</script>", "&amp;", "é\ud800", math.nan, math.inf, 1.5, None, True], "é": {"\n": 1}}
    read = json.loads(to_script(data))
    assert read == {"a": ["<", "</script>", "&amp;", "é\ufffd", None, None, 1.5, None, True], "é": {"\n": 1}}


def test_the_header_says_it_without_a_script(events: list[Event]) -> None:
    page = Page(build(events).to_html())
    data = " ".join(page.data)
    for expected in (
        "as planned, with 2 fallbacks, 1 near miss",
        "80.0 %",
        "1 of 2",
        "of FLOPs",
        "omnicomp audit FILE",
    ):
        assert expected in data


def test_what_can_be_changed_comes_before_what_is_drawn_and_in_full(events: list[Event]) -> None:
    text = build(events).to_html()
    start = text.index('<section class="findings"')
    shown = text[start : text.index('<div id="app">')]
    assert start < text.index('<div id="app">')
    for said in (
        "aten.foo.default on eager at model.py:12",
        "Inductor has no lowering for",
        "write an override for it",
    ):
        assert said in shown
    assert "do not return the attention weights" in shown
    assert shown.index("fallback") < shown.index("near miss") < shown.index("option not as requested")


def test_some_of_the_sites_are_not_green(events: list[Event]) -> None:
    assert '<a class="tile warn" href="#tab=sites"><b>1 of 2</b> attention sites fused</a>' in build(events).to_html()
    fused = [event for event in events if not isinstance(event, NearMiss)]
    assert '<a class="tile good" href="#tab=sites"><b>1 of 1</b> attention sites fused</a>' in build(fused).to_html()


def test_the_tab_of_the_browser_says_what_the_text_says(events: list[Event]) -> None:
    found = build(events)
    title = re.search("<title>(.*)</title>", found.to_html())
    assert title
    assert title[1].startswith("omni: 2 fallbacks, 1 near miss")
    assert title[1].endswith(found.summary().removeprefix("omni: "))
    healthy = build([event for event in events if isinstance(event, Capture)])
    assert f"<title>{healthy.summary()}</title>" in healthy.to_html()


def test_thousands_of_causes_are_a_short_list_that_opens() -> None:
    chains = [(Reason(code="unsupported_op", by="inductor", sentence="no " + "x" * i),) for i in range(500)]
    nodes = tuple(NodePlacement(node=f"n{i}", op="aten.a", lowering="eager", chain=c) for i, c in enumerate(chains))
    text = build([Placement(graph="g0", part="forward", nodes={"eager": 500}, declined=nodes)]).to_html()
    assert text.count("<article>") == 40
    assert "<summary>497 more causes</summary>" in text
    assert "all 500 causes" in text


def test_the_data_holds_what_the_report_does() -> None:
    found = build(large_timeline(60, graphs=2))
    data = page_data(found)
    assert [row["id"] for row in data["rows"]] == [row.id for row in found.subgraphs]
    assert len(data["boundaries"]) == sum(len(part.boundaries) for graph in found.graphs for part in graph.parts)
    assert len(data["merges"]) == sum(len(part.merges) for graph in found.graphs for part in graph.parts)
    assert len(data["sites"]) == sum(len(graph.near_misses) + len(graph.rewrites) for graph in found.graphs)
    assert len(data["lanes"][0]["slices"]) == 2
    row = next(row for row in data["rows"] if row["id"] == "g0.forward.2")
    assert row["retreats"][0][:2] == ["inductor", "eager"]
    assert data["reasons"][row["retreats"][0][2]]["code"] == "build_failed"


def test_a_reason_is_in_the_data_once() -> None:
    reason = Reason(code="unsupported_op", by="inductor", sentence="no lowering")
    declined = tuple(NodePlacement(node=f"n{i}", op="aten.a", lowering="eager", chain=(reason,)) for i in range(9))
    data = page_data(build([Placement(graph="g0", part="forward", nodes={"eager": 9}, declined=declined)]))
    assert len(data["reasons"]) == 1


def test_candidates_of_a_measured_choice() -> None:
    slower = Reason(code="slower", sentence="inductor was faster", by="openvino")
    found = build(
        [
            Candidate(graph="g0", candidate="inductor", selected=True, seconds=1e-3, speed=1.0, rounds=5),
            Candidate(graph="g0", candidate="openvino", seconds=2e-3, speed=0.5, spread=0.02, reason=slower),
        ]
    )
    data = page_data(found)
    assert [row[1] for row in data["candidates"]] == ["inductor", "openvino"]
    assert data["reasons"][data["candidates"][1][-1]]["sentence"] == "inductor was faster"


def test_lines_of_source_can_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("first\nprivate = 1\n")
    node = NodePlacement(node="n", op="aten.a", lowering="eager", source=f"{file}:2")
    found = build([Placement(graph="g0", part="forward", nodes={"eager": 1}, declined=(node,))])
    assert Page(to_html(found)).json["excerpts"] == {f"{file}:2": [2, 1, ["first", "private = 1"], False]}
    assert "private" not in to_html(found, excerpts=False)


def test_of_nothing() -> None:
    page = Page(build([]).to_html())
    assert any("nothing was compiled yet" in text for text in page.data)
    assert page.json["rows"] == []
