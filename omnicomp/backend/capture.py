"""What Dynamo hands over as a graph, and what it does not: where a graph breaks, and what it compiles no more."""

import dataclasses
import functools
import hashlib
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

import omnicomp
from omnicomp import passes, records
from omnicomp._torch.dynamo import control_flow
from omnicomp._torch.dynamo.control_flow import end_of
from omnicomp._torch.inductor import compile_fx
from omnicomp.analysis.costs import known_sizes
from omnicomp.analysis.hashes import stable_identities
from omnicomp.analysis.nodes import all_nodes, call_count, fake_value, function_name, module_path, source_line
from omnicomp.builder.known_failures import wrong_code
from omnicomp.devices import Device, primary_device, resolve_device
from omnicomp.errors import harmless
from omnicomp.lowerings import GraphRecord, KeyParts, LoweringContext
from omnicomp.lowerings.identities import compiler_identities
from omnicomp.lowerings.overrides import registry as overrides
from omnicomp.options.digest import package_digest
from omnicomp.options.policy import Policy, effective_options
from omnicomp.runtime.tf32 import record_without_tf32
from omnicomp.timeline import Capture, Event, NearMiss, Option, PassRun, Reason, Stage, Timeline, current, rank
from omnicomp.timeline.reasons import RECOMPILE_LIMIT, common_path, distinct
from omnicomp.timeline.recorder import run_id
from omnicomp.timeline.sinks import jsonl, logs, opentelemetry, structured_trace

_FIELD: Final = re.compile(r"^\s*(Explanation|Hint|Developer debug context): (.+)$")
_BRANCH: Final = "generic_jump"


def record_graph_break(gm: Any, graph: str, timeline: Timeline) -> None:
    """Record why a graph ends before its function does, if it does."""
    with harmless("why a graph ends"):
        found = end_of(gm)
        if found is not None:
            text, source = found
            reason = _reason(text, source)
            node = reason.observed or "the end of the graph"
            timeline.append(
                NearMiss(graph=graph, name="dynamo", kind="graph_break", node=node, source=source, reason=reason)
            )


def record_recompile_limit(compile_id: str, limit: str, function: str, source: str, guard: str) -> None:
    """Record that calls of a function run eager for which none of its graphs holds; it is told of with the last one."""
    with harmless("that a function is compiled no more"):
        frame = compile_id.rpartition("/")[0]
        captured = [event for event in current().events() if isinstance(event, Capture)]
        graphs = [event.graph for event in captured if event.compile_id.rpartition("/")[0] == frame]
        if not graphs:  # of another backend
            return
        reason = Reason(
            code=RECOMPILE_LIMIT,
            by="dynamo",
            sentence=f"compiled as often as torch._dynamo.config.{limit} allows; other calls run eager",
            observed=guard,
            source=source,
            lever=f"compile with dynamic=True or torch._dynamo.mark_dynamic what changes, or raise {limit}",
        )
        current().append(
            NearMiss(graph=graphs[-1], name="dynamo", kind=RECOMPILE_LIMIT, node=function, source=source, reason=reason)
        )


def _reason(text: str, source: str) -> Reason:
    """Dynamo's text is a headline, then lines with an explanation, hints and what it saw; the lines may be missing."""
    headline = text.strip().partition("\n")[0].strip().rstrip(".")
    if headline.startswith(_BRANCH):
        return Reason(
            code="graph_break",
            by="dynamo",
            sentence="a branch depends on the values of a tensor",
            source=source,
            lever="choose with torch.where or torch.cond, or decide outside of the compiled function",
        )
    fields: dict[str, list[str]] = {}
    for name, value in _fields(text):
        fields.setdefault(name, []).append(value.strip())
    explanation = " ".join(fields.get("Explanation", ())).rstrip(".")
    return Reason(
        code="graph_break",
        by="dynamo",
        sentence=explanation or headline,
        observed=next(iter(fields.get("Developer debug context", ())), ""),
        source=source,
        lever=_lever(fields.get("Hint", [])),
    )


def _fields(text: str) -> Iterator[tuple[str, str]]:
    return ((found[1], found[2]) for line in text.splitlines() if (found := _FIELD.match(line)))


