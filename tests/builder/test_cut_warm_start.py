"""A part that was cut is restored from AOTAutograd's cache with its subgraphs, as a whole one is, or says why not.

Most of it within one process: the caches are on disk, and a reset forgets what was compiled. Rules that leave Inductor
nothing make a cut part that needs no compiler.
"""

import dataclasses
import importlib.util
import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from torch import Tensor
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor.codecache import FxGraphCache
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch.fx import Graph, GraphModule

import omnicomp
from omnicomp._torch.inductor import cache_entry as stitched
from omnicomp._torch.inductor import graph_text as sources
from omnicomp._torch.inductor.cache_entry import StitchedGraph
from omnicomp.builder import cache_keys
from omnicomp.lowerings.eager import EagerLowering
from omnicomp.lowerings.inductor import InductorLowering
from omnicomp.lowerings.overrides.registry import unregister
from omnicomp.timeline import Cache, Option, Retreat, current

EAGER: dict[str, Any] = {"aten.*": "eager"}
ERFINV: dict[str, Any] = {"aten.erfinv": "eager"}


@pytest.fixture(autouse=True)
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Caches that hold nothing for this test, and no record of what was compiled before."""
    monkeypatch.setattr(cache_keys.STORE, "_root", lambda: tmp_path / "keys")
    with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
        yield


def compiled(
    function: Callable[..., Any], *shapes: tuple[int, ...], lowerings: Any = EAGER, **options: Any
) -> list[Tensor]:
    """Compile and call with inputs that are equal each time; returns results and gradients."""
    torch.compiler.reset()
    omnicomp.timeline.clear()
    torch.manual_seed(0)
    dynamic = options.pop("dynamic", None)
    inputs = [torch.rand(shape).requires_grad_() for shape in shapes]
    call = torch.compile(
        function, backend="omni", dynamic=dynamic, options={"summary": False, "lowerings": lowerings, **options}
    )
    out = call(*inputs)
    out.square().sum().backward()
    return [out.detach(), *(value.grad for value in inputs)]  # type: ignore[list-item]


def caches() -> list[tuple[str, str, str]]:
    return [(e.part, e.cache, e.verdict) for e in current() if isinstance(e, Cache) and e.cache == "aot_autograd"]


def story() -> Any:
    """The audit, with graphs that are numbered as in a process of their own."""
    return json.loads(re.sub(r"\bg\d+\b", "g0", json.dumps(omnicomp.audit().stable(), default=str)))


def place(subgraph: str) -> str:
    return subgraph.partition(".")[2]


HIT = [("forward", "aot_autograd", "hit"), ("backward", "aot_autograd", "hit")]
MISS = [("", "aot_autograd", "miss")]


def restored_as_built(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> list[Tensor]:
    """Compile twice: the second time is restored, and everything that can be seen of it is equal."""
    built = compiled(function, *shapes, **options)
    assert caches() == MISS
    before = story()
    found = compiled(function, *shapes, **options)
    assert caches() == HIT
    torch.testing.assert_close(found, built, rtol=0, atol=0)
    assert [value.stride() for value in found] == [value.stride() for value in built]
    assert story() == before
    assert omnicomp.audit().mismatches == ()
    return found


def ran(part: str = "forward") -> list[str | None]:
    return [row.ran for row in omnicomp.audit().subgraphs if row.part == part]


def three(x: Tensor, y: Tensor) -> Tensor:
    return torch.erfinv((x * y).tanh() * 0.5).t().sin() + x.t()


@pytest.mark.inductor
def test_a_cut_part_is_restored_with_its_subgraphs() -> None:
    found = restored_as_built(three, (4, 6), (4, 6), lowerings=ERFINV)
    assert ran() == ["inductor", "eager", "inductor"]
    torch.testing.assert_close(found, by_eager(three, (4, 6), (4, 6)))


def by_eager(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    inputs = [torch.rand(shape).requires_grad_() for shape in shapes]
    out = function(*inputs)
    out.square().sum().backward()
    return [out.detach(), *(value.grad for value in inputs)]  # type: ignore[list-item]


def test_a_cut_part_that_torch_loads_alone_says_what_to_do() -> None:
    graph = StitchedGraph("")
    graph.post_compile((), CompiledFxGraphConstants(), {})
    with pytest.raises(omnicomp.SaveError, match="save the function again"):
        graph([])


def program(path: Path, *, above: int) -> Callable[..., Any]:
    """A model in a file of its own, with lines above it."""
    text = """
import torch
class Inner(torch.nn.Module):
    def forward(self, x):
        return torch.erfinv(x.tanh() * 0.5).sin()
