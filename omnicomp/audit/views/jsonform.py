"""The report as JSON, the same read back, and the part of it that two runs of one program share.

An object has a key for each field of its dataclass, and some for what is computed (`_DERIVED`), which a reader ignores.
What the place of an object says is left out: the events of a subgraph have no `part` and no `subgraph`.
`omnicomp.audit.schema` makes the JSON Schema from the same keys, and `docs/audit.md` describes the form. A reader
ignores unknown keys; keys are only added within a schema.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from omnicomp.audit.model import (
    AUDIT_SCHEMA,
    SHARE_BASES,
    GraphAudit,
    Merge,
    PartAudit,
    ProcessAudit,
    Report,
    SubgraphAudit,
    TimeUse,
)
from omnicomp.audit.views.rows import summary
from omnicomp.errors import ReportError
from omnicomp.safety.escapes import json_text
from omnicomp.timeline import Artefacts, Event, Reason
from omnicomp.timeline.files import Unread, check_numbers

_DERIVED: Final[dict[type, tuple[str, ...]]] = {
    GraphAudit: ("compile_seconds",),
    SubgraphAudit: ("lowering", "mismatch", "seconds", "artefact"),
    Merge: ("sentence",),
    TimeUse: ("mean",),
}
# What an object says of all that is inside it, by the field that says it.
_SAYS: Final[dict[type, tuple[str, str]]] = {
    GraphAudit: ("id", "graph"),
    PartAudit: ("name", "part"),
    SubgraphAudit: ("id", "subgraph"),
}
_HIDDEN: Final = frozenset({"seq"})
# The report is not that deep; an option that a user passed may be.
_DEEPEST: Final = 64

Said = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of the objects that stand for a dataclass."""

    name: str
    hint: Any
    derived: bool = False
    placed: bool = False
    required: bool = False


@functools.cache
def keys(cls: type) -> tuple[Key, ...]:
    """The keys of the objects that stand for a dataclass, in order."""
    hints = get_type_hints(cls)
    placed = {"graph", "part", "subgraph"} if issubclass(cls, (Event, SubgraphAudit)) else set[str]()
    found: list[Key] = []
    for field in dataclasses.fields(cls):
        if field.name in _HIDDEN:
            continue
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        found.append(Key(field.name, hints[field.name], placed=field.name in placed, required=required))
    for name in _DERIVED.get(cls, ()):
        found.append(Key(name, get_type_hints(getattr(cls, name).fget)["return"], derived=True))
    return tuple(found)


