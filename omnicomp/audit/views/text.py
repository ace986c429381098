"""The audit for a terminal, with rich: what can be changed first, then what ran where."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from omnicomp.audit.model import Report, SubgraphAudit
from omnicomp.audit.views import rows
from omnicomp.audit.views.findings import Finding, findings
from omnicomp.audit.views.layout import Facts, FittingTable, cell, plain
from omnicomp.audit.views.rows import percent, plural, short_source, summary

_STYLES: Final = {"inductor": "green", "override": "cyan", "eager": "yellow"}
_TONES: Final = {"mismatch": "bold red", "fallback": "bold yellow"}
_MOST_FINDINGS: Final = 12
_MOST_ROWS: Final = 5
_HINT: Final = "omnicomp audit --full, or to_text(), has all"


def to_text(audit: Report, width: int = 120) -> str:
    """Plain text without colours, with everything."""
    return plain(*renderables(audit, full=True), width=width)


def renderables(audit: Report, *, full: bool = False) -> Iterator[RenderableType]:
    """The summary, each cause with its lever, and what ran where; equal rows are one, with a count.

    Args:
        audit: the report.
        full: every row, what each consists of, and tables of passes, options and caches.
    """
    yield cell(summary(audit), "bold red" if audit.mismatches or audit.unfinished else "bold")
    for line in rows.missing(audit):
        yield cell(line, "yellow")
    if full:
        for graph in audit.graphs:
            yield cell(rows.graph_line(graph))
    yield from _findings(findings(audit), full)
    yield from _subgraphs(audit, full)
    if full:
        for table in (_attention, _certificates, _speculations, _passes, _options, _caches):
            found = table(audit)
            if found.rows:
                yield Text()
                yield found
    note = rows.basis_note(audit)
    if note:
        yield cell(note, "dim")


def _findings(found: Sequence[Finding], full: bool) -> Iterator[RenderableType]:
    shown = found if full or len(found) <= _MOST_FINDINGS + 1 else found[:_MOST_FINDINGS]
    for finding in shown:
        yield Text()
        yield cell(finding.title, _TONES.get(finding.kind, "bold"))
        facts = Facts(indent=2)
        for reason in finding.reasons:
            facts.add("why", cell(rows.cause(reason)))
            if reason.lever:
                facts.add("to change", cell(reason.lever, "italic"))
        if not finding.reasons:
            facts.add("why", cell("no reason was recorded"))
        yield facts
    if len(shown) < len(found):
        yield Text()
        yield cell(f"and {len(found) - len(shown)} more causes: {_HINT}", "dim")


def _lowering(row: SubgraphAudit) -> Text:
    found = cell("not called", "dim") if row.ran is None else cell(row.ran, _STYLES.get(row.ran, "magenta"))
    state = rows.status(row)
    if state:
        found.append(f"\n{state}", "bold red" if row.mismatch else "dim")
    return found


def _subgraphs(audit: Report, full: bool) -> Iterator[RenderableType]:
    groups: dict[object, list[SubgraphAudit]] = {}
    for row in audit.subgraphs:
        name = row.id.rsplit("/", 1)[-1] if row.parent else ""
        alike = (name, row.planned, row.ran, rows.status(row), tuple(sorted(row.ops.items())), tuple(rows.proof(row)))
        groups.setdefault((*alike, *(rows.what(row) if full else ())), []).append(row)
    share = "operators" if audit.share_basis == "nodes" else "FLOPs"
    kept = list(groups.values())
    if not full and len(kept) > _MOST_ROWS + 1:
        most = sorted(kept, key=lambda same: (not same[0].mismatch, -sum(row.share or 0 for row in same)))[:_MOST_ROWS]
        kept = [same for same in kept if any(same is each for each in most)]
    names = ("subgraph", "count", "planned", "ran", "nodes", f"% {share}", "what", "build")
    numbers = ("count", "nodes", f"% {share}", "build")
    found = FittingTable("", *names, right=numbers, spare=("what", "build", "nodes") if full else ("build", "nodes"))
    for same in kept:
        row = same[0]
        found.add_row(
            cell(f"  /{row.id.rsplit('/', 1)[-1]}" if row.parent else row.id),
            cell(len(same) if len(same) > 1 else ""),
            cell(row.planned or "not recorded"),
            _lowering(row),
            cell(row.nodes),
            cell(percent(None if row.share is None else sum(each.share or 0 for each in same))),
            cell("\n".join(rows.what(row) if full else rows.proof(row))),
            cell(rows.duration(sum(each.seconds for each in same))),
        )
    if not kept:
        return
    yield Text()
    yield found
    shown = {row.id for same in kept for row in same}
    left = [row for row in audit.subgraphs if row.id not in shown]
    if left:
        work = f", {percent(sum(row.share or 0 for row in left))} of {share}"
        yield cell(f"and {plural(len(left), 'more subgraph')}{work}: {_HINT}", "dim")


def _alike(found: FittingTable, lines: Iterable[tuple[str, Sequence[Text]]]) -> FittingTable:
    """Fill a table whose first column names places; equal lines of several places are one, with a count."""
    groups: dict[tuple[str, ...], tuple[list[str], Sequence[Text]]] = {}
    for place, cells in lines:
        groups.setdefault(tuple(each.plain for each in cells), ([], cells))[0].append(place)
    for places, cells in groups.values():
        places = list(dict.fromkeys(places))
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        found.add_row(cell(f"{places[0]}{more}"), *cells)
    return found


def _attention(audit: Report) -> FittingTable:
    sites = audit.sites
    found = FittingTable(f"Attention: {rows.attention(sites)}", "site", "fused to", "detail")
    lines = [(site, site.target) for site in sites.fused] + [(site, "as called") for site in sites.called]
    return _alike(
        found,
        (
            (
                f"{site.graph} {site.node} {site.module} {short_source(site.source)}",
                (cell(target), cell(rows.rewrite_text(site))),
            )
            for site, target in lines
        ),
    )


def _certificates(audit: Report) -> FittingTable:
    found = FittingTable("Certificates", "change", "pass", "verdict", "detail")
    lines: list[tuple[str, Sequence[Text]]] = []
    for graph in audit.graphs:
        for event in graph.certificates:
            name, node, verdict, detail = rows.certificate(event)
            red = "red" if event.verdict == "refuted" else ""
            lines.append((f"{graph.id} {node}", (cell(name), cell(verdict, red), cell(detail))))
    return _alike(found, lines)


def _speculations(audit: Report) -> FittingTable:
    found = FittingTable("Assumptions", "graph", "assumed", "state", "variant", "detail")
    events = ((graph.id, event) for graph in audit.graphs for event in graph.speculations)
    return _alike(found, ((id, tuple(map(cell, rows.speculation(event)))) for id, event in events))


def _passes(audit: Report) -> FittingTable:
    names = ("graph", "pass", "result", "rewrites", "operators", "note", "time")
    found = FittingTable("Passes", *names, right=("rewrites", "time"), spare=("operators",))
    lines: list[tuple[str, Sequence[Text]]] = []
    for graph in audit.graphs:
        for run in graph.passes:
            cells = (run.name, rows.pass_result(run), run.rewrites or "", rows.node_diff(run.node_diff), run.note)
            lines.append((graph.id, tuple(map(cell, (*cells, rows.duration(run.seconds))))))
    return _alike(found, lines)


def _options(audit: Report) -> FittingTable:
    found = FittingTable("Options", "graph", "option", "requested", "effective")
    lines: list[tuple[str, Sequence[Text]]] = []
    for graph in audit.graphs:
        for setting in graph.settings:
            if setting.requested or setting.changed_by:
                effective = cell(setting.effective or "as requested", "yellow" if setting.changed_by else "")
                lines.append((graph.id, (cell(setting.key), cell(setting.requested), effective)))
    return _alike(found, lines)


def _caches(audit: Report) -> FittingTable:
    found = FittingTable("Caches", "graph", "part", "cache", "verdict", "note")
    caches = ((graph.id, cache) for graph in audit.graphs for cache in graph.caches)
    return _alike(found, ((id, tuple(map(cell, (c.part, c.cache, c.verdict, rows.cache_note(c))))) for id, c in caches))
