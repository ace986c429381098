"""Faults planted wherever building can fail: the program keeps eager's values and gradients, and says why.

`test_faults_calls.py` has those of calls, `test_faults_stores.py` those of files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from faults import CUT, EAGER, WHOLE, Place, check, said, without_caches
from tiers import fast

# What every graph goes through, and what each of its parts does.
EVERYWHERE = {
    "capture": Place("omnicomp.backend.pipeline", "capture_graph", parts=False),
    "digest": Place("omnicomp.backend.capture", "graph_digest", parts=False),
    "copy": Place("omnicomp.backend.pipeline", "copy_module", parts=False),
    "blocks": Place("omnicomp.backend.block_overrides", "entering", parts=False),
    "searches": Place("omnicomp.backend.block_overrides", "apply_searches", parts=False),
    "passes": Place("omnicomp.backend.run_passes", "run_pipeline", parts=False),
    "pass": Place("omnicomp.passes.base", "_run_on_region", parts=False),
    "repairs": Place("omnicomp.passes.repairs", "RepairFirstCall.meets", parts=False),
    "weights": Place("omnicomp.backend.weight_inputs", "lift_weights", parts=False),
    "autograd": Place("torch._functorch._aot_autograd.graph_compile", "aot_dispatch_autograd_graph", parts=False),
    "summary": Place("omnicomp.runtime.fallback_limit", "_notify", parts=False),
    "part": Place("omnicomp.builder.part", "copy_module"),
    "failures": Place("omnicomp.builder.part", "PartFailures"),
    "placement": Place("omnicomp.builder.part", "place"),
    "record": Place("omnicomp.builder.part", "PartRecord"),
    "observer": Place("omnicomp.builder.part", "wrap"),
    "attestation": Place("omnicomp.builder.record", "emit_ran", parts=False),
}
PIECES = {
    "extract": Place("omnicomp.builder.part", "extract"),
    "stitch": Place("omnicomp.builder.part", "stitching"),
    "eager": Place("omnicomp.lowerings.eager", "EagerLowering.lower"),
    "pieces' record": Place("omnicomp.builder.record", "PartRecord.emit_pieces"),
}
OWN = {
    "autograd of our own": Place("omnicomp._torch.autograd.aot_autograd", "compile_graph", parts=False),
    "own partitioner": Place("omnicomp._torch.autograd.aot_autograd", "partition", parts=False),
}
COMPILED = {
    "compiler": Place("omnicomp._torch.inductor.compile_fx", "compile_fx", parts=False),
    "partitioner": Place("torch._functorch.partitioners", "solve_min_cut", parts=False),
    "joint passes": Place("torch._inductor.compile_fx", "_recursive_joint_graph_passes", parts=False),
    "part's passes": Place("torch._inductor.compile_fx", "_recursive_post_grad_passes"),
    "overrides": Place("omnicomp.builder.part", "apply_overrides"),
    "lowering": Place("torch._inductor.graph", "GraphLowering.run"),
    "scheduler": Place("torch._inductor.scheduler", "Scheduler._init"),
    "codegen": Place("torch._inductor.graph", "GraphLowering.codegen"),
    "compilation": Place("torch._inductor.codecache", "CppCodeCache.load_async"),
    "module": Place("torch._inductor.codecache", "PyCodeCache.load_by_key_path"),
    "guard": Place("omnicomp.builder.part", "Guard"),
}
IN_ONE = {
    "kept record": Place("omnicomp.builder.record", "PartRecord.dumps"),
    "way down": Place("omnicomp.builder.eager_artefact", "dumps"),
}
CACHES = {
    "graph cache key": Place("torch._inductor.codecache", "FxGraphCache.prepare_key"),
    "graph cache read": Place("torch._inductor.codecache", "FxGraphCache._lookup_graph"),
    "graph cache write": Place("torch._inductor.codecache", "FxGraphCache._write_to_local_cache"),
    "autograd cache key": Place("torch._functorch._aot_autograd.autograd_cache", "autograd_cache_key"),
    "autograd cache read": Place("torch._functorch._aot_autograd.autograd_cache", "AOTAutogradCache._lookup"),
    "autograd cache write": Place(
        "torch._functorch._aot_autograd.autograd_cache", "AOTAutogradCache._write_to_local_cache"
    ),
    "cache verdict": Place("omnicomp.backend.autograd", "verdict"),
    "replay": Place("omnicomp.backend.autograd", "replay"),
    "replayed way down": Place("omnicomp.builder.eager_artefact", "guard"),
}
AUTOTUNED = {
    "autotuning": Place("torch._inductor.select_algorithm", "AlgorithmSelectorCache.__call__"),
}


def moments(*tables: Mapping[str, Place], few: Mapping[str, Place] | None = None, quick: Sequence[str] = ()) -> Any:
    """Each place with each moment in which it can raise; of the places in `few`, with two.

    In the fast tier each place raises once, and in the moments of `quick`.
    """
    cases = [(name, place, place.moments) for table in tables for name, place in table.items()]
    cases += [(name, place, place.moments[2:]) for name, place in (few or {}).items()]
    params = [
        pytest.param(place, when, id=f"{name}-{when}", marks=() if when in ("first", *quick) else pytest.mark.slow)
        for name, place, moments in cases
        for when in moments
    ]
    return pytest.mark.parametrize(("place", "when"), params)


@moments(EVERYWHERE, PIECES, OWN, quick=("backward",))
def test_without_a_compiler(place: Place, when: str, caplog: pytest.LogCaptureFixture) -> None:
    assert check(place, when, EAGER) > 0
    assert said(caplog.text)


@pytest.mark.inductor
@moments(COMPILED, IN_ONE, few=EVERYWHERE)
def test_in_one_graph_of_inductors(place: Place, when: str, caplog: pytest.LogCaptureFixture) -> None:
    with without_caches():
        assert check(place, when, WHOLE) > 0
    assert said(caplog.text)


@pytest.mark.inductor
@moments(PIECES, few=COMPILED)
def test_in_pieces(place: Place, when: str, caplog: pytest.LogCaptureFixture) -> None:
    with without_caches():
        assert check(place, when, CUT) > 0
    assert said(caplog.text)


@pytest.mark.inductor
@moments(AUTOTUNED)
def test_while_autotuning(place: Place, when: str, caplog: pytest.LogCaptureFixture) -> None:
    with without_caches():
        assert check(place, when, {"max_autotune": True}) > 0
    assert said(caplog.text)


@pytest.mark.inductor
@pytest.mark.parametrize("when", fast(["first", "later", "always"], "first".__eq__))
@pytest.mark.parametrize("place", CACHES.values(), ids=CACHES)
def test_in_a_cache(place: Place, when: str, request: pytest.FixtureRequest) -> None:
    """Cold and warm: what can't be read or written is compiled, and what is found is right."""
    # A tag of its own makes the caches of graphs empty, while C++ that is the same is compiled once.
    with torch.compiler.config.patch(cache_key_tag=f"{request.node.name} {torch.rand(())}"):
        assert check(place, when, WHOLE, starts=2) > 0
