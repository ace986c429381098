"""The backend: `torch.compile(model, backend="omni")`.

The way of a graph reads top to bottom in `omni`: capture, passes, autograd with placement and lowering of each part,
and what to do if that fails. Where a pass assumed something of the inputs, there are two of what follows the passes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from omnicomp import passes
from omnicomp._torch import aot, dynamo, faults, folding, inductor, late, partition
from omnicomp._torch.fx import copy_module
from omnicomp.capture import CapturedGraph, capture_graph
from omnicomp.errors import CompilerFaultError, OmnicompError
from omnicomp.ladder import build_part
from omnicomp.localize import first_line
from omnicomp.lowerings.overrides import registry as overrides
from omnicomp.lowerings.overrides.tag import apply_blocks
from omnicomp.notices import notify
from omnicomp.once import Once
from omnicomp.options import Policy, parse
from omnicomp.passes.base import PassContext, run_pipeline
from omnicomp.records import replay
from omnicomp.speculation import Assumption
from omnicomp.timeline import (
    Attempt,
    Cache,
    Event,
    Option,
    Ran,
    Reason,
    Retreat,
    Speculation,
    Timeline,
    current,
)
from omnicomp.variants import ASSUMED, GENERAL, Checks, Variant, Variants

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
        options: omnicomp's own keys (`omnicomp.options.Policy`) and Inductor's config keys.

    Returns:
        A function of the graph's inputs.

    Raises:
        OptionError: an option is unknown or has a wrong value.
    """
    try:
        policy = parse(mode, options)
    except OmnicompError as error:
        raise dynamo.user_error(error) from None
    with dynamo.compile_lock:
        graph = _override_blocks(gm, capture_graph(gm, example_inputs, policy, options))
        original = copy_module(gm)
        passed = _run_passes(gm, graph, speculate=_may_speculate(policy))
        if passed.assumptions:
            return _with_variants(passed, original, example_inputs, graph)
        return _build(passed, example_inputs, graph)


def reset() -> None:
    """Forget recorded CUDA graphs; `torch.compiler.reset()` calls it."""
    inductor.reset_cudagraphs()


omni.reset = reset  # type: ignore[attr-defined]


def _override_blocks(gm: GraphModule, graph: CapturedGraph) -> CapturedGraph:
    """Put overrides in the place of whole modules, before the passes change those and before variants part."""
    if "override" in graph.policy.lowerings:
        for name, error in overrides.broken().items():
            _record_broken(graph, name, error)
    return dataclasses.replace(graph, declined=apply_blocks(gm, graph.context("", {}), training=graph.training))


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
    """

    module: GraphModule
    assumptions: tuple[Assumption, ...]
    events: tuple[Event, ...]


def _run_passes(gm: GraphModule, graph: CapturedGraph, *, speculate: bool) -> _Passed:
    """Run the pipeline; a pass that raises costs its rewrites, not the user's program."""
    # Rewrites are reported to a timeline of their own first: those of a pass that raises did not happen.
    reported = Timeline()
    context = PassContext(
        graph_id=graph.id,
        device=graph.device,
        policy=graph.policy,
        timeline=reported,
        training=graph.training,
        speculate=speculate,
    )
    kept = copy_module(gm)
    try:
        run_pipeline(passes.PIPELINE, gm, context)
    except dynamo.CONTROL_FLOW:
        raise
    except Exception as error:
        if graph.policy.on_error == "raise":
            raise
        reason = Reason(
            code="capture_failed",
            by="passes",
            sentence=f"a pass raised, and the graph goes on as Dynamo captured it: {first_line(error)}",
            lever="switch the pass off with options={'disable_passes': [...]}, and report the error",
        )
        _record_retreat(graph, "passes", "no passes", reason)
        return _Passed(module=kept, assumptions=(), events=())
    return _Passed(module=gm, assumptions=tuple(context.assumptions), events=reported.events())


def _may_speculate(policy: Policy) -> bool:
    """Whether a variant can be compiled after Dynamo's compilation; with frozen weights it can't, as they are gone."""
    return policy.speculate and late.is_tracing() and not inductor.freezing(policy.inductor)


