"""What the code of a device's classes is known by in Inductor's cache keys.

Inductor hashes its own sources and none of anybody else's: with an edited wrapper class and nothing else changed, it
served the code that the old class had generated.
"""

import hashlib
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import omnicomp
from omnicomp._torch.inductor.versions import describe

__all__ = ["code_digest"]


def code_digest(classes: Iterable[type], values: Iterable[Any], files: Iterable[str] = ()) -> str:
    """Hash of omnicomp's version, of the sources of classes, and of values.

    Args:
        classes: those that generate code; with their bases outside torch, each by its file and by the code of its
            members, as a class may have been made while the program ran.
        values: settings, limits and texts; functions by their code.
        files: further sources.
    """
    value = hashlib.sha256(omnicomp.__version__.encode())
    seen: set[str] = set(files)
    waiting, met = list(classes), set[type]()
    while waiting:
        cls = waiting.pop(0)
        if cls in met or cls.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing"):
            continue
        met.add(cls)
        waiting += [*cls.__mro__[1:], *(member for member in cls.__dict__.values() if isinstance(member, type))]
        value.update(f"{cls.__module__}.{cls.__qualname__}".encode())
        for name, member in sorted(cls.__dict__.items()):
            if name not in ("__dict__", "__weakref__", "__doc__", "_abc_impl"):
                value.update(f"{name}={describe(_plain(member))}\n".encode())
        try:
            seen.add(inspect.getfile(cls))
        except (TypeError, OSError):
            continue  # made at run time, by code that is in its members
    for path in sorted(seen):
        if Path(path).is_file():
            value.update(Path(path).name.encode() + b"\0" + Path(path).read_bytes())
    for each in values:
        value.update(f"{describe(each)}\n".encode())
    return value.hexdigest()[:32]


def _plain(member: Any) -> Any:
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
