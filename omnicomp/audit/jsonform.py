"""The audit as JSON, and the part of it that two runs of one program share.

`docs/timeline.md` describes the form. A reader ignores unknown keys; keys are only added within a schema.
"""

import dataclasses
import json
import re
from typing import Any, Final

from omnicomp.audit.model import AUDIT_SCHEMA, Audit, Fallback, GraphAudit, PartAudit, SubgraphAudit
from omnicomp.timeline import Event, NodePlacement

__all__ = ["stable", "to_dict", "to_json"]

# What a run leaves behind on a disk or reads off a clock; a cold and a warm start differ in nothing else.
_VOLATILE: Final = frozenset({"seconds", "artefact", "evidence", "caches", "calibrations", "events"})
_CACHE_PATH: Final = re.compile(r"\S*torchinductor_\S*")


def to_json(audit: Audit) -> str:
    """The JSON form as text, indented, with a stable order of keys."""
    return json.dumps(to_dict(audit), indent=2, ensure_ascii=False, default=str) + "\n"


def to_dict(audit: Audit) -> dict[str, Any]:
    """The JSON form as plain dictionaries and lists."""
    return {
        "schema": AUDIT_SCHEMA,
        "summary": audit.summary(),
        "events": audit.events,
        "share_basis": audit.share_basis,
        "shares": audit.shares,
        "attention": {"fused": len(audit.sites.fused), "near_misses": len(audit.sites.near_misses)},
        "mismatches": [row.id for row in audit.mismatches],
        "fallbacks": [_fallback(fallback) for fallback in audit.fallbacks],
        "graphs": [_graph(graph) for graph in audit.graphs],
    }


def stable(audit: Audit) -> dict[str, Any]:
    """The JSON form without times, artefacts, evidence and cache verdicts."""
    artefacts = sorted({a.artefact for row in audit.subgraphs for a in row.attempts if a.artefact}, key=len)
    return _stable(to_dict(audit), tuple(reversed(artefacts)))


def _stable(value: Any, artefacts: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _stable(item, artefacts) for key, item in value.items() if key not in _VOLATILE}
    if isinstance(value, list):
        return [_stable(item, artefacts) for item in value]
    if isinstance(value, str):
        for artefact in artefacts:
            value = value.replace(artefact, "<artefact>")
        return _CACHE_PATH.sub("<cache>", value)
    return value


def _event(event: Event) -> dict[str, Any]:
    """An event without what the recorder stamped on it and what its place in the report says."""
    left_out = {"schema", "type", "graph", "time", "seq"}
    return {key: value for key, value in event.to_dict().items() if key not in left_out}


def _events(events: tuple[Event, ...], *left_out: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in _event(event).items() if k not in left_out} for event in events]


def _graph(graph: GraphAudit) -> dict[str, Any]:
    return {
        "id": graph.id,
        "compile_id": graph.compile_id,
        "function": graph.function,
        "nodes": graph.nodes,
        "device": graph.device,
        "mode": graph.mode,
        "variant": graph.variant,
        "training": graph.training,
        "dynamic": graph.dynamic,
        "options": graph.options,
        "versions": graph.versions,
        "ineffective": _events(graph.ineffective),
        "passes": _events(graph.passes),
        "rewrites": _events(graph.rewrites),
        "near_misses": _events(graph.near_misses),
        "speculations": _events(graph.speculations),
        "calibrations": _events(graph.calibrations),
        "weights": _events(graph.weights),
        "parts": [_part(part) for part in graph.parts],
        "attempts": _events(graph.attempts),
        "retreats": _events(graph.retreats),
        "caches": _events(graph.caches),
    }


def _part(part: PartAudit) -> dict[str, Any]:
    return {
        "name": part.name,
        "placement": part.placement,
        "declined": [_declined(node) for node in part.declined],
        "note": part.note,
        "subgraphs": [_subgraph(row) for row in part.subgraphs],
    }


def _declined(node: NodePlacement) -> dict[str, Any]:
    return {
        **{f.name: getattr(node, f.name) for f in dataclasses.fields(node) if f.name != "chain"},
        "chain": [reason.to_dict() for reason in node.chain],
    }


def _subgraph(row: SubgraphAudit) -> dict[str, Any]:
    plain = {
        field.name: getattr(row, field.name)
        for field in dataclasses.fields(row)
        if field.name not in ("graph", "part", "attempts", "retreats", "runs", "modules", "sources")
    }
    return {
        **plain,
        "mismatch": row.mismatch,
        "modules": list(row.modules),
        "sources": list(row.sources),
        "seconds": row.seconds,
        "artefact": row.artefact,
        "attempts": _events(row.attempts, "part", "subgraph"),
        "retreats": _events(row.retreats, "part", "subgraph"),
        "runs": _events(row.runs, "part", "subgraph"),
    }


def _fallback(fallback: Fallback) -> dict[str, Any]:
    return {
        **{f.name: getattr(fallback, f.name) for f in dataclasses.fields(fallback) if f.name != "reasons"},
        "reasons": [reason.to_dict() for reason in fallback.reasons],
    }
