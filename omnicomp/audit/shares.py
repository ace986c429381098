"""Shares of the work: what each row does of all operators, FLOPs, bytes and measured time."""

import dataclasses
from typing import Final

from omnicomp.audit.facts import Shares
from omnicomp.audit.model import Audit, SubgraphAudit

__all__ = ["with_shares"]

_COUNTS: Final = {"nodes": "nodes", "flops": "flops_hint", "bytes": "bytes_hint"}


def with_shares(audit: Audit) -> Audit:
    """Give every row that counts its share of the work; a parent's share leaves out its override calls."""
    rows = [row for row in audit.subgraphs if not row.superseded]
    known = {basis: _shares_of_counts(rows, field) for basis, field in _COUNTS.items()}
    known["seconds"] = _parts({row.id: row.timing.seconds for row in rows if row.timing is not None})
    # A row of unknown cost would vanish from shares of FLOPs, and often it is the one that fell back.
    basis = next((name for name in ("flops", "nodes") if known[name]), None)
    if basis is None:
        return audit

    def with_share(row: SubgraphAudit) -> SubgraphAudit:
        shares = Shares(**{name: values.get(row.id) for name, values in known.items()})
        return dataclasses.replace(row, share=known[basis].get(row.id), shares=shares)

    graphs = tuple(
        dataclasses.replace(
            graph,
            parts=tuple(
                dataclasses.replace(part, subgraphs=tuple(with_share(row) for row in part.subgraphs))
                for part in graph.parts
            ),
        )
        for graph in audit.graphs
    )
    return dataclasses.replace(audit, graphs=graphs, share_basis=basis)


def _shares_of_counts(rows: list[SubgraphAudit], field: str) -> dict[str, float]:
    if field != "nodes" and any(getattr(row, field) < 0 for row in rows if not row.parent):
        return {}
    own: dict[str, float] = {row.id: max(getattr(row, field), 0) for row in rows}
    work = dict(own)
    for row in rows:
        if row.parent in own:
            own[row.parent] = max(own[row.parent] - work[row.id], 0)
    return _parts(own)


def _parts(work: dict[str, float]) -> dict[str, float]:
    total = sum(work.values())
    return {id: value / total for id, value in work.items()} if total > 0 else {}
