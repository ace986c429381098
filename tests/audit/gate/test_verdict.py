"""The views of a verdict: golden files of a fixed set of reports, and names that must be shown and never obeyed."""

import dataclasses
import datetime
import html
import json
import re
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

import golden
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from omnicomp.audit import Audit, build
from omnicomp.audit.gate import judge
from omnicomp.audit.gate.annotations import to_annotations
from omnicomp.audit.gate.junit import to_junit
from omnicomp.audit.gate.markdown import to_markdown
from omnicomp.audit.gate.verdict import Verdict, message, to_json, to_text
from omnicomp.options.acknowledged import Acknowledged, Entry
from omnicomp.options.fallback_limits import FallbackBudget
from omnicomp.safety.escapes import code, github_data, github_property, markdown, one_line, relative, split_source, xml
from omnicomp.timeline import Capture, Event, NodePlacement, Placement, Process, Ran, Reason, Retreat, Subgraph
from omnicomp.timeline.files import Unread

NASTY = "<script>alert(1)</script>|\n::error::x\r\n\x1b[2J]]>`@someone` #12 [a](http://b.c) %0A **b** \u202e\ud800"
VIEWS: dict[str, Callable[[Sequence[Verdict]], str]] = {
    "txt": to_text,
    "md": to_markdown,
    "github": lambda verdicts: to_annotations(verdicts, "/home/me"),
    "xml": to_junit,
    "json": to_json,
}
Sample = Callable[..., list[Event]]


def clean() -> Audit:
    where: dict[str, Any] = {"graph": "g0", "part": "inference", "subgraph": "g0.inference.0"}
    return build(
        [
            Capture(graph="g0", function="Model.forward (/home/me/model.py:5)", nodes=3),
            Placement(graph="g0", part="inference", nodes={"inductor": 3}),
            Subgraph(**where, lowering="inductor", nodes=3, flops_hint=10, module="layers.0"),
            Ran(**where, lowering="inductor"),
        ]
    )


def killed() -> Audit:
    """Of a process that was killed while it compiled, with a line that was torn."""
    graph = Capture(graph="g0", run="12-ab", pid=12, function=f"f {NASTY} (/home/me/model.py:5)")
    found = build([Process(state="began", run="12-ab", pid=12), graph])
    return dataclasses.replace(found, unread=(Unread(kind="torn", count=1, first="4.jsonl, line 3"),))


def hostile(name: str = NASTY) -> Audit:
    """A report in which every text is hostile."""
    reason = Reason(code="unsupported_op", by=name, sentence=name, observed=name, needed=name, lever=name, source=name)
    where: dict[str, Any] = {"graph": "g0", "part": "forward"}
    return build(
        [
            Capture(graph="g0", function=name, nodes=3),
            Placement(
                **where,
                nodes={name: 1, "eager": 1},
                declined=(
                    NodePlacement(node=name, op=name, lowering="eager", source=name, module=name, chain=(reason,)),
                ),
            ),
            Subgraph(**where, subgraph="g0.forward.0", lowering="eager", nodes=1, ops={name: 1}, refused=(name,)),
            Subgraph(**where, subgraph=f"g0.forward.1x{name}y", lowering=name, nodes=2, ops={name: 2}, modules=(name,)),
            Retreat(
                **where, subgraph=f"g0.forward.1x{name}y", source_lowering=name, target_lowering="eager", reason=reason
            ),
            Ran(**where, subgraph=f"g0.forward.1x{name}y", lowering="eager"),
            Ran(**where, subgraph="g0.forward.0", lowering=name),
        ]
    )


def verdicts(make_events: Sample) -> dict[str, list[Verdict]]:
    sample, entries = (
        build(make_events()),
        [Entry(selector="aten.foo", reason=NASTY, expires=datetime.date(2030, 1, 1))],
    )
    acknowledged = Acknowledged(entries=tuple(entries), problems=("pyproject.toml: acknowledgement 2 has no reason",))
    over = judge(sample, FallbackBudget(max_nodes=0, max_flops_share=0.01), name="runs/0.json")
    within = judge(
        sample, FallbackBudget(max_nodes=8, allow=("aten.topk",)), acknowledged=acknowledged, name="runs/1.json"
    )
    return {
        "over": [over],
        "within": [within],
        "clean": [judge(clean())],
        "hostile": [judge(hostile(), name=NASTY)],
        "several": [over, judge(clean(), name="runs/2.json"), within],
        "compared": [judge(sample, baseline=[clean()], name="runs/3.json")],
        "empty": [judge(Audit())],
        "killed": [judge(killed(), name="runs/4.jsonl"), judge(clean(), name="runs/2.json")],
        "allowed": [judge(killed(), name="runs/4.jsonl", allow_unfinished=True)],
    }


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    "name", ["over", "within", "clean", "hostile", "several", "compared", "empty", "killed", "allowed"]
)
def test_golden(name: str, view: str, make_events: Sample) -> None:
    text = VIEWS[view](verdicts(make_events)[name])
    golden.check(f"check/{name}.{view}", text.encode("utf-8", "backslashreplace").decode())


