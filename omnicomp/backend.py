"""The backend: `torch.compile(model, backend="omni")`.

The way of a graph reads top to bottom in `omni`: capture, passes, autograd with placement and lowering of each part,
and what to do if that fails.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from omnicomp import passes
from omnicomp._torch import aot, dynamo, inductor
from omnicomp._torch.fx import copy_module
from omnicomp.costs import known_sizes
from omnicomp.devices import Device, get_device, primary_device
from omnicomp.errors import OmnicompError
from omnicomp.graphs import all_nodes, call_count, fake_value, function_name, module_path, source_line
from omnicomp.ladder import build_part
from omnicomp.localize import first_line
from omnicomp.lowerings import LoweringContext
from omnicomp.lowerings.overrides import registry as overrides
from omnicomp.notices import notify
from omnicomp.once import Once
from omnicomp.options import Policy, parse
from omnicomp.passes.base import PassContext, run_pipeline
from omnicomp.passes.base import digest as passes_digest
from omnicomp.records import distinct, replay
from omnicomp.timeline import Attempt, Cache, Capture, Option, Ran, Reason, Retreat, Timeline, attach, current

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
        graph = _capture(gm, example_inputs, policy, options)
        gm = _run_passes(gm, graph)
        kept = copy_module(gm)
        try:
            with dynamo.leave_transforms_on_error():
                compiled = _compile(gm, example_inputs, graph)
        except dynamo.CONTROL_FLOW:
            raise
        except dynamo.GRAPH_BREAKS as error:
            _record_graph_break(graph, error)
            raise
        except Exception as error:
            if policy.on_error == "raise":
                raise
            compiled = _retreat_to_eager(kept, graph, error)
        notify(graph.id, policy)
        return compiled


def reset() -> None:
    """Forget recorded CUDA graphs; `torch.compiler.reset()` calls it."""
    inductor.reset_cudagraphs()


omni.reset = reset  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Graph:
    """A captured graph on its way through the backend."""

    id: str
    device: Device
    policy: Policy
    training: bool
    digest: str
    modules: tuple[str, ...]
    sources: tuple[str, ...]
    sizes: dict[str, int]

    def context(self, part: str, inductor_kwargs: Mapping[str, Any]) -> LoweringContext:
        """What the lowerings may know about one part."""
        return LoweringContext(
            graph_id=self.id,
            part=part,
            device=self.device,
            policy=self.policy,
            timeline=current(),
            inductor_kwargs=dict(inductor_kwargs),
            digest=self.digest,
            modules=self.modules,
            sources=self.sources,
            sizes=self.sizes,
        )


def _capture(gm: GraphModule, inputs: Sequence[Any], policy: Policy, options: Mapping[str, Any] | None) -> _Graph:
    """Record the graph and choose its device."""
    timeline = current()
    attach(timeline, None)
    if policy.timeline is not None:
        attach(timeline, policy.timeline)
    nodes = list(all_nodes(gm))
    tensors = [v for v in tree_leaves([fake_value(n) for n in nodes]) if isinstance(v, torch.Tensor)]
    tensors += [v for v in inputs if isinstance(v, torch.Tensor)]
    device = primary_device(t.device.type for t in tensors) if policy.device == "auto" else get_device(policy.device)
    training = torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs)
    graph = _Graph(
        id=timeline.next_graph(),
        device=device,
        policy=policy,
        training=training,
        digest=_digest(policy, device),
        modules=distinct(map(module_path, nodes)),
        sources=distinct(map(source_line, nodes)),
        sizes=known_sizes(inputs),
    )
    timeline.append(
        Capture(
            graph=graph.id,
            compile_id=dynamo.compile_id(),
            function=function_name(nodes),
            nodes=call_count(gm),
            device=device.type,
            training=training,
            dynamic=any(isinstance(v, torch.SymInt) for v in inputs),
            mode=policy.mode,
            options=dict(options or {}),
            versions={"torch": torch.__version__, "omnicomp": version()},
        )
    )
    if inductor.freezing_requested(policy.inductor):
        _record_freezing(graph)
    return graph


def _record_freezing(graph: _Graph) -> None:
    current().append(
        Option(
            graph=graph.id,
            key="freezing",
            requested="True",
            effective="False",
            reason=Reason(
                code="option_ineffective",
                by="dynamo",
                sentence="Dynamo decides on freezing from the global config while it traces, before options are read",
                lever="set torch._inductor.config.freezing = True before the first call, under torch.no_grad()",
            ),
        )
    )


def _run_passes(gm: GraphModule, graph: _Graph) -> GraphModule:
    """Run the pipeline; a pass that raises costs its rewrites, not the user's program."""
    # Rewrites are reported to a timeline of their own first: those of a pass that raises did not happen.
    reported = Timeline()
    context = PassContext(
        graph_id=graph.id, device=graph.device, policy=graph.policy, timeline=reported, training=graph.training
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
        return kept
    for event in reported:
        current().append(event)
    return gm


def _compile(gm: GraphModule, inputs: Sequence[Any], graph: _Graph) -> Any:
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
    with inductor.cache_tag(graph.digest), inductor.on_artefact_loaded(restored):
        compiled = inductor.compile_fx(
            gm, list(inputs), inner_compile=inner_compile, config_patches=dict(graph.policy.inductor)
        )
    after = inductor.cache_counters()
    for verdict in ("miss", "bypass"):
        if after[f"aot_autograd.{verdict}"] > before[f"aot_autograd.{verdict}"]:
            current().append(Cache(graph=graph.id, part="", cache="aot_autograd", verdict=verdict))
    return compiled


def _record_graph_break(graph: _Graph, error: Exception) -> None:
    """Dynamo takes the graph back, breaks it, and hands over the pieces as graphs of their own."""
    reason = Reason(
        code="capture_failed",
        by="dynamo",
        sentence=f"the graph can't be traced as a whole, and Dynamo breaks it in pieces: {first_line(error)}",
        lever="keep sizes independent of data, or see torch._dynamo.config.capture_dynamic_output_shape_ops",
    )
    _record_retreat(graph, "capture", "graph break", reason)


def _record_retreat(graph: _Graph, source: str, target: str, reason: Reason) -> None:
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


def _uses_inductor(graph: _Graph) -> bool:
    return "inductor" in graph.policy.lowerings and "inductor" in graph.device.lowerings


def _retreat_to_eager(gm: GraphModule, graph: _Graph, error: Exception) -> Any:
    """Run the graph as the passes left it, through torch's dispatcher."""
    timeline = current()
    compiler = "inductor" if _uses_inductor(graph) else "autograd"
    reason = Reason(
        code="capture_failed",
        by=compiler,
        sentence=f"the compiler raised on the whole graph: {first_line(error)}",
        observed=type(error).__name__,
        source=graph.sources[0] if graph.sources else "",
        lever="report the error to PyTorch, or keep the operator out with torch.compiler.disable",
    )
    _record_retreat(graph, compiler, "eager", reason)
    timeline.append(Attempt(graph=graph.id, part="", subgraph=graph.id, lowering=compiler, ok=False, reason=reason))
    timeline.append(Attempt(graph=graph.id, part="", subgraph=graph.id, lowering="eager", ok=True, selected=True))
    ran = Ran(graph=graph.id, part="", subgraph=graph.id, lowering="eager", evidence="torch.fx.GraphModule")
    once = Once(lambda: timeline.append(ran))

    def run(*args: Any) -> Any:
        result = gm(*args)
        once()
        return result

    return dynamo.disable(run, reason="omnicomp runs this graph eagerly")


def _digest(policy: Policy, device: Device) -> str:
    """Hash of everything of ours that changes generated code, for the keys of the compile caches."""
    parts = (
        package_digest(),
        sorted(policy.digest_parts().items()),
        device.type,
        passes_digest(passes.PIPELINE),
        overrides.digest(policy.disable_overrides),
    )
    return f"omnicomp-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"


@functools.cache
def version() -> str:
    """Version of the installed package, or `checkout` if it is not installed."""
    try:
        return importlib.metadata.version("omnicomp")
    except importlib.metadata.PackageNotFoundError:
        return "checkout"


@functools.cache
def package_digest() -> str:
    """Hash of omnicomp's version and sources: an edited checkout never meets the artefacts of the old one.

    The views (audit, cli) are left out: they read what was compiled and change nothing of it.
    """
    value = hashlib.sha256(version().encode())
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] in ("audit", "cli"):
            continue
        value.update(str(relative).encode())
        value.update(path.read_bytes())
    return value.hexdigest()
