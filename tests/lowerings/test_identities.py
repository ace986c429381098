"""The compilers beside Inductor in the keys of the caches: another version, or an edited source, is another key."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import python

from omnicomp.backend.capture import graph_digest, key_parts
from omnicomp.devices.cpu import CpuDevice
from omnicomp.devices.inductor.spec import package_sources
from omnicomp.lowerings import engines
from omnicomp.lowerings.engines.toy import ToyEngine
from omnicomp.options.policy import parse

POLICY = parse(None, None)
TOY = parse(None, {"lowerings": ["toy", "inductor"]})


class Mine(CpuDevice):
    """A CPU with a compiler of its own."""

    version = "1"

    def compile_subgraph(self, module: Any, inputs: Any) -> Any:
        raise NotImplementedError

    def compiler_version(self) -> str:
        return self.version


@pytest.fixture(autouse=True)
def nothing_is_cached() -> Iterator[None]:
    yield
    package_sources.cache_clear()
    engines.resolve_engine.cache_clear()


def test_another_version_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = graph_digest(POLICY, Mine())
    assert graph_digest(POLICY, Mine()) == before
    assert key_parts(POLICY, Mine())["compiler device"][0] == "1"
    monkeypatch.setattr(Mine, "version", "2")
    assert graph_digest(POLICY, Mine()) != before


def test_another_method_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = graph_digest(POLICY, Mine())
    monkeypatch.setattr(Mine, "compile_subgraph", lambda self, module, inputs: module)
    assert graph_digest(POLICY, Mine()) != before


def test_sources_of_the_package_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "acme_cards"
    package.mkdir()
    device = "from omnicomp.devices.cpu import CpuDevice\nfrom acme_cards import compiler\n"
    device += "class Card(CpuDevice):\n    def compile_subgraph(self, module, inputs):\n        return compiler.run\n"
    (package / "__init__.py").write_text(device)
    (package / "compiler.py").write_text("def run(arguments): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import acme_cards  # type: ignore[import-not-found]

    before = graph_digest(POLICY, acme_cards.Card())
    (package / "compiler.py").write_text("def run(arguments): return arguments\n")
    package_sources.cache_clear()
    assert graph_digest(POLICY, acme_cards.Card()) != before
    for name in [name for name in sys.modules if name.startswith("acme_cards")]:
        del sys.modules[name]


def test_an_engine_that_is_there_now_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before, others = graph_digest(TOY, CpuDevice()), graph_digest(POLICY, CpuDevice())
    monkeypatch.setattr(ToyEngine, "missing", lambda self: "the library toy is not installed")
    assert graph_digest(TOY, CpuDevice()) != before
    assert graph_digest(POLICY, CpuDevice()) == others
    assert "compiler toy" not in key_parts(POLICY, CpuDevice())


USE = """
import torch, omnicomp, omnicomp.devices as D, card
D._discover()[0]["cpu"] = card.Card()
with torch.no_grad():
    torch.compile(lambda x: x.exp() + 1, backend="omni")(torch.ones(3))
print(card.CALLS, [event.lowering for event in omnicomp.timeline.events() if event.type == "ran"])
"""
CARD = """
import torch
from omnicomp.devices.cpu import CpuDevice
CALLS = []
class Program:
    def __init__(self, module): self.module = module
    def __call__(self, args): return torch.fx.Interpreter(self.module).run(*args)
class Card(CpuDevice):
    def compile_subgraph(self, module, inputs):
        CALLS.append(1)
        {}
"""


@pytest.mark.slow
def test_a_compiler_that_failed_is_asked_again_by_the_next_process(tmp_path: Path) -> None:
    def run(body: str) -> str:
        (tmp_path / "card.py").write_text(CARD.format(body))
        environment = {
            "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}",
            "OMNICOMP_CACHE_DIR": str(tmp_path / "omni"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        }
        return python("-c", USE, environment=environment, folder=tmp_path, fresh=True, check=True).stdout.strip()

    absent = 'raise NotImplementedError("no compile path yet")'
    assert run(absent) == "[1] ['inductor']"
    assert run(absent) == "[1] ['inductor']"
    assert run("return Program(module)") == "[1] ['device']"
