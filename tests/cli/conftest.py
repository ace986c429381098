import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.backends import registry

from omnicomp._torch.dynamo.registrations import backend_names
from omnicomp.cli import main
from omnicomp.timeline import Capture, Ran, Subgraph, current

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    current().clear()
    yield
    current().clear()
    torch.compiler.reset()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A backend under the name omni that runs the graph as it is, and what it was called with."""
    seen: list[dict[str, Any]] = []

    def stub(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        graph = current().next_graph()
        identity = f"{graph}.inference.0"
        current().append(Capture(graph=graph, nodes=1))
        current().append(
            Subgraph(graph=graph, part="inference", subgraph=identity, lowering="eager", nodes=1, flops_hint=1)
        )

        def run(*args: Any) -> Any:
            current().append(Ran(graph=graph, part="inference", subgraph=identity, lowering="eager"))
            return gm(*args)

        return torch._dynamo.disable(run)

    stub._tags = ()  # type: ignore[attr-defined]
    assert "omni" in backend_names()
    monkeypatch.setitem(registry._COMPILER_FNS, "omni", stub)
    return seen


@pytest.fixture
def omnicomp(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Call the command line: exit status, stdout, stderr."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["omnicomp", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capfd.readouterr()
        code = stop.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), out, err

    return call
