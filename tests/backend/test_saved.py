"""Saved functions: right when they are loaded, with all that surrounds them, or refused in one sentence.

Most of it within one process, after a reset: what is loaded comes from the bytes. `lowerings=["eager"]` makes parts
that need no compiler.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from torch import Tensor, nn
from torch._dynamo.aot_compile import AOTCompiledFunction

import omnicomp
from omnicomp import passes
from omnicomp.analysis.accuracy import Judged
from omnicomp.backend import saved
from omnicomp.errors import SaveError
from omnicomp.passes.assumptions import Assumption, assumption
from omnicomp.passes.base import Pass, PassContext, PassResult
from omnicomp.timeline import Cache, PassRun, Speculation, current

EAGER: dict[str, Any] = {"lowerings": ["eager"]}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.compiler.reset()
    omnicomp.timeline.clear()
    with torch._dynamo.config.patch(enable_aot_compile=True):  # which torch 2.11 asks for
        yield
    torch.compiler.reset()


def save(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, **options: Any) -> bytes:
    compiled: Any = torch.compile(
        function, backend="omni", fullgraph=True, dynamic=dynamic, options={"summary": False, **EAGER, **options}
    )
    ahead = getattr(compiled, "forward", compiled).aot_compile((inputs, {}))
    return AOTCompiledFunction.serialize(ahead, {}).serialized_data


def load(data: bytes, function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    omnicomp.timeline.clear()
    code = getattr(function, "forward", function)
    loaded = AOTCompiledFunction.deserialize(data, code.__globals__)
    return (lambda *inputs: loaded(function, *inputs)) if isinstance(function, nn.Module) else loaded


def cycle(function: Callable[..., Any], *inputs: Any, **options: Any) -> Callable[..., Any]:
    """Save, forget, and load."""
    return load(save(function, *inputs, **options), function)


def trained(function: Callable[..., Any], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = function(x)
    out.sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def product(x: Tensor) -> Tensor:
    return x.sin() @ x.t()


def handed_on(x: Tensor) -> tuple[Tensor, Tensor, int]:
    return x, x.t(), 3


def writes(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


@pytest.mark.parametrize("function", [product, handed_on, writes])
def test_a_loaded_function_computes_what_eager_does(function: Callable[..., Any]) -> None:
    x = torch.randn(4, 6)
    loaded = cycle(function, x.clone())
    ours, theirs = x.clone(), x.clone()
    torch.testing.assert_close(loaded(ours), function(theirs))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_training_step_is_loaded_with_its_backward(dynamic: bool) -> None:
    loaded = cycle(product, torch.randn(4, 6, requires_grad=True), dynamic=dynamic)
    for rows in (4, 9) if dynamic else (4,):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(trained(loaded, x), trained(product, x))


@pytest.mark.inductor
def test_a_part_that_was_cut_is_loaded_with_the_code_of_its_subgraphs() -> None:
    def digamma(x: Tensor) -> Tensor:
        return torch.digamma(x.abs() + 1).cos()

    x = torch.randn(4, 6)
    loaded = cycle(digamma, x, lowerings={"aten.digamma": "eager"})
    torch.testing.assert_close(loaded(x), digamma(x))
    audit = omnicomp.audit()
    assert [row.ran for row in audit.subgraphs] == ["inductor", "eager", "inductor"]
    assert audit.mismatches == ()


def test_the_audit_tells_what_was_loaded_and_ran() -> None:
    loaded = cycle(product, torch.randn(4, 6))
    assert [(e.part, e.verdict) for e in current() if isinstance(e, Cache) and e.cache == saved.CACHE] == [
        ("inference", "hit")
    ]
    assert [row.ran for row in omnicomp.audit().subgraphs] == [None]
    loaded(torch.randn(4, 6))
    assert [row.ran for row in omnicomp.audit().subgraphs] == ["eager"]
    assert omnicomp.audit().mismatches == ()


def test_a_loaded_function_can_be_saved_again() -> None:
    loaded: Any = cycle(product, torch.randn(4, 6))
    data = AOTCompiledFunction.serialize(loaded, {}).serialized_data
    x = torch.randn(4, 6)
    torch.testing.assert_close(load(data, product)(x), product(x))


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


@torch.no_grad()
def test_copies_of_weights_are_made_of_the_loading_process_weights_and_follow_them() -> None:
    model, x = Linear(), torch.randn(4, 16)
    loaded = cycle(model, x, dtype_policy="bf16")
    for change in (lambda w: None, lambda w: w.add_(1), lambda w: w.data.mul_(3)):
        change(model.inner.weight)
        expected = model(x)
        found = loaded(x)
        assert not torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


class DropsMaskedFill(Pass):
    """Rewrites `x.masked_fill(~mask, value)` to `x` as if the mask were full."""

    name = "drops_masked_fill"

    def applies(self, module: torch.fx.GraphModule, context: PassContext) -> bool:
        return context.speculate

    def run(self, module: torch.fx.GraphModule, context: PassContext) -> PassResult:
        (node,) = module.graph.find_nodes(op="call_method", target="masked_fill")
        operand, inverted, _ = node.args
        assert context.root is not None
        found = assumption(context.root, inverted.args[0], sentence="the mask is full")
        assert isinstance(found, Assumption)
        context.assume(found)
        node.replace_all_uses_with(operand)
        module.graph.erase_node(node)
        module.graph.erase_node(inverted)
        return PassResult(module, True)


def hidden(x: Tensor, mask: Tensor) -> Tensor:
    square = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril() & mask[None, :].bool()
    return (x @ x.t()).masked_fill(~square.any(0)[None, :], -1.0).cumsum(-1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_both_variants_are_loaded_with_their_check(
    dynamic: bool, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "PIPELINE", (DropsMaskedFill(),))
    full = torch.ones(5, dtype=torch.long)

    def run(function: Callable[..., Any], x: Tensor, mask: Tensor) -> Any:
        return trained(lambda x: function(x, mask), x) if training else function(x, mask)

    loaded = cycle(hidden, torch.randn(5, 3, requires_grad=training), full, dynamic=dynamic)
    for size in (5, 7) if dynamic else (5,):
        for hole in (None, 0):
            x, mask = torch.randn(size, 3), torch.ones(size, dtype=torch.long)
            if hole is not None:
                mask[hole] = 0
            found, expected = (run(each, x, mask) for each in (loaded, hidden))
            torch.testing.assert_close(found, expected)
    assert "drops_masked_fill" in [event.name for event in current() if isinstance(event, PassRun) and event.modified]
    states = [(event.variant, event.state) for event in current() if isinstance(event, Speculation)]
    assert states == [("assumed", "assumed"), ("assumed", "held"), ("general", "failed")]


@torch.no_grad()
def test_a_graph_on_an_engine_is_refused_in_one_sentence_that_names_the_lever() -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with pytest.raises(
        SaveError, match=r"^g\d+ can't be saved: g\d+.inference.0 is on onnxruntime[^\n]*lowerings[^\n]*$"
    ):
        save(Linear(), torch.randn(4, 16), lowerings=["onnxruntime"])


@pytest.mark.inductor
@pytest.mark.parametrize("lowerings", [["inductor"], {"aten.digamma": "eager"}], ids=["whole", "cut"])
def test_a_loaded_function_is_verified(lowerings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def digamma(x: Tensor) -> Tensor:
        return torch.digamma(x.abs() + 1).cos()

    x = torch.randn(4, 6)
    data = save(digamma, x, lowerings=lowerings, verify="first")
    torch.testing.assert_close(load(data, digamma)(x), digamma(x))
    rows = [row for row in omnicomp.audit().subgraphs if row.ran == "inductor"]
    assert rows
    assert all("verified against" in row.evidence for row in rows)
    wrong = Judged(error=1.0, own=0.0, allowed=0.0, worst=0)
    monkeypatch.setattr("omnicomp.runtime.verify.judge", lambda *values: wrong)
    torch.testing.assert_close(load(data, digamma)(x), digamma(x))
    assert {row.ran for row in omnicomp.audit().subgraphs} == {"eager"}


def test_the_repairs_of_the_first_call_are_in_force_for_what_is_loaded() -> None:
    def pinv(x: Tensor) -> Tensor:
        return torch.linalg.pinv(x).conj() @ x

    x = torch.randn(4, 3, dtype=torch.complex64)
    torch.testing.assert_close(cycle(pinv, x)(x), pinv(x))


def test_a_graph_that_runs_eager_as_a_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no such compiler")

    monkeypatch.setattr("omnicomp.backend.pipeline.compile_parts", fail)
    with pytest.raises(SaveError, match=r"all of it runs eager, .*on_error"):
        save(product, torch.randn(4, 6))


def test_what_another_omnicomp_saved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = save(product, torch.randn(4, 6))
    monkeypatch.setattr(omnicomp, "__version__", "99.0")
    with pytest.raises(SaveError, match="save it again"):
        load(data, product)


def test_a_stage_that_wraps_a_graph_without_a_state_is_not_passed_by() -> None:
    def inner() -> None: ...

    saved.put_state(inner, lambda: None)  # type: ignore[arg-type,return-value]
    wrapper = functools.wraps(inner)(lambda: inner())
    with pytest.raises(ValueError, match="eager"):
        saved.state_of(wrapper)


OVERRIDE = """
import omnicomp, torch