def test_the_message_of_the_error(make_events: Sample) -> None:
    assert message(verdicts(make_events)["over"][0], "g0") == (
        "g0 is over the fallback budget: 9 operators run eager (at most 0), 10.0 % of FLOPs (at most 1.0 %)\n"
        "  - aten.foo.default at /home/me/model.py:12 in <script>alert(1)</script>: override: no override is "
        "registered for aten.foo.default; inductor: Inductor has no lowering for aten.foo.default (observed "
        "op=aten.foo.default). To change this: write an override for it\n"
        "  - g0.forward.10 (<script>alert(1)</script>), 8 operators: inductor: /tmp/torchinductor_me/ab/c1.cpp does "
        "not compile\n"
        "To let one pass, name it in options={'fallback': {'allow': [...]}}, or acknowledge it in pyproject.toml."
    )


def test_every_line_of_the_text_is_one_that_was_meant(make_events: Sample) -> None:
    for found in verdicts(make_events).values():
        for line in to_text(found).splitlines():
            assert line.isprintable()
            assert line.startswith(("omni: ", "  - ", "note: ", "runs/"))


COMMAND = re.compile(r"::(error|warning|notice) (?:file=[^:,\r\n]+,)?(?:line=\d+,)?title=[^:,\r\n]+::[^\r\n]*")


def is_commands(text: str) -> bool:
    return all(COMMAND.fullmatch(line) and line.isprintable() for line in text.splitlines())


def rendered(text: str) -> str:
    """Markdown's escapes undone, as a browser would show it."""
    return html.unescape(re.sub(r"\\([\\`*_\[\]~!$])", r"\1", text)).replace("\u200b", "")


TEXT = st.text() | st.sampled_from([NASTY, "]]>", "::error::", "a|b", "`", "\\|", "@a", "#1", "https://x.y", "www.x.y"])


@given(text=TEXT)
def test_markdown_shows_text_and_obeys_nothing(text: str) -> None:
    shown = markdown(text)
    assert "\n" not in shown
    assert not re.search(r"[<>|]", shown.replace("&lt;", ""))
    plain = re.sub(r"&(?:#124|lt|gt|amp);", " ", shown).replace("&#8203;", "\u200b")
    assert not re.search(r"@\w|#\w|\w://|\bwww\.|\bGH-\d", plain, re.IGNORECASE)
    for char in "`*_[]~":
        assert not re.search(rf"(?<!\\)(?:\\\\)*{re.escape(char)}", shown)
    assert rendered(shown) == " ".join("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text).split())


@given(text=TEXT)
def test_other_escapes(text: str) -> None:
    assert re.search(r"[\r\n]", github_data(text)) is None
    assert re.search(r"[\r\n:,]", github_property(text)) is None
    assert re.search(r"%(?!25|0A|0D|3A|2C)", github_property(text)) is None
    element = ElementTree.Element("a", b=xml(text))
    element.text = xml(text)
    again = ElementTree.fromstring(ElementTree.tostring(element, encoding="unicode"))
    assert again.text or not xml(text)
    assert again.get("b") == xml(text)
    assert code("") == ""


@given(name=TEXT.filter(bool))
def test_any_name_gives_views_that_hold(name: str) -> None:
    found = [judge(hostile(name), name=name)]
    assert all(line.isprintable() for line in to_text(found).splitlines())
    assert is_commands(to_annotations(found, "/home/me"))
    root = ElementTree.fromstring(to_junit(found))
    assert {case.get("name") for case in root.iter("testcase")} >= {"fallback budget", "g0.forward.0"}
    assert json.loads(to_json(found))["over"] is True
    text = to_markdown(found)
    for line in text.splitlines():
        tags = re.findall(r"<[^>]*>?", line)
        assert set(tags) <= {"<code>", "</code>", "<details>", "</details>", "<summary>", "</summary>"}
        # A name can neither add a cell nor end a row.
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4, 5)


OWN_MARKUP = {
    *("paragraph", "inline", "text", "text_special", "softbreak", "html_inline", "html_block", "strong"),
    *("table", "thead", "tbody", "tr", "th", "td", "bullet_list", "list_item"),
}


