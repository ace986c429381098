"""Where autotuning fails, a part is built again without it, which the next process knows."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch._inductor import lowering as inductor_lowering
from torch._inductor.codecache import CacheBase
from torch._inductor.select_algorithm import ExternKernelCaller, ExternKernelChoice, NoValidChoicesError

import omnicomp
from omnicomp._torch.inductor.failures import not_kept
from omnicomp.builder import known_failures
from omnicomp.builder.known_failures import CACHE, entries

aten = torch.ops.aten
OTHER = ExternKernelChoice(torch.matmul, None, name="another_matmul")


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is planted here is in no key of Inductor's caches."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Matrix products are no code of Inductor's, so that no compiler runs."""
    return (x @ w).neg() @ w


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 6, generator=generator).requires_grad_() for _ in range(2)]


def compile_and_compare() -> None:
    """Values and gradients are eager's."""
    torch.compiler.reset()
    omnicomp.timeline.clear()
    compiled = torch.compile(program, backend="omni", options={"summary": False, "verify": "off"})
    results = []
    for call in (compiled, program):
        arguments = inputs()
        result = call(*arguments)
        result.sum().backward()
        results.append([result.detach(), *(each.grad for each in arguments)])
    torch.testing.assert_close(*results)


def events(kind: str, part: str | None = None) -> list:
    return [e for e in omnicomp.timeline.events() if e.type == kind and part in (None, e.part)]


def ran(part: str) -> list[str]:
    """The lowerings of the subgraphs of a part, as they ran."""
    return [e.lowering for e in events("ran", part)]


def plant_choices(monkeypatch: pytest.MonkeyPatch, benchmark: Callable[..., float]) -> None:
    """What measuring a choice of autotuning does."""
    monkeypatch.setattr(ExternKernelCaller, "benchmark", benchmark)


def tuned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def tuned_inputs(size: int = 96) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(size, size, generator=generator) for _ in range(2)]


def compile_tuned(size: int, **options) -> None:
    torch.compiler.reset()
    omnicomp.timeline.clear()
    settings = {"max_autotune": True, "summary": False, "verify": "off", "freezing": False, **options}
    compiled = torch.compile(tuned, backend="omni", options=settings)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tuned_inputs(size)), tuned(*tuned_inputs(size)))


@pytest.fixture
def tunable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Lets a product have two choices on the CPU, where it needs a constant weight otherwise."""
    from torch._inductor.kernel import mm

    asked: list[bool] = []
    original = mm.autotune_select_algorithm

    def select(name, choices, nodes, layout, **kwargs):
        asked.append(bool(torch._inductor.config.max_autotune))
        if torch._inductor.config.max_autotune:
            choices = [*choices, OTHER.bind(nodes, layout)]
        return original(name, choices, nodes, layout, **kwargs)

    monkeypatch.setattr(mm, "autotune_select_algorithm", select)
    # What was measured is kept in a file that other tests and runs must not see.
    monkeypatch.setattr(CacheBase, "get_local_cache_path", lambda *_: tmp_path / "measured")
    return asked


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), MemoryError("planted")])
def test_out_of_memory_while_autotuning_builds_again_without(monkeypatch, tunable, error: Exception) -> None:
    def benchmark(self, *args, out) -> float:
        raise error

    plant_choices(monkeypatch, benchmark)
    compile_tuned(93 if isinstance(error, MemoryError) else 94)
    assert ran("inference") == ["inductor"]
    (retreat,) = events("retreat")
    assert retreat.reason.code == "build_failed"
    assert "autotuning failed" in retreat.reason.sentence
    assert retreat.reason.observed in (type(error).__name__, NoValidChoicesError.__name__)
    # Torch takes a choice that ran out of memory for a slow one, and has none left in the end.
    kept = isinstance(error, torch.OutOfMemoryError)
    assert len(entries()) == kept
    if kept:
        tried = len(tunable)
        monkeypatch.setattr(known_failures, "_PROCESS", os.urandom(8).hex())
        compile_tuned(94)  # AOTAutograd's cache must not have kept it as if it were tuned
        assert not any(tunable[tried:])
        assert [e.verdict for e in events("cache") if e.cache == CACHE] == ["hit"]
        (retreat,) = events("retreat")
        assert "known from an earlier process" in retreat.reason.sentence


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), MemoryError("planted")])
def test_a_node_whose_lowering_runs_out_of_memory_moves_and_is_not_kept(monkeypatch, error: Exception) -> None:
    def fails(*_, **__):
        raise error

    monkeypatch.setitem(inductor_lowering.lowerings, aten.neg.default, fails)
    compile_and_compare()
    assert ran("forward") == ["inductor", "eager", "inductor"]
    assert entries() == []


def test_a_part_that_is_not_what_its_key_says_is_not_kept() -> None:
    class Compiled:
        _fx_graph_cache_key = "key"

        def __call__(self, inputs: list[int]) -> list[int]:
            return [*inputs, 1]

    part = not_kept(Compiled())
    assert not hasattr(part, "_fx_graph_cache_key")
    assert part([2]) == [2, 1]
