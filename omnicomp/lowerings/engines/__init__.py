"""Engines: other compilers as lowerings, discovered by the entry-point group `omnicomp.engines`.

`docs/new-engine.md` builds one from nothing. An engine's library is imported when the engine is first asked for.
"""

import functools
import importlib
import importlib.metadata
from typing import Any

from omnicomp._torch.inductor.own_context import apart
from omnicomp.errors import EngineError, OptionError, nearest
from omnicomp.lowerings.engines.base import Engine, EngineExecutable, RunOptions
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.operators import Operator, Operators
from omnicomp.lowerings.engines.subgraph import Subgraph
from omnicomp.options.checks import BUILT_IN, GROUP, engine_names, mapping_of_mappings
from omnicomp.safety.privacy import logger

__all__ = [
    "Clustering",
    "Engine",
    "EngineExecutable",
    "Operator",
    "Operators",
    "RunOptions",
    "Subgraph",
    "check_engines",
    "engine_names",
    "resolve_engine",
]

log = logger("omnicomp.engines")


@functools.cache
def resolve_engine(name: str) -> Engine:
    """The engine of a name; the same object each time.

    That it is found does not mean that its library is installed: `Engine.missing` says so.

    Raises:
        EngineError: there is no engine of that name, or it cannot be loaded, or it is not an `Engine`.
    """
    if name not in engine_names():
        known = ", ".join(engine_names())
        raise EngineError(f"unknown engine {name!r}; known engines are {known}{nearest(name, engine_names())}")
    try:
        # It is first asked for in the middle of a compilation: tensors that its module makes must be real ones.
        made = apart(lambda: _declared(name)())
    except Exception as error:
        log.warning("the engine %s can't be loaded: %s: %s", name, type(error).__name__, error)
        raise EngineError(f"the engine {name} can't be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(made, Engine) or made.name != name:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise EngineError(f"what is declared as the engine {name} is no subclass of Engine with that name")
    return made


def check_engines(name: str, value: Any) -> dict[str, dict[str, Any]]:
    """Options of clustering and of running by the name of an engine, checked against the engine's own.

    Raises:
        OptionError: an engine is unknown, or has no such option.
    """
    given = mapping_of_mappings(name, value)
    for engine, values in given.items():
        try:
            resolve_engine(engine).configured(values)
        except EngineError as error:
            raise OptionError(f"{name}: {error}") from None
    return given


def _declared(name: str) -> type[Engine]:
    if name in BUILT_IN:
        module, _, qualified = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), qualified)
    entry = next(entry for entry in importlib.metadata.entry_points(group=GROUP) if entry.name == name)
    return entry.load()
