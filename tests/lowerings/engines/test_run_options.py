"""Run options: what a user gives comes to the session, and nothing is compiled anew for it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import fake_engines as fake
import pytest
import torch

from omnicomp.devices.cpu import CpuDevice
from omnicomp.errors import EngineError, OptionError
from omnicomp.lowerings.engines import EngineExecutable, RunOptions, Subgraph
from omnicomp.lowerings.engines.base import Session
from omnicomp.lowerings.engines.onnxruntime.engine import OnnxRuntimeRunOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(RunOptions):
    priority: int = 0
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


class Executable(fake.Kept):
    made: ClassVar[list[RunOptions]] = []

    def session_with(self, options: RunOptions) -> Session:
        self.made.append(options)
        return self.session()


class Engine(fake.Fake):
    name = "fake_run"
    run_options = Own()

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        self.builds.append(fake.Build(subgraph))
        return Executable(self, subgraph)


def compiled(engine: str, **run: Any) -> Any:
    options = {"lowerings": [engine, "eager"], "on_error": "raise", "engines": {engine: {"run": run}}}
    return torch.compile(torch.nn.ReLU(), backend="omni", options=options)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    Executable.made.clear()
    return fake.installed(monkeypatch, Engine)  # type: ignore[return-value]


def test_a_session_is_made_with_them(engine: Engine) -> None:
    x = torch.randn(3)
    assert torch.equal(compiled("fake_run", priority=2, threads=3, entries={"a": "b"})(x), x.relu())
    assert Executable.made == [Own(priority=2, threads=3, entries={"a": "b"})]
    assert [build.subgraph.threads for build in engine.builds] == [3]


def test_what_was_compiled_serves_others(engine: Engine) -> None:
    for priority in (1, 2):
        compiled("fake_run", priority=priority)(torch.ones(3))
        torch.compiler.reset()
    assert [getattr(each, "priority", None) for each in Executable.made] == [1, 2]
    assert len(engine.builds) == 1


def test_a_call_waits_for_the_device(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(CpuDevice, "synchronize", lambda self: waited.append(self.type), raising=False)
    function = compiled("fake_run", wait=True)
    for count in (1, 2):
        function(torch.ones(3))
        assert len(waited) >= count
    before = len(waited)
    compiled("fake_run")(torch.ones(4))
    assert len(waited) == before


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ({"thread": 2}, "no run option 'thread'; did you mean"),
        ({"threads": 0}, "run option threads of the engine fake_run can't be 0"),
        ({"wait": 1}, "run option wait of the engine fake_run can't be 1"),
        ({"priority": "high"}, "can't be 'high'; it takes a value as its default, for example 0"),
        ({"entries": ["a"]}, "run option entries"),
        (3, "can't be 3; it takes a mapping"),
    ],
)
def test_what_is_no_run_option(engine: Engine, run: Any, told: str) -> None:
    with pytest.raises(EngineError, match=told):
        engine.configured({"run": run})
    options = {"lowerings": ["fake_run", "eager"], "engines": {"fake_run": {"run": run}}}
    with pytest.raises(OptionError, match=told):
        torch.compile(torch.relu, backend="omni", options=options)(torch.ones(2))


def test_those_of_onnxruntime_come_to_the_library() -> None:
    library = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    made: list[Sequence[str]] = []

    class Recorded(library.RunOptions):  # type: ignore[misc]
        def add_run_config_entry(self, name: str, value: str) -> None:
            made.append((name, value))
            super().add_run_config_entry(name, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "RunOptions", Recorded)
        x = torch.randn(3, 4)
        entries = {"memory.enable_memory_arena_shrinkage": "cpu:0"}
        assert torch.equal(compiled("onnxruntime", entries=entries)(x), x.relu())
    assert made == [("memory.enable_memory_arena_shrinkage", "cpu:0")]
    assert OnnxRuntimeRunOptions().entries == {}
