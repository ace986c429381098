"""Tables and facts fit their width, and cut no word where any other way is left."""

import io
import re

import pytest

from omnicomp.audit import build
from omnicomp.audit.views.html import to_html
from omnicomp.audit.views.layout import ENGINES, Facts, FittingTable, asset, cell, fitted, plain, tones
from omnicomp.timeline import Attempt, Event, Ran, Subgraph

WORDS = ("aten._scaled_dot_product_flash_attention.default", "g0.inference.0", "the weights are used twice", "12.5 s")


def table() -> FittingTable:
    found = FittingTable("Title", "what", "subgraph", "why", "build", "note", right=("build",), spare=("what", "build"))
    found.add_row(*map(cell, (*WORDS, "")))
    return found


@pytest.mark.parametrize(
    ("width", "shown"),
    [(120, ["what", "subgraph", "why", "build"]), (60, ["subgraph", "why", "build"]), (26, ["subgraph", "why"])],
)
def test_columns_are_left_out_before_a_word_is_cut(width: int, shown: list[str]) -> None:
    title, head, _, *rows = plain(table(), width=width).splitlines()
    assert title == "Title"
    assert [name.strip() for name in head.split("|")] == shown
    words = " ".join(" ".join(row.split("|")) for row in rows).split()
    assert set(words) <= set(" ".join(WORDS).split())
    assert max(map(len, rows)) <= width


def test_rows_are_stacked_where_no_column_can_go() -> None:
    found = FittingTable("", "what", "where", "why")
    found.add_row(cell("aten.topk.default"), cell("model.py:12"), cell("no lowering for it"))
    assert plain(found, width=24).splitlines() == [
        "aten.topk.default",
        "  where  model.py:12",
        "  why    no lowering for",
        "         it",
    ]


def test_a_path_is_broken_after_a_slash() -> None:
    path = "/home/me/.cache/inductor/omnicomp/repro/aten_digamma_default_bb94ecc36e13.py"
    lines = plain(Facts(("to change", cell(f"run {path} again")), ("why", cell("it failed"))), width=60).splitlines()
    assert lines == [
        "to change  run /home/me/.cache/inductor/omnicomp/repro/",
        "           aten_digamma_default_bb94ecc36e13.py again",
        "why        it failed",
    ]


def test_a_word_without_separators_still_fits() -> None:
    assert max(map(len, plain(Facts(("why", cell("x" * 500))), width=40).splitlines())) <= 40


def test_markup_is_shown() -> None:
    assert "[red]x[/red]" in plain(Facts(("[bold]", cell("[red]x[/red]"))), width=40)


def test_lines_go_on_where_their_last_column_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = "ok      torch    2.13.0 of a long long name of a build\n  - aten.topk at m.py:1: no lowering for it here\n"
    assert fitted(text).splitlines() == [
        "ok      torch    2.13.0 of a long long",
        "                 name of a build",
        "  - aten.topk at m.py:1: no lowering for",
        "    it here",
    ]
    long = f"  - run /home/me/{'x' * 30}/{'y' * 30}.py::error::z\n"
    assert max(map(len, fitted(long).splitlines())) <= 40


def test_no_line_of_a_log_is_cut_and_none_becomes_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"  - {'x' * 38} ::error::do this\n"
    monkeypatch.setenv("COLUMNS", "40")
    assert fitted(line) == line
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert fitted("word " * 90) == "word " * 90


STYLE = asset("base.css") + asset("page.css")


@pytest.mark.parametrize("name", ["inductor", "override", "eager"])
def test_what_every_report_has_keeps_its_name(name: str) -> None:
    assert tones(["toy", name])[name] == name


def test_an_engine_has_one_colour_in_every_report() -> None:
    alone = tones(["toy"])["toy"]
    assert alone.startswith("engine-")
    assert tones(["eager", "toy", "inductor"])["toy"] == alone
    assert tones(["", "toy"]) == tones(["toy"])


def test_engines_of_one_report_have_different_colours_as_long_as_there_are_some() -> None:
    names = [f"engine number {number}" for number in range(ENGINES)]
    found = tones(names)
    assert len({found[name] for name in names}) == ENGINES
    assert tones(reversed(names)) == found
    assert set(tones([*names, "one more"]).values()) == {*found.values()}


def test_the_style_sheet_has_each_colour_light_and_dark() -> None:
    for number in range(ENGINES):
        values = re.findall(rf"--engine-{number}: (#[0-9a-f]{{6}})", STYLE)
        assert len(values) == 3
        assert len(set(values)) == 2
        assert f".engine-{number} {{ --tone: var(--engine-{number}); }}" in STYLE


def test_the_page_knows_engines_that_were_only_tried() -> None:
    where = {"graph": "g0", "part": "inference", "subgraph": "g0.inference.0"}
    events: list[Event] = [
        Subgraph(**where, lowering="toy", nodes=1, flops_hint=5),
        Attempt(**where, lowering="other", ok=False, selected=False),
        Ran(**where, lowering="toy"),
    ]
    found = tones(["toy", "other"])
    page = to_html(build(events))
    assert f'"toy":"{found["toy"]}"' in page
    assert f'"other":"{found["other"]}"' in page
    assert f'<span class="dot {found["toy"]}"></span>toy' in page
