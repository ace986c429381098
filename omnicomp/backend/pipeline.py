"""The backend: `torch.compile(model, backend="omni")`.

`omni` reads from top to bottom: capture, passes, autograd with placement and lowering of each part, and the answer to a
failure. Where a pass assumed something of the inputs, two variants are compiled behind the passes.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from omnicomp import passes, weights
from omnicomp._torch.dynamo import control_flow, late_compile, threads
from omnicomp._torch.fx import copy_module, forget_tensors
from omnicomp._torch.inductor import compile_fx
from omnicomp.analysis.nodes import all_nodes
from omnicomp.analysis.provenance import places_of
from omnicomp.analysis.random_state import generator_states
from omnicomp.backend import weight_inputs
from omnicomp.backend.autograd import uses_inductor
from omnicomp.backend.capture import CapturedGraph, capture_graph
from omnicomp.backend.options import policy_of
from omnicomp.backend.select import compile_chosen
from omnicomp.backend.variants import ASSUMED, GENERAL, Checks, Variant, Variants
from omnicomp.errors import CompilerFaultError, LegaliseError, OmnicompError, Once, first_line
from omnicomp.lowerings.override import has_own_gradients, put_references
from omnicomp.lowerings.overrides import registry as overrides
from omnicomp.lowerings.overrides.search import apply_searches
from omnicomp.lowerings.overrides.tag import apply_blocks
from omnicomp.options.policy import Policy
from omnicomp.passes.assumptions import Assumption
from omnicomp.passes.base import Pass, PassContext, run_pipeline
from omnicomp.passes.repairs import Repair
from omnicomp.runtime.evidence import Rejected, rejectable
from omnicomp.runtime.fallback_limit import enforce
from omnicomp.runtime.fallback_warning import notify
from omnicomp.runtime.override_check import devices_of
from omnicomp.timeline import (
    Event,
    Option,
    Ran,
    Reason,
    Speculation,
    Timeline,
    current,
)
from omnicomp.timeline.activity import activity
from omnicomp.timeline.graph_dump import dump
from omnicomp.timeline.step_down import Where, record_step_down

__all__ = ["omni", "reset"]


def omni(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a graph that Dynamo captured; this is what `torch.compile(..., backend="omni")` calls.

    Args:
        gm: the Dynamo graph; the backend owns it.
        example_inputs: fake or real tensors and symbolic sizes, one a placeholder.
        mode: torch.compile's mode, with the meaning that Inductor gives it.
        options: omnicomp's own keys (`omnicomp.options.policy.Policy`) and Inductor's config keys.

    Returns:
        A function of the graph's inputs.

    Raises:
        OptionError: an option is unknown or has a wrong value.
    """
    try:
        policy = policy_of(mode, options)
    except OmnicompError as error:
        raise control_flow.user_error(error) from None
    under_way = activity("compile", "a graph", shown=policy.progress)
    with control_flow.compile_lock, control_flow.unseen_by_hooks(), under_way as doing:
        try:
            captured = capture_graph(gm, example_inputs, policy, options)
            doing.say(f"{captured.id} {captured.capture.function}".rstrip(), graph=captured.id)
            dump(captured.id, "dynamo", gm)
            plain = copy_module(gm)
        except (*control_flow.CONTROL_FLOW, OmnicompError):
            raise
        except Exception as error:
            if policy.on_error == "raise":
                raise
            return _run_uncaptured(gm, error)
        try:
            return _compile_captured(gm, plain, captured, example_inputs)
        except (*control_flow.CONTROL_FLOW, *control_flow.GRAPH_BREAKS, OmnicompError):
            raise
        except Exception as error:
            if policy.on_error == "raise":
                raise
            return _retreat_to_eager(plain, captured, error)


def reset() -> None:
    """Forget recorded CUDA graphs and free copies of weights; `torch.compiler.reset()` calls it."""
    compile_fx.reset_cudagraphs()
    weights.clear()


omni.reset = reset  # type: ignore[attr-defined]
threads.tell_threads_apart()


def _run_uncaptured(gm: GraphModule, error: Exception) -> Callable[..., Any]:
    """Run a Dynamo graph of which nothing could be learnt, through torch's dispatcher."""
    reason = Reason(
        code="capture_failed",
        by="capture",
        sentence=f"the graph could not be recorded, and runs eager as Dynamo captured it: {first_line(error)}",
        observed=type(error).__name__,
        lever="report the error; to see it raised, set options={'on_error': 'raise'}",
    )
    return _running_eager(gm, current().next_graph(), "capture", reason)


