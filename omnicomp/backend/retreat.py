"""The answers to a failure of the whole graph: it runs eager, and the timeline says why."""

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from omnicomp._torch.dynamo import control_flow
from omnicomp._torch.fx import copy_module
from omnicomp._torch.repairs.recomputed_draws import eager_calls
from omnicomp.analysis.random_state import generator_states
from omnicomp.backend.autograd import uses_inductor
from omnicomp.backend.capture import CapturedGraph
from omnicomp.errors import CompilerFaultError, Once, first_line
from omnicomp.lowerings.override import put_references
from omnicomp.runtime.evidence import Rejected, rejectable
from omnicomp.runtime.override_check import devices_of
from omnicomp.runtime.ranks import agree_on_eager
from omnicomp.timeline import Outcome, Ran, Reason, current
from omnicomp.timeline.recorder import Where, record_step_down


def run_uncaptured(gm: GraphModule, error: Exception) -> Callable[..., Any]:
    """Run a Dynamo graph that could not be recorded, through torch's dispatcher."""
    reason = Reason(
        code="capture_failed",
        by="capture",
        sentence=f"the graph could not be recorded, and runs eager as Dynamo captured it: {first_line(error)}",
        observed=type(error).__name__,
        lever="report the error; to see it raised, set options={'on_error': 'raise'}",
    )
    return _running_eager(gm, current().next_graph(), "capture", reason)


def given_up_if_rejected(compiled: Callable[..., Any], kept: GraphModule, graph: CapturedGraph) -> Callable[..., Any]:
    """Call the compiled graph, unless the first call finds the gradients of an override in it wrong.

    That forward is abandoned, and the graph runs eager with the override's reference. After the first
    call this is one more frame, in graphs that hold an override with a derivative of its own.
    """
    target = compiled
    pending = True

    def call(*args: Any) -> Any:
        nonlocal target, pending
        if not pending:
            return target(*args)
        states = generator_states(devices_of(args))
        try:
            with rejectable():
                results = target(*args)
        except Rejected as rejected:
            states.restore()
            once = record_eager(graph.id, graph_compiler(graph), rejected.reason)
            eager = eager_calls(put_references(copy_module(kept)))

            def run(*args: Any) -> Any:
                result = eager(*args)
                once()
                return result

            target = run
            results = target(*args)
        pending = False
        return results

    return control_flow.disable(call, reason="omnicomp verifies the gradients of an override")


def record_graph_break(graph: CapturedGraph, error: Exception) -> None:
    """Dynamo takes the graph back, breaks it, and hands over the pieces as graphs of their own."""
    reason = Reason(
        code="capture_failed",
        by="dynamo",
        sentence=f"the graph can't be traced as a whole, and Dynamo breaks it in pieces: {first_line(error)}",
        lever="keep sizes independent of data, or see torch._dynamo.config.capture_dynamic_output_shape_ops",
    )
    record_retreat(graph.id, "capture", "graph break", reason)


def record_retreat(graph: str, source: str, target: str, reason: Reason) -> None:
    """Record that the whole graph stepped down."""
    record_step_down(current(), _whole(graph), source, target, reason, attempts=False)


def _whole(graph: str) -> Where:
    return {"graph": graph, "part": "", "subgraph": graph}


def retreat_to_eager(gm: GraphModule, graph: CapturedGraph, error: Exception) -> Any:
    """Run the graph as the passes left it, through torch's dispatcher."""
    reason = Reason(
        code="capture_failed",
        by=graph_compiler(graph),
        sentence=str(error)
        if isinstance(error, CompilerFaultError)
        else f"the compiler raised on the whole graph: {first_line(error)}",
        observed=type(error).__name__,
        source=graph.record.sources[0] if graph.record.sources else "",
        lever="report the error to PyTorch, or keep the operator out with torch.compiler.disable",
    )
    return _running_eager(gm, graph.id, graph_compiler(graph), reason, failed=graph)


def _running_eager(
    gm: GraphModule, graph: str, compiler: str, reason: Reason, failed: CapturedGraph | None = None
) -> Callable[..., Any]:
    """Call a graph as it is. Records now that it moved to eager, and in the first call that it ran there.

    If it did so because something failed, the first call asks whether it did on all ranks.
    """
    once, eager = record_eager(graph, compiler, reason), eager_calls(gm)
    asked = failed is None
    recorded = current()
    raised = Once(lambda: recorded.append(Outcome(**_whole(graph), state="raised")))

    def run(*args: Any) -> Any:
        nonlocal asked
        try:
            if not asked and failed is not None:
                agree_on_eager(recorded, failed.record, failed.policy, reason, gm, args)
                asked = True
            result = eager(*args)
        except BaseException:
            raised()
            raise
        once()
        return result

    return control_flow.disable(run, reason="omnicomp runs this graph eagerly")


def run_by_eagers_autograd(gm: GraphModule, graph: CapturedGraph) -> Callable[..., Any]:
    """Run a graph in training as Dynamo captured it, as the option `autograd` asks for."""
    reason = Reason(
        code="eager_autograd",
        by="autograd",
        sentence="the graph is in training, and options={'autograd': 'eager'} asks for eager's autograd",
        lever="leave the option out",
    )
    return _running_eager(gm, graph.id, graph_compiler(graph), reason)


def run_on_fake_tensors(gm: GraphModule, graph: CapturedGraph) -> Callable[..., Any]:
    """Run a graph that was called with fake tensors, of which generated code would read the memory."""
    reason = Reason(
        code="capture_failed",
        by="capture",
        sentence="the call's inputs are fake tensors, which have no memory: the graph runs operator by operator",
        lever="none is needed; calls with real tensors are compiled",
    )
    return _running_eager(gm, graph.id, graph_compiler(graph), reason)


def record_eager(graph: str, compiler: str, reason: Reason) -> Once:
    """Record that the whole graph moved to eager; the result records, when called, that it ran there."""
    timeline = current()
    record_step_down(timeline, _whole(graph), compiler, "eager", reason)
    ran = Ran(**_whole(graph), lowering="eager", evidence="torch.fx.GraphModule")
    return Once(lambda: timeline.append(ran))


def graph_compiler(graph: CapturedGraph) -> str:
    """What compiles the whole graph, for the timeline."""
    return "inductor" if uses_inductor(graph) else "autograd"
