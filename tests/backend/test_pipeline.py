"""The whole way of a graph: values, gradients, what is recorded, and what happens when something fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from concurrency import in_threads
from processes import python
from recorded import events
from tiers import fast
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import omnicomp
from omnicomp.passes import Pass
from omnicomp.timeline import Attempt, Capture, Option, Placement, Ran, Retreat, Rewrite, Subgraph, current

EAGER = {"lowerings": ["eager"]}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        hidden = torch.digamma(hidden + 3)
        return self.second(hidden).relu(), hidden.sum()


@contextmanager
def inductor_fails_on(*operators: Any, message: str = "planted failure") -> Iterator[None]:
    """Make Inductor's lowering of some operators raise."""
    from torch._inductor import lowering

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(message)

    saved = {operator: lowering.lowerings[operator] for operator in operators}
    lowering.lowerings.update(dict.fromkeys(operators, fail))
    try:
        # An artefact that was built before the failure was planted would come from the cache.
        with torch.compiler.config.patch(force_disable_caches=True):
            yield
    finally:
        lowering.lowerings.update(saved)


def check_step(model: nn.Module, compiled: Any, *inputs: torch.Tensor) -> None:
    """Outputs and parameter gradients equal eager's."""
    results = []
    for run in (model, compiled):
        model.zero_grad()
        outputs = run(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(output.square().sum() for output in outputs).backward()
        results.append((outputs, [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0])


def test_found_by_name_without_importing_omnicomp() -> None:
    code = (
        "import sys, torch\n"
        "f = torch.compile(lambda x: x.sin() + 1, backend='omni', options={'lowerings': ['eager']})\n"
        "assert torch.equal(f(torch.ones(3)), torch.ones(3).sin() + 1)\n"
        "print('omnicomp' in sys.modules)\n"
    )
    assert python("-c", code, check=True).stdout.strip() == "True"


def test_forward_and_gradients_without_inductor() -> None:
    model = Small()
    check_step(model, torch.compile(model, backend="omni", options=EAGER), torch.randn(4, 8))
    assert {e.part for e in events(Subgraph)} == {"forward", "backward"}
    assert {e.lowering for e in events(Ran)} == {"eager"}


def test_capture_says_what_was_compiled() -> None:
    model = Small()
    torch.compile(model, backend="omni", options=EAGER)(torch.randn(4, 8))
    (capture,) = events(Capture)
    assert capture.device == "cpu"
    assert capture.training
    assert capture.function.startswith("forward (")
    assert __file__ in capture.function
    assert capture.options == EAGER
    assert capture.versions["torch"] == torch.__version__


def test_nothing_is_recorded_before_the_first_call() -> None:
    torch.compile(Small(), backend="omni", options=EAGER)
    assert current().events() == ()


def test_what_ran_is_recorded_when_it_runs() -> None:
    model = Small()
    compiled = torch.compile(model, backend="omni", options=EAGER)
    outputs, total = compiled(torch.randn(4, 8))
    assert [e.part for e in events(Ran)] == ["forward"]
    (outputs.sum() + total).backward()
    assert [e.part for e in events(Ran)] == ["forward", "backward"]
    compiled(torch.randn(4, 8))
    assert len(events(Ran)) == 2, "later calls record nothing"


def test_graph_breaks_recompiles_and_dynamic_shapes() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos() * x.shape[0]

    compiled = torch.compile(broken, backend="omni", options=EAGER)
    for rows in (2, 3, 4, 5):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), broken(x))
    captures = events(Capture)
    assert len(captures) == 4, "two frames, each once static and once dynamic"
    assert any(capture.dynamic for capture in captures)


def test_a_shape_that_depends_on_data_breaks_the_graph_and_not_the_compilation() -> None:
    def select(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        return (y[x > 0] * 2).cos()

    x = torch.randn(16)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(select, backend="omni", options=EAGER)
        torch.testing.assert_close(compiled(x), select(x))
    compiled = torch.compile(select, backend="omni", options=EAGER)
    torch.testing.assert_close(compiled(x), select(x))

    def write(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        y[x > 0] = value
        return y.cos()

    omnicomp.timeline.clear()
    value = torch.ones((), requires_grad=True)
    torch.testing.assert_close(torch.compile(write, backend="omni", options=EAGER)(x, value), write(x, value))
    text = omnicomp.audit().to_text()
    assert all(e.lowering == "eager" for e in events(Ran))
    assert "Traceback" not in text


def test_fullgraph_and_dynamic_true() -> None:
    compiled = torch.compile(lambda x: x.sin().sum(0), backend="omni", options=EAGER, fullgraph=True, dynamic=True)
    for rows in (2, 7):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), x.sin().sum(0))
    assert len(events(Capture)) == 1
    (subgraph,) = events(Subgraph)
    assert "s" in subgraph.flops, "FLOPs are an expression in the graph's symbols"


