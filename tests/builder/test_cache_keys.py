"""What comes from a compile cache is never stale, and a miss says which part of the key changed."""

import json
import shutil
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from concurrency import in_threads
from processes import python
from torch import Tensor

import omnicomp
from omnicomp import passes
from omnicomp._torch.inductor.cache_lookups import Lookup, read_parts
from omnicomp.builder import cache_keys
from omnicomp.builder.cache_keys import changes, verdict
from omnicomp.lowerings import KeyParts
from omnicomp.timeline import Cache, Ran, Retreat, current

ROOT = Path(__file__).parents[2]
KEY = KeyParts(identity="f (model.py)", parts={"omnicomp": ("1", "a"), "option x": ("1", "1"), "override y": ("", "c")})


@pytest.fixture(autouse=True)
def key_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of records for each test."""
    monkeypatch.setattr(cache_keys.STORE, "_root", lambda: tmp_path / "keys")
    (tmp_path / "keys").mkdir()
    return cache_keys.STORE.folder


def miss(key: KeyParts = KEY, **parts: tuple[str, str]) -> Cache:
    lookup = Lookup(cache="fx_graph", verdict="miss", key="k", parts={"the graph": ("", "g"), **parts})
    return verdict(lookup, key, graph="g0", part="forward")


def with_parts(**changed: tuple[str, str] | None) -> KeyParts:
    parts = {**KEY.parts, **{name.replace("_", " "): value for name, value in changed.items()}}
    return KeyParts(identity=KEY.identity, parts={name: value for name, value in parts.items() if value is not None})


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        (with_parts(omnicomp=("1", "b")), "omnicomp: its sources"),
        (with_parts(omnicomp=("2", "z")), "omnicomp: 1 → 2"),
        (with_parts(option_x=("2", "2")), "option x: 1 → 2"),
        (with_parts(override_y=("", "d")), "override y: edited"),
        (with_parts(override_z=("", "d")), "override z added"),
        (with_parts(override_y=None), "override y removed"),
    ],
)
def test_each_part_of_a_key_is_named_when_it_changes(key: KeyParts, changed: str) -> None:
    assert miss().note == "compiled for the first time with this cache folder"
    assert miss().changed == ()
    assert "nothing changed" in miss().note
    assert miss(key).changed == (changed,)


def test_a_config_entry_that_is_not_recorded_is_at_its_default() -> None:
    miss()
    config = {"torch._inductor.config.shape_padding": ("False", "n")}
    assert miss(**config).changed == ("torch._inductor.config.shape_padding: its default → False",)


def test_without_components_of_torch_only_ours_are_compared() -> None:
    def bare(key: KeyParts) -> Cache:
        return verdict(Lookup(cache="aot_autograd", verdict="miss"), key, graph="g0", part="")

    assert bare(KEY).note == "compiled for the first time with this cache folder"
    assert (bare(KEY).note, bare(KEY).changed) == ("", ())
    assert bare(with_parts(option_x=("2", "2"))).changed == ("option x: 1 → 2",)


def test_a_config_as_a_whole_is_not_named_beside_its_entries() -> None:
    old = {"torch._functorch.config": ("", "a")}
    assert changes(old, {"torch._functorch.config": ("", "b")}) == ("torch._functorch.config: changed",)
    new = {"torch._functorch.config": ("", "b"), "torch._functorch.config.debug": ("True", "True")}
    assert changes(old, new) == ("torch._functorch.config.debug: its default → True",)


def test_the_lines_that_torch_logs_of_a_key_are_read() -> None:
    default = torch._inductor.config.shape_padding
    lines = [
        "[aaaaaaaaaaaaaaaa] gm: <lambda>()\n\ndef forward(self):\n",
        "[bbbbbbbbbbbbbbbb] example_inputs[0]: TensorMetadata(dtype=torch.float32, shape=torch.Size([4, 8]), stride=1)",
        f"[cccccccccccccccc] inductor_config[shape_padding]: {default}",
        "[dddddddddddddddd] inductor_config[max_autotune]: True",
        "[eeeeeeeeeeeeeeee] cache_key_tag: x",
        "[ffffffffffffffff] fx_kwargs[get_decomp_fn]: <function f at 0x7f00>",
        "[gggggggggggggggg] example_inputs[1]: ('s77',)",
        *(f"[{number:016x}] example_inputs[{number}]: s0" for number in range(256, 300)),
    ]
    parts = read_parts(lines)
    assert parts["the graph"] == ("", "a" * 12)
    assert parts["input 0"] == ("float32[4, 8]", "b" * 12)
    assert parts["input 1"] == ("s77", "g" * 12)
    assert parts["torch._inductor.config.max_autotune"] == ("True", "d" * 12)
    assert parts["fx_kwargs[get_decomp_fn]"] == ("", "f" * 12)
    assert set(parts) - {"inputs from 256 on"} == {
        *("the graph", "input 0", "input 1", "torch._inductor.config.max_autotune", "fx_kwargs[get_decomp_fn]")
    }
    lines[-1] = lines[-1].replace("000", "111")
    assert read_parts(lines)["inputs from 256 on"] != parts["inputs from 256 on"]


@pytest.mark.parametrize("content", ["", "{", '{"a": 1}', '{"a": [1, 2, 3]}', "\xff", "[]"])
def test_a_record_that_is_no_record_is_a_reason_and_is_replaced(key_folder: Path, content: str) -> None:
    miss()
    (path,) = key_folder.iterdir()
    path.write_bytes(content.encode("latin-1"))
    event = miss()
    assert event.reason is not None
    assert (event.reason.code, event.changed) == ("key_record_unusable", ())
    assert "nothing changed" in miss().note


def test_a_folder_that_cannot_be_written_is_a_reason(key_folder: Path) -> None:
    key_folder.write_text("a file, not a folder")
    event = miss()
    assert event.reason is not None
    assert event.reason.code == "key_record_unusable"


def test_threads_that_write_at_once_leave_a_whole_file(key_folder: Path) -> None:
    def write(number: int) -> None:
        for step in range(20):
            miss(with_parts(option_x=(f"{number} {step}", f"{number} {step}")))

    in_threads(write)
    (path,) = key_folder.iterdir()
    assert json.loads(path.read_text())["value"]["the graph"] == ["", "g"]
    assert miss().reason is None


# With Inductor, in this process: the caches are on disk, and a reset forgets what was compiled.


@pytest.fixture
def cold() -> Iterator[None]:
    """Caches that hold nothing for this test."""
    with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
        yield


def compiled(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> tuple[Any, list[Cache]]:
    torch.compiler.reset()
    omnicomp.timeline.clear()
    with torch.no_grad():
        result = torch.compile(function, backend="omni", options={"summary": False, **options})(*inputs)
    return result, [event for event in current() if isinstance(event, Cache)]


def rows() -> list[tuple[str, str, str | None, dict[str, int]]]:
    return [(row.part, row.planned, row.ran, row.ops) for row in omnicomp.audit().subgraphs]


def verdicts(events: list[Cache]) -> list[tuple[str, str]]:
    return [(event.cache, event.verdict) for event in events]


@pytest.mark.inductor
@pytest.mark.usefixtures("cold")
def test_options_shapes_and_configs_are_named_and_nothing_stale_is_taken() -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() * 2

    x = torch.randn(5)
    _, events = compiled(function, x)
    assert verdicts(events) == [("fx_graph", "miss"), ("aot_autograd", "miss")]
    assert {event.note for event in events} == {"compiled for the first time with this cache folder"}
    result, events = compiled(function, x)
    assert verdicts(events) == [("aot_autograd", "hit")]
    torch.testing.assert_close(result, function(x))

    result, events = compiled(function, x, dtype_policy="bf16")
    assert [event.changed for event in events] == [("option dtype_policy: 'keep' → 'bf16'",)] * 2
    result, events = compiled(function, torch.ones(6))
    torch.testing.assert_close(result, function(torch.ones(6)))
    assert "input 0: float32[5] → float32[6]" in events[0].changed
    _, events = compiled(function, x, max_fusion_size=7)
    assert "torch._inductor.config.max_fusion_size: its default → 7" in events[0].changed
    result, events = compiled(lambda x: x.cos() * 2, x)
    torch.testing.assert_close(result, x.cos() * 2)
    assert verdicts(events)[-1] == ("aot_autograd", "miss")


@pytest.mark.inductor
@pytest.mark.usefixtures("cold")
def test_a_part_that_is_cut_says_of_each_subgraph_what_changed() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.digamma(x.sin() * 2) + 1

    x, options = torch.rand(5) + 1, {"lowerings": {"aten.digamma": "eager"}}
    compiled(function, x, **options)
    result, events = compiled(function, x, **options)
    torch.testing.assert_close(result, function(x))
    assert verdicts(events) == [("aot_autograd", "hit")]
    with torch._functorch.config.patch(enable_autograd_cache=False):
        _, events = compiled(function, x, **options)
    found = [(event.subgraph.partition(".")[2], event.verdict) for event in events]
    assert found == [("inference.0", "hit"), ("inference.2", "hit")]
    _, events = compiled(function, torch.rand(6) + 1, **options)
    assert all(event.changed == ("input 0: float32[5] → float32[6]",) for event in events[:2])


@pytest.mark.inductor
@pytest.mark.usefixtures("cold")
def test_an_edited_pass_is_named_and_its_new_rewrite_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    import operator
    from omnicomp.passes.base import Pass, PassResult

    class Scale(Pass):
        name = "scale"

        def applies(self, module, context):
            return True

        def run(self, module, context):
            for node in module.graph.find_nodes(op="call_function", target=operator.mul):
                node.args = (node.args[0], FACTOR)
                context.rewrite(self.name, "arithmetic", node, target="mul")
            return PassResult(module, True)
    """
    found: list[tuple[Any, list[Cache]]] = []
    for factor in (3, 4):
        folder = tmp_path / str(factor)
        folder.mkdir()
        (folder / "scale_pass.py").write_text(textwrap.dedent(source).replace("FACTOR", str(factor)))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "scale_pass", raising=False)
        import scale_pass  # pyright: ignore[reportMissingImports]

        monkeypatch.setattr(passes, "PIPELINE", (scale_pass.Scale(),))
        found.append(compiled(lambda x: x.sin() * 2, torch.ones(5), certify="off"))  # it is wrong on purpose
    for factor, (result, _) in zip((3, 4), found, strict=True):
        torch.testing.assert_close(result, torch.ones(5).sin() * factor)
    assert "pass scale: edited" in found[1][1][-1].changed


