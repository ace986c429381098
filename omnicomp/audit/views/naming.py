"""What a name that somebody asks about may mean: a node, an operator, a module, a line, a subgraph, a code."""

import fnmatch

from omnicomp.audit.model import Audit, SubgraphAudit
from omnicomp.timeline import CODES, NearMiss, NodePlacement, Reason

__all__ = [
    "is_at",
    "is_inside",
    "is_name",
    "is_of_reason",
    "is_operator",
    "known_names",
    "means_miss",
    "means_node",
    "means_row",
]


def is_name(question: str, name: str) -> bool:
    """Whether a name is the one that is meant, or matches the pattern."""
    return bool(name) and (question == name or fnmatch.fnmatchcase(name, question))


def is_inside(question: str, module: str) -> bool:
    """Whether a module is the one that is meant, or inside it."""
    return bool(module) and (is_name(question, module) or fnmatch.fnmatchcase(module, f"{question}.*"))


def is_operator(question: str, op: str) -> bool:
    """Whether it is the operator, with or without its namespace and overload."""
    names = (op, op.rpartition(".")[0], op.partition(".")[2], op.partition(".")[2].rpartition(".")[0])
    return any(is_name(question, name) for name in names)


def is_at(question: str, source: str) -> bool:
    """`file:12`, its end, or the whole file."""
    return bool(source) and (
        is_name(question, source)
        or source.endswith(f"/{question}")
        or is_name(question, source.rpartition(":")[0])
        or source.rpartition(":")[0].endswith(f"/{question}")
    )


def is_of_reason(question: str, reason: Reason) -> bool:
    """Whether a reason has that code, is about that node, or was caused or given by it."""
    node = reason.node.partition(" ")[0]
    return question in (reason.code, node, reason.cause.partition(" ")[0], reason.by) and bool(question)


def means_node(question: str, node: NodePlacement) -> bool:
    """Whether a refused node is meant, by any of its names."""
    return (
        is_name(question, node.node)
        or is_operator(question, node.op)
        or is_inside(question, node.module)
        or is_at(question, node.source)
        or any(question == reason.code or question == reason.cause.partition(" ")[0] for reason in node.chain)
    )


def means_row(question: str, row: SubgraphAudit) -> bool:
    """Whether a subgraph is meant, or has something that is."""
    return (
        any(is_name(question, name) for name in (row.id, row.identity, row.id.partition("/")[2]))
        or any(is_inside(question, module) for module in (row.module, *row.modules))
        or any(is_operator(question, op) for op in row.ops)
        or any(is_at(question, source) for source in row.sources)
        or any(is_of_reason(question, reason) for reason in row.reasons)
    )


def means_miss(question: str, miss: NearMiss) -> bool:
    """Whether a candidate that a pass left alone is meant."""
    return (
        any(is_name(question, name) for name in (miss.node, miss.name, miss.kind))
        or is_operator(question, miss.node)
        or is_inside(question, miss.module)
        or is_at(question, miss.source)
        or is_of_reason(question, miss.reason)
    )


def known_names(audit: Audit) -> set[str]:
    """What a question may be about, for the hint at a misspelt one."""
    found: set[str] = set(CODES)
    for graph in audit.graphs:
        found |= {graph.id, *(setting.key for setting in graph.settings), *(run.name for run in graph.passes)}
        for miss in graph.near_misses:
            found |= {miss.node, miss.module}
        for part in graph.parts:
            for node in part.declined:
                found |= {node.node, node.op, node.module, node.op.rpartition(".")[0]}
            for row in part.subgraphs:
                found |= {row.id, row.module, *row.modules, *row.ops}
    return found - {""}
