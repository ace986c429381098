"""Functions by name on a command line: `file.py:function` or `module:function`."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omnicomp.errors import OmnicompError

__all__ = ["find_function"]


def find_function(name: str) -> Callable[..., Any]:
    """Import what a name stands for.

    Args:
        name: `path/to/file.py:function` or `package.module:function`; the module is also looked for in the current
            folder.

    Raises:
        OmnicompError: there is no such file, module or function, or importing it raises.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise OmnicompError(f"{name!r} names no function; write file.py:function or module:function")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise OmnicompError(f"{place} has no function {attribute!r}; write file.py:function or module:function")
    return found


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise OmnicompError(f"there is no file {path}; write file.py:function or module:function")
    name = f"omnicomp_named_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OmnicompError(f"{path} can't be imported; it has to be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dynamo and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise OmnicompError(f"{path} can't be imported: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise OmnicompError(f"the module {name} can't be imported: {type(error).__name__}: {error}") from error
