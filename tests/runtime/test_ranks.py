"""Ranks agree before a graph with collectives runs: what differs is named on all ranks, and nobody hangs."""

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

from omnicomp.runtime.ranks import Plan, difference
from omnicomp.timeline import read_events

PROGRAM = """
import omnicomp
import torch.distributed._functional_collectives as funcol
from omnicomp.builder import part as part_module
from omnicomp.lowerings.eager import EagerLowering
from omnicomp.runtime import ranks

FAULT, FAULTY = GIVEN["fault"], RANK in GIVEN["ranks"]
options = {"lowerings": ["eager"], "ranks_seconds": GIVEN.get("limit", 20), **GIVEN.get("options", {})}

def f(x, more=False):
    y = funcol.all_reduce(x.sin(), GIVEN.get("reduce", "sum"), dist.group.WORLD)
    return funcol.all_reduce(y * 2, "sum", dist.group.WORLD) if more else y.cos()

def same(x):
    return torch.topk(f(x), 2).values

if FAULT == "mesh":  # of two dimensions: each rank has other groups
    from torch.distributed.device_mesh import init_device_mesh
    rows, columns = init_device_mesh("cpu", (SIZE // 2, 2)).get_all_groups()

    def f(x):
        return funcol.all_reduce(funcol.all_reduce(x.sin(), "sum", rows) * 2, "sum", columns).cos()
elif FAULT == "constants":  # each rank has numbers of its own, which decide what a rewrite finds
    def f(x):
        q = x.view(1, 1, 8, 1).expand(1, 1, 8, 8).contiguous()
        mask = torch.arange(RANK * 2, RANK * 2 + 8)[:, None] >= torch.arange(8)
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)
        return funcol.all_reduce(y[0, 0, :, 0], "sum", dist.group.WORLD).cos()
elif FAULT == "sizes":  # of the last rank's data are others
    def f(x):
        return funcol.all_reduce(x.repeat(1 + RANK).sin().sum() + x, "sum", dist.group.WORLD).cos()

x = torch.arange(1.0, 9.0)
expected = same(x)
dist.barrier()
started = time.monotonic()

def raising(error):
    def call(*args, **kwargs):
        raise error
    return call

if FAULTY:
    if FAULT == "option":
        options |= GIVEN["other"]
    elif FAULT == "version of omnicomp":
        import omnicomp.backend.capture as capture
        capture.package_digest = lambda: "another"
    elif FAULT == "version of torch":
        ranks._torch_version = lambda: "2.99"
    elif FAULT == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "import":
        import no_such_module
    elif FAULT == "killed in the build":
        EagerLowering.lower = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "slow":
        time.sleep(3)
    elif FAULT == "hangs":
        time.sleep(GIVEN["limit"] + 6)
    elif FAULT == "build":
        EagerLowering.lower = raising(RuntimeError("the kernel is broken"))
    elif FAULT == "compiler":
        import omnicomp.backend.pipeline as pipeline
        pipeline.compile_parts = raising(RuntimeError("the compiler is broken"))
    elif FAULT == "last resort":
        part_module._Builder.build = raising(RuntimeError("the build is broken"))
    elif FAULT == "placement":
        import dataclasses
        place = part_module.place
        from omnicomp.timeline import NodePlacement, Reason
        def other(*args):
            plan = place(*args)
            why = Reason(code="build_failed", by="inductor", sentence="it does not compile here")
            node = NodePlacement(node="topk", op="aten.topk.default", lowering="eager", chain=(why,))
            return dataclasses.replace(plan, declined=(*plan.declined, node))
        part_module.place = other
    elif FAULT == "read-only cache":
        os.makedirs(os.environ["OMNICOMP_CACHE_DIR"], exist_ok=True)
        os.chmod(os.environ["OMNICOMP_CACHE_DIR"], 0o500)
    elif FAULT == "call":
        os.environ["BROKEN"] = "1"
elif FAULT == "override":  # missing on the faulty rank
    @omnicomp.override(op=torch.ops.aten.sin.default, name="sine")
    def sine(x):
        return torch.cos(x - torch.pi / 2)
if FAULT == "override":
    options["lowerings"] = ["override", "eager"]

if FAULT == "call":
    @omnicomp.override(op=torch.ops.aten.sin.default, name="sine")
    def sine(x):
        if "BROKEN" in os.environ:
            raise RuntimeError("the kernel is broken")
        return torch.cos(x - torch.pi / 2)
    options |= {"lowerings": ["override", "eager"], "verify": "off"}

def program(x):
    if FAULTY and FAULT == "other reduction":
        return funcol.all_reduce(x.sin(), "max", dist.group.WORLD)
    if FAULTY and FAULT == "other dtype":
        return funcol.all_reduce(x.sin().double(), "sum", dist.group.WORLD)
    if FAULTY and FAULT == "other size":
        return funcol.all_reduce(x.sin()[:4], "sum", dist.group.WORLD)
    if FAULTY and FAULT == "no collective":
        return x.sin()
    if FAULTY and FAULT == "one more":
        return f(x, True)
    if FAULT == "program" and FAULTY:
        return torch.topk((f(x) + 1) - 1, 2).values
    if FAULT == "break":
        y = f(x)
        if FAULTY:
            torch._dynamo.graph_break()
        return f(y)
    return same(x)

def elsewhere(x):
    return same(x) if GIVEN["alike"] else torch.topk(f(x, True), 2).values

if FAULT == "elsewhere" and FAULTY:
    program = elsewhere
compiled = torch.compile(program, backend="omni", options=options) if FAULT != "eager" or not FAULTY else program
result = {"error": "", "equal": None}
try:
    value = compiled(x)
    if FAULT == "killed later":
        if FAULTY:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        is_gone, closing = ranks.is_gone, iter([False] * SIZE)  # its sockets close first
        ranks.is_gone = lambda process: next(closing, True) and is_gone(process)
        value = compiled(x)
    result["equal"] = bool(torch.allclose(value, expected, atol=1e-5)) if value.shape == expected.shape else False
except Exception as error:
    notes = "; ".join(getattr(error, "__notes__", ()))
    result["error"] = f"{type(error).__name__}: {error}; {notes}"
result["seconds"] = time.monotonic() - started
result["states"] = [e.state for e in omnicomp.timeline.events() if e.type == "agreement"]
print(json.dumps(result), flush=True)
"""


