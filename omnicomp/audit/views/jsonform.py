"""The audit as JSON, the same read back, and the part of it that two runs of one program share.

`docs/audit.md` describes the form, and `schema/report-2.json` checks it. A reader ignores unknown keys; keys are only
added within a schema.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from omnicomp.audit.model import AUDIT_SCHEMA, SHARE_BASES, GraphAudit, Report
from omnicomp.audit.views.form import decode, encode
from omnicomp.audit.views.rows import summary
from omnicomp.errors import ReportError

__all__ = ["from_dict", "from_json", "stable", "to_dict", "to_json"]

# What a run leaves behind on a disk or reads off a clock; a cold and a warm start differ in nothing else.
_VOLATILE: Final = frozenset(
    {"seconds", "artefact", "evidence", "caches", "calibrations", "events", "verifications", "time", "timing", "memory"}
    | {"stages", "compile_seconds", "candidates", "pid", "rank", "ranks", "processes", "skipped"}
)
_CACHE_PATH: Final = re.compile(r"\S*torchinductor_\S*")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def to_json(audit: Report) -> str:
    """The JSON form as text, indented, with a stable order of keys."""
    return json.dumps(to_dict(audit), indent=2, ensure_ascii=False) + "\n"


def to_dict(audit: Report) -> dict[str, Any]:
    """The JSON form as plain dictionaries and lists."""
    sites = audit.sites
    return {
        "schema": AUDIT_SCHEMA,
        "summary": summary(audit),
        "events": audit.events,
        "skipped": audit.skipped,
        "share_basis": audit.share_basis,
        "shares": audit.shares,
        "shares_by": audit.shares_by,
        "environment": encode(audit.environment),
        "attention": {"fused": len(sites.fused), "near_misses": len(sites.near_misses)},
        "mismatches": [row.id for row in audit.mismatches],
        "fallbacks": encode(audit.fallbacks),
        "graphs": encode(audit.graphs),
    }


def from_json(text: str, name: str) -> Report:
    """The report that `to_json` wrote.

    Args:
        text: the JSON form.
        name: of the file, for the error.

    Raises:
        ReportError: it is no report, or of a newer schema.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{name} is no report ({error}); give what omnicomp audit --format json wrote") from None
    return from_dict(data, name)


def from_dict(data: Any, name: str = "the report") -> Report:
    """The report of which `to_dict` made the data; what is computed from the rest is computed again.

    Raises:
        ReportError: it is no report, or of a newer schema.
    """
    schema: Any = data.get("schema") if isinstance(data, Mapping) else None
    if not isinstance(data, dict) or isinstance(schema, bool) or not isinstance(schema, int) or "graphs" not in data:
        raise ReportError(f"{name} is no report; give what omnicomp audit --format json wrote, or a timeline")
    if schema > AUDIT_SCHEMA:
        raise ReportError(f"{name} has schema {schema} and this version reads up to {AUDIT_SCHEMA}; upgrade omnicomp")
    try:
        return Report(
            graphs=decode(tuple[GraphAudit, ...], data["graphs"], "graphs"),
            events=decode(int, data.get("events", 0), "events"),
            share_basis=_basis(data.get("share_basis", "none")),
            skipped=decode(int, data.get("skipped", 0), "skipped"),
        )
    except ReportError as error:
        raise ReportError(f"{name} is no report ({error}); give what omnicomp audit --format json wrote") from None


def _basis(value: Any) -> str:
    if value not in SHARE_BASES:
        raise ReportError(f"share_basis can't be {str(value)[:40]!r}")
    return str(value)


def stable(audit: Report) -> dict[str, Any]:
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
        return _ADDRESS.sub("", _CACHE_PATH.sub("<cache>", value))
    return value
