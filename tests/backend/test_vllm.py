"""The adaptor as vLLM 0.33 calls it: `CompilerInterface` of vllm/compilation/compiler_interface.py, its manager's keys
and handles, pieces with symbolic sizes of Dynamo's mode, and single sizes as fake tensors of a mode of their own."""

import abc
import dataclasses
import inspect
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.split_module import split_module

import omnicomp
from omnicomp.backend import vllm
from omnicomp.errors import SaveError
from omnicomp.timeline import current

EAGER = {"lowerings": ["eager"]}


class CompilerInterface(abc.ABC):
    """The methods and parameters of vLLM 0.33."""

    name: str

    @abc.abstractmethod
    def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None: ...

    @abc.abstractmethod
    def compute_hash(self, vllm_config: Any) -> str: ...

    @abc.abstractmethod
    def compile(
        self, graph: Any, example_inputs: Any, compiler_config: Any, compile_range: Any, key: str | None = None
    ) -> Any: ...

    @abc.abstractmethod
    def load(self, handle: Any, graph: Any, example_inputs: Any, graph_index: int, compile_range: Any) -> Any: ...


class Adaptor(vllm.OmniAdaptor, CompilerInterface): ...


@pytest.mark.parametrize("ours", [vllm.OmniAdaptor, CompilerInterface])
def test_the_methods_are_those_of_vllm(ours: Any) -> None:
    theirs = pytest.importorskip("vllm.compilation.compiler_interface", exc_type=ImportError).CompilerInterface
    methods = [name for name, member in vars(theirs).items() if inspect.isfunction(member)]
    assert {"initialize_cache", "compute_hash", "compile", "load"} <= set(methods)
    for name in methods:
        one, other = (inspect.signature(getattr(each, name)).parameters for each in (ours, theirs))
        assert [(each.name, each.kind) for each in one.values()] == [(each.name, each.kind) for each in other.values()]
        given = {each.name: each.default for each in other.values() if each.default is not each.empty}
        assert given.items() <= {each.name: each.default for each in one.values()}.items(), name


@dataclasses.dataclass(frozen=True)
class Range:
    start: int
    end: int

    def is_single_size(self) -> bool:
        return self.start == self.end


WHOLE = Range(2, 64)


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # as the adaptor sets them
        monkeypatch.setenv(name, os.environ.get(name, str(tmp_path / name)))
    torch.compiler.reset()
    current().clear()
    yield
    torch.compiler.reset()
    current().clear()


def pieces(function: Any, *args: Any) -> list[GraphModule]:
    """The graph of a function as vLLM gets it: captured once by Dynamo, the first dimension symbolic."""
    found: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: Any) -> Any:
        found.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=keep, fullgraph=True, dynamic=True)(*args)
    return found


def of_range(graph: GraphModule) -> list[Any]:
    return [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]


def of_size(graph: GraphModule, size: int) -> list[Any]:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    values: list[Any] = []
    for value in of_range(graph):
        if isinstance(value, torch.SymInt):
            values.append(size)
            continue
        shape = [size if isinstance(length, torch.SymInt) else length for length in value.shape]
        with mode:
            values.append(torch.empty(shape, dtype=value.dtype))
    return values


def layer(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.nn.functional.silu(x @ weight) * x,)


def arguments(graph: GraphModule, *tensors: torch.Tensor) -> list[Any]:
    """What the piece is called with: its sizes, then its tensors, in the order of its inputs."""
    rest, out = list(tensors), []
    for value in of_range(graph):
        out.append(tensors[0].shape[0] if isinstance(value, torch.SymInt) else rest.pop(0))
    return out


def captured(rows: int = 8) -> tuple[GraphModule, torch.Tensor]:
    weight = torch.randn(4, 4)
    torch._dynamo.mark_static(weight)
    return pieces(layer, torch.randn(rows, 4), weight)[0], weight


def adaptor(folder: Path | None, prefix: str = "") -> Adaptor:
    made = Adaptor()
    made.initialize_cache(str(folder or "nowhere"), disable_cache=folder is None, prefix=prefix)
    return made


