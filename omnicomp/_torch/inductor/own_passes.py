"""Inductor's own FX passes, seen one by one: the graph before and after each.

Torch runs each pass inside of a `GraphTransformObserver` that has its name. Passes in passes are part of the outer one.
"""

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from omnicomp._torch.fx import copy_module
from omnicomp._torch.repairs.needed import Exchange

Look = Callable[[str, GraphModule, GraphModule], None]


class _Looking(threading.local):
    def __init__(self) -> None:
        self.look: Look | None = None
        self.inside: list[GraphModule | None] = []


_looking = _Looking()


def _entering(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any) -> Any:
        if _looking.look is not None:
            outer = not _looking.inside and isinstance(self.gm, GraphModule)
            _looking.inside.append(copy_module(self.gm, lazy=True) if outer else None)
        return original(self)

    return enter


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: Any, kind: Any, error: Any, where: Any) -> Any:
        original(self, kind, error, where)
        before = _looking.inside.pop() if _looking.inside else None
        if before is not None and error is None and _looking.look is not None:
            _looking.look(".".join(filter(None, (self.subsystem, self.passname))), before, self.gm)

    return leave


_enter = Exchange(GraphTransformObserver, "__enter__", _entering)
_leave = Exchange(GraphTransformObserver, "__exit__", _leaving)


@contextlib.contextmanager
def watched(look: Look) -> Generator[None]:
    """Inside, and on this thread, `look` is called behind each pass.

    Args:
        look: gets the pass' name, a copy of the graph as it was, and the graph, which it may change.
    """
    outer = _looking.look, _looking.inside
    with _enter, _leave:
        _looking.look, _looking.inside = look, []
        try:
            yield
        finally:
            _looking.look, _looking.inside = outer


def put_back(module: GraphModule, before: GraphModule) -> None:
    """Give a module the graph that it had, in the same `Graph`, of which the passes that follow know."""
    graph = module.graph
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    values: dict[Node, Node] = {}
    for node in before.graph.nodes:
        values[node] = copy = graph.node_copy(node, values.__getitem__)
        if copy.name != node.name:
            copy.name = node.name
        if node.op == "get_attr" and not hasattr(module, str(node.target)):
            setattr(module, str(node.target), getattr(before, str(node.target)))
    module.recompile()