@pytest.mark.inductor
@pytest.mark.usefixtures("cold")
def test_caches_that_are_switched_off_leave_no_record(key_folder: Path) -> None:
    with torch.compiler.config.patch(force_disable_caches=True):
        _, events = compiled(lambda x: x.sin() * 2, torch.ones(5))
    assert (events, key_folder.exists()) == ([], False)


@pytest.mark.inductor
@pytest.mark.usefixtures("cold")
def test_a_remote_cache_brings_artefacts_and_decisions() -> None:
    from torch._inductor.mock_cache import PatchCaches, global_stats

    def function(x: Tensor) -> Tensor:
        return (x.exp() * 2).sum()

    inductor = torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=True)
    autograd = torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=True)
    with PatchCaches(), inductor, autograd:
        _, events = compiled(function, torch.ones(5))
        assert verdicts(events) == [("fx_graph", "miss"), ("aot_autograd", "miss")]
        cold = rows()
        result, events = compiled(function, torch.ones(5))
        assert verdicts(events) == [("aot_autograd", "hit")]
        assert global_stats.aot_autograd.num_get_hit == 1
        assert rows() == cold
        assert [e.lowering for e in current() if isinstance(e, Ran)] == ["inductor"]
        torch.testing.assert_close(result, function(torch.ones(5)))
        _, events = compiled(function, torch.ones(5), dtype_policy="bf16")
        assert events[-1].changed == ("option dtype_policy: 'keep' → 'bf16'",)
        # A restored artefact has no graph to be compared with.
        compiled(function, torch.ones(5), verify="first")
        assert global_stats.aot_autograd.num_get_hit == 1


