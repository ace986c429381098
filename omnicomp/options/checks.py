"""One declaration per option, `OptionSpec`, the checks that options share, and names of engines before any import."""

import copy
import dataclasses
import functools
import importlib.metadata
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from omnicomp import records
from omnicomp.errors import nearest, wrong_value

Check = Callable[[str, Any], Any]
T = TypeVar("T")


@records.dataclass(frozen=True, kw_only=True)
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
        raise wrong_value(name, value, "True or False")
    return value


def count(name: str, value: Any) -> int:
    """A whole number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise wrong_value(name, value, "a whole number that is not negative", example=8)
    return value


def bound(example: str, *, optional: bool = True) -> Check:
    """A positive number, or None where that is allowed."""

    def check(name: str, value: Any) -> float | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise wrong_value(name, value, f"a positive number{' or None' if optional else ''}", example=example)
        return float(value)

    return check


def limit(example: str) -> Check:
    """A number that is not negative."""

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise wrong_value(name, value, "a number that is not negative", example=example)
        return float(value)

    return check


def choice(*known: str) -> Check:
    """One of several words."""

    def check(name: str, value: Any) -> str:
        if value not in known:
            raise wrong_value(name, value, known=known)
        return value

    return check


def listed(name: str, value: Any, what: str = "names", example: object = "") -> tuple[Any, ...]:
    """A list, tuple or set of anything."""
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        raise wrong_value(name, value, f"a list of {what}", example=example)
    return tuple(value)


def names(known: tuple[str, ...] | None = None, several: bool = False) -> Check:
    """A list of different names, of those that are known if any are given."""

    def check(name: str, value: Any) -> tuple[str, ...]:
        items = listed(name, value)
        for item in items:
            if known is not None and item not in known:
                raise wrong_value(name, item, known=known, verb="contain")
        if len(set(items)) != len(items):
            raise wrong_value(name, value, "different names")
        if several and len(items) < 2:
            raise wrong_value(name, value, "two names or more to choose from", example=["inductor", "frozen"])
        return tuple(map(str, items))

    return check


def function(name: str, value: Any) -> Any:
    """A function with a name, or None."""
    if value is not None and not (callable(value) and hasattr(value, "__qualname__")):
        raise wrong_value(name, value, "a function of the names and values of a graph's inputs, or None")
    return value


def path(name: str, value: Any) -> str:
    """The path of a file, as text."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise wrong_value(name, value, "the path of a file to write", example="'run.jsonl'")
    return str(os.fspath(value))


def word(name: str, value: Any) -> str:
    """A name, as text."""
    if not isinstance(value, str):
        raise wrong_value(name, value, "a name", example="'trial'")
    return value


def mapping_of_mappings(name: str, value: Any) -> dict[str, dict[str, Any]]:
    """Options by the name of whom they are for."""
    if not isinstance(value, Mapping):
        raise wrong_value(name, value, "a mapping of engines to their options", example={"toy": {"smallest": 4}})
    for owner, values in value.items():
        if not isinstance(values, Mapping):
            raise wrong_value(f"{name}[{owner!r}]", values, "a mapping of options", example={"smallest": 4})
    return {str(owner): dict(values) for owner, values in value.items()}


def did_you_mean(name: str, known: tuple[str, ...]) -> str:
    """The nearest known name, or all of them where nothing is near."""
    return nearest(name, known) or f"; known ones are {', '.join(known)}"


GROUP: Final = "omnicomp.engines"

BUILT_IN: Final[dict[str, str]] = {
    "frozen": "omnicomp.lowerings.engines.frozen:FrozenInductor",
    "toy": "omnicomp.lowerings.engines.toy:ToyEngine",
    "openvino": "omnicomp.lowerings.engines.openvino:OpenVinoEngine",
    "onnxruntime": "omnicomp.lowerings.engines.onnxruntime:OnnxRuntimeEngine",
    "xla": "omnicomp.lowerings.engines.xla:XlaEngine",
    "tvm": "omnicomp.lowerings.engines.tvm:TvmEngine",
    "tensorrt": "omnicomp.lowerings.engines.tensorrt:TensorRtEngine",
}
"""Those that come with omnicomp, also where it runs from a checkout that was never installed."""


@functools.cache
def engine_names() -> tuple[str, ...]:
    """Those of `BUILT_IN`, then those that installed packages declare by the entry-point group `omnicomp.engines`."""
    found = (entry.name for entry in importlib.metadata.entry_points(group=GROUP))
    return tuple(dict.fromkeys([*BUILT_IN, *found]))
