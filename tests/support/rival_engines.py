"""Engines for tests of choosing: each runs a subgraph operator by operator, with a fault or a delay of its own."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from omnicomp.lowerings.engines import Clustering, Engine, EngineExecutable, Subgraph, resolve_engine
from omnicomp.options import checks

aten = torch.ops.aten
TAKEN = (
    *(aten.t.default, aten.mm.default, aten.addmm.default, aten.relu.default, aten.tanh.default, aten.add.Tensor),
    *(aten.mul.Tensor, aten._softmax.default, aten.view.default, aten.sum.dim_IntList, aten.sigmoid.default),
)


class _Executable(EngineExecutable):
    def __init__(self, subgraph: Subgraph, engine: "Rival") -> None:
        self._subgraph, self._engine = subgraph, engine

    def session(self) -> Any:
        return self._run

    def _run(self, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        given = iter(inputs)
        values = [
            self._subgraph.constants[index] if index in self._subgraph.constants else next(given)
            for index in range(len(self._subgraph.placeholders))
        ]
        return self._engine.finish(list(self._subgraph.module.forward(*values)))


class Rival(Engine):
    """Runs the graph as it is."""

    name: ClassVar[str] = "rival"
    clustering = Clustering()
    native = False
    built: ClassVar[int] = 0
    calls: ClassVar[int] = 0

    def missing(self) -> str:
        return ""

    def version(self) -> str:
        return "1"

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        type(self).built += 1
        return _Executable(subgraph, self)

    def finish(self, results: list[Any]) -> list[Any]:
        type(self).calls += 1
        return results


Rival.operators.add(*TAKEN)


class Slow(Rival):
    """Takes 40 ms a call."""

    name = "slow"
    built = calls = 0

    def finish(self, results: list[Any]) -> list[Any]:
        time.sleep(0.04)  # far more than a thread waits for a busy processor
        return super().finish(results)


class Wrong(Rival):
    """Returns another value."""

    name = "wrong"
    built = calls = 0

    def finish(self, results: list[Any]) -> list[Any]:
        return [value * 1.01 for value in super().finish(results)]


class Unbuildable(Rival):
    """Compiles nothing."""

    name = "unbuildable"
    built = calls = 0

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        raise RuntimeError("no such kernel")


class Absent(Rival):
    """Is not installed."""

    name = "absent"

    def missing(self) -> str:
        return "install the package absent"


class Changeable(Rival):
    """Slow for the first part of a model, and for no other."""

    name = "changeable"
    built = calls = 0

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        made = super().compile(subgraph)
        ops = [node.target for node in subgraph.module.graph.nodes]
        if aten.tanh.default in ops:
            made._engine = Slow()  # type: ignore[attr-defined]
        return made


RIVALS = {cls.name: cls for cls in (Rival, Slow, Wrong, Unbuildable, Absent, Changeable)}


@contextmanager
def declared() -> Iterator[None]:
    """Inside, the engines of this module are known by their names."""
    for cls in RIVALS.values():
        cls.built = cls.calls = 0
        checks.BUILT_IN[cls.name] = f"{cls.__module__}:{cls.__qualname__}"
    checks.engine_names.cache_clear()
    resolve_engine.cache_clear()
    try:
        yield
    finally:
        for name in RIVALS:
            del checks.BUILT_IN[name]
        checks.engine_names.cache_clear()
        resolve_engine.cache_clear()
