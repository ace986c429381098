"""Faults planted wherever something can fail: the program keeps eager's values and gradients, and says why."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from omnicomp.timeline import Attempt, Cache, Option, Retreat, current

# Where, and which compiler meets it there. Each is replaced by a function that raises.
PLACES = {
    "pass": ("omnicomp.backend", "run_pipeline"),
    "placement": ("omnicomp.ladder", "place"),
    "eager": ("omnicomp.lowerings.eager", "EagerLowering.lower"),
    "autograd": ("torch._functorch._aot_autograd.graph_compile", "aot_stage1_graph_capture"),
    "record": ("omnicomp.records", "PartRecord.dumps"),
    "extract": ("omnicomp.ladder", "extract"),
    "stitch": ("omnicomp.ladder", "stitch"),
    "overrides": ("omnicomp.ladder", "apply_overrides"),
}
COMPILED = {
    "partitioner": ("torch._functorch.partitioners", "solve_min_cut"),
    "lowering": ("torch._inductor.graph", "GraphLowering.run"),
    "scheduler": ("torch._inductor.scheduler", "Scheduler._init"),
    "codegen": ("torch._inductor.graph", "GraphLowering.codegen"),
    "module": ("torch._inductor.codecache", "PyCodeCache.load_by_key_path"),
    "graph cache key": ("torch._inductor.codecache", "FxGraphCache.prepare_key"),
    "graph cache read": ("torch._inductor.codecache", "FxGraphCache._lookup_graph"),
    "graph cache write": ("torch._inductor.codecache", "FxGraphCache._write_to_local_cache"),
    "autograd cache key": ("torch._functorch._aot_autograd.autograd_cache", "autograd_cache_key"),
    "autograd cache read": ("torch._functorch._aot_autograd.autograd_cache", "AOTAutogradCache._lookup"),
    "autograd cache write": ("torch._functorch._aot_autograd.autograd_cache", "AOTAutogradCache._write_to_local_cache"),
}
EAGER = {"lowerings": ["eager"]}
MIXED = {"lowerings": {"*": ["inductor", "eager"], "aten.cos": "eager"}}


def program(x: Tensor, w: Tensor) -> Tensor:
    return (torch.sin(x) @ w).cos() * x.exp()


def step(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """Result and gradients of one call."""
    made = torch.Generator().manual_seed(3)
    x, w = (torch.randn(3, 3, generator=made).requires_grad_() for _ in range(2))
    result = function(x, w)
    result.sum().backward()
    return result.detach(), x.grad, w.grad


@contextlib.contextmanager
def planted(place: tuple[str, str], when: str, error: type[Exception] = RuntimeError) -> Iterator[list[int]]:
    """Make a function raise at its first call, at all but the first, or always; the list counts what was raised."""
    module = importlib.import_module(place[0])
    *path, name = place[1].split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part)
    static = vars(owner)[name]
    original = getattr(static, "__func__", static)
    calls, raised = [0], [0]

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if when == "always" or (calls[0] == 1) == (when == "first"):
            raised[0] += 1
            raise error("planted failure")
        return original(*args, **kwargs)

    setattr(owner, name, type(static)(fail) if isinstance(static, classmethod | staticmethod) else fail)
    try:
        yield raised
    finally:
        setattr(owner, name, static)


def said() -> bool:
    """Whether the timeline tells of the planted failure."""
    reasons = [e.reason for e in current() if isinstance(e, Retreat | Attempt | Cache | Option)]
    return any("planted failure" in str(reason) for reason in reasons if reason is not None)


def check(place: tuple[str, str], when: str, options: dict[str, Any], *, fresh: bool = False) -> int:
    expected = step(program)
    with planted(place, when) as raised, torch.compiler.config.patch(force_disable_caches=not fresh):
        compiled = torch.compile(program, backend="omni", options=options)
        for _ in range(2):
            for got, want in zip(step(compiled), expected, strict=True):
                torch.testing.assert_close(got, want)
    return raised[0]


@pytest.mark.parametrize("when", ["first", "later", "always"])
@pytest.mark.parametrize("place", PLACES)
def test_without_a_compiler(place: str, when: str) -> None:
    if check(PLACES[place], when, EAGER):
        assert said()


@pytest.mark.inductor
@pytest.mark.parametrize("options", [{}, MIXED], ids=["whole", "cut"])
@pytest.mark.parametrize("when", ["first", "later", "always"])
@pytest.mark.parametrize("place", PLACES | COMPILED)
def test_with_inductor(place: str, when: str, options: dict[str, Any], tmp_path: Any) -> None:
    cached = "cache" in place
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)} if cached else {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cache.items():
            patch.setenv(name, value)
        raised = check((PLACES | COMPILED)[place], when, options, fresh=cached)
    if raised and not cached:
        assert said()