def run(size: int, fault: str, ranks: list[int], folder: Path, **given: Any) -> list[Any]:
    return run_ranks(size, PROGRAM, {"fault": fault, "ranks": ranks, **given}, folder)


def named(results: list[Any], *words: str, but: tuple[int, ...] = ()) -> None:
    """All ranks but some raise an error that says one of these words, in a minute; a quiet machine needs half of it."""
    for rank, result in enumerate(results):
        assert "hung" not in result, (rank, results)
        if rank not in but:
            assert any(each in result.get("error", "") for each in words), (rank, result)
            assert result["seconds"] < 60, (rank, result)


DIFFERENCES: list[tuple[str, str, dict[str, Any]]] = [
    ("option", "option epilogue_fusion: rank 0 has", {"other": {"epilogue_fusion": False}}),
    ("option", "option autograd: rank 0 has", {"other": {"autograd": "eager"}}),
    ("version of omnicomp", "in the omnicomp: rank 0 has", {}),
    ("version of torch", "in the torch: rank 0 has", {}),
    ("override", "override sine", {}),
    ("placement", "placement of aten.topk.default", {}),
    ("call", "the kernel is broken", {}),
    ("compiler", "lowering of the whole graph", {}),
    ("other reduction", "collective 0: rank 0 has all_reduce", {}),
    ("other dtype", "collective 0: rank 0 has all_reduce", {}),
    ("other size", "collective 0: rank 0 has all_reduce", {}),
    ("one more", "collective 1: rank 0 has", {}),
    ("elsewhere", "which differ in the collective 1: rank 0 has", {"alike": False}),
    ("break", "whose graph ends at ", {}),
    ("build", "the kernel is broken", {"options": {"on_error": "raise"}}),
]
ENDS: list[tuple[str, dict[str, Any]]] = [
    ("killed", {"limit": 15}),
    ("import", {"limit": 8}),
    ("killed in the build", {}),
    ("killed later", {}),
    ("hangs", {"limit": 4}),
    ("no collective", {"limit": 5}),
    ("eager", {"limit": 5}),
]
# Which rank is missing; or, where the first one to raise was rank 0, that the store ended with it.
NAMED = ("has ended", "did not come within", "may have ended")
HARMLESS: list[tuple[str, dict[str, Any]]] = [
    ("nothing", {}),
    ("slow", {}),
    ("read-only cache", {}),
    ("last resort", {}),
    ("build", {}),
    ("program", {}),
    ("elsewhere", {"alike": True}),
    ("placement", {"options": {"ranks": "warn"}}),
    ("placement", {"options": {"ranks": "follow"}}),
]


