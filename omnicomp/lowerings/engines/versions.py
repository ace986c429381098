"""Checks that an engine's packages are installed, and new enough, without importing them."""

import functools
import importlib.metadata
import re
from collections.abc import Mapping

__all__ = ["missing_package"]


def missing_package(needed: Mapping[str, tuple[int, ...]], install: str) -> str:
    """One sentence on the first package that is not there or too old; empty if all are there.

    Args:
        needed: oldest version of each package, by the name that it is installed by.
        install: the command that installs them.
    """
    return _missing(tuple(needed.items()), install)


@functools.cache
def _missing(needed: tuple[tuple[str, tuple[int, ...]], ...], install: str) -> str:
    for name, oldest in needed:
        least = ".".join(map(str, oldest))
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed: {install}"
        if tuple(map(int, re.findall(r"\d+", found)))[: len(oldest)] < oldest:
            return f"{name} {found} is too old, {least} or newer is needed: {install}"
    return ""
