"""Engines for tests: they run a subgraph with torch, and are broken in one way each."""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch.fx import GraphModule, Interpreter

from omnicomp.lowerings import engines
from omnicomp.lowerings.engines import Clustering, Engine, EngineExecutable, Subgraph
from omnicomp.lowerings.engines.base import Session
from omnicomp.lowerings.engines.store import store
from omnicomp.options import checks

aten = torch.ops.aten
OPERATORS = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.relu.default, aten.sin.default, aten.cos.default,
    aten.exp.default, aten.mm.default, aten.addmm.default, aten.t.default, aten.view.default, aten.sum.default,
    aten.sum.dim_IntList, aten.cat.default, aten.embedding.default, aten.unsqueeze.default, aten.topk.default,
    aten._native_batch_norm_legit_no_training.default, aten.convolution.default, aten.expand.default,
)  # fmt: skip


def installed(monkeypatch: pytest.MonkeyPatch, owner: type[Engine]) -> Engine:
    """Make an engine known under its name, and return the object that the ladder asks."""
    where = f"{owner.__module__}:{owner.__qualname__}"
    monkeypatch.setitem(checks.BUILT_IN, owner.name, where)
    for each in (checks.engine_names, engines.resolve_engine):
        each.cache_clear()
    store.clear()
    return engines.resolve_engine(owner.name)


class Kept(EngineExecutable):
    """Runs the graph operator by operator, with the weights that it was built with."""

    def __init__(self, engine: "Fake", subgraph: Subgraph) -> None:
        self.engine = engine
        self.subgraph = subgraph
        self.sessions = 0

    def session(self) -> Session:
        self.sessions += 1
        return self.run

    def run(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        subgraph = self.subgraph
        given = iter(inputs)
        named = set(subgraph.inputs)
        arguments = [
            subgraph.constants[i] if i in subgraph.constants else next(given) if node in named else None
            for i, node in enumerate(subgraph.placeholders)
        ]
        with torch.no_grad():
            results = Fakes(subgraph.module, self.engine).run(*arguments)
        return [value.clone() if value is not None else None for value in results]


class Fakes(Interpreter):
    """Runs a graph and lets the engine stand in for an operator."""

    def __init__(self, module: GraphModule, engine: "Fake") -> None:
        super().__init__(module)
        self.engine = engine

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.engine.call(target, args, kwargs)


class Build:
    """What was compiled, without the values of the weights: nobody else may hold their memory."""

    def __init__(self, subgraph: Subgraph) -> None:
        self.constants = sorted(subgraph.constants)
        self.subgraph = dataclasses.replace(subgraph, constants={})
        self.targets = [node.target for node in subgraph.module.graph.nodes if node.op == "call_function"]


class Fake(Engine):
    """An engine that is right. What it compiled is in `builds`."""

    name = "fake"
    native = False
    builds: ClassVar[list["Build"]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.builds = []

    def __init__(self) -> None:
        type(self).builds = []

    def missing(self) -> str:
        return ""

    def version(self) -> str:
        return "1.0"

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        self.builds.append(Build(subgraph))
        return Kept(self, subgraph)

    def call(self, target: Any, args: Any, kwargs: Any) -> Any:
        return target(*args, **kwargs)


def _convert(*_: Any) -> None:
    """A form of an operator: these engines run the graph itself."""


Fake.builds = []
Fake.op(*OPERATORS)(_convert)


class Training(Fake):
    name = "fake_training"
    clustering = Clustering(training=True)


class Missing(Fake):
    name = "fake_missing"

    def missing(self) -> str:
        return 'FakeLib is not installed: pip install "omnicomp[fake]"'


class TooOld(Fake):
    name = "fake_old"

    def missing(self) -> str:
        return "FakeLib 1.0 is too old: 2.0 or newer is needed"


class Unsure(Fake):
    name = "fake_unsure"

    def missing(self) -> str:
        raise OSError("libfake.so: undefined symbol")


class NoBuild(Fake):
    """It can't compile the sine."""

    name = "fake_no_build"
    error: ClassVar[Exception] = RuntimeError("no kernel for sin")

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        if any(node.target is aten.sin.default for node in subgraph.module.graph.nodes):
            raise self.error
        return super().compile(subgraph)


class Nothing(Fake):
    """It compiles nothing at all."""

    name = "fake_nothing"

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        self.builds.append(Build(subgraph))
        raise NotImplementedError("not today")


class NoExecutable(Fake):
    name = "fake_no_executable"

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        return "compiled"  # type: ignore[return-value]


class Wrong(Fake):
    """Its sine is a little off."""

    name = "fake_wrong"

    def call(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call(target, args, kwargs)
        return result * 1.01 if target is aten.sin.default else result


class Raises(Fake):
    """It raises in the calls that come after the second."""

    name = "fake_raises"
    calls = 0

    def call(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.sin.default:
            Raises.calls += 1
            if Raises.calls > 2:
                raise RuntimeError("the device is gone")
        return super().call(target, args, kwargs)


class OnDisk(Fake):
    """What it compiled is kept on disk; what was loaded from there is in `loaded`."""

    name = "fake_disk"
    loaded: ClassVar[list[bytes]] = []

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        self.builds.append(Build(subgraph))
        return _OnDiskExecutable(self, subgraph)

    def loads(self, data: bytes, subgraph: Subgraph) -> EngineExecutable:
        if not data.startswith(b"fake"):
            raise ValueError("no fake")
        OnDisk.loaded.append(data)
        return _OnDiskExecutable(self, subgraph)


class _OnDiskExecutable(Kept):
    def dumps(self) -> bytes:
        return b"fake" + bytes(1000)


class Stateful(Fake):
    """A request that threads must not share: it sets its inputs, waits, and reads them."""

    name = "fake_stateful"

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        self.builds.append(Build(subgraph))
        return _StatefulExecutable(self, subgraph)


class _StatefulExecutable(Kept):
    def session(self) -> Session:
        self.sessions += 1
        slot: list[Any] = [None]

        def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
            slot[0] = inputs
            time.sleep(0.001)
            return self.run(slot[0])

        return run


def lowerings_that_ran(events: Iterable[Any]) -> list[str]:
    """Of each subgraph that was called, in order."""
    return [event.lowering for event in events if type(event).__name__ == "Ran"]
