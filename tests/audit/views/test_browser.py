"""The page in a real browser, where one is installed: it draws, filters, links and runs nothing that a name says."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Page, chromium, find_chromium
from made_timelines import large_timeline

from omnicomp.audit import Audit, build
from omnicomp.audit.views import rows
from omnicomp.audit.views.findings import findings
from omnicomp.audit.views.html import to_html
from omnicomp.timeline import Capture, Event, NodePlacement, Placement, Ran, Reason, Subgraph

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium is installed (Debian: apt install chromium)"
)

HOSTILE = "<script>alert(1)</script>"
SELECTED = "document.querySelector('[role=tab][aria-selected=true]').id"
ROWS = "[...document.querySelectorAll('#panel .vrow')].map(r => r.children[0].textContent)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium(width=1300, height=900) as page:
        yield page


@pytest.fixture(scope="module")
def report() -> Audit:
    return build(large_timeline(1000, graphs=2))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, report: Audit) -> Path:
    path = tmp_path_factory.mktemp("page") / "audit.html"
    path.write_text(to_html(report), encoding="utf-8")
    return path


@pytest.fixture
def page(browser: Page, file: Path) -> Iterator[Page]:
    """The page, freshly opened; no test may leave an error on the console, or fetch anything."""
    browser.resize(1300, 900)
    browser.prefer("light")
    browser.open(file)
    yield browser
    assert browser.errors == []
    assert browser.requests == []


def status(page: Page) -> str:
    return page.text(".toolbar [role=status]")


def test_it_draws_only_what_is_in_sight(page: Page) -> None:
    assert status(page) == "1,000 rows"
    assert 5 < page.count("#panel .vrow") < 80
    assert page.run("document.querySelector('.vtable').getAttribute('aria-rowcount')") == "1001"
    page.run("document.querySelector('.vtable').scrollTop = 1e9")
    page.drawn()
    assert "g1.forward.499" in page.run(ROWS)
    assert page.count("#panel .vrow") < 80


def test_every_view_opens(page: Page) -> None:
    for tab in page.run("[...document.querySelectorAll('[role=tab]')].map(t => t.id)"):
        page.click(f"#{tab}")
        assert page.run(SELECTED) == tab
        assert page.run("document.querySelector('#panel').textContent.length") > 20, tab
        assert page.errors == [], tab


def test_an_engine_has_a_colour_of_its_own(browser: Page, tmp_path: Path) -> None:
    events: list[Event] = []
    for number, name in enumerate(("toy", "openvino", "inductor", "eager")):
        where = {"graph": "g0", "part": "inference", "subgraph": f"g0.inference.{number}"}
        events += [Subgraph(**where, lowering=name, nodes=1, flops_hint=1), Ran(**where, lowering=name)]
    (tmp_path / "engines.html").write_text(to_html(build(events)), encoding="utf-8")
    browser.resize(1300, 900)
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.open(tmp_path / "engines.html")
        pills = "[...document.querySelectorAll('.vrow .badge')].map(b => getComputedStyle(b).color)"
        dots = "[...document.querySelectorAll('.chips .dot')].map(b => getComputedStyle(b).backgroundColor)"
        dim = browser.run("getComputedStyle(document.querySelector('.vhead')).color")
        found = browser.run(pills)
        assert len(found) == 8
        assert len(set(found)) == 4
        assert dim not in found
        assert set(browser.run(dots)) == set(found)
    assert browser.errors == []


def test_a_region_that_is_built_once_is_named_where_the_text_names_it(browser: Page, tmp_path: Path) -> None:
    row = Subgraph(
        graph="g0",
        part="inference",
        subgraph="g0.inference.0",
        lowering="inductor",
        nodes=353,
        ops={"aten.view.default": 75},
        repeats={"model.layers (61 operators)": 4},
    )
    (tmp_path / "regions.html").write_text(to_html(build([row])), encoding="utf-8")
    browser.resize(1300, 900)
    browser.open(tmp_path / "regions.html")
    assert "model.layers (61 operators): built once, called 4 times" in browser.text("#panel .vrow")
    assert browser.count('#panel .vrow [title*="built once, called 4 times"]') == 1  # whose end may be cut off
    browser.run("document.querySelector('#panel .vrow').click()")
    assert "built once, called 4 times" in browser.text("[role=dialog], dialog, aside")


def test_the_search_filters_and_the_address_holds_it(page: Page, file: Path) -> None:
    page.press("/")
    page.type("layers.7.router nonzero")
    assert status(page) == "2 of 1,000 rows"
    assert page.run(ROWS) == ["g0.forward.29", "g1.forward.29"]
    fragment = page.run("location.hash").removeprefix("#")
    page.open(file, fragment)
    assert status(page) == "2 of 1,000 rows"
    page.click(".clear")
    assert status(page) == "1,000 rows"
    page.press("/")
    page.type("surely nowhere")
    assert page.run("document.querySelector('#panel .empty').hidden") is False


def test_lowerings_and_what_to_show_are_filters(page: Page, report: Audit) -> None:
    page.click(".toggle.eager")
    eager = sum(1 for row in report.subgraphs if row.lowering == "eager")
    assert status(page) == f"{eager} of 1,000 rows"
    assert page.run("document.querySelector('.toggle.eager').getAttribute('aria-pressed')") == "true"
    page.run(
        "const s = document.querySelector('[data-key=only]'); s.value = 'retreat'; s.dispatchEvent(new Event('change'))"
    )
    retreats = sum(1 for row in report.subgraphs if row.retreats)
    assert status(page) == f"{retreats} of 1,000 rows"


def test_a_link_shows_a_view_a_filter_and_a_subgraph(browser: Page, page: Page, file: Path) -> None:
    browser.open(file, "tab=graph&q=layers.3&by=nodes&sel=g0.forward.13")
    assert page.run(SELECTED) == "tab-graph"
    assert page.text("#detail h2") == "g0.forward.13"
    assert "use torch.where with three arguments" in page.text("#detail")
    assert page.run("document.querySelector('[data-key=by]').value") == "nodes"
    assert page.count("#panel .arcs path.chosen") > 0
    browser.open(file, "tab=nonsense&sel=constructor&by=constructor&graph=__proto__&low=x")
    assert page.run(SELECTED) == "tab-subgraphs"
    assert status(page) == "1,000 rows"


def test_going_back_shows_what_was_shown(page: Page) -> None:
    page.click("#tab-flame")
    page.click("#tab-modules")
    page.run("new Promise((done) => { addEventListener('popstate', () => done(), { once: true }); history.back(); })")
    page.drawn()
    assert page.run(SELECTED) == "tab-flame"


def test_a_table_is_used_by_keys_alone(page: Page) -> None:
    page.run("document.querySelector('.vtable').focus()")
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        page.press(key)
    assert page.text("#detail h2") == "g0.forward.2"
    assert page.run("document.activeElement.className") == "vtable"
    page.press("End")
    assert page.run("document.querySelector('.vrow.focus').children[0].textContent") == "g1.forward.499"
    page.press("Escape")
    assert page.run("document.querySelector('#detail').hidden") is True


def test_tabs_are_used_by_keys_alone(page: Page) -> None:
    page.run("document.querySelector('#tab-subgraphs').focus()")
    page.press("ArrowRight")
    assert page.run(SELECTED) == "tab-reasons"
    assert page.run("document.activeElement.id") == "tab-reasons"
    page.press("End")
    assert page.run(SELECTED) == "tab-about"


def test_the_modules_open_by_keys(page: Page) -> None:
    page.click("#tab-modules")
    page.run("document.querySelector('.vtable').focus()")
    page.press("Home")
    page.press("ArrowLeft")
    assert page.run("document.querySelector('.vrow').getAttribute('aria-expanded')") == "false"
    rows = "Number(document.querySelector('.vtable').getAttribute('aria-rowcount'))"
    closed = page.run(rows)
    page.press("ArrowRight")
    assert page.run("document.querySelector('.vrow').getAttribute('aria-expanded')") == "true"
    assert page.run(rows) > closed


def test_the_flame_goes_in_and_out_by_keys(page: Page) -> None:
    page.click("#tab-flame")
    page.run("document.querySelector('.box').focus()")
    page.press("ArrowDown")
    page.press("Enter")
    assert page.text(".crumbs") == "everythingg0"
    assert "of FLOPs" in page.text(".says")
    page.press("Escape")
    assert page.text(".crumbs") == "everything"


def test_the_time_line_shows_compilations_and_events(page: Page) -> None:
    page.click("#tab-time")
    names = page.run("[...document.querySelectorAll('.box')].map(b => b.textContent)")
    assert {"autograd", "lowering forward"} <= set(names)
    assert any("Model0.forward" in name for name in names)
    assert "g0.forward.2: inductor retreated to eager" in page.run(
        "[...document.querySelectorAll('#panel .vrow')].map(r => r.children[2].textContent)"
    )


def test_columns_sort(page: Page) -> None:
    page.run("[...document.querySelectorAll('.vhead button')].find(b => b.textContent === 'build').click()")
    page.drawn()
    head = "document.querySelectorAll('.vhead > div')[8].getAttribute('aria-sort')"
    assert page.run(head) == "ascending"
    page.run("[...document.querySelectorAll('.vhead button')].find(b => b.textContent === 'build').click()")
    page.drawn()
    assert page.run(head) == "descending"


def test_light_and_dark(page: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    page.prefer("dark")
    dark = page.run(background)
    assert light != dark
    page.click(".theme")
    assert page.run(background) == light
    page.click(".theme")
    assert page.run(background) == dark
    page.click(".theme")


def test_a_narrow_page_does_not_scroll_sideways(page: Page) -> None:
    page.resize(390, 800)
    for tab in page.run("[...document.querySelectorAll('[role=tab]')].map(t => t.id)"):
        page.click(f"#{tab}")
        assert page.run("document.documentElement.scrollWidth") <= 390, tab
    page.click("#tab-subgraphs")
    page.click("#panel .vrow")
    assert page.run("document.activeElement.tagName") == "H2"


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_causes_and_levers_are_on_the_first_screen(page: Page, width: int, height: int) -> None:
    page.resize(width, height)
    shown = page.run("[...document.querySelectorAll('.findings .lever')].map(p => p.getBoundingClientRect().bottom)")
    assert shown
    assert shown[0] <= height
    top = page.run("document.querySelector('#app').getBoundingClientRect().top")
    assert max(shown) <= top


def test_a_narrow_table_has_the_columns_that_fit(browser: Page, page: Page, file: Path) -> None:
    browser.resize(390, 844)
    browser.open(file)
    heads = "[...document.querySelectorAll('#panel .vhead > div')].map(d => d.textContent)"
    assert page.run(heads) == ["subgraph", "ran", "share"]
    assert page.run("document.querySelector('.vtable').scrollWidth <= document.querySelector('.vtable').clientWidth")


def test_the_tabs_are_named_as_the_text_is(page: Page, report: Audit) -> None:
    names = page.run("[...document.querySelectorAll('[role=tab]')].map(t => t.textContent)")
    assert "Attention" + re.sub(" sites? fused$", "", rows.attention(report.sites)) in names
    assert f"Findings{len(findings(report))}" in names
    text = report.to_text()
    for title in ("Attention", "Passes", "Caches"):
        assert f"\n{title}" in text
        assert any(name.startswith(title) for name in names)


def test_names_are_shown_and_never_run(browser: Page, tmp_path: Path) -> None:
    reason = Reason(code="unsupported_op", by=HOSTILE, sentence=HOSTILE, observed=HOSTILE, lever=HOSTILE)
    node = NodePlacement(node=HOSTILE, op=HOSTILE, lowering="eager", source=HOSTILE, module=HOSTILE, chain=(reason,))
    row = {"graph": "g0", "part": "forward", "subgraph": "g0.forward.0"}
    found = build(
        [
            Capture(graph="g0", time=5.0, function=HOSTILE, options={HOSTILE: HOSTILE}, module=HOSTILE),
            Placement(graph="g0", part="forward", nodes={"eager": 1}, declined=(node,), note=HOSTILE),
            Subgraph(
                **row,
                lowering=HOSTILE,
                nodes=1,
                ops={HOSTILE: 1},
                modules=(HOSTILE,),
                sources=(HOSTILE,),
                refused=(HOSTILE,),
            ),
            Ran(**row, time=6.0, lowering=HOSTILE, evidence=HOSTILE, kernels={HOSTILE: 1}),
        ]
    )
    path = tmp_path / "hostile.html"
    path.write_text(to_html(found), encoding="utf-8")
    browser.open(path)
    for tab in browser.run("[...document.querySelectorAll('[role=tab]')].map(t => t.id)"):
        browser.click(f"#{tab}")
        if browser.count("#panel .vrow"):
            browser.click("#panel .vrow")
            assert HOSTILE in browser.text("#detail") or tab == "tab-time"
    assert HOSTILE in browser.text("body")
    assert browser.count("script") == 2
    assert browser.errors == []


def test_a_report_of_nothing_opens(browser: Page, tmp_path: Path) -> None:
    path = tmp_path / "nothing.html"
    path.write_text(to_html(build([])), encoding="utf-8")
    browser.open(path)
    assert "nothing was compiled yet" in browser.text("header")
    assert browser.errors == []


@pytest.mark.skipif(not os.environ.get("OMNICOMP_SCREENSHOTS"), reason="OMNICOMP_SCREENSHOTS names no folder")
def test_screenshots(page: Page) -> None:
    folder = Path(os.environ["OMNICOMP_SCREENSHOTS"])
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        for tab in ("subgraphs", "reasons", "modules", "flame", "graph", "time"):
            page.click(f"#tab-{tab}")
            page.screenshot(folder / f"{tab}-{scheme}.png")
