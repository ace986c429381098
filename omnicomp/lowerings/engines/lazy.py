"""Modules of libraries that may not be installed."""

import functools
import importlib
import importlib.metadata
import re
from collections.abc import Mapping
from typing import Any


class Lazy:
    """A module that is imported when it is first used, as tables are read where no library is installed."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)


def missing_package(needed: Mapping[str, tuple[int, ...]], install: str) -> str:
    """One sentence on the first package that is not there or too old; empty if all are there."""
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
