"""Events from their JSON form, each field checked: what was written by another version or by hand is met here."""

import dataclasses
from types import UnionType
from typing import Any, get_args, get_origin

from omnicomp.timeline.events import EVENT_TYPES, SCHEMA_VERSION, Event, NodePlacement
from omnicomp.timeline.reasons import Reason

__all__ = ["event_from_dict"]


def _node_placement(data: dict[str, Any]) -> NodePlacement:
    chain = tuple(Reason.from_dict(reason) for reason in data.get("chain", ()))
    known = {field.name for field in dataclasses.fields(NodePlacement)} - {"chain"}
    return NodePlacement(**{key: str(value) for key, value in data.items() if key in known}, chain=chain)


def _check(field: "dataclasses.Field[Any]", value: Any) -> None:
    """Refuse a value whose kind is not the field's: a view would fail on it far from the line that has it."""
    items: list[Any] = list(value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ())
    kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
    accepted: tuple[Any, ...] = tuple(get_origin(kind) or kind for kind in kinds)
    if float in accepted:
        accepted += (int,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        raise TypeError(f"its field {field.name!r} can't be {type(value).__name__}")
    inner: tuple[Any, ...] = get_args(field.type)
    if tuple in accepted and str in inner and not all(isinstance(item, str) for item in items):
        raise TypeError(f"its field {field.name!r} must hold text")
    if dict in accepted and int in inner and not all(isinstance(item, int) for item in items):
        raise TypeError(f"its field {field.name!r} must hold whole numbers")


def event_from_dict(data: dict[str, Any]) -> Event | None:
    """Rebuild an event from its JSON form.

    Returns:
        The event, or None if its type is not known to this version.

    Raises:
        TypeError: a field is missing or of the wrong kind.
        ValueError: the schema is newer than this version reads.
    """
    schema = data.get("schema")
    if not isinstance(schema, int):
        raise TypeError("it has no integer field 'schema'")
    if schema > SCHEMA_VERSION:
        raise ValueError(f"its schema is {schema} and this version reads up to {SCHEMA_VERSION}; upgrade omnicomp")
    cls = EVENT_TYPES.get(str(data.get("type")))
    if cls is None:
        return None
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name not in data:
            continue
        value = data[field.name]
        if field.name == "reason" and isinstance(value, dict):
            value = Reason.from_dict(value)
        elif field.name == "declined":
            value = tuple(_node_placement(item) for item in value)
        elif isinstance(value, list):
            value = tuple(value)
        _check(field, value)
        values[field.name] = value
    return cls(**values)