def _lever(hints: list[str]) -> str:
    """The hints as one sentence, in an imperative's lower case."""
    said = "; or ".join(hint.rstrip(".") for hint in hints if "report an issue" not in hint)
    return said[:1].lower() + said[1:]


def attach_all(timeline: Timeline, policy: Policy) -> None:
    """Attach the sinks that the environment, the options and the program ask for; none is attached twice."""
    jsonl.attach(timeline, None, policy.timeline_max_bytes)
    if policy.timeline is not None:
        jsonl.attach(timeline, policy.timeline, policy.timeline_max_bytes)
    timeline.begin()
    logs.attach(timeline)
    structured_trace.attach(timeline, _report)
    opentelemetry.attach(timeline)


def _report(events: Sequence[Event]) -> str:
    """The audit as text, for a trace that is asked for."""
    from omnicomp.audit import build

    return build(events).to_text()


@records.dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """A captured graph on its way through the backend.

    `plain` is a copy of a graph in training as Dynamo captured it, for what eager's autograd is asked for. `values`
    are real inputs to look at and to measure on, where the graph is compiled for fake ones in another process; those
    that are not known are fake.
    """

    record: GraphRecord
    device: Device
    policy: Policy
    training: bool
    capture: Capture
    plain: GraphModule | None = None
    values: tuple[Any, ...] | None = None
    _published: list[Event] = dataclasses.field(default_factory=list[Event])

    @property
    def id(self) -> str:
        """Id of the graph."""
        return self.record.id

    def with_record(self, **changes: Any) -> "CapturedGraph":
        """The graph with fields of its record replaced."""
        return dataclasses.replace(self, record=dataclasses.replace(self.record, **changes))

    def publish(self, events: Sequence[Event]) -> None:
        """Record what the passes did; what they did in the same way before the graph was compiled again is there."""
        before = tuple(self._published)
        for event in events:
            known = dataclasses.replace(event, seconds=0.0) if isinstance(event, PassRun) else event
            if known not in before:
                self._published.append(known)
                current().append(event)

    def context(self, part: str, inductor_kwargs: Mapping[str, Any]) -> LoweringContext:
        """The context that the lowerings of one part get."""
        return LoweringContext(
            graph=self.record,
            part=part,
            device=self.device,
            policy=self.policy,
            timeline=current(),
            inductor_kwargs=dict(inductor_kwargs),
        )


def capture_graph(
    gm: GraphModule, inputs: Sequence[Any], policy: Policy, options: Mapping[str, Any] | None
) -> CapturedGraph:
    """Record the graph and choose its device."""
    timeline = current()
    attach_all(timeline, policy)
    nodes = list(all_nodes(gm))
    tensors = [v for v in tree_leaves([fake_value(n) for n in nodes]) if isinstance(v, torch.Tensor)]
    tensors += [v for v in inputs if isinstance(v, torch.Tensor)]
    device = (
        primary_device(t.device.type for t in tensors) if policy.device == "auto" else resolve_device(policy.device)
    )
    training = torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs)
    paths = [module_path(node) for node in nodes]
    id, modules, function = timeline.next_graph(), distinct(paths), function_name(nodes)
    effective, origins = effective_options(policy, options)
    scope = _scope(policy, id, nodes)
    parts = {**key_parts(policy, device), **({"what rules of placement go by": ("", scope)} if scope else {})}
    graph = CapturedGraph(
        record=GraphRecord(
            id=id,
            digest=f"{graph_digest(policy, device)}{scope}",
            modules=modules,
            sources=distinct(map(source_line, nodes)),
            sizes=known_sizes(inputs),
            key=KeyParts(identity=_identity(function, modules, training), parts=parts),
        ),
        device=device,
        policy=policy,
        training=training,
        capture=Capture(
            graph=id,
            function=function,
            nodes=call_count(gm),
            device=device.type,
            training=training,
            dynamic=any(isinstance(v, torch.SymInt) for v in inputs),
            mode=policy.mode,
            options=dict(options or {}),
            effective=effective,
            origins=origins,
            module=common_path(filter(None, paths)),
            fingerprint=stable_identities(nodes),
            **of_this_process(device),
        ),
    )
    timeline.append(graph.capture)
    tracing = control_flow.seconds_of_tracing()
    if tracing is not None:
        timeline.append(Stage(graph=id, stage="dynamo", seconds=tracing))
    record_graph_break(gm, id, timeline)
    record_without_tf32(id, policy.dtype_policy, device, timeline)
    if compile_fx.freezing_requested(policy.inductor):
        _record_freezing(graph)
    if "device" in policy.lowerings and "device" not in device.lowerings:
        _record_no_compiler(graph)
    return graph


