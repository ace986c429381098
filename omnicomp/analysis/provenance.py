"""Source lines and module paths in cached artefacts, stored as node indices so that moved code still hits the cache.

An edit above a function moves its lines, and a model inside another one has longer module paths; neither makes another
graph, so that the compile caches restore what was built before. The places of the decisions that were recorded then are
those of the nodes now.
"""

import functools
from collections.abc import Iterable
from typing import Any, Final

from torch.fx import Node

from omnicomp import records
from omnicomp.analysis.nodes import module_path, source_line

_SOURCES: Final = ("source", "sources")
_MODULES: Final = ("module", "modules")
_NODE: Final = "node"
_LEFT_OUT: Final = "left_out"


@records.dataclass(frozen=True)
class Places:
    """Places of the nodes of a Dynamo graph, in its order."""

    sources: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    @functools.cached_property
    def _by_source(self) -> dict[str, int]:
        return {source: index for index, source in reversed(list(enumerate(self.sources))) if source}

    @functools.cached_property
    def _by_module(self) -> dict[str, tuple[int, int]]:
        """The node of each module and of each module around one, with how many names its own path has more."""
        found: dict[str, tuple[int, int]] = {}
        for index, path in enumerate(self.modules):
            names = path.split(".") if path else []
            for more in range(len(names)):
                found.setdefault(".".join(names[: len(names) - more]), (index, more))
        return found

    def leave_out(self, value: Any, key: str = "") -> Any:
        """A part of a record without the source lines and modules that nodes of the graph have."""
        if isinstance(value, dict):
            return {name: self.leave_out(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self.leave_out(item, key) for item in value]
        if isinstance(value, str) and key in _SOURCES and value in self._by_source:
            return {_NODE: self._by_source[value]}
        if isinstance(value, str) and key in _MODULES and value in self._by_module:
            index, more = self._by_module[value]
            return {_NODE: index, _LEFT_OUT: more}
        return value

    def fill_in(self, value: Any, key: str = "") -> Any:
        """The inverse of `leave_out`, with the source lines and modules of the nodes of this graph."""
        if isinstance(value, list):
            return [self.fill_in(item, key) for item in value]
        if not isinstance(value, dict):
            return value
        if key in (*_SOURCES, *_MODULES) and _NODE in value:
            of = self.sources if key in _SOURCES else self.modules
            names = of[value[_NODE]] if value[_NODE] < len(of) else ""
            more = value.get(_LEFT_OUT, 0)
            return ".".join(names.split(".")[:-more]) if more else names
        return {name: self.fill_in(item, name) for name, item in value.items()}


def places_of(nodes: Iterable[Node]) -> Places:
    """The provenance of nodes, in their order."""
    found = [(source_line(node), module_path(node)) for node in nodes]
    return Places(tuple(source for source, _ in found), tuple(path for _, path in found))