class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
    def forward(self, x):
        return self.inner(x)
model = Outer()
"""
    path.write_text("#\n" * above + text)
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace["model"]


def test_the_lines_are_those_of_the_program_that_it_is_restored_in(tmp_path: Path) -> None:
    compiled(program(tmp_path / "one.py", above=0), (4, 6))
    compiled(program(tmp_path / "two.py", above=7), (4, 6))
    assert caches() == HIT
    audit = omnicomp.audit()
    (graph,) = audit.graphs
    forward = next(part for part in graph.parts if part.name == "forward")
    assert {node.source for node in forward.declined} == {f"{tmp_path / 'two.py'}:12"}
    (row,) = forward.subgraphs
    assert (row.sources, row.modules, row.module) == ((f"{tmp_path / 'two.py'}:12",), ("inner",), "inner")
    assert "one.py" not in audit.to_json()


@pytest.mark.inductor
def test_symbolic_sizes_are_guarded_and_other_sizes_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[StitchedGraph] = []
    save = stitched.save
    monkeypatch.setattr(stitched, "save", lambda graph, *rest: kept.append(graph) or save(graph, *rest))
    restored_as_built(three, (4, 6), (4, 6), lowerings=ERFINV, dynamic=True)
    assert len(kept) == 2
    for graph in kept:
        assert graph.guards_expr
        for guards in (graph.guards_expr, "other"):
            key: Any = graph._fx_graph_cache_key
            found, *_ = FxGraphCache.find_guarded_entry(key, True, None, lambda expr, _, own=guards: expr == own, [])
            assert (found is not None) == (guards != "other")
    for rows in (9, 2):
        # Another size at a start is the same graph for the caches.
        result = compiled(three, (rows, 5), (rows, 5), lowerings=ERFINV, dynamic=True)
        assert caches() == HIT
        torch.testing.assert_close(result, by_eager(three, (rows, 5), (rows, 5)))


def test_constants_and_results_that_are_inputs_or_numbers_travel() -> None:
    def function(x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0]) + torch.full_like(x, float("inf")).isfinite()

    restored_as_built(function, (2, 3))
    assert ran() == ["eager"]


def test_an_option_of_cuda_graphs_is_told_again() -> None:
    restored_as_built(lambda x: x.sin() * 2, (3,), **{"triton.cudagraphs": True})
    assert [event.key for event in current() if isinstance(event, Option) and event.reason] == ["triton.cudagraphs"]


def test_another_option_is_not_restored() -> None:
    compiled(lambda x: x.sin() * 2, (3,))
    compiled(lambda x: x.sin() * 2, (3,), lowerings={**EAGER, "aten.nothing": "eager"})
    assert caches() == MISS


@pytest.mark.inductor
def test_a_rule_for_one_graph_is_not_restored_for_another() -> None:
    compiled(lambda x: x + 1, (3,))
    number = int(omnicomp.audit().graphs[0].id[1:])
    lowerings = {**EAGER, f"g{number + 2}": ["inductor"]}
    planned: list[str] = []
    for _ in range(2):
        compiled(lambda x: x.sin() * 2, (3,), lowerings=lowerings)
        planned += [row.planned for row in omnicomp.audit().subgraphs if row.part == "forward"]
    # The lowering of the second must not be that of the first, although their graphs are the same.
    assert planned == ["eager", "inductor"]


KERNEL = """
import torch, omnicomp

@omnicomp.override(op=torch.ops.aten.digamma.default)
def edited_digamma(x):
    return torch.special.digamma(x)
