"""The audit in one line."""

from omnicomp.audit.facts import Fallback
from omnicomp.audit.model import Audit

__all__ = ["NOTHING", "graph_breaks", "percent", "plural", "short_source", "summary"]

NOTHING = "omni: nothing was compiled yet; call the compiled function first"


def summary(audit: Audit) -> str:
    """One line: shares of the work, attention, retreats, and whether what ran is what was planned."""
    if not audit.events:
        return NOTHING
    rows = [row for row in audit.subgraphs if not row.parent and not row.superseded]
    head = f"omni: {plural(len(audit.graphs), 'graph')}, {plural(len(rows), 'subgraph')}"
    if not audit.subgraphs:
        return f"{head}: nothing was built"
    clauses = [_shares(audit)]
    sites = audit.sites
    if sites.total:
        clauses.append(f"attention {len(sites.fused)} of {plural(sites.total, 'site')} fused")
    ineffective = [option.key for graph in audit.graphs for option in graph.ineffective]
    if ineffective:
        keys = ", ".join(dict.fromkeys(ineffective))
        clauses.append(f"{plural(len(set(ineffective)), 'option')} not as requested ({keys})")
    broken = graph_breaks(audit)
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        clauses.append(f"{plural(len(broken), 'graph break')} ({short_source(broken[0])}{more})")
    if audit.retreats:
        clauses.append(plural(len(audit.retreats), "retreat"))
    clauses.append(_verdict(audit))
    return f"{head}: {'; '.join(clause for clause in clauses if clause)}"


def graph_breaks(audit: Audit) -> list[str]:
    """The places at which Dynamo broke off, each once; a break in a called function ends the graph of each caller."""
    found = (miss for graph in audit.graphs for miss in graph.near_misses if miss.reason.code == "graph_break")
    return list(dict.fromkeys(miss.source or miss.node for miss in found))


def _shares(audit: Audit) -> str:
    basis = {"flops": "FLOPs", "nodes": "operators"}.get(audit.share_basis, "")
    shares = audit.shares
    pieces: list[str] = []
    for lowering in sorted(shares, key=lambda name: (name == "eager", -shares[name], name)):
        piece = f"{lowering or 'unplanned'} {percent(shares[lowering])}"
        if not pieces and basis:
            piece += f" of {basis}"
        where = _where(audit.fallbacks) if lowering == "eager" else ""
        pieces.append(f"{piece} ({where})" if where else piece)
    return ", ".join(pieces)


def _where(fallbacks: tuple[Fallback, ...]) -> str:
    """The first fallback and how many more places there are."""
    places = list(dict.fromkeys((f.op.split(", ")[0] or f.subgraph, f.source) for f in fallbacks))
    if not places:
        return ""
    op, source = places[0]
    first = f"{op} at {short_source(source)}" if source else op
    return f"{first} and {len(places) - 1} more" if len(places) > 1 else first


def _verdict(audit: Audit) -> str:
    wrong = list(audit.mismatches)
    if wrong:
        more = f", and {len(wrong) - 1} more did not run as planned" if len(wrong) > 1 else ""
        return f"ERROR: {wrong[0].id} was {wrong[0].difference}{more}"
    live = [row for row in audit.subgraphs if not row.superseded]
    idle = sum(1 for row in live if row.ran is None)
    if idle == len(live):
        return "nothing ran yet"
    return f"nothing that ran differs from the plan{f'; {idle} not called yet' if idle else ''}"


def percent(share: float | None) -> str:
    """A share as `98.7 %`; what is little but not nothing is not shown as nothing."""
    if share is None:
        return ""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1 - 1e-12:
        return "> 99.9 %"
    return f"{100 * share:.1f} %"


def plural(count: int, noun: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def short_source(source: str) -> str:
    """`model.py:12` of `/home/me/model.py:12`."""
    return source.replace("\\", "/").rsplit("/", 1)[-1]