def _compile_captured(
    gm: GraphModule, plain: GraphModule, captured: CapturedGraph, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Overrides of blocks, passes, and all that follows; `plain` is a copy of the graph that nothing has changed."""
    graph = _override_blocks(gm, captured)
    # Without a block that was replaced, the copy is one of the graph as the passes get it.
    same = [node.name for node in plain.graph.nodes] == [node.name for node in gm.graph.nodes]
    if not same:
        dump(graph.id, "overrides", gm)
    original = plain if same else copy_module(gm)
    passed = _run_passes(gm, graph, speculate=_may_speculate(graph.policy), kept=original, inputs=inputs)
    if passed.assumptions:
        return _with_variants(passed, original, inputs, graph)
    compiled = _build(passed, inputs, graph)
    for copy in (plain, original):
        if copy is not passed.module:
            forget_tensors(copy)
    return compiled


def _override_blocks(gm: GraphModule, graph: CapturedGraph) -> CapturedGraph:
    """Put overrides in the place of whole modules and of what searches find, before passes and variants part."""
    if "override" in graph.policy.lowerings:
        for name, error in overrides.broken().items():
            _record_broken(graph, name, error)
    context = graph.context("", {})
    declined = apply_blocks(gm, context, training=graph.training)
    return dataclasses.replace(graph, declined=declined + apply_searches(gm, context, training=graph.training))


def _record_broken(graph: CapturedGraph, name: str, error: str) -> None:
    current().append(
        Option(
            graph=graph.id,
            key=f"entry point {overrides.GROUP}: {name}",
            requested="its overrides",
            effective="none",
            reason=Reason(
                code="option_ineffective",
                by="override",
                sentence=f"the plugin {name} can't be loaded, and its overrides are not there: {error}",
                lever="repair or uninstall the package that declares it",
            ),
        )
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Passed:
    """A graph behind the passes.

    Attributes:
        module: the graph.
        assumptions: what it takes for granted of its inputs.
        events: what the passes reported.
        traced_under: makes what has to be in force while it is compiled.
    """

    module: GraphModule
    assumptions: tuple[Assumption, ...]
    events: tuple[Event, ...]
    traced_under: tuple[Callable[[], contextlib.AbstractContextManager[None]], ...]


def _run_passes(
    gm: GraphModule,
    graph: CapturedGraph,
    *,
    speculate: bool,
    kept: GraphModule | None = None,
    inputs: Sequence[Any] = (),
) -> _Passed:
    """Run the pipeline; a pass that raises costs its rewrites, not the user's program.

    `kept` is a copy of the graph to go on with then, if there is one already.
    """
    own = copy_module(gm) if kept is None else None
    pipeline = [item.of(graph.policy) for item in passes.PIPELINE]
    try:
        passed = _run(pipeline, gm, graph, speculate=speculate, inputs=inputs)
    except control_flow.CONTROL_FLOW:
        raise
    except LegaliseError as error:
        raise control_flow.user_error(error) from None
    except Exception as error:
        if graph.policy.on_error == "raise":
            raise
        reason = Reason(
            code="capture_failed",
            by="passes",
            sentence=f"a pass raised, and the graph goes on as Dynamo captured it: {first_line(error)}",
            lever="switch the pass off with options={'disable_passes': [...]}, and report the error",
        )
        _record_retreat(graph.id, "passes", "no passes", reason)
        repairs = [item for item in pipeline if isinstance(item, Repair)]
        return _run(repairs, copy_module(kept or own or gm), graph)
    if own is not None:
        forget_tensors(own)
    return passed


def _run(
    pipeline: Sequence[Pass],
    gm: GraphModule,
    graph: CapturedGraph,
    *,
    speculate: bool = False,
    inputs: Sequence[Any] = (),
) -> _Passed:
    # Rewrites are reported to a timeline of their own first: those of a pass that raises did not happen.
    context = PassContext(
        graph_id=graph.id,
        device=graph.device,
        timeline=Timeline(),
        training=graph.training,
        speculate=speculate,
        inputs=inputs,
    )
    policy = graph.policy
    run_pipeline(
        pipeline,
        gm,
        context,
        disabled=policy.disable_passes,
        check=policy.check_passes,
        shown=policy.progress,
    )
    return _Passed(
        module=gm,
        assumptions=tuple(context.assumptions),
        events=context.timeline.events(),
        traced_under=tuple(context.traced_under),
    )


def _may_speculate(policy: Policy) -> bool:
    """Whether a variant can be compiled after Dynamo's compilation; with frozen weights it can't, as they are gone."""
    return policy.speculate and late_compile.is_tracing() and not compile_fx.freezing(policy.inductor)


def _with_variants(
    passed: _Passed, original: GraphModule, inputs: Sequence[Any], graph: CapturedGraph
) -> Callable[..., Any]:
    """A variant that is right where the assumptions hold, and a general one; each compiled when a call needs it."""
    try:
        scene = late_compile.keep_scene(inputs)
    except Exception as error:  # noqa: BLE001 - becomes a reason in the timeline
        reason = Reason(
            code="not_checkable",
            by="speculation",
            sentence=f"no second variant could be compiled later, so nothing is assumed: {first_line(error)}",
            observed=type(error).__name__,
            lever="report the error",
        )
        sentence = "; ".join(item.sentence for item in passed.assumptions)
        current().append(
            Speculation(graph=graph.id, state="stopped", variant=GENERAL, sentence=sentence, reason=reason)
        )
        return _build(_run_passes(original, graph, speculate=False, inputs=inputs), inputs, graph)
    general = dataclasses.replace(
        graph, id=f"{graph.id}:{GENERAL}", capture=dataclasses.replace(graph.capture, variant=GENERAL)
    )
    eager = copy_module(original)
    # A calibration needs the real inputs, which are gone when this variant is built.
    calibrated = (
        None
        if graph.policy.dtype_error is None
        else _run_passes(copy_module(original), general, speculate=False, inputs=inputs)
    )

    def build_assumed(after_dynamo: bool) -> Callable[..., Any]:
        return build(lambda: passed, graph, after_dynamo)

    def build_general(after_dynamo: bool) -> Callable[..., Any]:
        current().append(dataclasses.replace(general.capture, graph=general.id))
        return build(lambda: calibrated or _run_passes(original, general, speculate=False), general, after_dynamo)

    def build(make: Callable[[], _Passed], variant: CapturedGraph, after_dynamo: bool) -> Callable[..., Any]:
        if not after_dynamo:
            return _build(make(), inputs, variant)
        compiled, sizes = late_compile.compile_late(
            scene, lambda fakes: _build(make(), fakes, variant, after_dynamo=True)
        )
        return compiled if sizes.holds is None else _within_sizes(compiled, eager, sizes, variant)

    variants = Variants(
        checks=Checks(passed.assumptions, [node.name for node in original.graph.find_nodes(op="placeholder")]),
        assumed=Variant(name=ASSUMED, graph=graph.id, build=build_assumed),
        general=Variant(name=GENERAL, graph=general.id, build=build_general),
        eager=eager,
        timeline=current(),
        on_cuda=any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs),
    )
    variants.compile_first(inputs)
    return variants.__call__


def _within_sizes(
    compiled: Callable[..., Any], eager: Callable[..., Any], sizes: late_compile.SizeGuards, graph: CapturedGraph
) -> Callable[..., Any]:
    """Call what was compiled where it is right, and the graph itself for other sizes, which Dynamo's guards let in."""
    compiler = "inductor" if uses_inductor(graph) else "autograd"
    reason = Reason(
        code="capture_failed",
        by="speculation",
        sentence="a variant that was compiled late is right for some sizes only, and a call had others: they run eager",
        needed=sizes.text,
        lever="switch it off with options={'speculate': False}",
    )
    retreat = Once(lambda: _record_eager(graph.id, compiler, reason)())

    def call(*args: Any) -> Any:
        if sizes.holds is not None and sizes.holds(args):
            return compiled(*args)
        retreat()
        return eager(*args)

    return call


def _build(
    passed: _Passed, inputs: Sequence[Any], graph: CapturedGraph, *, after_dynamo: bool = False
) -> Callable[..., Any]:
    """Compile a graph behind the passes, or answer for the compiler's failure.

    Args:
        passed: the graph, which is consumed.
        inputs: real or fake tensors and symbolic sizes, one a placeholder.
        graph: what it belongs to.
        after_dynamo: whether Dynamo's compilation is over, so that it can't be asked to break the graph any more.
    """
    for event in passed.events:
        current().append(event)
    graph = dataclasses.replace(graph, places=places_of(all_nodes(passed.module)))
    kept = copy_module(passed.module)
    steering = () if after_dynamo else control_flow.CONTROL_FLOW
    try:
        with control_flow.leave_transforms_on_error(), contextlib.ExitStack() as stack:
            for make in passed.traced_under:
                stack.enter_context(make())
            compiled = weight_inputs.with_copies(passed.module, inputs, graph, compile_chosen)
    except steering:
        raise
    except Exception as error:
        if not after_dynamo and isinstance(error, control_flow.GRAPH_BREAKS):
            _record_graph_break(graph, error)
            raise
        if graph.policy.on_error == "raise":
            raise
        compiled = _retreat_to_eager(put_references(kept), graph, error)  # an override may be to blame
    else:
        if graph.training and graph.policy.verify != "off" and has_own_gradients(kept):
            compiled = _given_up_if_rejected(compiled, kept, graph)
        else:
            forget_tensors(kept)
    compiled = enforce(compiled, graph.id, graph.policy)
    notify(graph.id, graph.policy)
    return compiled


def _given_up_if_rejected(compiled: Callable[..., Any], kept: GraphModule, graph: CapturedGraph) -> Callable[..., Any]:
    """Call what was compiled, unless the gradients of an override in it are found wrong in the first call.

    The forward that finds that is given up, and the graph runs eager with the override's reference. After the first
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
            once = _record_eager(graph.id, "inductor" if uses_inductor(graph) else "autograd", rejected.reason)
            eager = put_references(copy_module(kept))

            def run(*args: Any) -> Any:
                result = eager(*args)
                once()
                return result

            target = run
            results = target(*args)
        pending = False
        return results

    return control_flow.disable(call, reason="omnicomp verifies the gradients of an override")


def _record_graph_break(graph: CapturedGraph, error: Exception) -> None:
    """Dynamo takes the graph back, breaks it, and hands over the pieces as graphs of their own."""
    reason = Reason(
        code="capture_failed",
        by="dynamo",
        sentence=f"the graph can't be traced as a whole, and Dynamo breaks it in pieces: {first_line(error)}",
        lever="keep sizes independent of data, or see torch._dynamo.config.capture_dynamic_output_shape_ops",
    )
    _record_retreat(graph.id, "capture", "graph break", reason)


def _record_retreat(graph: str, source: str, target: str, reason: Reason) -> None:
    """Record that the whole graph moved from one way of going on to another."""
    record_step_down(current(), _whole(graph), source, target, reason, attempts=False)


def _whole(graph: str) -> Where:
    return {"graph": graph, "part": "", "subgraph": graph}


def _retreat_to_eager(gm: GraphModule, graph: CapturedGraph, error: Exception) -> Any:
    """Run the graph as the passes left it, through torch's dispatcher."""
    compiler = "inductor" if uses_inductor(graph) else "autograd"
    reason = Reason(
        code="capture_failed",
        by=compiler,
        sentence=str(error)
        if isinstance(error, CompilerFaultError)
        else f"the compiler raised on the whole graph: {first_line(error)}",
        observed=type(error).__name__,
        source=graph.sources[0] if graph.sources else "",
        lever="report the error to PyTorch, or keep the operator out with torch.compiler.disable",
    )
    return _running_eager(gm, graph.id, compiler, reason)


def _running_eager(gm: GraphModule, graph: str, compiler: str, reason: Reason) -> Callable[..., Any]:
    """Call a graph as it is; that it moved to eager is recorded now, and that it ran there by its first call."""
    once = _record_eager(graph, compiler, reason)

    def run(*args: Any) -> Any:
        result = gm(*args)
        once()
        return result

    return control_flow.disable(run, reason="omnicomp runs this graph eagerly")


def _record_eager(graph: str, compiler: str, reason: Reason) -> Once:
    """Record that the whole graph moved to eager; what is returned records that it ran there."""
    timeline = current()
    record_step_down(timeline, _whole(graph), compiler, "eager", reason)
    ran = Ran(**_whole(graph), lowering="eager", evidence="torch.fx.GraphModule")
    return Once(lambda: timeline.append(ran))
