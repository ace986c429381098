"""Version of the package, and a hash of its sources for the keys of caches."""

import functools
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Final

__all__ = ["package_digest", "version"]

_NOT_COMPILED_WITH: Final = ("audit", "cli", "testing")


@functools.cache
def version() -> str:
    """Version of the installed package, or `checkout` if it is not installed."""
    try:
        return importlib.metadata.version("omnicomp")
    except importlib.metadata.PackageNotFoundError:
        return "checkout"


@functools.cache
def package_digest() -> str:
    """Hash of omnicomp's version and sources: an edited checkout never meets the artifacts of the old one.

    Rooms that do not change compiled code are left out.
    """
    value = hashlib.sha256(version().encode())
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] in _NOT_COMPILED_WITH:
            continue
        value.update(str(relative).encode())
        value.update(path.read_bytes())
    return value.hexdigest()
