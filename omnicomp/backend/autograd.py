"""Times of the stages of a compilation, for the timeline; an outer stage does not count the stages inside it."""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from omnicomp._torch.autograd import aot_autograd, partitioner
from omnicomp._torch.autograd.compiled_function import Results, on_function
from omnicomp._torch.dynamo.control_flow import CONTROL_FLOW, GRAPH_BREAKS
from omnicomp._torch.dynamo.regions import traced_anew
from omnicomp._torch.fx import copy_module, forget_tensors
from omnicomp._torch.inductor import compile_fx
from omnicomp._torch.inductor.cache_entry import StitchedGraph, is_bundled, is_marked, mark
from omnicomp._torch.inductor.cache_lookups import autograd_lookup, counts
from omnicomp._torch.inductor.recordable import marked_inputs
from omnicomp._torch.repairs import folded_nans
from omnicomp._torch.repairs.decompositions import decompositions_mended
from omnicomp._torch.repairs.rounded_casts import casts_kept
from omnicomp._torch.repairs.stale_floats import floats_current
from omnicomp._torch.repairs.written_while_read import sources_kept
from omnicomp.backend.capture import CapturedGraph
from omnicomp.builder.cache_keys import verdict
from omnicomp.builder.early_regions import EarlyRegions, call_regions
from omnicomp.builder.known_failures import wrong_code
from omnicomp.builder.part import build_part
from omnicomp.builder.record import replay
from omnicomp.builder.regions import left_whole
from omnicomp.builder.stitched_artefact import restoring
from omnicomp.errors import OmnicompError, first_line, harmless
from omnicomp.options.policy import VERIFYING, Policy, engines_of
from omnicomp.runtime.fallback_limit import judge_graph, notify
from omnicomp.runtime.tf32 import compiling
from omnicomp.timeline import Reason, Stage, current
from omnicomp.timeline.activity import activity
from omnicomp.timeline.graph_dump import dump
from omnicomp.timeline.recorder import Where, record_step_down

if TYPE_CHECKING:
    from omnicomp.lowerings.engines.subgraph import Weights

Compile = Callable[..., Any]
"""Takes a graph, its inputs, its record, and more."""


class _Nested(threading.local):
    seconds = 0.0
    """What the stages took that were inside of the one under way."""


_nested = _Nested()


@contextlib.contextmanager
def stage(name: str, graph: str, part: str = "") -> Generator[None]:
    """Record how long the body took, also where it raises."""
    outer, _nested.seconds = _nested.seconds, 0.0
    start = time.perf_counter()
    try:
        yield
    finally:
        total = time.perf_counter() - start
        inside, _nested.seconds = _nested.seconds, outer + total
        with harmless("how long a stage took"):
            current().append(Stage(graph=graph, stage=name, part=part, seconds=total - inside))


def autograd_stage(compile_parts: Compile) -> Compile:
    """The function, recorded as the stage `autograd` of its graph."""

    @functools.wraps(compile_parts)
    def recorded(gm: GraphModule, inputs: Sequence[Any], graph: CapturedGraph, *more: Any) -> Any:
        with stage("autograd", graph.id):
            return compile_parts(gm, inputs, graph, *more)

    return recorded


@autograd_stage
def compile_parts(
    gm: GraphModule, inputs: Sequence[Any], graph: CapturedGraph, weights: "Weights | None" = None
) -> Any:
    """Run AOTAutograd and build every part; the records of parts that a cache restores are replayed.

    A graph for inference stays as it is; one in training is consumed.
    """
    policy = graph.policy
    undecomposed = engines_of(policy) or policy.numerics != "inductor"
    if graph.training or policy.regions == "never" or undecomposed or not uses_inductor(graph):
        return _compile(gm, inputs, graph, weights, None)
    try:
        always = policy.regions == "always"
        regions = call_regions(gm, always=always, device=graph.device.type, options=policy.inductor)
        if regions is None:
            return _compile(gm, inputs, graph, weights, None)
        if policy.certifies:
            from omnicomp.builder.certificates import certify_calls, refuted

            found = certify_calls(gm, regions.module, graph.id)
            current().append(found)
            if refuted([found]):
                return _compile(gm, inputs, graph, weights, left_whole(refuted([found])))
        return _compile(regions.module, inputs, graph, weights, regions)
    except (*CONTROL_FLOW, *GRAPH_BREAKS, OmnicompError):
        raise
    except Exception as error:
        if policy.on_error == "raise":
            raise
        why = f"calls of what repeats could not be traced: {first_line(error)}"
        return _compile(gm, inputs, graph, weights, left_whole(why))