def encode(value: Any, said: frozenset[str] = frozenset(), depth: int = 0) -> Any:
    """A part of the report as JSON types."""
    if depth > _DEEPEST:
        return "…"
    if isinstance(value, Reason):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        inside = said | {_SAYS[cls][1]} if cls in _SAYS else said
        return {
            key.name: encode(getattr(value, key.name), inside, depth + 1)
            for key in keys(cls)
            if not (key.placed and key.name in said)
        }
    if isinstance(value, (tuple, list)):
        return [encode(item, said, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item, said, depth + 1) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such number
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def decode(hint: Any, data: Any, where: str, said: Said | None = None) -> Any:
    """The inverse of `encode`.

    Raises:
        ReportError: the data is not of that type; the message names the place.
    """
    said = said or {}
    if hint is Any:
        return data
    if isinstance(hint, UnionType):
        if data is None:
            return None
        return decode(next(kind for kind in get_args(hint) if kind is not type(None)), data, where, said)
    origin = get_origin(hint) or hint
    if origin is tuple:
        inner = get_args(hint)[0]
        return tuple(decode(inner, item, f"{where}[{i}]", said) for i, item in enumerate(_kind(data, list, where)))
    if origin is dict:
        inner = get_args(hint)[1]
        return {key: decode(inner, item, f"{where}.{key}", said) for key, item in _kind(data, dict, where).items()}
    if hint is Reason:
        for key in ("code", "sentence"):
            if not _kind(data, dict, where).get(key):
                raise ReportError(f"{where} has no {key!r}")
        known = {field.name for field in dataclasses.fields(Reason)}
        return Reason.from_dict({k: _kind(v, str, f"{where}.{k}") for k, v in data.items() if k in known})
    if dataclasses.is_dataclass(hint):
        return _object(hint, _kind(data, dict, where), where, said)
    if hint is float:
        return math.nan if data is None else float(_kind(data, (int, float), where))
    return _kind(data, hint, where)


def _object(cls: Any, data: dict[str, Any], where: str, said: Said) -> Any:
    if cls in _SAYS:
        field, name = _SAYS[cls]
        said = {**said, name: str(data.get(field, ""))}
    values: dict[str, Any] = {}
    for key in keys(cls):
        if key.derived:
            continue
        if key.name in data:
            values[key.name] = decode(key.hint, data[key.name], f"{where}.{key.name}", said)
        elif key.placed and key.name in said:
            values[key.name] = said[key.name]
        elif key.required:
            raise ReportError(f"{where} has no {key.name!r}")
    return cls(**values)


def _kind(data: Any, kinds: Any, where: str) -> Any:
    accepted = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(data, accepted) or (isinstance(data, bool) and bool not in accepted):
        raise ReportError(f"{where} can't be {type(data).__name__}")
    return data


# What a run leaves behind on a disk or reads off a clock; a cold and a warm start differ in nothing else.
_VOLATILE: Final = frozenset(
    {
        "seconds",
        "artefact",
        "evidence",
        "caches",
        "calibrations",
        "events",
        "verifications",
        "recordings",
        "time",
        "timing",
        "memory",
    }
    | {"stages", "compile_seconds", "candidates", "pid", "rank", "ranks", "processes", "skipped"}
    | {"run", "last", "unread", "unfinished", "background", "artefacts"}
)
_CACHE_PATH: Final = re.compile(r"\S*torchinductor_\S*")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def to_json(audit: Report) -> str:
    """The JSON form as text, indented, with a stable order of keys."""
    return json_text(to_dict(audit)) + "\n"


def to_dict(audit: Report) -> dict[str, Any]:
    """The JSON form as plain dictionaries and lists."""
    sites = audit.sites
    return {
        "schema": AUDIT_SCHEMA,
        "summary": summary(audit),
        "events": audit.events,
        "skipped": audit.skipped,
        "left_out": audit.left_out,
        "unread": encode(audit.unread),
        "unfinished": encode(audit.unfinished),
        "processes": encode(audit.processes),
        "artefacts": encode(audit.artefacts),
        "share_basis": audit.share_basis,
        "shares": audit.shares,
        "shares_by": audit.shares_by,
        "environment": encode(audit.environment),
        "attention": {
            "fused": len(sites.fused),
            "near_misses": len(sites.near_misses),
            "called": len(sites.called),
        },
        "mismatches": [row.id for row in audit.mismatches],
        "fallbacks": encode(audit.fallbacks),
        "backend_timeline": encode(audit.backend_timeline),
        "graphs": encode(audit.graphs),
    }


def from_json(text: str, name: str) -> Report:
    """The report that `to_json` wrote.

    Raises:
        ReportError: it is no report, or of a newer schema.
    """
    try:
        data = json.loads(text)
        check_numbers(data, text)
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
            left_out=decode(int, data.get("left_out", 0), "left_out"),
            processes=decode(tuple[ProcessAudit, ...], data.get("processes", []), "processes"),
            unread=decode(tuple[Unread, ...], data.get("unread", []), "unread"),
            artefacts=decode(tuple[Artefacts, ...], data.get("artefacts", []), "artefacts"),
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
    data = to_dict(audit)
    for graph in data["graphs"]:
        for certificate in graph["certificates"]:
            del certificate["kept"]  # of a rewrite it says something else, which stays
    return _stable(data, tuple(reversed(artefacts)))


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
