"""The audit as one HTML file: no network, no script, light or dark as the reader's system asks.

Names of modules, operators and files come from the user's program; every one of them passes through `_e`.
"""

import html
from collections.abc import Iterable, Iterator
from typing import Final

from omnicomp.audit import rows
from omnicomp.audit.model import Audit, SubgraphAudit
from omnicomp.audit.style import STYLE
from omnicomp.audit.summary import percent, plural, short_source

__all__ = ["to_html"]

_KNOWN: Final = ("inductor", "override", "eager")


def to_html(audit: Audit) -> str:
    """The whole page."""
    body = [_header(audit), _graphs(audit), _subgraphs(audit), _reasons(audit), _attention(audit)]
    body += [_speculations(audit), _passes(audit), _options(audit), _caches(audit)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>omnicomp audit</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in body if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def _e(value: object) -> str:
    return html.escape(rows.printable(value), quote=True)


def _header(audit: Audit) -> str:
    verdict, tone = _verdict(audit)
    text = audit.summary().removeprefix("omni: ")
    return (
        f'<header>\n<h1>omnicomp audit <span class="pill {tone}">{_e(verdict)}</span></h1>\n'
        f'<p class="summary">{_e(text)}</p>\n{_bar(audit)}{_tiles(audit)}</header>'
    )


def _verdict(audit: Audit) -> tuple[str, str]:
    if audit.mismatches:
        return f"{plural(len(audit.mismatches), 'subgraph')} did not run as planned", "bad"
    if not any(row.ran for row in audit.subgraphs):
        return "nothing ran yet", "muted"
    if audit.fallbacks or audit.retreats:
        return "as planned, with fallbacks", "warn"
    return "as planned", "good"


def _class(lowering: str) -> str:
    return lowering if lowering in _KNOWN else "other"


def _bar(audit: Audit) -> str:
    shares = sorted(audit.shares.items(), key=lambda item: (item[0] == "eager", -item[1]))
    if not shares:
        return ""
    basis = "operators" if audit.share_basis == "nodes" else "FLOPs"
    pieces = "".join(f'<span class="{_class(name)}" style="flex-grow:{share:.6f}"></span>' for name, share in shares)
    legend = "".join(
        f'<li><span class="dot {_class(name)}"></span>{_e(name)} <b>{_e(percent(share))}</b></li>'
        for name, share in shares
    )
    return f'<div class="bar">{pieces}</div>\n<ul class="legend">{legend}<li class="of">of {basis}</li></ul>\n'


def _tiles(audit: Audit) -> str:
    sites = audit.sites
    tiles = [
        ("graphs", str(len(audit.graphs)), ""),
        ("subgraphs", str(sum(1 for row in audit.subgraphs if not row.parent)), ""),
        ("on eager, not by choice", str(len(audit.fallbacks)), "warn" if audit.fallbacks else ""),
        ("retreats", str(len(audit.retreats)), "warn" if audit.retreats else ""),
        ("not as planned", str(len(audit.mismatches)), "bad" if audit.mismatches else ""),
    ]
    if sites.total:
        tiles.insert(2, ("attention sites fused", f"{len(sites.fused)} of {sites.total}", ""))
    cells = "".join(f'<div class="tile {tone}"><b>{_e(value)}</b>{_e(name)}</div>' for name, value, tone in tiles)
    return f'<div class="tiles">{cells}</div>\n'


def _table(title: str, columns: Iterable[str], body: Iterable[str], note: str = "", open: bool = True) -> str:
    """A section with a table whose cells are HTML already; empty without rows."""
    lines = list(body)
    if not lines:
        return ""
    head = "".join(f"<th>{_e(column)}</th>" for column in columns)
    return (
        f"<section><details{' open' if open else ''}><summary><h2>{_e(title)}</h2></summary>\n"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + f"\n</tbody></table></div>{f'<p class=note>{_e(note)}</p>' if note else ''}</details></section>"
    )


def _tr(*cells: str, tone: str = "") -> str:
    return f"<tr{f' class={tone}' if tone else ''}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _code(value: object, title: str = "") -> str:
    if not value:
        return ""
    hint = f' title="{_e(title)}"' if title else ""
    return f"<code{hint}>{_e(value)}</code>"


def _source(source: str) -> str:
    return _code(short_source(source), source)


def _lines(values: Iterable[str]) -> str:
    return "<br>".join(value for value in values if value)


def _graphs(audit: Audit) -> str:
    def body() -> Iterator[str]:
        for graph in audit.graphs:
            known = {"training": graph.training, "dynamic": graph.dynamic, graph.variant: bool(graph.variant)}
            traits = [trait for trait, on in known.items() if on]
            versions = ", ".join(f"{name} {version}" for name, version in graph.versions.items())
            placed = _lines(
                f"{_e(part.name or 'whole graph')}: {_e(rows.counts(part.placement))}"
                + (f"<br><span class=dim>{_e(part.note)}</span>" if part.note else "")
                for part in graph.parts
                if part.placement
            )
            cells = (graph.compile_id, graph.device, graph.mode, ", ".join(traits), str(graph.nodes))
            yield _tr(_code(graph.id), _e(graph.function), *(_e(cell) for cell in cells), placed, _e(versions))

    columns = ("graph", "function", "compile id", "device", "mode", "traits", "operators", "placed", "versions")
    return _table("Graphs", columns, body())


def _subgraphs(audit: Audit) -> str:
    def body() -> Iterator[str]:
        for row in audit.subgraphs:
            tone = "mismatch" if row.mismatch else "child" if row.parent else ""
            name = f"/{row.id.rsplit('/', 1)[1]}" if row.parent else row.id
            share = percent(row.share)
            width = f"width:{100 * (row.share or 0):.2f}%"
            meter = f'<span class="meter"><i class="{_class(row.lowering)}" style="{width}"></i></span>'
            yield _tr(
                _code(name, row.id),
                _badge(row.planned or "not recorded"),
                _ran(row),
                f'<span class="number">{row.nodes}</span>',
                f'<span class="number">{_e(share)}</span>{meter if share else ""}',
                _lines(_e(line) for line in rows.what(row)) + _more(row),
                f'<span class="number">{_e(rows.duration(row.seconds))}</span>',
                tone=tone,
            )

    share = "operators" if audit.share_basis == "nodes" else "FLOPs"
    columns = ("subgraph", "planned", "ran", "nodes", f"share of {share}", "what", "build")
    return _table("Subgraphs", columns, body(), rows.basis_note(audit))


def _badge(lowering: str) -> str:
    return f'<span class="badge {_class(lowering)}">{_e(lowering)}</span>'


def _ran(row: SubgraphAudit) -> str:
    cell = _badge(row.ran) if row.ran else "<span class=dim>not called yet</span>"
    state = rows.status(row)
    return f"{cell}<br><span class={'error' if row.mismatch else 'dim'}>{_e(state)}</span>" if state else cell


def _more(row: SubgraphAudit) -> str:
    """What is too long for a row: all modules and lines, evidence, artefact, attempts."""
    facts = [
        ("evidence", row.evidence),
        ("artefact", row.artefact if row.artefact != row.evidence else ""),
        ("FLOPs", f"{row.flops} = {row.flops_hint:,}" if row.flops_hint > 0 else row.flops),
        ("bytes", f"{row.bytes} = {row.bytes_hint:,}" if row.bytes_hint > 0 else row.bytes),
        ("inputs, outputs", f"{row.inputs}, {row.outputs}" if row.inputs or row.outputs else ""),
        ("operators", rows.counts(row.ops, limit=len(row.ops)) if len(row.ops) > 4 else ""),
        ("modules", ", ".join(row.modules) if len(row.modules) > 3 else ""),
        ("lines", ", ".join(row.sources)),
    ]
    for attempt in row.attempts:
        verdict = "built" if attempt.ok else "failed"
        why = str(attempt.reason or attempt.skipped or "")
        used = ", selected" if attempt.selected else ""
        facts.append((f"tried {attempt.lowering}", f"{verdict}{used}{f': {why}' if why else ''}"))
    items = "".join(f"<dt>{_e(name)}</dt><dd>{_e(value)}</dd>" for name, value in facts if value and value != "0")
    return f"<details class=more><summary>more</summary><dl>{items}</dl></details>" if items else ""


def _reasons(audit: Audit) -> str:
    def body() -> Iterator[str]:
        for row in rows.reason_rows(audit):
            why = [
                f"{f'<b>{_e(reason.by)}</b>: ' if reason.by else ''}{_e(rows.reason_text(reason))} "
                f"<span class=dim>[{_e(reason.code)}]</span>"
                for reason in row.reasons
            ]
            levers = _lines(dict.fromkeys(_e(reason.lever) for reason in row.reasons))
            where = _code(row.where, row.source)
            yield _tr(_code(row.what), where, _lines(why) or "no reason was recorded", levers)

    return _table("Reasons", ("what", "where", "why", "to change this"), body())


def _attention(audit: Audit) -> str:
    sites = audit.sites

    def body() -> Iterator[str]:
        for site in sites.fused:
            place = f"{_code(f'{site.graph} {site.node}')} {_source(site.source)}"
            fused = f'<span class="badge inductor">fused</span> {_e(site.target)}'
            yield _tr(place, _e(site.module), fused, _e(site.detail))
        for miss in sites.near_misses:
            place = f"{_code(f'{miss.graph} {miss.node}')} {_source(miss.source)}"
            verdict = '<span class="badge eager">left alone</span>'
            yield _tr(place, _e(miss.module), verdict, _e(rows.near_miss_text(miss)))

    title = f"Attention: {len(sites.fused)} of {plural(sites.total, 'site')} fused"
    return _table(title, ("site", "module", "verdict", "detail"), body())


def _speculations(audit: Audit) -> str:
    body = (
        _tr(_code(graph.id), *map(_e, rows.speculation(event)))
        for graph in audit.graphs
        for event in graph.speculations
    )
    return _table("Speculation", ("graph", "assumed", "state", "variant", "detail"), body)


def _passes(audit: Audit) -> str:
    body = (
        _tr(
            _code(graph.id),
            _code(run.name),
            _e(rows.pass_result(run)),
            f'<span class="number">{run.rewrites or ""}</span>',
            f'<span class="number">{_e(rows.duration(run.seconds))}</span>',
            _e(rows.node_diff(run.node_diff)),
            _e(run.note),
        )
        for graph in audit.graphs
        for run in graph.passes
    )
    return _table("Passes", ("graph", "pass", "result", "rewrites", "time", "operators", "note"), body)


def _options(audit: Audit) -> str:
    def body() -> Iterator[str]:
        for graph in audit.graphs:
            ineffective = {option.key for option in graph.ineffective}
            for key, value in graph.options.items():
                if key not in ineffective:
                    yield _tr(_code(graph.id), _code(key), _e(value), "as requested", "")
            for option in graph.ineffective:
                why = _e(rows.with_lever(option.reason))
                yield _tr(_code(graph.id), _code(option.key), _e(option.requested), _e(option.effective), why)

    return _table("Options", ("graph", "option", "requested", "effective", "why"), body())


def _caches(audit: Audit) -> str:
    body = (
        _tr(
            _code(graph.id),
            *(_e(cell) for cell in (cache.part, cache.cache, cache.verdict)),
            _code(cache.key),
            _e(rows.cache_note(cache)),
        )
        for graph in audit.graphs
        for cache in graph.caches
    )
    return _table("Caches", ("graph", "part", "cache", "verdict", "key", "note"), body, open=False)