@omnicomp.override(op=torch.ops.aten.erfinv.default)
def my_erfinv(x):
    return torch.erfinv(x) + 0
"""
PROGRAM = """
import sys, torch
torch._dynamo.config.enable_aot_compile = True
sys.path.insert(0, {folder!r})
def f(x): return torch.erfinv(x.tanh() * 0.5)
torch.manual_seed(0)
x = torch.randn(4)
"""
SAVES = """
import mine
compiled = torch.compile(f, backend="omni", fullgraph=True, options={{"lowerings": {lowerings}}})
compiled.aot_compile(((x,), {{}})).save_compiled_function({file!r})
"""
LOADS = """
with open({file!r}, "rb") as file:
    g = torch.compiler.load_compiled_function(file)
torch.testing.assert_close(g(x), f(x))
import omnicomp
print([row.ran for row in omnicomp.audit().subgraphs])
"""


@pytest.mark.parametrize(
    "lowerings",
    [
        ["override", "eager"],
        pytest.param(["override", "inductor"], marks=[pytest.mark.inductor, pytest.mark.slow]),
    ],
    ids=lambda names: names[-1],
)
def test_a_process_that_loads_imports_what_declares_an_override(lowerings: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OVERRIDE)
    words = {"folder": str(tmp_path), "file": str(tmp_path / "f"), "lowerings": lowerings}
    python("-c", (PROGRAM + SAVES).format(**words), check=True)
    loaded = python("-c", (PROGRAM + LOADS).format(**words), check=True)
    assert "'override'" in loaded.stdout
    (tmp_path / "mine.py").unlink()
    refused = python("-c", (PROGRAM + LOADS).format(**words))
    assert "SaveError: the saved function calls the override 'my_erfinv' of the module 'mine'" in refused.stderr


BUNDLED = """
import pathlib, sys, torch
torch._dynamo.config.caching_precompile = True
file, loads = pathlib.Path({file!r}), sys.argv[1] == "loads"
def attention(q, mask):
    square = torch.tril(torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool)) & mask[:, None, None, :].bool()
    return (q @ q.mT).masked_fill(~square, torch.finfo(q.dtype).min).softmax(-1) @ q