def test_a_range_of_sizes(tmp_path: Path) -> None:
    graph, weight = captured()
    text = graph.print_readable(print_output=False)
    call, handle = adaptor(tmp_path).compile(graph, of_range(graph), dict(EAGER), WHOLE, "artifact_2_64_subgraph_0")
    assert handle == ("artifact_2_64_subgraph_0", str(tmp_path / "artifact_2_64_subgraph_0"))
    for rows in (2, 8, 63):
        x = torch.randn(rows, 4)
        assert torch.equal(call(*arguments(graph, x, weight))[0], layer(x, weight)[0])
    assert graph.print_readable(print_output=False) == text
    assert omnicomp.audit().summary().startswith("omni: 1 graph")


def test_a_single_size_has_no_symbols(tmp_path: Path) -> None:
    graph, weight = captured()
    call, handle = adaptor(tmp_path).compile(graph, of_size(graph, 4), dict(EAGER), Range(4, 4), "artifact_4_4")
    x = torch.randn(4, 4)
    assert torch.equal(call(*arguments(graph, x, weight))[0], layer(x, weight)[0])
    assert handle is not None


def test_inside_of_dynamos_compilation(tmp_path: Path) -> None:
    made, weight = adaptor(tmp_path), torch.randn(4, 4)

    def backend(gm: GraphModule, inputs: Any) -> Any:
        whole, _ = made.compile(gm, of_range(gm), dict(EAGER), WHOLE, "whole")
        single, _ = made.compile(gm, of_size(gm, 4), dict(EAGER), Range(4, 4), "single")
        return lambda *args: (single if 4 in args else whole)(*args)

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (8, 4):
            x = torch.randn(rows, 4)
            assert torch.equal(compiled(x, weight)[0], layer(x, weight)[0])


def test_equal_pieces_are_built_once(tmp_path: Path) -> None:
    made = adaptor(tmp_path)
    graph, weight = captured()
    other = pieces(layer, torch.randn(8, 4), weight)[0]
    first = made.compile(graph, of_range(graph), dict(EAGER), WHOLE, "a")
    assert made.compile(graph, of_range(graph), dict(EAGER), WHOLE, "b") == first
    assert len(omnicomp.audit().graphs) == 1
    assert not (tmp_path / "b").exists()
    changed = made.compile(other, of_range(other), {**EAGER, "dtype_policy": "bf16"}, WHOLE, "c")
    single = made.compile(graph, of_size(graph, 4), dict(EAGER), Range(4, 4), "d")
    assert len({id(first[0]), id(changed[0]), id(single[0])}) == 3


def test_the_layers_of_a_model_share_one_build(tmp_path: Path) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))

    def model(x: torch.Tensor) -> torch.Tensor:
        for each in layers:
            x = torch.nn.functional.silu(each(x)) * x
        return x

    graph = pieces(model, torch.randn(8, 4))[0]
    starts = graph.graph.find_nodes(op="call_function", target=torch.nn.functional.linear)
    cut = split_module(graph, None, lambda node: sum(start <= node for start in starts), keep_original_order=True)
    made = adaptor(tmp_path)
    each = [made.compile(piece, of_range(piece), dict(EAGER), WHOLE, name) for name, piece in cut.named_children()]
    assert len(each) == 3
    assert each[1:] == each[:1] * 2
    assert len(omnicomp.audit().graphs) == 1


def test_a_piece_that_holds_a_tensor_is_not_shared(tmp_path: Path) -> None:
    made = adaptor(tmp_path)
    graphs = [captured()[0] for _ in range(2)]
    calls = []
    for number, graph in enumerate(graphs):
        graph.register_buffer("held", torch.full((4,), float(number)))
        (value,) = graph.graph.output_node().args[0]
        with graph.graph.inserting_before(graph.graph.output_node()):
            held = graph.graph.get_attr("held")
            held.meta["example_value"] = value.meta["example_value"].fake_mode.from_tensor(graph.held)
            added = graph.graph.call_function(torch.add, (value, held))
        graph.graph.output_node().args = ((added,),)
        graph.recompile()
        calls.append(made.compile(graph, of_range(graph), dict(EAGER), WHOLE, f"piece_{number}")[0])
    x, weight = torch.randn(8, 4), torch.randn(4, 4)
    low, high = (call(*arguments(graphs[0], x, weight))[0] for call in calls)
    torch.testing.assert_close(high - low, torch.ones(8, 4))


