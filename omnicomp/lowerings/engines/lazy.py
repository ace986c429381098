"""Modules of libraries that may not be installed."""

import importlib
from typing import Any

__all__ = ["Lazy"]


class Lazy:
    """A module that is imported when it is first used, as tables are read where no library is installed."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)
