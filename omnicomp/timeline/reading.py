"""Events from their JSON form, each field checked: what was written by another version or by hand is met here."""

import dataclasses
import functools
from types import UnionType
from typing import Any, Final, get_args, get_origin

from omnicomp.timeline.events import SCHEMA_VERSION, Event, NodePlacement
from omnicomp.timeline.kinds import EVENT_TYPES
from omnicomp.timeline.reasons import Reason

__all__ = ["event_from_dict"]

# What JSON has no number for is written as text.
_NO_NUMBERS: Final = ("inf", "-inf", "nan")


def _node_placement(data: dict[str, Any]) -> NodePlacement:
    chain = tuple(Reason.from_dict(reason) for reason in data.get("chain", ()))
    known = {field.name for field in dataclasses.fields(NodePlacement)} - {"chain"}
    return NodePlacement(**{key: str(value) for key, value in data.items() if key in known}, chain=chain)


@dataclasses.dataclass(frozen=True)
class _Field:
    """What a field of an event may be: the types of its value, and of the items of that, if those are plain."""

    name: str
    kinds: frozenset[type]
    items: type | None


@functools.cache
def _fields(cls: type[Event]) -> tuple[_Field, ...]:
    found: list[_Field] = []
    for field in dataclasses.fields(cls):
        hint: Any = field.type
        alternatives = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds: set[Any] = {get_origin(kind) or kind for kind in alternatives}
        inner = next((kind for kind in get_args(hint) if kind is not Ellipsis), None) if tuple in kinds else None
        if dict in kinds:
            inner = get_args(hint)[1]
        if float in kinds:
            kinds.add(int)
        found.append(_Field(field.name, frozenset(kinds), inner if inner in (str, int) else None))
    return tuple(found)


def _check(field: _Field, value: Any) -> None:
    """Refuse a value whose kind is not the field's: a view would fail on it far from the line that has it."""
    if type(value) not in field.kinds:
        raise TypeError(f"its field {field.name!r} can't be {type(value).__name__}")
    if field.items is not None and value:
        for item in value.values() if type(value) is dict else value:
            if not isinstance(item, field.items):
                kind = "text" if field.items is str else "whole numbers"
                raise TypeError(f"its field {field.name!r} must hold {kind}")


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
    for field in _fields(cls):
        name = field.name
        if name not in data:
            continue
        value = data[name]
        if name == "declined":
            value = tuple(_node_placement(item) for item in value)
        elif type(value) is list:
            value = tuple(value)
        elif name == "reason" and type(value) is dict:
            value = Reason.from_dict(value)
        elif float in field.kinds and value in _NO_NUMBERS:
            value = float(value)
        _check(field, value)
        values[name] = value
    return cls(**values)
