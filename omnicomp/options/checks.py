"""One declaration per option, `OptionSpec`, and the checks that options share."""

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from omnicomp.errors import OptionError, nearest

__all__ = [
    "Check",
    "OptionSpec",
    "boolean",
    "bound",
    "choice",
    "count",
    "did_you_mean",
    "function",
    "listed",
    "mapping_of_mappings",
    "names",
    "option",
    "path",
]

Check = Callable[[str, Any], Any]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionSpec:
    """How an option is checked, and what it does; its name, type and default are those of the field of `Policy`.

    Attributes:
        check: takes the option's name and the user's value, and returns the value to keep or raises `OptionError`.
        doc: the option's row of docs/options.md.
        in_digest: whether generated code depends on it, which makes it a part of the keys of the compile caches.
        variable: the environment variable that sets the option where the call does not.
        read: the check of the variable's text; None where the variable adds to the option, and `parse` reads it.
    """

    check: Check
    doc: str
    in_digest: bool = True
    variable: str = ""
    read: Check | None


def option(default: T, check: Check, doc: str, **more: Any) -> T:
    """A dataclass field with the `OptionSpec` of the other arguments in its metadata."""
    values: dict[str, Any] = {"check": check, "doc": doc, "read": check, **more}
    made: Any = dataclasses.field(default_factory=lambda: copy.copy(default), metadata={"option": OptionSpec(**values)})
    return made


def boolean(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} takes True or False, not {value!r}")
    return value


def count(name: str, value: Any) -> int:
    """A whole number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError(f"{name} takes a number that is not negative, not {value!r}")
    return value


def bound(example: str, *, optional: bool = True) -> Check:
    """A positive number, or None where that is allowed."""

    def check(name: str, value: Any) -> float | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise OptionError(f"{name} takes a positive number such as {example}, not {value!r}")
        return float(value)

    return check


def choice(*known: str) -> Check:
    """One of several words."""

    def check(name: str, value: Any) -> str:
        if value not in known:
            text = value if isinstance(value, str) else str(value).removeprefix("torch.")
            raise OptionError(f"{name} can't be {value!r}{did_you_mean(text, known)}")
        return value

    return check


def listed(name: str, value: Any, what: str = "names") -> tuple[Any, ...]:
    """A list, tuple or set of anything."""
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        raise OptionError(f"{name} takes a list of {what}, not {value!r}")
    return tuple(value)


def names(known: tuple[str, ...] | None = None, several: bool = False) -> Check:
    """A list of different names, of those that are known if any are given."""

    def check(name: str, value: Any) -> tuple[str, ...]:
        items = listed(name, value)
        for item in items:
            if known is not None and item not in known:
                raise OptionError(f"{name} can't contain {item!r}{did_you_mean(str(item), known)}")
        if len(set(items)) != len(items):
            raise OptionError(f"{name} names something twice: {value!r}")
        if several and len(items) < 2:
            raise OptionError(f"{name} takes two names or more to choose from, not {value!r}")
        return tuple(map(str, items))

    return check


def function(name: str, value: Any) -> Any:
    """A function with a name, or None."""
    if value is not None and not (callable(value) and hasattr(value, "__qualname__")):
        raise OptionError(f"{name} takes a function of the names and values of a graph's inputs, not {value!r}")
    return value


def path(name: str, value: Any) -> str:
    """The path of a file, as text."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise OptionError(f"{name} takes the path of a file to write, not {value!r}")
    return str(os.fspath(value))


def mapping_of_mappings(name: str, value: Any) -> dict[str, dict[str, Any]]:
    """Options by the name of whom they are for."""
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} takes a mapping of engines to their options, not {value!r}")
    for owner, values in value.items():
        if not isinstance(values, Mapping):
            raise OptionError(f"{name}: the options of {owner!r} are a mapping, not {values!r}")
    return {str(owner): dict(values) for owner, values in value.items()}


def did_you_mean(name: str, known: tuple[str, ...]) -> str:
    """The nearest known name, or all of them where nothing is near."""
    return nearest(name, known) or f"; known ones are {', '.join(known)}"
