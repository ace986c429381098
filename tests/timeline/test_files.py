"""The reader of timeline files: whatever bytes it is given, there are events or one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnicomp.audit import load
from omnicomp.audit.views.jsonform import from_dict, to_dict
from omnicomp.audit.views.tree import to_tree
from omnicomp.errors import OmnicompError, TimelineError
from omnicomp.timeline import Capture, Event, Placement, Ran, Subgraph, files
from omnicomp.timeline.files import TimelineReader

GOOD = [
    json.dumps(event.to_dict()).encode()
    for event in (
        Capture(graph="g0", function="f", options={"a": [1, {"b": None}]}),
        Placement(graph="g0", part="forward", nodes={"eager": 1}),
        Subgraph(graph="g0", part="forward", subgraph="g0.forward.0", lowering="eager", nodes=1, modules=("m",)),
        Ran(graph="g0", part="forward", subgraph="g0.forward.0", lowering="eager"),
    )
]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def changed_events(draw: st.DrawFn) -> bytes:
    """An event with one field that was replaced, removed or added."""
    data: dict[str, Any] = json.loads(draw(st.sampled_from(GOOD)))
    key = draw(st.sampled_from(sorted(data)) | st.text(max_size=5))
    if draw(st.booleans()):
        data[key] = draw(JSON)
    else:
        data.pop(key, None)
    return json.dumps(data).encode("utf-8", "surrogatepass")


LINES = st.one_of(
    st.sampled_from(GOOD),
    changed_events(),
    st.binary(max_size=40),
    st.tuples(st.sampled_from(GOOD), st.integers(0, 200)).map(lambda item: item[0][: item[1]]),
    JSON.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")),
)


def read(path: Path) -> tuple[list[Event], int] | str:
    """The events and the torn lines of a file, or the sentence."""
    reader = TimelineReader(path)
    try:
        return [event for _, event in reader], reader.torn
    except OmnicompError as error:
        return str(error)


@given(lines=st.lists(LINES, max_size=6), last=st.booleans())
def test_any_bytes_give_events_or_one_sentence(tmp_path: Path, lines: list[bytes], last: bool) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"\n" if last else b""))
    found = read(path)
    if isinstance(found, str):
        assert found.isprintable()
        assert str(path) in found
    else:
        events, torn = found
        assert all(isinstance(event, Event) for event in events)
        assert len(events) + torn <= sum(line.count(b"\n") + 1 for line in lines)


@given(st.binary(max_size=4000))
def test_any_file_gives_events_or_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    found = read(path)
    assert found == ([], 0) if not content.strip() else isinstance(found, (str, tuple))


@given(cut=st.integers(0, 1000), where=st.integers(0, len(GOOD) - 1))
def test_cutting_a_line_short_costs_that_line_alone(tmp_path: Path, cut: int, where: int) -> None:
    path = tmp_path / "t.jsonl"
    cut = min(cut, len(GOOD[where]) - 1)
    path.write_bytes(b"\n".join([*GOOD[:where], GOOD[where][:cut], *GOOD[where + 1 :]]) + b"\n")
    found = read(path)
    assert isinstance(found, tuple)
    assert (len(found[0]), found[1]) == (len(GOOD) - 1, 1 if cut else 0)


def test_a_large_file_without_lines_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LONGEST", 1000)
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"x" * 10_000_000)
    read_bytes = 0

    def counted(original: Any) -> Any:
        def parse(self: Any, file: Path, number: int, line: bytes) -> Any:
            nonlocal read_bytes
            read_bytes += len(line)
            return original(self, file, number, line)

        return parse

    monkeypatch.setattr(TimelineReader, "_parse", counted(TimelineReader._parse))
    with pytest.raises(TimelineError, match="line 1 is no timeline event"):
        list(TimelineReader(path))
    assert read_bytes <= 1000 * 100


@pytest.mark.parametrize("name", ["", "/", "no/where", "a\0b", "two\nlines\x1b[2J"])
def test_a_path_that_is_no_file_is_one_sentence(name: str) -> None:
    with pytest.raises(TimelineError, match="can't be read") as caught:
        list(TimelineReader(name))
    assert str(caught.value).isprintable()


def test_events_of_a_newer_version_are_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"schema": 1, "type": "party", "graph": "g0"}\n{"sch')
    assert read(path) == ([], 1)


FOREIGN = [b"epoch 1, loss 0.3", b'{"level": "info"}', b"[1]", b"3", b'"x"', b"null", b'{"schema": "1", "type": "ran"}']
NEWER = json.dumps({**Capture(graph="g9").to_dict(), "schema": 2}).encode()
BROKEN = [b'{"schema": 1, "type": "ran", "graph": "g0"}', b'{"schema": 1, "type": "capture", "graph": 7}']
BROKEN += [json.dumps({**Capture(graph="g9").to_dict(), "nodes": 10**400}).encode()]
UNKNOWN = [b'{"schema": 1, "type": "party", "graph": "g0"}', b'{"schema": 1, "type": "rave\\u001b", "graph": "g0"}']


@pytest.mark.parametrize("length", [1, 5, 30])
def test_a_file_of_a_first_event_that_is_cut_short_is_of_a_process_that_was_killed(tmp_path: Path, length: int) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD[0][:length])
    audit = load(path)
    assert [each.what for each in audit.unfinished] == ["process"]
    assert audit.skipped == 1


@pytest.mark.parametrize(
    ("lines", "kinds", "sentence"),
    [
        (FOREIGN, {"foreign": 7}, "7 foreign lines (the first: t.jsonl, line 2, it is not JSON)"),
        ([NEWER], {"newer": 1}, "1 line of a newer version (t.jsonl, line 2, its schema is 2 and this version reads"),
        (BROKEN, {"broken": 3}, "3 broken lines (the first: t.jsonl, line 2, it has no 'part', 'subgraph', 'low"),
        (UNKNOWN * 2, {"unknown": 2}, "2 events of an unknown type (the first: t.jsonl, line 2, party)"),
        ([GOOD[1][:30], b"\0" * 50], {"torn": 2}, "2 torn lines (the first: t.jsonl, line 2)"),
        ([line + b"\r" for line in GOOD[1:3]], {}, ""),
    ],
)
def test_what_can_be_read_is_read_and_the_rest_is_counted_and_named(
    tmp_path: Path, lines: list[bytes], kinds: dict[str, int], sentence: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\n".join([GOOD[0], *lines, *GOOD[1:]]) + b"\n")
    audit = load(path)
    assert [row.ran for row in audit.subgraphs] == ["eager"]
    assert {each.kind: each.count for each in audit.unread} == kinds
    assert sentence in audit.gaps
    count = sum(each.count for each in audit.unread)
    for view in (audit.summary(), to_tree(audit), audit.to_text(), audit.to_html(), audit.to_json()):
        assert view.isprintable() or "\x1b" not in view
        told = " ".join(view.split())
        assert f"{count} line" in told if count else "left out" not in audit.summary()
    assert {each.kind: each.count for each in from_dict(to_dict(audit)).unread} == kinds


def test_many_lines_of_a_log_before_the_first_event_are_passed_by(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(b"log line %d\n" % number for number in range(500)) + b"\n".join(GOOD))
    reader = TimelineReader(path)
    assert len(list(reader)) == len(GOOD)
    assert [(each.kind, each.count) for each in reader.unread] == [("foreign", 500)]


def test_a_file_that_is_all_of_a_newer_version_says_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(NEWER + b"\n" + NEWER)
    with pytest.raises(TimelineError, match="upgrade omnicomp"):
        load(path)
