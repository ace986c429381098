"""The audit for a terminal, with rich."""

import io
from collections.abc import Iterator

from rich.box import ASCII_DOUBLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from omnicomp.audit.model import Audit, SubgraphAudit
from omnicomp.audit.views import rows
from omnicomp.audit.views.summary import percent, plural, short_source

__all__ = ["renderables", "to_text"]

_WIDTH = 120
_STYLES = {"inductor": "green", "override": "cyan", "eager": "yellow"}


def to_text(audit: Audit) -> str:
    """Plain text, 120 columns wide, without colours."""
    stream = io.StringIO()
    console = Console(file=stream, width=_WIDTH, no_color=True, force_terminal=False, legacy_windows=False)
    console.print(*renderables(audit), sep="\n", highlight=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).rstrip() + "\n"


def renderables(audit: Audit) -> Iterator[RenderableType]:
    """The header, then a table for each question; an empty table is left out."""
    yield _text(audit.summary(), "bold red" if audit.mismatches else "bold")
    for graph in audit.graphs:
        yield _text(rows.graph_line(graph))
    tables = (_subgraphs, _reasons, _attention, _speculations, _passes, _options, _caches)
    for make in tables:
        table = make(audit)
        if table.row_count:
            yield Text()
            yield table
    note = rows.basis_note(audit)
    if note:
        yield _text(note, "dim")


def _text(value: object, style: str = "") -> Text:
    """A cell that shows markup and control characters instead of obeying them."""
    return Text(rows.printable(value), style=style)


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    # Rules of ASCII: the same text in a log file, a pager and a terminal without Unicode.
    table = Table(title=title, title_justify="left", title_style="bold", box=ASCII_DOUBLE_HEAD, expand=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _lowering(row: SubgraphAudit) -> Text:
    if row.ran is None:
        cell = _text("not called yet", "dim")
    else:
        cell = _text(row.ran, _STYLES.get(row.ran, "magenta"))
    state = rows.status(row)
    if state:
        cell.append(f"\n{state}", "bold red" if row.mismatch else "dim")
    return cell


def _subgraphs(audit: Audit) -> Table:
    share = "operators" if audit.share_basis == "nodes" else "FLOPs"
    table = _table(
        "Subgraphs", "subgraph", "planned", "ran", "nodes", f"% {share}", "what", "build", right=("nodes", f"% {share}")
    )
    for row in audit.subgraphs:
        table.add_row(
            _text(f"  /{row.id.rsplit('/', 1)[-1]}" if row.parent else row.id),
            _text(row.planned or "not recorded"),
            _lowering(row),
            _text(row.nodes),
            _text(percent(row.share)),
            _text("\n".join(rows.what(row))),
            _text(rows.duration(row.seconds)),
        )
    return table


def _reasons(audit: Audit) -> Table:
    table = _table("Reasons", "what", "where", "why", "to change this")
    for row in rows.reason_rows(audit):
        head = (_text(row.what), _text(row.where))
        for reason in row.reasons:
            why = rows.reason_text(reason)
            table.add_row(*head, _text(f"{reason.by}: {why}" if reason.by else why), _text(reason.lever))
            head = (Text(), Text())
        if not row.reasons:
            table.add_row(*head, _text("no reason was recorded"), Text())
    return table


def _attention(audit: Audit) -> Table:
    sites = audit.sites
    table = _table(
        f"Attention: {len(sites.fused)} of {plural(sites.total, 'site')} fused", "site", "module", "verdict", "detail"
    )
    for site in sites.fused:
        place = f"{site.graph} {site.node} {short_source(site.source)}"
        table.add_row(_text(place), _text(site.module), _text(f"fused: {site.target}"), _text(site.detail))
    for miss in sites.near_misses:
        place = f"{miss.graph} {miss.node} {short_source(miss.source)}"
        table.add_row(_text(place), _text(miss.module), _text("left alone", "yellow"), _text(rows.near_miss_text(miss)))
    return table


def _speculations(audit: Audit) -> Table:
    table = _table("Speculation", "graph", "assumed", "state", "variant", "detail")
    for graph in audit.graphs:
        for event in graph.speculations:
            table.add_row(_text(graph.id), *map(_text, rows.speculation(event)))
    return table


def _passes(audit: Audit) -> Table:
    table = _table("Passes", "graph", "pass", "result", "rewrites", "time", "operators", "note", right=("rewrites",))
    for graph in audit.graphs:
        for run in graph.passes:
            table.add_row(
                _text(graph.id),
                _text(run.name),
                _text(rows.pass_result(run)),
                _text(run.rewrites or ""),
                _text(rows.duration(run.seconds)),
                _text(rows.node_diff(run.node_diff)),
                _text(run.note),
            )
    return table


def _options(audit: Audit) -> Table:
    table = _table("Options", "graph", "option", "requested", "effective", "why")
    for graph in audit.graphs:
        ineffective = {option.key for option in graph.ineffective}
        for key, value in graph.options.items():
            if key not in ineffective:
                table.add_row(_text(graph.id), _text(key), _text(value), _text("as requested"), _text(""))
        for option in graph.ineffective:
            table.add_row(
                _text(graph.id),
                _text(option.key),
                _text(option.requested),
                _text(option.effective, "yellow"),
                _text(rows.with_lever(option.reason)),
            )
    return table


def _caches(audit: Audit) -> Table:
    table = _table("Caches", "graph", "part", "cache", "verdict", "key", "note")
    for graph in audit.graphs:
        for cache in graph.caches:
            table.add_row(
                *(_text(cell) for cell in (graph.id, cache.part, cache.cache, cache.verdict, cache.key)),
                _text(rows.cache_note(cache)),
            )
    return table
