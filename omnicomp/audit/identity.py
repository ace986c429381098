"""Identities: what names a graph or a subgraph in every run of a program.

An identity is text such as `layers.3.attn/forward/5f0c2a9b41de-83b01c77`: the path that all of its module paths begin
with (else the name of the compiled function), its part, and its fingerprint. A fingerprint is a hash of the operators
with the dtypes of their results, a hyphen, and a hash that includes the classes of sizes
(`omnicomp.analysis.hashes`). It has no numbers of graphs, names of nodes, files, lines or device indices, and
no order of nodes, so it is equal in other processes, on other machines and on other ranks. Equal identities in a report
are numbered `~2`, `~3`, …: those of graphs in the order of capture, those of subgraphs in the order of their graphs'.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence

from omnicomp.audit.model import GraphAudit, PartAudit, SubgraphAudit
from omnicomp.timeline.reasons import common_path


def natural(id: str) -> list[tuple[int, str]]:
    """Sort key that puts `g0.forward.10` after `g0.forward.9`."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", id)]


def without_number(identity: str) -> str:
    """An identity without its number."""
    return re.sub(r"~\d+$", "", identity)


def operators_of(identity: str) -> str:
    """An identity without its number and the classes of sizes: the same for another batch size."""
    return without_number(identity).rpartition("-")[0]


def graph_identity(graph: GraphAudit) -> str:
    """Identity of a graph, not yet numbered among equal ones."""
    kind = "training" if graph.training else "inference"
    variant = f":{graph.variant}" if graph.variant else ""
    # A timeline of an older version has no fingerprint; the number of operators is the least that it tells.
    return f"{_label(graph)}/{kind}{variant}/{graph.fingerprint or _hashed({'operators': graph.nodes})}"


def row_identity(row: SubgraphAudit, graph: GraphAudit) -> str:
    """Identity of a subgraph, not yet numbered; the row of a whole graph has the graph's."""
    if row.id == graph.id:
        return graph_identity(graph)
    place = row.module or common_path(row.modules) or _label(graph)
    name = re.sub(r":\d+$", "", row.id.rsplit("/", 1)[1]) if "/" in row.id else ""
    pieces = (place, f"{row.part}:{graph.variant}" if graph.variant else row.part, name)
    return "/".join((*filter(None, pieces), row.fingerprint or _hashed(row.ops)))


def _label(graph: GraphAudit) -> str:
    return graph.module or graph.function.partition(" ")[0] or "graph"


def _hashed(counts: Mapping[str, int]) -> str:
    text = hashlib.sha256(repr(sorted(counts.items())).encode()).hexdigest()[:12]
    return f"{text}-00000000"


def with_identities(graphs: Sequence[GraphAudit]) -> tuple[GraphAudit, ...]:
    """The graphs and their rows with identities; equal ones are numbered."""
    taken: dict[str, int] = {}
    named = [dataclasses.replace(graph, identity=_numbered(graph_identity(graph), taken)) for graph in graphs]
    rows = [(graph, row) for graph in named for row in graph.subgraphs]
    # Not in the order of capture: another order of the same graphs must give every row the identity that it had.
    rows.sort(key=lambda item: (natural(item[0].identity), natural(item[1].id.removeprefix(item[0].id))))
    taken = {}
    identities = {row.id: _numbered(row_identity(row, graph), taken) for graph, row in rows}

    def renamed(part: PartAudit) -> PartAudit:
        subgraphs = tuple(dataclasses.replace(row, identity=identities[row.id]) for row in part.subgraphs)
        return dataclasses.replace(part, subgraphs=subgraphs)

    return tuple(dataclasses.replace(graph, parts=tuple(map(renamed, graph.parts))) for graph in named)


def _numbered(identity: str, taken: dict[str, int]) -> str:
    count = taken[identity] = taken.get(identity, 0) + 1
    return identity if count == 1 else f"{identity}~{count}"
