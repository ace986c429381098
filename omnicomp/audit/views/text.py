"""The audit for a terminal, with rich."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from omnicomp.audit.model import Report, SubgraphAudit
from omnicomp.audit.views import rows
from omnicomp.audit.views.rows import cell, percent, plural, short_source, summary, table

__all__ = ["renderables", "to_text"]

_STYLES = {"inductor": "green", "override": "cyan", "eager": "yellow"}


def to_text(audit: Report, width: int = 120) -> str:
    """Plain text without colours."""
    return rows.plain(*renderables(audit), width=width)


def renderables(audit: Report) -> Iterator[RenderableType]:
    """The header, then a table for each question; an empty table is left out."""
    yield cell(summary(audit), "bold red" if audit.mismatches else "bold")
    for graph in audit.graphs:
        yield cell(rows.graph_line(graph))
    tables = (_subgraphs, _reasons, _attention, _speculations, _passes, _options, _caches)
    for make in tables:
        found = make(audit)
        if found.row_count:
            yield Text()
            yield found
    note = rows.basis_note(audit)
    if note:
        yield cell(note, "dim")
    if audit.gaps:
        yield cell(audit.gaps, "yellow")


def _lowering(row: SubgraphAudit) -> Text:
    if row.ran is None:
        found = cell("not called yet", "dim")
    else:
        found = cell(row.ran, _STYLES.get(row.ran, "magenta"))
    state = rows.status(row)
    if state:
        found.append(f"\n{state}", "bold red" if row.mismatch else "dim")
    return found


def _subgraphs(audit: Report) -> Table:
    share = "operators" if audit.share_basis == "nodes" else "FLOPs"
    found = table(
        "Subgraphs", "subgraph", "planned", "ran", "nodes", f"% {share}", "what", "build", right=("nodes", f"% {share}")
    )
    for row in audit.subgraphs:
        found.add_row(
            cell(f"  /{row.id.rsplit('/', 1)[-1]}" if row.parent else row.id),
            cell(row.planned or "not recorded"),
            _lowering(row),
            cell(row.nodes),
            cell(percent(row.share)),
            cell("\n".join(rows.what(row))),
            cell(rows.duration(row.seconds)),
        )
    return found


def _reasons(audit: Report) -> Table:
    found = table("Reasons", "what", "where", "why", "to change this")
    for row in rows.reason_rows(audit):
        head = (cell(row.what), cell(row.where))
        for reason in row.reasons:
            why = rows.reason_text(reason)
            found.add_row(*head, cell(f"{reason.by}: {why}" if reason.by else why), cell(reason.lever))
            head = (Text(), Text())
        if not row.reasons:
            found.add_row(*head, cell("no reason was recorded"), Text())
    return found


def _attention(audit: Report) -> Table:
    sites = audit.sites
    found = table(
        f"Attention: {len(sites.fused)} of {plural(sites.total, 'site')} fused", "site", "module", "verdict", "detail"
    )
    for site in sites.fused:
        place = f"{site.graph} {site.node} {short_source(site.source)}"
        found.add_row(cell(place), cell(site.module), cell(f"fused: {site.target}"), cell(site.detail))
    for miss in sites.near_misses:
        place = f"{miss.graph} {miss.node} {short_source(miss.source)}"
        found.add_row(cell(place), cell(miss.module), cell("left alone", "yellow"), cell(rows.near_miss_text(miss)))
    return found


def _speculations(audit: Report) -> Table:
    found = table("Speculation", "graph", "assumed", "state", "variant", "detail")
    for graph in audit.graphs:
        for event in graph.speculations:
            found.add_row(cell(graph.id), *map(cell, rows.speculation(event)))
    return found


def _passes(audit: Report) -> Table:
    found = table("Passes", "graph", "pass", "result", "rewrites", "time", "operators", "note", right=("rewrites",))
    for graph in audit.graphs:
        for run in graph.passes:
            found.add_row(
                cell(graph.id),
                cell(run.name),
                cell(rows.pass_result(run)),
                cell(run.rewrites or ""),
                cell(rows.duration(run.seconds)),
                cell(rows.node_diff(run.node_diff)),
                cell(run.note),
            )
    return found


def _options(audit: Report) -> Table:
    found = table("Options", "graph", "option", "requested", "effective", "why")
    for graph in audit.graphs:
        ineffective = {option.key for option in graph.ineffective}
        for key, value in graph.options.items():
            if key not in ineffective:
                found.add_row(cell(graph.id), cell(key), cell(value), cell("as requested"), cell(""))
        for option in graph.ineffective:
            found.add_row(
                cell(graph.id),
                cell(option.key),
                cell(option.requested),
                cell(option.effective, "yellow"),
                cell(rows.with_lever(option.reason)),
            )
    return found


def _caches(audit: Report) -> Table:
    found = table("Caches", "graph", "part", "cache", "verdict", "key", "note")
    for graph in audit.graphs:
        for cache in graph.caches:
            found.add_row(
                *(cell(text) for text in (graph.id, cache.part, cache.cache, cache.verdict, cache.key)),
                cell(rows.cache_note(cache)),
            )
    return found