def test_input_mutation_and_aliased_outputs() -> None:
    def mutate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.mul_(2)
        return x.view(-1), x + 1

    compiled = torch.compile(mutate, backend="omni", options=EAGER)
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    got, expected = compiled(x), mutate(y)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(x, y)
    assert got[0].data_ptr() == x.data_ptr()


def test_dropout_is_eagers_without_inductor() -> None:
    model = nn.Dropout(0.5)
    compiled = torch.compile(model, backend="omni", options=EAGER)
    x = torch.ones(64)
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(x), expected)


def test_a_compiler_that_raises_on_the_whole_graph_gives_way_to_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no autograd today")

    monkeypatch.setattr("omnicomp._torch.inductor.compile_fx.compile_fx", explode)
    model = Small()
    check_step(model, torch.compile(model, backend="omni"), torch.randn(4, 8))
    (retreat,) = events(Retreat)
    assert (retreat.source_lowering, retreat.target_lowering) == ("inductor", "eager")
    assert "no autograd today" in retreat.reason.sentence
    assert [e.lowering for e in events(Ran)] == ["eager"]
    (entry,) = omnicomp.timeline.backend_timeline()
    assert [a["level"] for a in entry["attempts"] if a["selected"]] == ["eager"]
    assert "no autograd today" in entry["attempts"][0]["reason"]
    assert len([r for r in caplog.records if r.name == "omnicomp"]) == 1


def test_on_error_raise_lets_the_error_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no autograd today")

    monkeypatch.setattr("omnicomp._torch.inductor.compile_fx.compile_fx", explode)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no autograd today"):
        torch.compile(torch.sin, backend="omni", options={"on_error": "raise"})(torch.ones(2))


def test_a_pass_that_raises_costs_its_rewrites_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Pass):
        name = "broken"

        def applies(self, module: Any, context: Any) -> bool:
            return True

        def run(self, module: Any, context: Any) -> Any:
            node = next(node for node in module.graph.nodes if node.op == "call_function")
            node.target = torch.cos
            context.rewrite(self.name, "trigonometry", node, target="cos")
            raise KeyError("half way through")

    monkeypatch.setattr("omnicomp.passes.PIPELINE", (Broken(),))
    x = torch.ones(3)
    compiled = torch.compile(lambda x: torch.sin(x) + 1, backend="omni", options=EAGER)
    torch.testing.assert_close(compiled(x), x.sin() + 1)
    (retreat,) = events(Retreat)
    assert "half way through" in retreat.reason.sentence
    assert events(Rewrite) == [], "what was undone is not reported as done"