def _with_variants(
    passed: _Passed, original: GraphModule, inputs: Sequence[Any], graph: CapturedGraph
) -> Callable[..., Any]:
    """A variant that is right where the assumptions hold, and a general one; each compiled when a call needs it."""
    try:
        scene = late.keep_scene(inputs)
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
        return _build(_run_passes(original, graph, speculate=False), inputs, graph)
    general = dataclasses.replace(
        graph, id=f"{graph.id}:{GENERAL}", capture=dataclasses.replace(graph.capture, variant=GENERAL)
    )
    eager = copy_module(original)

    def build_assumed(after_dynamo: bool) -> Callable[..., Any]:
        return build(lambda: passed, graph, after_dynamo)

    def build_general(after_dynamo: bool) -> Callable[..., Any]:
        current().append(dataclasses.replace(general.capture, graph=general.id))
        return build(lambda: _run_passes(original, general, speculate=False), general, after_dynamo)

    def build(make: Callable[[], _Passed], variant: CapturedGraph, after_dynamo: bool) -> Callable[..., Any]:
        if not after_dynamo:
            return _build(make(), inputs, variant)
        compiled, sizes = late.compile_late(scene, lambda fakes: _build(make(), fakes, variant, after_dynamo=True))
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
    compiled: Callable[..., Any], eager: Callable[..., Any], sizes: late.SizeGuards, graph: CapturedGraph
) -> Callable[..., Any]:
    """Call what was compiled where it is right, and the graph itself for other sizes, which Dynamo's guards let in."""
    compiler = "inductor" if _uses_inductor(graph) else "autograd"
    reason = Reason(
        code="capture_failed",
        by="speculation",
        sentence="a variant that was compiled late is right for some sizes only, and a call had others: they run eager",
        needed=sizes.text,
        lever="switch it off with options={'speculate': False}",
    )
    retreat = Once(lambda: _record_eager(graph, compiler, reason)())

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
    kept = copy_module(passed.module)
    steering = () if after_dynamo else dynamo.CONTROL_FLOW
    try:
        faults.refuse_known_faults(passed.module, training=graph.training)
        faults.return_inputs_of_dropout(passed.module)
        with dynamo.leave_transforms_on_error(), faults.unobserved_first_call(passed.module):
            compiled = _compile(passed.module, inputs, graph)
    except steering:
        raise
    except Exception as error:
        if not after_dynamo and isinstance(error, dynamo.GRAPH_BREAKS):
            _record_graph_break(graph, error)
            raise
        if graph.policy.on_error == "raise":
            raise
        compiled = _retreat_to_eager(kept, graph, error)
    notify(graph.id, graph.policy)
    return compiled


def _compile(gm: GraphModule, inputs: Sequence[Any], graph: CapturedGraph) -> Any:
    """Autograd, with every part built by the ladder; decisions of parts restored from a cache are replayed."""

    def inner_compile(part: GraphModule, part_inputs: Sequence[Any], **kwargs: Any) -> Any:
        name = inductor.part_name(kwargs)
        with inductor.cache_tag(graph.digest):
            built = build_part(part, part_inputs, graph.context(name, kwargs))
        if name == "backward":
            notify(graph.id, graph.policy)
        return built

    def restored(compiled: Any, record: str | None, part: str) -> None:
        replay(record, graph.context(part, {}), compiled)

    if not _uses_inductor(graph):
        return aot.compile_graph(gm, inputs, inner_compile)
    before = inductor.cache_counters()
    # A restored part comes without the graph that it could be compared with.
    lookup = inductor.autograd_cache(graph.policy.verify == "off")
    with inductor.cache_tag(graph.digest), inductor.on_artefact_loaded(restored), lookup:
        compiled = inductor.compile_fx(
            gm,
            list(inputs),
            inner_compile=inner_compile,
            config_patches=folding.config_patches(partition.config_patches(graph.policy.inductor)),
        )
    after = inductor.cache_counters()
    for verdict in ("miss", "bypass"):
        if after[f"aot_autograd.{verdict}"] > before[f"aot_autograd.{verdict}"]:
            current().append(Cache(graph=graph.id, part="", cache="aot_autograd", verdict=verdict))
    return compiled


def _record_graph_break(graph: CapturedGraph, error: Exception) -> None:
    """Dynamo takes the graph back, breaks it, and hands over the pieces as graphs of their own."""
    reason = Reason(
        code="capture_failed",
        by="dynamo",
        sentence=f"the graph can't be traced as a whole, and Dynamo breaks it in pieces: {first_line(error)}",
        lever="keep sizes independent of data, or see torch._dynamo.config.capture_dynamic_output_shape_ops",
    )
    _record_retreat(graph, "capture", "graph break", reason)


def _record_retreat(graph: CapturedGraph, source: str, target: str, reason: Reason) -> None:
    """Record that the whole graph moved from one way of going on to another."""
    current().append(
        Retreat(
            graph=graph.id,
            part="",
            subgraph=graph.id,
            source_lowering=source,
            target_lowering=target,
            reason=reason,
        )
    )


def _uses_inductor(graph: CapturedGraph) -> bool:
    policy = graph.policy
    asked = "inductor" in policy.lowerings or any("inductor" in rule.lowerings for rule in policy.rules)
    return asked and "inductor" in graph.device.lowerings


def _retreat_to_eager(gm: GraphModule, graph: CapturedGraph, error: Exception) -> Any:
    """Run the graph as the passes left it, through torch's dispatcher."""
    compiler = "inductor" if _uses_inductor(graph) else "autograd"
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
    once = _record_eager(graph, compiler, reason)

    def run(*args: Any) -> Any:
        result = gm(*args)
        once()
        return result

    return dynamo.disable(run, reason="omnicomp runs this graph eagerly")


def _record_eager(graph: CapturedGraph, compiler: str, reason: Reason) -> Once:
    """Record that the whole graph moved to eager; what is returned records that it ran there."""
    timeline = current()
    _record_retreat(graph, compiler, "eager", reason)
    timeline.append(Attempt(graph=graph.id, part="", subgraph=graph.id, lowering=compiler, ok=False, reason=reason))
    timeline.append(Attempt(graph=graph.id, part="", subgraph=graph.id, lowering="eager", ok=True, selected=True))
    ran = Ran(graph=graph.id, part="", subgraph=graph.id, lowering="eager", evidence="torch.fx.GraphModule")
    return Once(lambda: timeline.append(ran))