"""


def test_an_edited_override_is_not_restored(tmp_path: Path) -> None:
    def run(source: str) -> list[Tensor]:
        path = tmp_path / "kernel.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        try:
            lowerings = {**EAGER, "*edited_digamma*": ["override", "eager"]}
            return compiled(lambda x: torch.digamma(x + 2) * 2, (5,), lowerings=lowerings)
        finally:
            unregister("edited_digamma")

    built = run(KERNEL)
    assert (caches(), ran()) == (MISS, ["eager", "override", "eager"])
    torch.testing.assert_close(run(KERNEL), built)
    assert (caches(), ran()) == (HIT, ["eager", "override", "eager"])
    torch.testing.assert_close(run(KERNEL.replace("digamma(x)\n", "digamma(x) + 0\n")), built)
    assert caches() == MISS
    assert "override edited_digamma: edited" in next(e.changed for e in current() if isinstance(e, Cache) and e.changed)


@pytest.fixture
def kernel() -> Iterator[list[bool]]:
    """An override, which fails once something is in the list."""
    broken: list[bool] = []

    @omnicomp.override(op=torch.ops.aten.digamma.default)
    def restored_digamma(x: Tensor) -> Tensor:
        if broken:
            raise RuntimeError("planted")
        return torch.special.digamma(x)

    yield broken
    unregister("restored_digamma")


def test_an_override_that_stands_alone_is_restored_and_gives_way_to_its_reference(kernel: list[bool]) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.digamma(x.sin() + 2) * 2

    lowerings = {**EAGER, "*restored_digamma*": ["override", "eager"]}
    built = restored_as_built(function, (5,), lowerings=lowerings)
    assert ran() == ["eager", "override", "eager"]
    torch.testing.assert_close(built, by_eager(function, (5,)))
    kernel.append(True)
    torch.testing.assert_close(compiled(function, (5,), lowerings=lowerings), built)
    assert caches() == HIT
    (retreat,) = [event for event in current() if isinstance(event, Retreat)]
    assert place(retreat.subgraph) == "forward.1"
    assert (retreat.source_lowering, retreat.target_lowering) == ("override", "eager")


@pytest.mark.inductor
def test_a_restored_subgraph_steps_down_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    built = compiled(three, (4, 6), (4, 6), lowerings=ERFINV)
    original = CompiledFxGraph.post_compile

    def broken(self: CompiledFxGraph, *args: Any) -> None:
        original(self, *args)

        def call(inputs: list[Any]) -> Any:
            raise RuntimeError("planted")

        self.current_callable = call

    monkeypatch.setattr(CompiledFxGraph, "post_compile", broken)
    found = compiled(three, (4, 6), (4, 6), lowerings=ERFINV)
    assert caches() == HIT
    torch.testing.assert_close(found, built)
    retreats = [place(event.subgraph) for event in current() if isinstance(event, Retreat)]
    assert retreats == ["forward.0", "forward.2", "backward.0", "backward.2"]
    assert {row.ran for row in omnicomp.audit().subgraphs} == {"eager"}
    with pytest.raises(RuntimeError, match="planted"):
        compiled(three, (4, 6), (4, 6), lowerings=ERFINV, on_error="raise")


@pytest.mark.inductor
def test_a_subgraph_that_is_gone_makes_it_a_miss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FxGraphCache, "_get_tmp_dir", staticmethod(lambda: str(tmp_path)))
    built = compiled(three, (4, 6), (4, 6), lowerings=ERFINV)
    key = next(e.key for e in current() if isinstance(e, Cache) and place(e.subgraph) == "forward.2")
    shutil.rmtree(tmp_path / key[1:3] / key)
    torch.testing.assert_close(compiled(three, (4, 6), (4, 6), lowerings=ERFINV), built)
    assert caches() == MISS
    (note,) = {event.note for event in current() if isinstance(event, Cache) and event.verdict == "miss"} - {""}
    assert "the artefact was not kept, or was removed" in note
    compiled(three, (4, 6), (4, 6), lowerings=ERFINV)
    assert caches() == HIT


def bypasses() -> list[str]:
    return [e.note for e in current() if isinstance(e, Cache) and e.cache == "aot_autograd" and e.verdict == "bypass"]


def test_what_cannot_travel_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_CONSTANT_BYTES", 4)

    def function(x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0])

    for _ in range(2):
        torch.testing.assert_close(compiled(function, (3,)), by_eager(function, (3,)))
        assert ("", "aot_autograd", "miss") in caches()
        assert all("a part that was cut is not kept" in note and "has 12 bytes" in note for note in bypasses())
        assert bypasses()


def test_a_kernel_that_is_known_by_a_number_of_the_process_does_not_travel() -> None:
    graph = Graph()
    graph.output((graph.call_function(torch.sin, (graph.placeholder("x"),), {"kernel_idx": 0}),))
    with pytest.raises(ValueError, match="by a number"):
        sources.to_source(GraphModule({}, graph))


def test_what_another_lowering_built_is_not_restored_by_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = EagerLowering.lower

    def lower_otherwise(self: EagerLowering, *args: Any) -> Any:
        return dataclasses.replace(lower(self, *args), lowering="another")

    monkeypatch.setattr(EagerLowering, "lower", lower_otherwise)
    for _ in range(2):
        compiled(lambda x: x.sin() * 2, (3,))
        assert MISS[0] in caches()
        assert all("is on another" in note for note in bypasses())
        assert bypasses()


def test_what_inductor_failed_on_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    def lower(self: InductorLowering, *args: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(InductorLowering, "lower", lower)
    function = lambda x: torch.erfinv(x * 0.5)  # noqa: E731
    for _ in range(2):
        compiled(function, (3,), lowerings=ERFINV, verdicts="off")
        assert any("a compiler failed on" in note for note in bypasses())


def test_a_cache_that_cannot_be_written_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError("planted: no space left on device")

    monkeypatch.setattr(FxGraphCache, "_write_to_local_cache", full)
    for _ in range(2):
        compiled(lambda x: x.sin() * 2, (3,))
        assert MISS[0] in caches()
        assert any("it can't be written" in note for note in bypasses())


def test_without_autograds_cache_nothing_is_kept() -> None:
    with torch._functorch.config.patch(enable_autograd_cache=False):
        compiled(lambda x: x.sin() * 2, (3,))
    assert caches() == []
    compiled(lambda x: x.sin() * 2, (3,))
    assert caches() == MISS


def test_a_cache_that_holds_the_artefacts_themselves_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._functorch.config.patch(bundled_autograd_cache=True):
        restored_as_built(lambda x: x.sin() * 2, (3,))
        monkeypatch.setattr(sources, "MAX_CONSTANT_BYTES", 0)
        for _ in range(2):
            compiled(lambda x: x * torch.tensor([1.0, 2.0, 3.0]), (3,))
            assert ran() == ["eager"]
            assert len(bypasses()) == 2
            assert not [event for event in current() if isinstance(event, Retreat)]


@pytest.mark.inductor
def test_a_remote_cache_brings_it_with_its_subgraphs() -> None:
    from torch._inductor.mock_cache import PatchCaches, global_stats

    inductor = torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=True)
    autograd = torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=True)
    with PatchCaches(), inductor, autograd:
        restored_as_built(three, (4, 6), (4, 6), lowerings=ERFINV)
        assert global_stats.aot_autograd.num_get_hit == 1


@pytest.mark.inductor
def test_a_bundle_brings_it_into_an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def use(folder: str) -> None:
        monkeypatch.setattr(FxGraphCache, "_get_tmp_dir", staticmethod(lambda: str(tmp_path / folder / "fx")))
        monkeypatch.setattr(AOTAutogradCache, "_get_tmp_dir", staticmethod(lambda: str(tmp_path / folder / "aot")))

    use("one")
    built = compiled(three, (4, 6), (4, 6), lowerings=ERFINV)
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    use("two")
    compiled(three, (4, 6), (4, 6), lowerings=ERFINV)
    assert caches() == MISS
    use("three")
    assert torch.compiler.load_cache_artifacts(saved[0]) is not None
    torch.testing.assert_close(compiled(three, (4, 6), (4, 6), lowerings=ERFINV), built, rtol=0, atol=0)
    assert caches() == HIT


PROGRAM = """
import json, sys, torch, omnicomp
from torch import nn