@given(name=TEXT.filter(bool))
@example(name=NASTY)
def test_a_parser_of_markdown_finds_no_markup_but_that_of_the_view(name: str) -> None:
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    blocks = parser.parse(to_markdown([judge(hostile(name), name=name)]))
    tokens = [token for block in blocks for token in (block, *(block.children or ()))]
    assert {re.sub("_(open|close)$", "", token.type) for token in tokens} <= OWN_MARKUP
    assert sum(token.type == "strong_open" for token in tokens) == 1
    assert {token.content for token in tokens if token.type == "html_inline"} == {"<code>", "</code>"}
    rows = sum(token.type == "tr_open" for token in tokens)
    assert rows == 1 + 2 + 2  # fallbacks with their head, and the shares with theirs
    shown = "".join(token.content for token in tokens if token.type in ("text", "text_special"))
    first = "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in name).split()
    assert first == [] or all(word in shown.replace("\u200b", "") for word in first)


def test_junit_has_a_case_for_each_subgraph_and_fails_with_the_budget(make_events: Sample) -> None:
    for found in verdicts(make_events).values():
        root = ElementTree.fromstring(to_junit(found))
        names = [case.get("name") for case in root.iter("testcase")]
        assert len([name for name in names if name == "fallback budget"]) == len(found)
        for verdict in found:
            assert {xml(one_line(row.id)) for row in verdict.audit.subgraphs} <= set(names)
        failed = [case for case in root.iter("testcase") if case.find("failure") is not None]
        over = any(verdict.over for verdict in found)
        assert bool([case for case in failed if case.get("name") == "fallback budget"]) == over
        assert int(root.get("failures", "-1")) == len(failed)
        assert int(root.get("tests", "-1")) == len(names)


def test_a_subgraph_that_did_not_run_as_planned_fails_and_is_told_everywhere() -> None:
    found = [judge(hostile())]
    assert found[0].audit.mismatches
    assert "did not run as planned" in to_markdown(found)
    assert "did not run as planned" in to_annotations(found, "/")
    assert "did not run as planned" in to_junit(found)


def many(count: int) -> Audit:
    reasons = [Reason(code="unsupported_op", sentence=f"{'why ' * 300}{number}") for number in range(count)]
    nodes = tuple(
        NodePlacement(
            node=f"n{i}", op=f"aten.op{i}.default", lowering="eager", source=f"/home/me/m.py:{i + 1}", chain=(reason,)
        )
        for i, reason in enumerate(reasons)
    )
    return build([Capture(graph="g0"), Placement(graph="g0", part="forward", nodes={"eager": count}, declined=nodes)])


def test_a_comment_has_room_on_github_whatever_there_is_to_say() -> None:
    one = judge(many(500), name="r.json")
    assert len(to_markdown([one])) < 65_536
    assert "and 480 more" in to_markdown([one])
    assert len(to_markdown([one] * 50)) < 65_536
    assert len(to_markdown([one] * 5000)) < 65_536


def test_no_more_annotations_than_are_shown() -> None:
    text = to_annotations([judge(many(500))], "/home/me")
    lines = text.splitlines()
    assert len(lines) == 10
    assert lines[1].startswith("::error file=m.py,line=1,title=aten.op0.default runs eager::")
    assert "and 492 more" in lines[-1]


def test_one_annotation_for_one_place(make_events: Sample) -> None:
    one = judge(build(make_events()))
    assert to_annotations([one, one], "/").count("aten.foo.default runs eager::") == 1


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/home/me/a/b.py", "/home/me", "a/b.py"),
        ("/home/me/a/b.py", "/home/me/", "a/b.py"),
        ("/home/me2/b.py", "/home/me", ""),
        ("b.py", "/home/me", "b.py"),
        ("./b.py", "/home/me", "b.py"),
        ("../b.py", "/home/me", ""),
        ("/home/me/../x.py", "/home/me", ""),
        ("<string>", "/home/me", ""),
        ("", "/home/me", ""),
        ("C:\\work\\b.py", "C:\\work", "b.py"),
        ("/a.py", "/", "a.py"),
    ],
)
def test_paths_are_relative_to_the_checkout(path: str, root: str, expected: str) -> None:
    assert relative(path, root) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a.py:12", ("a.py", 12)),
        ("a.py", ("a.py", 0)),
        ("a:b", ("a:b", 0)),
        ("", ("", 0)),
        ("C:\\a.py:3", ("C:\\a.py", 3)),
    ],
)
def test_a_source_has_a_path_and_a_line(source: str, expected: tuple[str, int]) -> None:
    assert split_source(source) == expected