def of_this_process(device: Device) -> dict[str, Any]:
    """The fields of a `Capture` event that tell of the process and its machine."""
    return {
        "compile_id": control_flow.compile_id(),
        "versions": _versions(device),
        "device_name": _name_of(device),
        "platform": f"{platform.system()} {platform.machine()}",
        "pid": os.getpid(),
        "rank": rank(),
        "run": run_id(),
    }


@functools.cache
def _name_of(device: Device) -> str:
    """The device's name for people; empty if it has none."""
    name = ""
    with harmless("the device's name"):
        name = device.capabilities().name if device.is_available() else ""
    return name


def _versions(device: Device) -> dict[str, str]:
    """Of the software that a graph is compiled with."""
    found = {"torch": torch.__version__, "omnicomp": omnicomp.__version__, "python": platform.python_version()}
    toolkit = torch.version.cuda or torch.version.hip
    if device.type == "cuda" and toolkit:
        found["hip" if torch.version.hip else "cuda"] = toolkit
    return found


def _record_freezing(graph: CapturedGraph) -> None:
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


def _record_no_compiler(graph: CapturedGraph) -> None:
    asked = graph.policy.lowerings
    current().append(
        Option(
            graph=graph.id,
            key="lowerings",
            requested=", ".join(asked),
            effective=", ".join(name for name in asked if name != "device"),
            reason=Reason(
                code="option_ineffective",
                by="device",
                sentence=f"{graph.device.type} has no compiler of its own",
                observed=", ".join(graph.device.lowerings),
                needed="device",
                lever="take device out of the lowerings, or write Device.compile_subgraph",
            ),
        )
    )


def graph_digest(policy: Policy, device: Device) -> str:
    """Hash of everything of ours that changes generated code, for the keys of the compile caches."""
    parts = (
        package_digest(),
        sorted(policy.digest_parts().items()),
        device.type,
        list(passes.keys(policy).items()),
        overrides.digest(policy.disable_overrides, policy.overrides),
        sorted(compiler_identities(policy, device).items()),
    )
    return f"omnicomp-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"


def key_parts(policy: Policy, device: Device) -> dict[str, tuple[str, str]]:
    """The components of the digest, by name: a text to show, and a hash."""
    parts = {"omnicomp": (omnicomp.__version__, package_digest()), "device": (device.type, device.type)}
    parts["code found to be wrong"] = ("", wrong_code())
    for name, value in policy.digest_parts().items():
        parts[f"option {name}"] = (repr(value), repr(value))
    for name, (version, digest) in compiler_identities(policy, device).items():
        parts[f"compiler {name}"] = (version, digest)
    for name, key in passes.keys(policy).items():
        parts[f"pass {name}"] = key
    for item in overrides.enabled(policy.disable_overrides, policy.overrides):
        parts[f"override {item.name}"] = ("", item.digest)
    return parts


def _scope(policy: Policy, id: str, nodes: Sequence[Node]) -> str:
    """The inputs of placement rules that torch's keys lack: modules, and the graph's id where a rule names one.

    Without them an equal graph in another module would be restored with that module's placement.
    """
    if not policy.rules:
        return ""
    seen = [id if any(rule.place is not None for rule in policy.rules) else "", *sorted(set(map(module_path, nodes)))]
    return f"-{hashlib.sha256(repr(seen).encode()).hexdigest()[:12]}"


def _identity(function: str, modules: Sequence[str], training: bool) -> str:
    """The function and the modules without line numbers, which are the same after an edit of the program."""
    return "\n".join((re.sub(r":\d+\)$", ")", function), f"training: {training}", *modules))
