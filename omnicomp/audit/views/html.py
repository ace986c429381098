"""The audit as one HTML file: no network, light or dark as the reader's system asks or the reader chooses.

The header is HTML; the rest is drawn by the page's own script (`page/*.js`) from JSON (`pagedata`), so that a report
with thousands of subgraphs opens at once. Names come from the user's program, and can't become markup: Python escapes
them, and the script makes text nodes of them. The page's policy allows its own script and style by their hashes, and
nothing else.
"""

import base64
import hashlib
from typing import Final

from omnicomp.audit.model import Report
from omnicomp.audit.views.pagedata import page_data, to_script, tones_of
from omnicomp.audit.views.rows import graph_breaks, percent, plural, summary
from omnicomp.audit.views.style import asset
from omnicomp.escapes import html_text as e

__all__ = ["to_html"]

_STYLES: Final = ("base.css", "page.css")
# In the order in which they build on one another.
_SCRIPTS: Final = (
    *("dom.js", "model.js", "table.js", "icicle.js", "detail.js"),
    *("graph.js", "drawn.js", "views.js", "app.js"),
)


def to_html(audit: Report, *, excerpts: bool = True) -> str:
    """The whole page.

    Args:
        audit: the report.
        excerpts: whether to show lines of the user's source around the places that it names, where the files are here.
    """
    style = "\n".join(asset(name) for name in _STYLES)
    script = "(() => {\n" + "\n".join(asset(name).replace('"use strict";\n', "") for name in _SCRIPTS) + "\n})();\n"
    script = f'"use strict";\n{script}'
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    data = to_script(page_data(audit, excerpts=excerpts))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>omnicomp audit</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n{_header(audit)}\n"
        "<noscript><p>The tables below this line are drawn by the page's own script, which is switched off. "
        "<code>omnicomp audit FILE</code> prints the same as text.</p></noscript>\n"
        f'<div id="app"></div>\n</main>\n<script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _header(audit: Report) -> str:
    verdict, tone = _verdict(audit)
    text = summary(audit).removeprefix("omni: ")
    return (
        f'<header>\n<h1>omnicomp audit <span class="pill {tone}">{e(verdict)}</span></h1>\n'
        f'<p class="summary">{e(text)}</p>\n{_bar(audit)}{_tiles(audit)}</header>'
    )


def _verdict(audit: Report) -> tuple[str, str]:
    if audit.mismatches:
        return f"{plural(len(audit.mismatches), 'subgraph')} did not run as planned", "bad"
    if not any(row.ran for row in audit.subgraphs):
        return "nothing ran yet", "muted"
    if audit.fallbacks or audit.retreats:
        return "as planned, with fallbacks", "warn"
    if graph_breaks(audit):
        return "as planned, with graph breaks", "warn"
    return "as planned", "good"


def _bar(audit: Report) -> str:
    """Shares of the work; drawn as SVG, whose sizes are attributes and need no style of their own."""
    shares = sorted(audit.shares.items(), key=lambda item: (item[0] == "eager", -item[1]))
    if not shares:
        return ""
    basis = "operators" if audit.share_basis == "nodes" else "FLOPs"
    classes = tones_of(audit)
    pieces, at = "", 0.0
    for name, share in shares:
        pieces += (
            f'<rect class="{classes.get(name, "none")}" x="{at:.4f}%" width="{100 * share:.4f}%" height="12"></rect>'
        )
        at += 100 * share
    legend = "".join(
        f'<li><span class="dot {classes.get(name, "none")}"></span>{e(name)} <b>{e(percent(share))}</b></li>'
        for name, share in shares
    )
    label = ", ".join(f"{name} {percent(share)}" for name, share in shares)
    return (
        f'<svg class="shares" role="img" aria-label="{e(label)}" width="100%" height="12">{pieces}</svg>\n'
        f'<ul class="legend">{legend}<li class="of">of {basis}</li></ul>\n'
    )


def _tiles(audit: Report) -> str:
    sites = audit.sites
    tiles = [
        ("graphs", str(len(audit.graphs)), "", "tab=about"),
        ("subgraphs", str(sum(1 for row in audit.subgraphs if not row.parent)), "", "tab=subgraphs"),
        ("on eager, not by choice", str(len(audit.fallbacks)), "warn" if audit.fallbacks else "", "tab=reasons"),
        ("retreats", str(len(audit.retreats)), "warn" if audit.retreats else "", "tab=subgraphs&only=retreat"),
        (
            "not as planned",
            str(len(audit.mismatches)),
            "bad" if audit.mismatches else "",
            "tab=subgraphs&only=mismatch",
        ),
    ]
    if sites.total:
        tiles.insert(2, ("attention sites fused", f"{len(sites.fused)} of {sites.total}", "", "tab=sites"))
    broken = graph_breaks(audit)
    if broken:
        tiles.insert(1, ("graph breaks", str(len(broken)), "warn", "tab=reasons"))
    cells = "".join(
        f'<a class="tile {tone}" href="#{e(view)}"><b>{e(value)}</b>{e(name)}</a>' for name, value, tone, view in tiles
    )
    return f'<div class="tiles">{cells}</div>\n'
