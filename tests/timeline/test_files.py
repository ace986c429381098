"""The reader of timeline files: whatever bytes it is given, there are events or one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
