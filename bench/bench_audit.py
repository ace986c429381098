"""Does the audit's page open and filter at once where a model has thousands of subgraphs?

    python bench/bench_audit.py [--quick]

Targets: a report of 5 000 subgraphs opens in less than 2 s and filters in less than 2 s, in a headless Chromium.

Opening is from the command to load the file until the page has drawn; filtering from a text in the search box until the
table and the number of rows have been drawn anew. The report is made up (`made_timelines`).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from chromium import Page, chromium, find_chromium
from harness import markdown_table
from made_timelines import large_timeline

from omnicomp.audit import build
from omnicomp.audit.views.html import to_html
from omnicomp.audit.views.jsonform import to_json
from omnicomp.audit.views.trace import to_trace
from omnicomp.audit.views.tree import to_tree

VIEWS = ("subgraphs", "reasons", "modules", "flame", "graph", "time")
SEARCHES = ("router", "layers.77", "g++", "aten.addmm inductor", "nothing like it")
MAKE_HEADER = ["subgraphs", "report s", "page s", "page MiB", "tree s", "trace s", "JSON s"]
PAGE_HEADER = ["subgraphs", "opens s", "filters s", "slowest filter s", "opens a view s", "slowest view s"]


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def bench_making(subgraphs: int, file: Path) -> list[str]:
    """What making the views takes; the page is left in the file."""
    start = time.perf_counter()
    report = build(large_timeline(subgraphs))
    folded = time.perf_counter() - start
    page = timed(lambda: file.write_text(to_html(report), encoding="utf-8"))
    others = [timed(lambda view=view: view(report)) for view in (to_tree, to_trace, to_json)]
    size = file.stat().st_size / 2**20
    return [f"{subgraphs}", f"{folded:.2f}", f"{page:.2f}", f"{size:.1f}", *(f"{seconds:.2f}" for seconds in others)]


def search(page: Page, text: str) -> float:
    """Seconds from a text in the search box until the filtered table is drawn."""
    script = """new Promise((done) => {
        const box = document.getElementById("search"), start = performance.now();
        box.value = %s;
        box.dispatchEvent(new Event("input"));
        requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start)));
    })"""
    return page.run(script % json.dumps(text)) / 1000


def bench_page(page: Page, subgraphs: int, file: Path, rounds: int) -> list[str]:
    """What a reader waits for."""
    opened: list[float] = []
    filtered: list[float] = []
    shown: list[float] = []
    for _ in range(rounds):
        opened.append(page.open(file))
        for text in SEARCHES:
            filtered.append(search(page, text))
            search(page, "")
        shown += [timed(lambda view=view: page.click(f"#tab-{view}")) for view in VIEWS]
    if page.errors:
        sys.exit(f"the page has errors: {page.errors}")
    numbers = (
        statistics.median(opened),
        statistics.median(filtered),
        max(filtered),
        statistics.median(shown),
        max(shown),
    )
    return [f"{subgraphs}", *(f"{seconds:.2f}" for seconds in numbers)]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    parser.add_argument("--rounds", type=int, default=0, help="how often the page is opened")
    arguments = parser.parse_args()
    sizes = (200,) if arguments.quick else (500, 5000)
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    print(f"{os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        files = {size: Path(folder, f"{size}.html") for size in sizes}
        print(markdown_table(MAKE_HEADER, [bench_making(size, file) for size, file in files.items()]))
        if find_chromium() is None:
            sys.exit("no Chromium is installed: the page was not opened")
        with chromium() as page:
            print(markdown_table(PAGE_HEADER, [bench_page(page, size, file, rounds) for size, file in files.items()]))


if __name__ == "__main__":
    main()