def test_the_cache_may_be_off() -> None:
    graph, weight = captured()
    made = adaptor(None)
    call, handle = made.compile(graph, of_range(graph), dict(EAGER), WHOLE, "unused")
    x = torch.randn(3, 4)
    assert handle is None
    assert torch.equal(call(*arguments(graph, x, weight))[0], layer(x, weight)[0])
    with pytest.raises(SaveError, match="initialize_cache"):
        made.load(("unused", "unused"), graph, of_range(graph), 0, WHOLE)


def test_two_parts_of_a_model_share_the_compile_caches(tmp_path: Path) -> None:
    for prefix in ("backbone", "eagle_head"):
        adaptor(tmp_path / prefix, prefix)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor_cache")


def test_each_model_has_its_folder_of_triton_kernels_unless_the_user_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR")
    for model in ("one", "two"):
        adaptor(tmp_path / model / "backbone", "backbone")
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / model / "triton_cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", "named")
    adaptor(tmp_path / "three")
    assert os.environ["TRITON_CACHE_DIR"] == "named"


def test_the_hash_is_of_what_changes_code(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Adaptor()
    before = made.compute_hash(None)
    assert before == Adaptor().compute_hash(None)
    with torch._inductor.config.patch(epilogue_fusion=False):
        assert made.compute_hash(None) != before
    monkeypatch.setattr(vllm, "fingerprint", lambda: {"omnicomp": "another"})
    assert made.compute_hash(None) != before


def test_an_artefact_that_is_missing_or_strange_is_an_error(tmp_path: Path) -> None:
    graph, _ = captured()
    made = adaptor(tmp_path)
    with pytest.raises(SaveError, match="can't be read"):
        made.load(("missing", "missing"), graph, of_range(graph), 0, WHOLE)


LOADED = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import omnicomp
from omnicomp.backend import vllm
made = vllm.OmniAdaptor()
import os
caches = os.environ["TORCHINDUCTOR_CACHE_DIR"]
made.initialize_cache(sys.argv[2])
os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
x, weight, expected, order = torch.load(sys.argv[2] + "/inputs.pt")
graph = torch.fx.GraphModule({}, torch.fx.Graph())
calls = [made.load(("a", "a"), graph, [], index, None) for index in range(2)]
assert calls[0] is calls[1]
values = {"size": x.shape[0], "x": x, "weight": weight}
with torch.no_grad():
    torch.testing.assert_close(calls[0](*[values[name] for name in order])[0], expected)
print(omnicomp.audit().summary())
"""


@pytest.mark.slow
@pytest.mark.inductor
def test_another_process_loads_what_inductor_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, weight = captured()
    shared = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    made = adaptor(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", shared)  # where other tests have Inductor's headers compiled
    call, handle = made.compile(graph, of_range(graph), {"size_asserts": False}, WHOLE, "a")
    x = torch.randn(5, 4)
    expected = layer(x, weight)[0]
    torch.testing.assert_close(call(*arguments(graph, x, weight))[0], expected)
    assert handle == ("a", str(tmp_path / "a"))
    tensors = iter(("x", "weight"))
    order = ["size" if isinstance(value, torch.SymInt) else next(tensors) for value in of_range(graph)]
    torch.save((x, weight, expected, order), tmp_path / "inputs.pt")
    done = python("-c", LOADED, Path(__file__).parents[2], tmp_path, check=True)
    assert done.stdout.startswith("omni: 1 graph")
    assert "inductor 100.0 %" in done.stdout


def test_the_plugin_needs_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Platform:
        @classmethod
        def get_compile_backend(cls) -> str:
            return "inductor"

    found: Any = types.ModuleType("vllm.platforms")
    found.current_platform = Platform()
    monkeypatch.setitem(sys.modules, "vllm.platforms", found)
    monkeypatch.setenv("VLLM_USE_MEGA_AOT_ARTIFACT", "0")
    for plugins in ("", "lora_filesystem_resolver"):
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
        vllm.plugin()
        assert found.current_platform.get_compile_backend() == "inductor"
    monkeypatch.setenv("VLLM_PLUGINS", "omni,lora_filesystem_resolver")
    vllm.plugin()
    assert found.current_platform.get_compile_backend() == "omnicomp.backend.vllm.OmniAdaptor"