@pytest.mark.inductor
@pytest.mark.usefixtures("cold")
def test_a_restored_artefact_steps_down_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.output_code import CompiledFxGraph

    def function(x: Tensor, w: Tensor) -> Tensor:
        return ((x.sin() @ w) + torch.tensor([1.0, 2.0, 3.0, 4.0])).softmax(-1).t()

    def run() -> tuple[Tensor, Tensor]:
        torch.compiler.reset()
        omnicomp.timeline.clear()
        w = torch.full((8, 4), 0.5).tril().requires_grad_()
        out = torch.compile(function, backend="omni")(torch.ones(2, 8), w)
        out.square().sum().backward()
        assert w.grad is not None
        return out.detach(), w.grad

    out, grad = run()
    original = CompiledFxGraph.post_compile

    def broken(self: CompiledFxGraph, *args: Any) -> None:
        original(self, *args)

        def call(inputs: list[Any]) -> Any:
            raise RuntimeError("planted")

        self.current_callable = call

    monkeypatch.setattr(CompiledFxGraph, "post_compile", broken)
    stepped, stepped_grad = run()
    assert verdicts([e for e in current() if isinstance(e, Cache)]) == [("aot_autograd", "hit")] * 2
    torch.testing.assert_close(stepped, out)
    torch.testing.assert_close(stepped_grad, grad)
    assert stepped.stride() == out.stride()
    retreats = [e for e in current() if isinstance(e, Retreat)]
    assert [(e.part, e.target_lowering) for e in retreats] == [("forward", "eager"), ("backward", "eager")]
    assert [e.lowering for e in current() if isinstance(e, Ran)] == ["eager", "eager"]
    assert omnicomp.audit().mismatches == ()