def cut(x): return torch.digamma(x.abs() + 1).cos()
torch.manual_seed(0)
q, x = torch.randn(2, 4, 512, 64), torch.randn(4)
full = torch.ones(2, 512)
padded = full.clone()
padded[1, :100] = 0
if loads: torch.compiler.load_cache_artifacts(file.read_bytes())
options = {{"lowerings": ["eager"], "summary": False}}
f, g = (torch.compile(each, backend="omni", options=options) for each in (attention, cut))
for mask in (full, padded):
    found, expected = ((each(q, mask) * mask[:, None, :, None]) for each in (f, attention))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(g(x), cut(x))
from omnicomp.backend import pipeline
def fail(*values): raise RuntimeError("no such compiler")
pipeline.compile_parts = fail
h = torch.compile(lambda x: x.sin(), backend="omni", options=options)
torch.testing.assert_close(h(x), x.sin())
if not loads:
    file.write_bytes(torch.compiler.save_cache_artifacts()[0])
import omnicomp
events = omnicomp.timeline.events()
print([e.verdict for e in events if e.type == "cache" and e.cache == "saved"])
print(sorted({{e.state for e in events if e.type == "speculation"}}))
"""


BROKEN = """
import pathlib, sys, torch
torch._dynamo.config.caching_precompile = True
file, loads = pathlib.Path({file!r}), sys.argv[1] == "loads"
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    def forward(self, x):
        x = self.a(x).relu()
        torch._dynamo.graph_break()
        return self.b(x).tanh().cumsum(-1)
