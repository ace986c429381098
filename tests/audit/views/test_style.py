"""Colours of lowerings: the same in each report, and of two engines of one report two."""

import re

import pytest

from omnicomp.audit import build
from omnicomp.audit.views.html import to_html
from omnicomp.audit.views.style import ENGINES, asset, tones
from omnicomp.timeline import Attempt, Event, Ran, Subgraph

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
