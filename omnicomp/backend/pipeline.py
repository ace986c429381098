"""The backend: `torch.compile(model, backend="omni")`.

From top to bottom: `omni` captures the graph, `compile_graph` runs the passes, `_build` answers for failures, and
`_compile_passed` calls autograd, which has each part placed and built. Where a pass assumed something of the inputs,
there are two variants of what follows the passes.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from omnicomp._torch.dynamo import control_flow, late_compile, overlaps, saving
from omnicomp._torch.fx import called_with_fakes, copy_module, forget_tensors, read_attributes
from omnicomp._torch.inductor import compile_fx, early_kernels, first_build, libraries
from omnicomp._torch.inductor.vec_isa import isas_tested_lazily
from omnicomp._torch.repairs.encoder_sizes import put_fake_layer
from omnicomp._torch.repairs.method_guards import guard_methods
from omnicomp._torch.repairs.random_numbers import as_passed
from omnicomp._torch.repairs.recomputed_draws import eager_calls
from omnicomp.analysis.nodes import all_nodes
from omnicomp.analysis.provenance import places_of
from omnicomp.backend import weight_inputs
from omnicomp.backend.autograd import asks_inductor, compile_parts, uses_inductor
from omnicomp.backend.bit_equality import compared
from omnicomp.backend.block_overrides import late_overrides, override_blocks
from omnicomp.backend.capture import CapturedGraph, capture_graph, record_recompile_limit
from omnicomp.backend.options import policy_of
from omnicomp.backend.outcome import ending
from omnicomp.backend.retreat import (
    given_up_if_rejected,
    graph_compiler,
    record_graph_break,
    retreat_to_eager,
    run_by_eagers_autograd,
    run_on_fake_tensors,
    run_uncaptured,
)
from omnicomp.backend.run_passes import Passed, run_passes
from omnicomp.backend.saved import Compiled, carried, hand_over, put_state
from omnicomp.backend.shared_memory import checked, refused
from omnicomp.errors import OmnicompError, first_line
from omnicomp.lowerings.override import has_own_gradients, put_references
from omnicomp.lowerings.overrides.late import LateOverrides, raise_late, restartable
from omnicomp.options.policy import Policy
from omnicomp.passes.assumptions import keeps_inputs
from omnicomp.passes.mask_classes import MaskClass
from omnicomp.runtime import ranks
from omnicomp.runtime.fallback_limit import enforce, notify
from omnicomp.safety.privacy import logger
from omnicomp.timeline import Reason, Speculation, current
from omnicomp.timeline.activity import activity
from omnicomp.timeline.graph_dump import dump

log = logger("omnicomp")


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
    with (
        control_flow.compile_lock,
        control_flow.unseen_by_hooks(),
        under_way as doing,
        ending() as end,
        saving.wanted(gm) as wish,
    ):
        end.state = "built" if wish is None else "saved"
        try:
            read_attributes(gm)
            guard_methods()
            example_inputs = as_passed(gm, example_inputs)
            graph = capture_graph(gm, example_inputs, policy, options)
            end.graph = graph.id
            ranks.join(graph.record, gm)
            doing.say(f"{graph.id} {graph.capture.function}".rstrip(), graph=graph.id)
            dump(graph.id, "dynamo", gm)
            plain = copy_module(gm, lazy=True)
            graph = dataclasses.replace(graph, plain=copy_module(gm, lazy=True) if graph.training else None)
        except (*control_flow.CONTROL_FLOW, OmnicompError):
            raise
        except Exception as error:
            if policy.on_error == "raise":
                raise
            return hand_over(run_uncaptured(gm, error), wish)
        if called_with_fakes(gm):
            return run_on_fake_tensors(gm, graph)
        if graph.training and policy.autograd == "eager":
            return hand_over(run_by_eagers_autograd(gm, graph), wish)
        if policy.background and wish is None:
            from omnicomp.backend.background import build_behind

            behind = build_behind(
                gm,
                plain,
                graph,
                example_inputs,
                lambda fakes: compile_graph(copy_module(plain), copy_module(plain), graph, fakes, after_dynamo=True),
            )
            if behind is not None:
                return behind
        if uses_inductor(graph):
            first_build.begin(graph.device.type, policy.inductor)
        try:
            with isas_tested_lazily:  # what a cache brings asks for the sets, too
                compiled = compile_graph(gm, plain, graph, example_inputs)
        except (*control_flow.CONTROL_FLOW, *control_flow.GRAPH_BREAKS, OmnicompError):
            raise
        except Exception as error:
            if policy.on_error == "raise":
                raise
            compiled = retreat_to_eager(plain, graph, error)
        return hand_over(compiled, wish, graph.id)


def _begin_first_build(mode: str | None, options: Mapping[str, Any] | None) -> None:
    """Begin what the first build waits for while Dynamo traces a graph that will most likely go to Inductor."""
    try:
        policy = policy_of(mode, options)
        device = first_build.likely_device()
        if device and asks_inductor(policy) and not policy.background:
            first_build.begin(device, policy.inductor)
    except Exception as error:  # noqa: BLE001 - the compilation meets the same, and says so
        log.debug("omni: the first build was not begun early: %s", first_line(error))


def compile_graph(
    gm: GraphModule,
    plain: GraphModule,
    graph: CapturedGraph,
    inputs: Sequence[Any],
    *,
    after_dynamo: bool = False,
) -> Callable[..., Any]:
    """Overrides of blocks, passes, and all that follows.

    Args:
        gm: a Dynamo graph, which is consumed.
        plain: an unchanged copy of it.
        graph: what it belongs to.
        inputs: real or fake tensors and symbolic sizes, one a placeholder.
        after_dynamo: whether Dynamo's compilation is over, so that it can't be asked to break the graph any more.

    Raises:
        Exception: what steers Dynamo, or anything if the policy says so.
    """
    sharing = overlaps.sharing_of(gm)
    if sharing.returned:
        return refused(plain, graph)
    graph = override_blocks(gm, graph)
    # Without a block that was replaced, the copy is one of the graph as the passes get it.
    same = [node.name for node in plain.graph.nodes] == [node.name for node in gm.graph.nodes]
    if not same:
        dump(graph.id, "overrides", gm)
    original = plain if same else copy_module(gm)
    while True:
        speculate = not after_dynamo and _may_speculate(graph.policy)
        passed = run_passes(gm, graph, speculate=speculate, kept=original, inputs=graph.values or inputs)
        try:
            if passed.assumptions:
                compiled = _with_variants(passed, original, inputs, graph)
                return checked(compared(compiled, plain, graph, owned=False), plain, sharing, graph)
            compiled = _build(passed, inputs, graph, after_dynamo=after_dynamo)
        except LateOverrides as wanted:
            gm = copy_module(original)
            graph = late_overrides(gm, graph, wanted)
            dump(graph.id, "overrides", gm)
            original = copy_module(gm)
            continue
        needed = sharing.compared or graph.policy.numerics == "eager"
        for copy in (plain, original):
            if copy is not passed.module and not (copy is plain and needed):
                forget_tensors(copy)
        compiled = compared(compiled, plain, graph, owned=not sharing.compared)
        return checked(compiled, plain, sharing, graph)


def _build(
    passed: Passed, inputs: Sequence[Any], graph: CapturedGraph, *, after_dynamo: bool = False
) -> Callable[..., Any]:
    """Compile a graph behind the passes; if the compiler fails, the graph runs eager."""
    graph.publish(passed.events)
    graph = graph.with_record(places=places_of(all_nodes(passed.module)))
    kept = copy_module(passed.module, lazy=True) if graph.training else passed.module
    steering = () if after_dynamo else control_flow.CONTROL_FLOW
    try:
        with contextlib.nullcontext() if after_dynamo else restartable():
            compiled = _compile_passed(passed, inputs, graph)
    except steering:
        raise
    except Exception as error:
        if not after_dynamo and isinstance(error, control_flow.GRAPH_BREAKS):
            record_graph_break(graph, error)
            raise
        if graph.policy.on_error == "raise":
            raise
        if not after_dynamo:
            raise_late(graph.record, error, graph_compiler(graph))
        compiled = retreat_to_eager(put_references(copy_module(kept)), graph, error)  # an override may be to blame
    else:
        if graph.training and graph.policy.verify != "off" and has_own_gradients(kept):
            # Gradients of an override are not compared in what was restored, which has no graph to go back to.
            compiled = carried(compiled, given_up_if_rejected(compiled, kept, graph))
        elif graph.training:
            forget_tensors(kept)
    compiled = carried(compiled, enforce(compiled, graph.id, graph.policy))
    notify(graph.id, graph.policy)
    return compiled


def _compile_passed(passed: Passed, inputs: Sequence[Any], graph: CapturedGraph) -> Callable[..., Any]:
    """Compile a graph behind the passes: weights, lowerings, autograd, and the building of each part."""
    with control_flow.leave_transforms_on_error(), passed.in_force():
        lifted = weight_inputs.lift_weights(passed.module, inputs, graph)
        chosen = graph
        if graph.policy.choose != "off":
            from omnicomp.backend.select.choose import choose

            chosen = choose(lifted.module, lifted.inputs, graph)
        if graph.policy.numerics == "eager" and graph.training:  # where no weights are lifted
            from omnicomp.backend.gradient_order import split_uses

            lifted = split_uses(lifted.module, lifted.inputs)
        compiled = compile_parts(lifted.module, lifted.inputs, chosen)
        if saving.is_bundled():
            events, repairs = passed.events, passed.traced_under
            put_state(compiled, lambda: Compiled.of(compiled, chosen, events, repairs))
        return lifted.followed(compiled)


def _may_speculate(policy: Policy) -> bool:
    """Whether a variant can be compiled after Dynamo's compilation; with frozen weights it can't, as they are gone."""
    return policy.speculate and late_compile.is_tracing() and not compile_fx.freezing(policy.inductor)


def _order_of_collectives(module: GraphModule, inputs: Sequence[Any], policy: Policy) -> Reason | None:
    """Why a graph may have no variants, which ranks choose by their own data; None if it may."""
    option = compile_fx.reorders_collectives(policy.inductor)
    if not option or not ranks.spans(module, inputs):
        return None
    return Reason(
        code="not_checkable",
        by="speculation",
        sentence="nothing is assumed, as ranks with other masks would take other variants, the collectives of which "
        f"Inductor may order in another way ({option})",
        observed=option,
        lever=f"leave {option} off, or pass no mask where nothing is hidden",
    )


def _with_variants(
    passed: Passed, original: GraphModule, inputs: Sequence[Any], graph: CapturedGraph
) -> Callable[..., Any]:
    """Variants that are right where assumptions hold, and a general one; each compiled when a call needs it."""
    from omnicomp.backend.variants import GENERAL, Case, Checks, Variant, Variants, variant_name, within_sizes
    from omnicomp.runtime.eager_gradients import effects_of

    reason, scene = _order_of_collectives(original, inputs, graph.policy), None
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
    if scene is None or reason is not None:
        sentence = "; ".join(item.sentence for item in passed.assumptions)
        current().append(
            Speculation(graph=graph.id, state="stopped", variant=GENERAL, sentence=sentence, reason=reason)
        )
        return _build(run_passes(original, graph, speculate=False, inputs=inputs), inputs, graph)
    general = dataclasses.replace(
        graph.with_record(id=f"{graph.id}:{GENERAL}"), capture=dataclasses.replace(graph.capture, variant=GENERAL)
    )
    # A calibration needs the real inputs, which are gone when this variant is built.
    calibrated = (
        None
        if graph.policy.dtype_error is None
        else run_passes(copy_module(original), general, speculate=False, inputs=inputs)
    )

    checks = Checks(passed.assumptions, [node.name for node in original.graph.find_nodes(op="placeholder")])

    def build_general(after_dynamo: bool) -> Callable[..., Any]:
        current().append(dataclasses.replace(general.capture, graph=general.id))
        return build(lambda: calibrated or run_passes(copy(), general, speculate=False), general, after_dynamo)

    def another(case: Case, number: int) -> Variant:
        answers: dict[Hashable, MaskClass] = {
            item.key: known for item, known in zip(checks.assumptions, case, strict=True) if known is not None
        }
        name = variant_name(number)
        own = graph if number == 1 else graph.with_record(id=f"{graph.id}:{name}")
        own = own if number == 1 else dataclasses.replace(own, capture=dataclasses.replace(graph.capture, variant=name))

        def build_it(after_dynamo: bool) -> Callable[..., Any]:
            if number > 1:
                current().append(dataclasses.replace(own.capture, graph=own.id))
            if case == checks.assumed:
                return build(lambda: passed, own, after_dynamo)
            return build(lambda: run_passes(copy(), own, speculate=True, answers=answers), own, after_dynamo)

        return Variant(name=name, graph=own.id, build=build_it)

    def copy() -> GraphModule:
        return copy_module(original)

    def build(make: Callable[[], Passed], variant: CapturedGraph, after_dynamo: bool) -> Callable[..., Any]:
        # The end of the graph's own compilation is recorded where it began.
        with ending("" if variant.id == graph.id else variant.id):
            if not after_dynamo:
                return _build(make(), inputs, variant)
            compiled, sizes = late_compile.compile_late(
                scene, lambda fakes: _build(make(), fakes, variant, after_dynamo=True)
            )
        # What is compiled ahead for a graph that may be saved is so before Dynamo makes its guards, which then hold it.
        if sizes.holds is None or saving.is_bundled():
            return compiled
        return within_sizes(compiled, eager_calls(original), sizes, variant)

    variants = Variants(
        checks=checks,
        assumed={} if checks.assumed is None else {checks.assumed: another(checks.assumed, 1)},
        general=Variant(name=GENERAL, graph=general.id, build=build_general),
        eager=original,
        timeline=current(),
        on_cuda=any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs),
        graph=graph.id,
        another=another if any(item.accepts for item in checks.assumptions) else None,
        repeatable=not compile_fx.records_cudagraphs(graph.policy.inductor)
        and keeps_inputs(original)
        and not effects_of(original),
    )
    variants.compile_first(graph.values or inputs)
    if saving.is_bundled():
        variants.compile_all()
    return variants.__call__


def reset() -> None:
    """Forget CUDA graphs, graphs of other sizes and classes of masks, free copies of weights, begin a new scope.

    `torch.compiler.reset()` calls it.
    """
    from omnicomp import weights
    from omnicomp.backend import earlier
    from omnicomp.passes import verdicts

    current().mark_reset()
    earlier.forget()
    compile_fx.reset_cudagraphs()
    verdicts.forget()
    weights.clear()


omni.reset = reset  # type: ignore[attr-defined]
control_flow.tell_threads_apart()
control_flow.watch_recompile_limits(record_recompile_limit)
control_flow.watch_starts(omni, _begin_first_build)
libraries.watch()
early_kernels.watch()
put_fake_layer()
