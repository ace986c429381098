"""The list of fallbacks that a project acknowledges: what counts, what is told, and that any text gets an answer."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnicomp.errors import AcknowledgeError
from omnicomp.options.acknowledged import Acknowledged, Entry, find, load, parse

TODAY = datetime.date(2026, 11, 21)
GOOD = """
[[tool.omnicomp.acknowledge]]
selector = "aten.topk"
reason = "no kernel yet"
expires = 2026-11-21
"""


def of(**fields: Any) -> Acknowledged:
    lines = "\n".join(f"{key} = {value}" for key, value in fields.items())
    return parse(f"[[tool.omnicomp.acknowledge]]\n{lines}\n", TODAY)


def test_an_entry_counts_through_its_last_day() -> None:
    found = parse(GOOD, TODAY)
    entry = Entry(selector="aten.topk", reason="no kernel yet", expires=TODAY)
    assert found == Acknowledged(entries=(entry,), source="pyproject.toml")
    found = parse(GOOD, TODAY + datetime.timedelta(days=1))
    assert (found.entries, found.expired) == ((), (entry,))
    assert found.problems == (
        "pyproject.toml: acknowledgement 1 (aten.topk) expired on 2026-11-21, and what it was about counts again",
    )


@pytest.mark.parametrize("date", ["2027-01-01", '"2027-01-01"', "2027-01-01T12:00:00Z"])
def test_a_date_may_be_written_as_text_or_with_a_time(date: str) -> None:
    assert of(selector='"a"', reason='"b"', expires=date).entries[0].expires == datetime.date(2027, 1, 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"selector": '"a"', "expires": "2027-01-01"}, "(a) has no reason"),
        ({"selector": '"a"', "reason": '" "', "expires": "2027-01-01"}, "(a) has no reason"),
        ({"reason": '"b"', "expires": "2027-01-01"}, "acknowledgement 1 has no selector"),
        ({"selector": '"a"', "reason": '"b"'}, "has no date"),
        ({"selector": '"a"', "reason": '"b"', "expires": '"next year"'}, "not next year"),
        ({"selector": '"a"', "reason": '"b"', "expires": "3"}, "not 3"),
        ({"selector": '"a"', "reason": '"b"', "expire": "2027-01-01"}, 'did you mean "expires"'),
        ({"selector": "3", "reason": '"b"', "expires": "2027-01-01"}, "has no selector"),
    ],
)
def test_what_is_incomplete_is_told_and_acknowledges_nothing(fields: dict[str, Any], said: str) -> None:
    found = of(**fields)
    assert found.entries == ()
    assert any(said in problem for problem in found.problems)
    assert all("\n" not in problem for problem in found.problems)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[tool.omnicomp.acknowlege]]\nselector = 'a'", 'did you mean "acknowledge"'),
        ("[tool.omnicomp]\nacknowledge = 3", "is a list"),
        ("[tool.omnicomp.acknowledge]\nselector = 'a'", "is a list"),
        ("[tool.omnicomp]\nacknowledge = [3]", "is a table with selector, reason, expires"),
        ("[tool]\nomnicomp = 3", "tool.omnicomp is a table"),
    ],
)
def test_what_is_in_another_form_is_told(text: str, said: str) -> None:
    found = parse(text, TODAY)
    assert found.entries == ()
    assert len(found.problems) == 1
    assert said in found.problems[0]


@pytest.mark.parametrize("text", ["", "tool = 3", "[tool.ruff]\nline-length = 3", "[tool.omnicomp]"])
def test_a_project_without_a_list_has_nothing_to_tell(text: str) -> None:
    found = parse(text, TODAY)
    assert (found.entries, found.problems) == ((), ())


def test_what_is_no_toml_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[[tool.omnicomp")
    with pytest.raises(AcknowledgeError, match="is no TOML"):
        load(tmp_path)
    (tmp_path / "pyproject.toml").write_bytes(b"\xff")
    with pytest.raises(AcknowledgeError, match="is no TOML"):
        load(tmp_path)


def test_the_nearest_file_upwards_is_taken_inside_of_a_repository(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(GOOD)
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    assert find(inside) == tmp_path / "pyproject.toml"
    assert len(load(inside, TODAY).entries) == 1
    (tmp_path / "a" / ".git").mkdir()
    assert find(inside) is None
    assert load(inside) == Acknowledged()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.dates() | st.datetimes() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries({}, optional={key: VALUES for key in ("selector", "reason", "expires", "expire")})


@given(table=VALUES | st.fixed_dictionaries({"acknowledge": st.lists(ENTRIES | VALUES, max_size=4) | VALUES}))
def test_any_table_gives_entries_that_are_whole_and_problems_of_one_line(
    table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omnicomp.options.acknowledged._toml", _Loaded({"tool": {"omnicomp": table}}))
    found = parse("", TODAY)
    for entry in (*found.entries, *found.expired):
        assert entry.selector.strip()
        assert entry.reason.strip()
        assert type(entry.expires) is datetime.date
    assert all(not entry.expired(TODAY) for entry in found.entries)
    assert all(problem.isprintable() for problem in found.problems)
    listed = table.get("acknowledge") if isinstance(table, dict) else None
    if isinstance(listed, list):
        # Nothing is dropped without a word.
        assert len(found.entries) + len(found.problems) >= len(listed)


class _Loaded:
    def __init__(self, data: Any) -> None:
        self.data = data

    def loads(self, text: str) -> Any:
        return self.data


@given(
    text=st.text() | st.text(alphabet="[]=\"'\n.#{},tolmnicpackwedg0123456789- ", max_size=80).map(lambda t: GOOD + t)
)
def test_any_text_gives_a_list_or_one_sentence(text: str) -> None:
    assert all(sentence.isprintable() for sentence in said(lambda: parse(text, TODAY)))


def said(read: Callable[[], Acknowledged]) -> tuple[str, ...]:
    try:
        return read().problems
    except AcknowledgeError as error:
        return (str(error),)


@given(data=st.binary(max_size=60))
def test_any_bytes_give_a_list_or_one_sentence(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_bytes(data)
    assert all("\n" not in sentence for sentence in said(lambda: load(tmp_path)))