torch.manual_seed(0)
model = Model()
if loads: torch.compiler.load_cache_artifacts(file.read_bytes())
compiled = torch.compile(model, backend="omni", options={{"lowerings": ["eager"], "summary": False}})
for rows in (4, 6, 9):
    x = torch.randn(rows, 8, requires_grad=True)
    found, expected = compiled(x), model(x)
    torch.testing.assert_close(found, expected)
    if loads or rows == 4:
        grads = (torch.autograd.grad(each.sum(), x)[0] for each in (found, expected))
        torch.testing.assert_close(*grads)
if not loads: file.write_bytes(torch.compiler.save_cache_artifacts()[0])
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
def test_a_cache_bundle_holds_the_backward_of_graphs_between_breaks_and_of_all_sizes(tmp_path: Path) -> None:
    program = BROKEN.format(file=str(tmp_path / "bundle"))
    for each in ("saves", "loads"):
        folder = {name: str(tmp_path / each) for name in ("TORCHINDUCTOR_CACHE_DIR", "OMNICOMP_CACHE_DIR")}
        done = python("-c", program, each, environment=folder, check=True)
        assert done.stdout.split()[-1] == ("0" if each == "loads" else "4")


def test_a_cache_bundle_with_dynamos_code_holds_checks_variants_and_eager_parts(tmp_path: Path) -> None:
    program = BUNDLED.format(file=str(tmp_path / "bundle"))
    folders = [
        {name: str(tmp_path / each) for name in ("TORCHINDUCTOR_CACHE_DIR", "OMNICOMP_CACHE_DIR")} for each in "ab"
    ]
    saving = python("-c", program, "saves", environment=folders[0], check=True)
    assert "['bypass']" in saving.stdout
    assert "can't be saved: all of it runs eager" in saving.stderr
    loading = python("-c", program, "loads", environment=folders[1], check=True)
    assert "['hit', 'hit', 'hit', 'bypass']" in loading.stdout
    assert "['assumed', 'failed', 'held']" in loading.stdout


class Unpicklable(DropsMaskedFill):
    """A pass of the program's own, in a class that another process lacks."""

    name = "unpicklable"

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")

    def applies(self, module: Any, context: Any) -> bool:
        return False


def test_a_function_is_saved_without_the_passes_that_the_program_gave() -> None:
    x = torch.randn(4, 6)
    torch.testing.assert_close(cycle(product, x, passes=[Unpicklable()])(x), product(x))
    assert "unpicklable" in [event.name for event in current() if isinstance(event, PassRun)]