def test_eight_threads_and_two_models() -> None:
    models = [Small().eval(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()]
    compiled = [torch.compile(model, backend="omni", options=EAGER) for model in models]
    if torch.__version__ < (2, 13):
        # There a thread that calls while another one compiles is taken for symbolic tracing, under any backend.
        for model in compiled:
            with torch.no_grad():
                model(torch.randn(4, 8))

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for turn in range(6):
            which = (seed + turn) % 2
            x = torch.randn(4, 8, generator=generator)
            with torch.no_grad():
                torch.testing.assert_close(compiled[which](x), models[which](x))

    in_threads(work)
    sequence = [event.seq for event in current()]
    assert sequence == list(range(len(sequence)))
    ran = [e.subgraph for e in events(Ran)]
    assert len(ran) == len(set(ran)), "a subgraph's first call is recorded once"


@pytest.mark.inductor
def test_a_graph_that_goes_wholly_to_inductor_is_one_subgraph() -> None:
    model = Small()
    check_step(model, torch.compile(model, backend="omni"), torch.randn(4, 8))
    assert [(e.part, e.subgraph.partition(".")[2], e.lowering) for e in events(Subgraph)] == [
        ("forward", "forward.0", "inductor"),
        ("backward", "backward.0", "inductor"),
    ]
    for ran in events(Ran):
        assert ran.lowering == "inductor"
        assert ".py (key f" in ran.evidence, "the evidence names Inductor's generated module and its key"
    assert all(placement.declined == () for placement in events(Placement))


@pytest.mark.inductor
@pytest.mark.parametrize("dynamic", fast([False, True], False.__eq__))
def test_an_operator_that_inductor_fails_on_is_cut_out_alone(dynamic: bool, caplog: pytest.LogCaptureFixture) -> None:
    aten = torch.ops.aten
    model = Small()
    with inductor_fails_on(aten.digamma.default):
        compiled = torch.compile(model, backend="omni", dynamic=dynamic)
        check_step(model, compiled, torch.randn(4, 8))
    placement = next(e for e in events(Placement) if e.part == "forward")
    assert placement.nodes["eager"] == 1
    (declined,) = placement.declined
    assert declined.op == "aten.digamma.default"
    line = next(i for i, text in enumerate(open(__file__), 1) if "torch.digamma(hidden" in text)
    assert declined.source == f"{__file__}:{line}"
    assert "planted failure" in declined.chain[-1].sentence
    lowerings = [e.lowering for e in events(Ran) if e.part == "forward"]
    assert lowerings == ["inductor", "eager", "inductor"], "everything else stays compiled"
    assert {e.lowering for e in events(Subgraph) if e.part == "backward"} == {"inductor"}
    modules = {e["module"].partition(".")[2]: e for e in omnicomp.timeline.backend_timeline()}
    levels = {a["level"]: a for a in modules["forward.1"]["attempts"]}
    assert "planted failure" in levels["compile"]["reason"]
    assert levels["eager"]["selected"]
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "omnicomp"]
    assert "aten.digamma.default" in warning
    assert "\n" not in warning


@pytest.mark.inductor
def test_a_failure_that_names_no_node_is_bisected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A code generation error, as from a C++ compiler, comes after the graph was lowered node by node."""
    from omnicomp._torch.inductor import compile_fx as inductor

    real = inductor.compile_fx_inner

    def compile_fx_inner(module: Any, *args: Any, **kwargs: Any) -> Any:
        if any(n.target is torch.ops.aten.digamma.default for n in module.graph.nodes):
            raise RuntimeError("the C++ compiler gave up")
        return real(module, *args, **kwargs)

    monkeypatch.setattr(inductor, "compile_fx_inner", compile_fx_inner)
    model = Small().eval()
    x = torch.randn(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="omni")(x), model(x))
    (placement,) = events(Placement)
    assert [node.op for node in placement.declined] == ["aten.digamma.default"]


@pytest.mark.inductor
def test_on_error_raise_shows_inductors_error() -> None:
    with (
        inductor_fails_on(torch.ops.aten.digamma.default),
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="planted failure"),
    ):
        torch.compile(Small(), backend="omni", options={"on_error": "raise"})(torch.randn(4, 8))


@pytest.mark.inductor
def test_freezing_by_option_is_reported_as_ineffective() -> None:
    compiled = torch.compile(torch.sin, backend="omni", options={"freezing": True})
    with torch.no_grad():
        compiled(torch.ones(2))
    (option,) = events(Option)
    assert (option.key, option.requested, option.effective) == ("freezing", "True", "False")


@pytest.mark.inductor
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_run(mode: str) -> None:
    model = Small()
    compiled = torch.compile(model, backend="omni", mode=mode)
    check_step(model, compiled, torch.randn(4, 8))
    assert events(Capture)[0].mode == mode
    assert all(attempt.ok for attempt in events(Attempt) if attempt.selected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_call_with_fake_tensors_computes_fake_tensors(dynamic: bool) -> None:
    """Generated code would read memory that they don't have, and the process would abort."""
    sizes = [DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC] * 2
    compiled = torch.compile(lambda x: torch.sin(x) + 1, backend="omni", fullgraph=True)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        found = compiled(mode.from_tensor(torch.randn(3, 4), symbolic_context=context))
    assert isinstance(found, FakeTensor)
    assert [int(size) for size in found.shape] == [3, 4]
