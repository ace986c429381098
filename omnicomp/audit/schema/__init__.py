"""The JSON Schema of a report: `report-2.json`, made from the report's dataclasses and shipped beside this module.

After a change of the model, `python -m omnicomp.audit.schema` writes it anew.
"""

import dataclasses
import inspect
import json
import re
from importlib.resources import files
from types import UnionType
from typing import Any, Final, get_args, get_origin

from omnicomp.audit.model import (
    AUDIT_SCHEMA,
    SHARE_BASES,
    Environment,
    Fallback,
    GraphAudit,
    ProcessAudit,
    Report,
    Unfinished,
)
from omnicomp.audit.views.jsonform import keys
from omnicomp.timeline import CODES, Artefacts, Reason
from omnicomp.timeline.files import Unread
from omnicomp.timeline.levels import ModuleLevels

__all__ = ["FILE", "generate", "load"]

FILE: Final = f"report-{AUDIT_SCHEMA}.json"
_PLAIN: Final[dict[Any, str]] = {str: "string", int: "integer", bool: "boolean"}
_COUNT: Final = {"type": "integer"}
_SHARES: Final = {"type": "object", "additionalProperties": {"type": ["number", "null"]}}


def load() -> dict[str, Any]:
    """The schema as it is shipped: unknown keys are allowed, as a later version may add some."""
    return json.loads((files("omnicomp.audit.schema") / FILE).read_text(encoding="utf-8"))


def generate(*, strict: bool = False) -> dict[str, Any]:
    """The schema of this version's reports.

    Args:
        strict: whether every key must be there, and no other; as this version writes them.
    """
    defs: dict[str, Any] = {}
    properties = {
        "schema": {"const": AUDIT_SCHEMA, "description": "version of this form"},
        "summary": {"type": "string", "description": "the one line"},
        "events": {**_COUNT, "description": "number of events that it was made from"},
        "skipped": {**_COUNT, "description": _documented(Report)["skipped"]},
        "left_out": {**_COUNT, "description": _documented(Report)["left_out"]},
        "unread": {"type": "array", "items": _type(Unread, defs, strict), "description": _documented(Report)["unread"]},
        "unfinished": {
            "type": "array",
            "description": "what began, and has no end",
            "items": _type(Unfinished, defs, strict),
        },
        "processes": {
            "type": "array",
            "description": _documented(Report)["processes"],
            "items": _type(ProcessAudit, defs, strict),
        },
        "artefacts": {
            "type": "array",
            "description": _documented(Report)["artefacts"],
            "items": _type(Artefacts, defs, strict),
        },
        "share_basis": {"enum": list(SHARE_BASES), "description": _documented(Report)["share_basis"]},
        "shares": {**_SHARES, "description": "share of the work by lowering"},
        "shares_by": {
            "type": "object",
            "description": "the same, counted in operators, FLOPs, bytes and measured seconds, as far as each is known",
            "properties": {name: _SHARES for name in ("nodes", "flops", "bytes", "seconds")},
            "required": ["nodes", "flops", "bytes", "seconds"],
            "additionalProperties": False,
        },
        "environment": _type(Environment, defs, strict),
        "attention": {
            "type": "object",
            "description": "numbers of sites",
            "properties": {"fused": _COUNT, "near_misses": _COUNT, "called": _COUNT},
            "required": ["fused", "near_misses"],
        },
        "mismatches": {
            "type": "array",
            "description": "ids of subgraphs that ran otherwise than planned without a recorded retreat",
            "items": {"type": "string"},
        },
        "fallbacks": {"type": "array", "items": _type(Fallback, defs, strict)},
        "backend_timeline": {
            "type": "array",
            "description": inspect.getdoc(Report.backend_timeline) or "",
            "items": _type(ModuleLevels, defs, strict),
        },
        "graphs": {"type": "array", "items": _type(GraphAudit, defs, strict)},
    }
    required = list(properties) if strict else ["schema", "graphs"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "omnicomp report",
        "description": "What ran where, and why; docs/audit.md explains it.",
        **_object(properties, required, strict),
        "$defs": dict(sorted(defs.items())),
    }


def _object(properties: dict[str, Any], required: list[str], strict: bool) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": not strict}


def _type(hint: Any, defs: dict[str, Any], strict: bool) -> dict[str, Any]:
    """The schema of a value; definitions of the dataclasses that it may be are added to `defs`."""
    if hint is Any:
        return {}
    if isinstance(hint, UnionType):
        return _either([_type(kind, defs, strict) for kind in get_args(hint)])
    if hint is type(None):
        return {"type": "null"}
    if hint is float:
        return {"type": ["number", "null"]}  # null: infinite, or no number
    origin = get_origin(hint)
    if origin is tuple:
        return {"type": "array", "items": _type(get_args(hint)[0], defs, strict)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(get_args(hint)[1], defs, strict)}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if hint.__name__ not in defs:
            defs[hint.__name__] = {}  # it may contain itself
            defs[hint.__name__] = _reason(strict) if issubclass(hint, Reason) else _dataclass(hint, defs, strict)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    return {"type": _PLAIN[hint]}


def _either(kinds: list[dict[str, Any]]) -> dict[str, Any]:
    if any(set(kind) != {"type"} for kind in kinds):
        return {"anyOf": kinds}
    names: list[str] = []
    for kind in kinds:
        names += [kind["type"]] if isinstance(kind["type"], str) else kind["type"]
    return {"type": list(dict.fromkeys(names))}


def _dataclass(cls: Any, defs: dict[str, Any], strict: bool) -> dict[str, Any]:
    documented = _documented(cls)
    properties: dict[str, Any] = {}
    for key in keys(cls):
        text = documented.get(key.name, "")
        if key.derived:
            text = inspect.getdoc(getattr(cls, key.name).fget) or ""
        properties[key.name] = {**_type(key.hint, defs, strict), **({"description": text} if text else {})}
    required = [key.name for key in keys(cls) if not key.placed and (strict or key.required)]
    summary = (inspect.getdoc(cls) or "").splitlines()[0]
    return {"description": summary, **_object(properties, required, strict)}


def _reason(strict: bool) -> dict[str, Any]:
    documented = _documented(Reason)
    properties: dict[str, Any] = {
        field.name: {"type": "string", "description": documented[field.name]} for field in dataclasses.fields(Reason)
    }
    if strict:
        properties["code"]["enum"] = sorted(CODES)
    return {"description": "Why; empty texts are left out.", **_object(properties, ["code", "sentence"], strict)}


def _documented(cls: Any) -> dict[str, str]:
    """What the docstring of a class and those of its bases say of each attribute."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for name, sentence in re.findall(r"^    (\w+): ((?:.|\n(?!    \w+:))*)", text, re.MULTILINE):
            found[name] = " ".join(sentence.split())
    return found
