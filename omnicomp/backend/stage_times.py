"""Times of the stages of a compilation, for the timeline; an outer stage does not count the stages inside it."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch.fx import GraphModule

from omnicomp.backend.capture import CapturedGraph
from omnicomp.errors import harmless
from omnicomp.timeline import Stage, current

__all__ = ["autograd_stage", "stage"]

Compile = Callable[..., Any]
"""Takes a graph, its inputs, its record, and more."""


class _Nested(threading.local):
    seconds = 0.0
    """What the stages took that were inside of the one under way."""


_nested = _Nested()


@contextlib.contextmanager
def stage(name: str, graph: str, part: str = "") -> Generator[None]:
    """Record how long the body took, also where it raises.

    Args:
        name: a key of `omnicomp.timeline.events.STAGES`.
        graph: id of the graph.
        part: `forward`, `backward` or `inference`, or empty for the whole graph.
    """
    outer, _nested.seconds = _nested.seconds, 0.0
    start = time.perf_counter()
    try:
        yield
    finally:
        total = time.perf_counter() - start
        inside, _nested.seconds = _nested.seconds, outer + total
        with harmless("how long a stage took"):
            current().append(Stage(graph=graph, stage=name, part=part, seconds=total - inside))


def autograd_stage(compile_parts: Compile) -> Compile:
    """The function, recorded as the stage `autograd` of its graph."""

    @functools.wraps(compile_parts)
    def recorded(gm: GraphModule, inputs: Sequence[Any], graph: CapturedGraph, *more: Any) -> Any:
        with stage("autograd", graph.id):
            return compile_parts(gm, inputs, graph, *more)

    return recorded
