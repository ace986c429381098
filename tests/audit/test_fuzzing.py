"""Whatever a file holds, there is a report that every view shows, or one sentence."""

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnicomp.audit import Audit, build
from omnicomp.audit.fleet import fleet
from omnicomp.audit.gate import judge
from omnicomp.audit.gate.annotations import to_annotations
from omnicomp.audit.gate.junit import to_junit
from omnicomp.audit.gate.markdown import to_markdown
from omnicomp.audit.gate.verdict import to_text
from omnicomp.audit.source import load
from omnicomp.audit.views.jsonform import to_dict
from omnicomp.audit.views.trace import to_trace
from omnicomp.audit.views.tree import to_tree
from omnicomp.audit.views.why import why
from omnicomp.errors import OmnicompError, ReportError
from omnicomp.timeline import Event

Make = Callable[..., list[Event]]

TEXT = st.text(max_size=12) | st.sampled_from(
    ["g0", "g0.forward.0", "<b id=hostile>", "\x1b[2J", "²", "9" * 30, "\ud800", ""]
)
MARKUP = ("<b id=hostile", "<script>alert(1)", "alert(1)</script")
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.lists(TEXT, max_size=2), st.just({}), st.just([])
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a JSON value."""
    keys: Any = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    return [place for key in keys for place in ((*path, key), *places(data[key], (*path, key)))]


def changed(data: Any, draw: Any, times: int) -> Any:
    """A copy in which values were exchanged, most by others of their kind."""
    data = copy.deepcopy(data)
    for _ in range(times):
        *path, last = draw(st.sampled_from(places(data)))
        inner = data
        for key in path:
            inner = inner[key]
        old = inner[last]
        same = TEXT if isinstance(old, str) else st.integers() if type(old) is int else st.floats()
        kind = same if isinstance(old, (str, int, float)) and draw(st.integers(0, 3)) else VALUES
        inner[last] = draw(kind)
    return data


def shown(found: Audit) -> None:
    """Make every view."""
    assert "\x1b" not in found.to_text() + found.to_html()
    json.loads(json.dumps(to_dict(found)))
    found.summary()
    page = found.to_html()
    assert not any(markup in page for markup in MARKUP)
    json.loads(to_trace(found))
    assert "\x1b" not in to_tree(found)
    for question in ("*", "*foo*", "aten.foo"):
        with contextlib.suppress(ReportError):  # nothing has that name any more
            assert "\x1b" not in why(found, question).to_text()


def judged(found: Audit, folder: Path) -> None:
    """Make every view of the verdict on its fallbacks."""
    verdicts = [judge(found, name="<b id=hostile>\x1b[2J")]
    assert "\x1b" not in to_text(verdicts) + to_markdown(verdicts)
    assert not any(markup in to_markdown(verdicts) for markup in MARKUP)
    ElementTree.fromstring(to_junit(verdicts).encode())
    assert all(line.startswith("::") for line in to_annotations(verdicts, folder).splitlines())


def outcome(path: Path) -> str:
    """`report`, or the sentence."""
    try:
        found = load(path)
    except OmnicompError as error:
        sentence = str(error)
    else:
        shown(found)
        judged(found, path.parent)
        return "report"
    assert sentence.isprintable()
    return sentence


@given(data=st.data())
def test_timelines_with_other_values(make_events: Make, tmp_path: Path, data: st.DataObject) -> None:
    events = [event.to_dict() for event in make_events()]
    events = changed(events, data.draw, data.draw(st.integers(0, 4)))
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events), errors="surrogatepass")
    outcome(path)


@given(data=st.data())
def test_reports_with_other_values(make_events: Make, tmp_path: Path, data: st.DataObject) -> None:
    report = json.loads(build(make_events()).to_json())
    path = tmp_path / "report.json"
    path.write_text(json.dumps(changed(report, data.draw, data.draw(st.integers(0, 4)))), errors="surrogatepass")
    outcome(path)


@given(content=st.binary(max_size=400) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    outcome(path)


@given(cut=st.integers(1, 3000), tail=st.binary(max_size=20))
def test_reports_that_are_cut_short(make_events: Make, tmp_path: Path, cut: int, tail: bytes) -> None:
    path = tmp_path / "report.json"
    text = build(make_events()).to_json().encode()
    path.write_bytes(text[: min(cut, len(text) - 3)] + tail)
    # A lone brace may also be the torn first line of a timeline. Nothing was read then, and the check fails.
    assert outcome(path) != "report" or judge(load(path)).is_unfinished


@given(contents=st.lists(st.binary(max_size=60), max_size=3))
def test_folders(make_events: Make, tmp_path: Path, contents: list[bytes]) -> None:
    for old in tmp_path.iterdir():
        old.unlink()
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.jsonl").write_bytes(content)
    try:
        found = fleet(tmp_path)
    except OmnicompError as error:
        sentence = str(error)
    else:
        sentence = found.summary()
        assert found.to_text()
        assert found.to_html()
    assert sentence.isprintable()


def test_without_a_change_there_is_a_report(make_events: Make, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(build(make_events()).to_json())
    assert outcome(tmp_path / "report.json") == "report"


def test_a_torn_first_line_is_a_timeline_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"{")
    assert judge(load(tmp_path / "a")).is_unfinished


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"schema": 2}', b'{"graphs": 3}', b"\n\n{}", b"{}\n{}"])
def test_what_is_no_report_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    assert outcome(tmp_path / "a") != "report"