# In processes of their own.

PROGRAM = """
import json, os, sys, torch, omnicomp

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import kernel

# A bundle is loaded into a process that has compiled nothing; without the tag its keys would be those of other tests.
torch.compiler.config.cache_key_tag = os.environ["TAG"]
folder = os.environ.get("GRAPHS")
if folder:  # an Inductor folder of its own would make it compile its C++ headers again
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor.codecache import FxGraphCache
    AOTAutogradCache._get_tmp_dir = staticmethod(lambda: folder + "/aot")
    FxGraphCache._get_tmp_dir = staticmethod(lambda: folder + "/fx")
loaded = os.environ.get("LOAD")
if loaded:
    assert torch.compiler.load_cache_artifacts(open(loaded, "rb").read()) is not None
model = lambda x: torch.digamma(x.sin() + 2) * 2
torch._dynamo.utils.counters.clear()
x = torch.linspace(0, 1, 12)
with torch.no_grad():
    out = torch.compile(model, backend=sys.argv[1])(x)
saved = os.environ.get("SAVE")
if saved:
    artefacts, _ = torch.compiler.save_cache_artifacts()
    open(saved, "wb").write(artefacts)
counters = torch._dynamo.utils.counters["aot_autograd"]
events = omnicomp.timeline.events()
print(json.dumps({
    "error": float((out - model(x)).abs().max()),
    "hit": counters["autograd_cache_hit"],
    "changed": [list(e.changed) for e in events if e.type == "cache" and e.cache == "aot_autograd"],
    "ran": sorted(e.subgraph for e in events if e.type == "ran"),
    "stable": omnicomp.audit().stable(),
    "package": os.path.dirname(omnicomp.__file__),
}))
"""
KERNEL = """
import torch, omnicomp

@omnicomp.override(op=torch.ops.aten.digamma.default)
def my_digamma(x):
    return torch.special.digamma(x)
"""


def run(folder: Path, backend: str = "omni", package: Path = ROOT, **environment: str) -> dict[str, Any]:
    """Run the program in a process of its own, with a package that may be a copy."""
    variables = {"PYTHONPATH": str(package), "OMNICOMP_VERIFY": "off", **environment}
    result = python(folder / "program.py", backend, environment=variables, check=True)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "kernel.py").write_text(KERNEL)
    return tmp_path


@pytest.mark.inductor
@pytest.mark.slow
def test_backends_overrides_and_versions_that_alternate_never_meet_a_stale_artefact(program: Path) -> None:
    tag = {"TAG": uuid.uuid4().hex}
    ran = ["g0.inference.0", "g0.inference.0/my_digamma"]
    one, two = program / "one", program / "two"
    for copy in (one, two):
        shutil.copytree(ROOT / "omnicomp", copy / "omnicomp", ignore=shutil.ignore_patterns("__pycache__"))
    placement = two / "omnicomp" / "builder" / "placement.py"
    placement.write_text(placement.read_text() + "\n# another version\n")

    first = run(program, package=one, **tag)
    assert (first["hit"], first["ran"], first["package"]) == (0, ran, str(one / "omnicomp"))
    theirs = run(program, "inductor", package=one, **tag)
    assert (theirs["hit"], theirs["ran"]) == (0, [])
    (program / "kernel.py").write_text(KERNEL.replace("digamma(x)\n", "digamma(x) + 0\n"))
    second = run(program, package=one, **tag)
    assert (second["hit"], second["changed"]) == (0, [["override my_digamma: edited"]])
    third = run(program, package=two, **tag)
    assert third["package"] == str(two / "omnicomp")
    assert (third["hit"], third["changed"]) == (0, [["omnicomp: its sources"]])

    again = run(program, package=one, **tag)
    assert (again["hit"], again["ran"], again["stable"]) == (1, ran, second["stable"])
    assert max(item["error"] for item in (first, theirs, second, third)) < 1e-5


@pytest.mark.inductor
def test_a_bundle_of_artefacts_brings_the_decisions_into_an_empty_cache(program: Path, tmp_path: Path) -> None:
    bundle, tag = str(tmp_path / "bundle"), uuid.uuid4().hex
    cold = run(program, SAVE=bundle, TAG=tag, GRAPHS=str(tmp_path / "one"))
    assert cold["hit"] == 0
    warm = run(program, LOAD=bundle, TAG=tag, GRAPHS=str(tmp_path / "two"))
    assert (warm["hit"], warm["ran"]) == (1, cold["ran"])
    assert warm["stable"] == cold["stable"]
    assert warm["error"] < 1e-5