torch.compiler.config.cache_key_tag = sys.argv[1]

@omnicomp.override(op=torch.ops.aten.digamma.default)
def my_digamma(x):
    return torch.special.digamma(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.second(torch.digamma(torch.erfinv(self.first(x).tanh() * 0.5) + 3)).softmax(-1)

torch.manual_seed(0)
model = Model()
compiled = torch.compile(model, backend="omni", options={"lowerings": {"aten.erfinv": "eager"}})
loss = compiled(torch.randn(4, 8)).square().sum()
loss.backward()
with torch.no_grad():
    compiled(torch.randn(5, 8))
    compiled(torch.randn(6, 8))
counters = torch._dynamo.utils.counters["aot_autograd"]
events = omnicomp.timeline.events()
print(json.dumps({
    "values": [float(loss.detach()), *(float(p.grad.norm()) for p in model.parameters())],
    "counted": [counters["autograd_cache_hit"], counters["autograd_cache_miss"]],
    "stable": omnicomp.audit().stable(),
    "levels": omnicomp.timeline.backend_timeline(),
    "ran": sorted(e.subgraph for e in events if e.type == "ran"),
    "hits": [(e.part, e.cache) for e in events if e.type == "cache" and e.verdict == "hit"],
}))
"""


@pytest.mark.inductor
def test_a_second_process_tells_the_same_story(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    tag = uuid.uuid4().hex
    made = [python(tmp_path / "program.py", tag, fresh=fresh, check=True) for fresh in (False, True)]
    cold, warm = (json.loads(done.stdout.splitlines()[-1]) for done in made)
    assert (cold["counted"], warm["counted"]) == ([0, 2], [2, 0])
    assert warm["hits"] == [[part, "aot_autograd"] for part in ("forward", "backward", "inference")]
    for same in ("values", "stable", "levels", "ran"):
        assert warm[same] == cold[same]
    assert "g0.forward.2/my_digamma" in warm["ran"]