def _compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    graph: CapturedGraph,
    weights: "Weights | None",
    regions: EarlyRegions | Reason | None,
) -> Any:
    # A verdict on generated code must not be passed by in a cache that holds that code.
    tag = f"{graph.record.digest}{wrong_code()}"
    verifies = graph.policy.verify in VERIFYING
    tag = f"{tag}-verified" if verifies and is_bundled() else tag
    tag = f"{tag}-passes" if graph.policy.verify == "inductor" else tag
    tag += marked_inputs(gm) if graph.device.type == "cuda" else ""
    engines, exact, count = bool(engines_of(graph.policy)), graph.policy.numerics != "inductor", len(inputs)
    known = weights or {}
    if engines and weights is None:
        from omnicomp.lowerings.engines.subgraph import weights_of

        known = weights_of(gm, inputs)
    own = None if graph.training else copy_module(gm, lazy=True) if not isinstance(regions, EarlyRegions) else gm
    gm = own or gm

    def inner_compile(part: GraphModule, part_inputs: Sequence[Any], **kwargs: Any) -> Any:
        name = compile_fx.part_name(kwargs)
        context = graph.context(name, kwargs)
        if engines:
            from omnicomp.lowerings.engines.subgraph import informed

            context = informed(context, part, known, count)
        context = dataclasses.replace(context, undecomposed=True) if exact else context
        doing = activity("part", context.part_id, shown=graph.policy.progress, graph=graph.id, part=name)
        dump(graph.id, "autograd", part, name)
        seen = _passes_seen(graph)
        with compile_fx.cache_tag(tag), compiling(context), stage("lowering", graph.id, name), doing, seen:
            built = build_part(part, part_inputs, context, regions)
        if is_bundled() and not is_marked(built):
            mark(
                built,
                StitchedGraph(
                    unkept=f"{context.part_id} could not be built, and runs eager; omnicomp.audit() tells why"
                ),
            )
        if name == "backward":
            judge_graph(graph.id, graph.policy)
            notify(graph.id, graph.policy)
        return built

    def restored(compiled: Any, kept: compile_fx.Kept) -> None:
        replay(kept, graph.context(kept.part, {}), compiled)

    by_inductor = uses_inductor(graph)
    patches = folded_nans.config_patches(partitioner.config_patches(graph.policy.inductor)) if by_inductor else {}
    if by_inductor and graph.policy.records and graph.device.type == "cuda":
        patches["triton.cudagraphs"] = True  # so that what can't be recorded, and where to cut, is found out
    # A restored part comes without the graph that it could be compared with, unless it is bundled. And torch looks it
    # up also for a partitioner of the user's that gives no key, which Inductor's own cache takes for a wish not to be
    # cached.
    keyed = not by_inductor or patches["custom_partitioner_fn"].uuid() is not None
    cache = compile_fx.autograd_cache(keyed and (is_bundled() or not verifies))
    before = counts()
    with (
        compile_fx.cache_tag(tag),
        compiling(graph.context("", {})),
        _passes_seen(graph),
        compile_fx.on_artefact_loaded(restored),
        on_function(eager_gradients(graph)),
        restoring(lambda part: graph.context(part, {})),
        cache,
        traced_anew(),
        decompositions_mended(),
        casts_kept(),
        sources_kept(),
        floats_current(),
        activity("autograd", f"autograd of {graph.id}", shown=graph.policy.progress, graph=graph.id),
    ):
        if not by_inductor:
            compiled = aot_autograd.compile_graph(gm, inputs, inner_compile)
        else:
            compiled = compile_fx.compile_fx(
                gm,
                list(inputs),
                inner_compile=inner_compile,
                config_patches=patches,
                decompositions={} if engines or exact else None,
            )
    if own is not None:
        forget_tensors(own)
    lookup = autograd_lookup(before)
    if lookup is not None and lookup.verdict != "hit":  # a restored graph says so itself
        current().append(verdict(lookup, graph.record.key, graph=graph.id, part=""))
    return compiled


def _passes_seen(graph: CapturedGraph) -> contextlib.AbstractContextManager[None]:
    """Inside, Inductor's own passes are checked, if that is asked for."""
    if graph.policy.verify != "inductor":
        return contextlib.nullcontext()
    from omnicomp.builder.certificates import inductors_certified

    return inductors_certified(graph.id)


def eager_gradients(graph: CapturedGraph) -> Callable[[Any, Results], None]:
    """Puts eager's autograd beside the backward of a graph in training, for what a compiled one can't give."""
    from omnicomp.runtime.eager_gradients import LEVER, EagerGradients

    def record(why: str) -> None:
        reason = Reason(
            code="eager_autograd",
            by="autograd",
            sentence=f"{why}: eager's autograd computed that gradient, and the forward once more",
            lever=LEVER,
        )
        where: Where = {"graph": graph.id, "part": "backward", "subgraph": f"{graph.id}.backward"}
        source = "inductor" if uses_inductor(graph) else "autograd"
        record_step_down(current(), where, source, "eager", reason, attempts=False)

    def attach(function: Any, results: Results) -> None:
        if graph.plain is not None:
            EagerGradients(graph.plain, [graph.device.type], record).attach(function, results)

    return attach


def uses_inductor(graph: CapturedGraph) -> bool:
    """Whether a part of the graph may go to Inductor, so that `compile_fx` drives autograd."""
    return asks_inductor(graph.policy) and "inductor" in graph.device.lowerings


def asks_inductor(policy: Policy) -> bool:
    """Whether Inductor is among the lowerings that a program asks for."""
    return "inductor" in policy.lowerings or any("inductor" in rule.lowerings for rule in policy.rules)
