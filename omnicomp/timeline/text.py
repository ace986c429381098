"""Names and values as text, the same in every process."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from omnicomp.escapes import shown

__all__ = ["common_path", "distinct", "text_of"]


_DEEPEST: Final = 8
_SHOWN: Final = 8


def common_path(paths: Iterable[str]) -> str:
    """The module path that all of the paths begin with: `layers.3` of `layers.3.attn` and `layers.3.mlp`; or empty."""
    shared: list[str] | None = None
    for path in paths:
        names = path.split(".")
        if shared is None:
            shared = names
        elif shared != names[: len(shared)]:
            same = (index for index, (one, other) in enumerate(zip(shared, names, strict=False)) if one != other)
            shared = shared[: next(same, min(len(shared), len(names)))]
    return ".".join(shared or ())


def distinct(values: Iterable[str]) -> tuple[str, ...]:
    """The first eight distinct, non-empty values, in order."""
    return tuple(dict.fromkeys(value for value in values if value))[:_SHOWN]


def text_of(value: Any, depth: int = 0) -> str:
    """A value as a person would write it: lists without brackets, functions and classes by their names.

    Args:
        value: of an option.
        depth: how many containers it is inside of; what is inside of more than eight is left out.
    """
    if depth > _DEEPEST:
        return "…"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {text_of(item, depth + 1)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(text_of(item, depth + 1) for item in value)
    if isinstance(value, (set, frozenset)):
        return ", ".join(sorted(text_of(item, depth + 1) for item in value))
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else shown(value)