def test_a_difference_is_named_on_all_ranks(tmp_path: Path) -> None:
    results = run(2, "option", [1], tmp_path, other={"dtype_policy": "bf16"})
    named(results, "option dtype_policy: rank 0 has 'keep', rank 1 has 'bf16'")
    assert [result["states"] for result in results] == [["differs"], ["differs"]]


def test_alike_ranks_agree_once(tmp_path: Path) -> None:
    results = run(2, "nothing", [], tmp_path)
    assert [(result["equal"], result["states"]) for result in results] == [(True, ["same"]), (True, ["same"])]


def test_a_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    results = run(2, "killed in the build", [1], tmp_path)
    named(results, "the process of rank 1 has ended", but=(1,))
    assert results[1]["status"] == -9
    assert read_events(tmp_path / "rank1.jsonl")


def test_graphs_of_other_places_are_named_with_what_breaks_them(tmp_path: Path) -> None:
    results = run(2, "break", [1], tmp_path)
    named(results, "differ in the collective 1: rank 0 has all_reduce 2x1 sum float32[8] in the inference of ")
    named(results, "; rank 1 has none in the inference of program", "whose graph ends at ")


def test_ranks_learn_what_rank_0_raised(tmp_path: Path) -> None:
    named(run(2, "call", [0], tmp_path), "the kernel is broken")


def test_ranks_that_follow_run_the_part_eager_together(tmp_path: Path) -> None:
    results = run(2, "placement", [1], tmp_path, options={"ranks": "follow"})
    assert [(result["equal"], result["states"]) for result in results] == [(True, ["eager"]), (True, ["eager"])]


def faulty(*short: list[int]) -> Any:
    """The ranks that a fault is planted on, of four; in the long tier all of these."""
    every = ([0], [1], [2], [3], [0, 2], [1, 2, 3])
    sets = [pytest.param(ranks, marks=() if ranks in short else pytest.mark.long) for ranks in every]
    return pytest.mark.parametrize("ranks", sets, ids=["+".join(map(str, ranks)) for ranks in every])


@pytest.mark.slow
@faulty([3])
@pytest.mark.parametrize(("fault", "words", "given"), DIFFERENCES, ids=[f"{f}-{w[:20]}" for f, w, _ in DIFFERENCES])
def test_differences_of_four_ranks(
    fault: str, words: str, given: dict[str, Any], ranks: list[int], tmp_path: Path
) -> None:
    named(run(4, fault, ranks, tmp_path, **given), words)


@pytest.mark.slow
@faulty([0])
@pytest.mark.parametrize(("fault", "given"), ENDS, ids=[fault for fault, _ in ENDS])
def test_ends_of_some_of_four_ranks(fault: str, given: dict[str, Any], ranks: list[int], tmp_path: Path) -> None:
    named(run(4, fault, ranks, tmp_path, **given), *NAMED, but=tuple(ranks))


@pytest.mark.slow
@faulty([2])
@pytest.mark.parametrize(("fault", "given"), HARMLESS, ids=[f"{fault}-{len(given)}" for fault, given in HARMLESS])
def test_what_harms_nothing(fault: str, given: dict[str, Any], ranks: list[int], tmp_path: Path) -> None:
    # Longer than a busy machine takes: nothing is to be missing here.
    results = run(4, fault, ranks, tmp_path, limit=60, **given)
    assert all(result.get("equal") for result in results), results


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["mesh", "constants", "sizes"])
def test_what_is_of_each_rank_is_no_difference(fault: str, tmp_path: Path) -> None:
    results = run(4, fault, [], tmp_path, limit=60)
    assert all(result.get("equal") for result in results), results


def plan(**fields: Any) -> Plan:
    base = {"program": "f, 3 operators, inference", "collectives": ("all_reduce 0 sum float32[8]",)}
    return Plan(**{**base, **fields})


def test_ranks_may_run_programs_of_their_own_that_communicate_alike() -> None:
    eager = (("lowering of inference.0", "eager", ""),)
    assert difference(plan(), plan(program="g, 4 operators, inference", decisions=eager)) is None
    assert difference(plan(), plan(masks="the mask is causal", decisions=eager)) is None
    assert difference(plan(), plan(decisions=eager)) == ("lowering of inference.0", "none", "eager")


def test_sizes_count_where_both_ranks_know_them() -> None:
    dynamic = plan(collectives=("all_reduce 0 sum float32[]",))
    assert difference(plan(), dynamic) is None
    assert difference(plan(), plan(collectives=("all_reduce 0 sum float32[4]",))) is not None
