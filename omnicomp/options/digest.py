"""The hash of the package's version and sources, for the keys of caches."""

import functools
import hashlib
from pathlib import Path
from typing import Final

import omnicomp

_NOT_COMPILED_WITH: Final = ("audit", "cli", "testing")


@functools.cache
def package_digest() -> str:
    """Hash of omnicomp's version and sources: an edited checkout never meets the artifacts of the old one.

    Rooms that do not change compiled code are left out.
    """
    value = hashlib.sha256(omnicomp.__version__.encode())
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] in _NOT_COMPILED_WITH:
            continue
        value.update(str(relative).encode())
        value.update(path.read_bytes())
    return value.hexdigest()
