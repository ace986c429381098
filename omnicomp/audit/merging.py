"""Advice on boundaries: which nodes keep two subgraphs of one lowering apart."""

from collections.abc import Sequence

from omnicomp.audit.facts import Merge
from omnicomp.audit.model import SubgraphAudit
from omnicomp.timeline import Boundary, NodePlacement

__all__ = ["merges"]


def merges(
    rows: Sequence[SubgraphAudit], boundaries: Sequence[Boundary], declined: Sequence[NodePlacement]
) -> tuple[Merge, ...]:
    """The subgraphs of a part that stand between two of one compiled lowering, because nodes of theirs were refused.

    Args:
        rows: of the part, in program order.
        boundaries: of the part.
        declined: nodes that an earlier lowering refused, with the reasons.
    """
    whole = [row for row in rows if not row.parent and not row.superseded]
    chains = {node.node: node.chain for node in declined}
    crossing: dict[tuple[str, str], Boundary] = {(b.source, b.target): b for b in boundaries}
    found: list[Merge] = []
    for left, between, right in zip(whole, whole[1:], whole[2:], strict=False):
        lowering = left.planned
        if lowering != right.planned or lowering in ("eager", between.planned) or not between.refused:
            continue
        pairs = ((left.id, between.id), (between.id, right.id), (left.id, right.id))
        crossed = [crossing[pair] for pair in pairs if pair in crossing]
        unknown = any(boundary.bytes_hint < 0 for boundary in crossed)
        found.append(
            Merge(
                left=left.id,
                between=between.id,
                right=right.id,
                lowering=lowering,
                nodes=between.refused,
                tensors=sum(boundary.tensors for boundary in crossed),
                bytes_hint=-1 if unknown else sum(boundary.bytes_hint for boundary in crossed),
                reasons=tuple(reason for node in between.refused for reason in chains.get(node, ())),
            )
        )
    return tuple(found)
