"""Every executable gets every wrapper, wherever it is made callable: built or restored, whole or cut."""

import ast
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import omnicomp
from omnicomp.lowerings import Executable
from omnicomp.runtime import wrappers
from omnicomp.runtime.wrappers import Surroundings

WRAPPING = {"with_tf32", "sampled", "named", "within_budget", "FirstCallObserver"}


def test_the_wrappers_are_used_in_one_module() -> None:
    package = Path(omnicomp.__file__).parent
    users = set()
    for path in [*(package / "builder").rglob("*.py"), *(package / "backend").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in WRAPPING:
                users.add(str(path.relative_to(package)))
    assert users == set()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, bool, bool]]]:
    """The executables that were surrounded: subgraph, lowering, and whether a guard and a verifier are there."""
    found: list[tuple[str, str, bool, bool]] = []

    def probe(call: Any, at: Surroundings) -> Any:
        found.append((at.subgraph, at.lowering, at.guard is not None, at.verifier is not None))
        return call

    monkeypatch.setattr(wrappers, "WRAPPERS", (*wrappers.WRAPPERS, probe))
    with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
        yield found


@pytest.mark.inductor
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_each_place_of_use(cut: bool, seen: list[tuple[str, str, bool, bool]]) -> None:
    def run(**options: Any) -> list[tuple[str, str, bool, bool]]:
        torch.compiler.reset()
        omnicomp.timeline.clear()
        seen.clear()
        x = torch.ones(7, requires_grad=True)
        lowerings = {"aten.digamma": "eager"} if cut else ["inductor"]
        options = {"summary": False, "lowerings": lowerings, **options}
        torch.compile(lambda x: torch.digamma(x.sin() + 2) * 3, backend="omni", options=options)(x).sum().backward()
        ran = {e.subgraph for e in omnicomp.timeline.events() if e.type == "ran"}
        assert {subgraph for subgraph, *_ in seen} == ran
        return sorted((subgraph.partition(".")[2], *rest) for subgraph, *rest in seen)

    built = run()
    assert {lowering for _, lowering, *_ in built} == ({"inductor", "eager"} if cut else {"inductor"})
    assert all(guard == (lowering != "eager") and not verifier for _, lowering, guard, verifier in built)
    restored = run()
    assert {e.verdict for e in omnicomp.timeline.events() if e.type == "cache"} == {"hit"}
    assert restored == built
    assert all(verifier == (lowering != "eager") for _, lowering, _, verifier in run(verify="first"))


@pytest.mark.parametrize("where", ["guard", "verifier"])
def test_what_stepped_down_is_not_recorded_as_run(where: str) -> None:
    class Down:
        stepped_down = failed = True
        verdict = ""

        def around(self, call: Any) -> Any:
            return call

    class Context:
        policy = omnicomp.Policy()
        device = omnicomp.resolve_device("cpu")
        graph_id, part = "g0", "inference"

    emitted: list[Any] = []
    result = Executable(lowering="inductor", call=lambda inputs: inputs)
    downs: dict[str, Any] = {"guard": None, where: Down()}
    context: Any = Context()
    wrapped = wrappers.wrap(result, context, "g0.inference.0", lambda *found: emitted.append(found), **downs)
    assert wrapped.first([1]) == [1]
    assert emitted == []
    assert wrapped.later() is result.call
