"""The record of a part: made from its plan, emitted when it is built, stored in the artefact, and replayed.

A warm start never reaches our code for a part that AOTAutograd's cache restores. The record travels inside the
compiled graph, so that the timeline of a warm start says what the cold one said. It is part of the cache key, so it
holds no ids of the process, no times, and no sizes of a dynamic graph. The user's source lines and module paths are
read afresh from the Dynamo graph at every start: the record names its nodes (`omnicomp.analysis.provenance`).
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch.fx import GraphModule, Node

from omnicomp._torch.inductor import compile_fx
from omnicomp._torch.inductor.cache_lookups import Lookup
from omnicomp.analysis.collectives import collectives_of
from omnicomp.analysis.costs import cost_of, hint_of_text, read_of, size_of
from omnicomp.analysis.hashes import stable_identity
from omnicomp.analysis.nodes import fake_value, module_path, op_name, source_line
from omnicomp.builder import eager_artefact
from omnicomp.builder.boundaries import boundaries
from omnicomp.builder.cache_keys import verdict
from omnicomp.builder.partition import Piece
from omnicomp.builder.placement import Plan
from omnicomp.builder.regions import Shared
from omnicomp.lowerings import MAIN, Executable, LoweringContext
from omnicomp.lowerings.inductor import whole_executable
from omnicomp.lowerings.override import PlannedCall, override_of, planned, planned_call
from omnicomp.lowerings.overrides.registry import registered
from omnicomp.runtime.evidence import FirstCallObserver
from omnicomp.runtime.recording import record_calls
from omnicomp.runtime.wrappers import wrap
from omnicomp.timeline import (
    Attempt,
    Boundary,
    Cache,
    Certified,
    Event,
    NodePlacement,
    Option,
    Placement,
    Ran,
    Reason,
    Subgraph,
)
from omnicomp.timeline.files import event_from_dict
from omnicomp.timeline.reasons import common_path, distinct

_SHOWN: Final = 8
_UNRECORDED: Final = ("graph", "time", "seq", "schema")
_HINTS: Final = ("flops_hint", "bytes_hint")
_PLACES: Final = ("sources", "modules")


class PartRecord:
    """The events of one part, except for those about building and running it, which are known later."""

    def __init__(
        self,
        module: GraphModule,
        plan: Plan,
        refused: tuple[NodePlacement, ...],
        context: LoweringContext,
        names: Sequence[str],
        pieces: Sequence[Piece] = (),
        certificates: Sequence[Certified] = (),
    ) -> None:
        """Describe a part before it is built: Inductor changes the graph that it is given."""
        self._context = context
        self._whole = not pieces
        self._names = tuple(names)
        self._plan = plan
        self._placement = Placement(
            graph=context.graph_id,
            part=context.part,
            nodes=plan.counts,
            declined=(*refused, *plan.declined),
            note=self._note(plan),
            collectives=collectives_of(module),
        )
        self._declined = {node.node for node in plan.declined}
        self._unfit = {(placed.node, placed.op): placed.chain for placed in refused}
        self._subgraphs: list[Subgraph] = []
        self._overrides: dict[str, list[str]] = {}
        self._calls: dict[str, list[PlannedCall]] = {}
        for index, run in enumerate(plan.runs):
            piece = pieces[index] if pieces else None
            self._describe(index, run.lowering, run.nodes, _boundary(module, piece), whole=piece is None)
        self._boundaries = boundaries(pieces, context)
        self._certificates = list(certificates)

    def subgraph_id(self, index: int) -> str:
        """Id of a subgraph of this part."""
        return f"{self._context.part_id}.{index}"

    def share(self, shared: Shared, index: int = 0) -> None:
        """Note what of a subgraph is built once."""
        id = self.subgraph_id(index)
        self._subgraphs = [
            dataclasses.replace(row, repeats=shared.calls, left_whole=shared.left_whole) if row.subgraph == id else row
            for row in self._subgraphs
        ]
        self._certificates += shared.certificates

    def dumps(self) -> str:
        """The record as text for the artefact."""
        attempts = self._attempts([("", 0.0)] * len(self._plan.runs))
        events = [*self._certificates, self._placement, *self._subgraphs, *self._boundaries, *attempts]
        kept = [_without_identity(event, self._whole) for event in events]
        text = json.dumps(self._context.graph.places.leave_out(kept), sort_keys=True)
        return text.replace(f'"{self._context.part_id}', '"@')

    def emit(self, seconds: float, artefact: str) -> None:
        """Record that the whole part was built by Inductor."""
        self.emit_pieces([(artefact, seconds)])

    def emit_pieces(self, builds: Sequence[tuple[str, float]]) -> None:
        """Record that every subgraph was built; `builds` has the artefact and the seconds of each."""
        events = self._placement, *self._subgraphs, *self._boundaries, *self._attempts(builds)
        self._append(*self._certificates, *events)

    def emit_empty(self) -> None:
        """Record a part without operators: it only passes its inputs on."""
        self._append(self._placement)

    def emit_cache(self, lookups: Sequence[Lookup], index: int | None = None) -> None:
        """Record what Inductor's cache said about the part, or about one subgraph of a part that was cut."""
        subgraph = "" if index is None else self.subgraph_id(index)
        where = {"graph": self._context.graph_id, "part": self._context.part, "subgraph": subgraph}
        self._append(*(verdict(lookup, self._context.graph.key, **where) for lookup in lookups))

    def calls(self, index: int) -> Sequence[PlannedCall]:
        """The calls of overrides in a subgraph, in program order."""
        return self._calls.get(self.subgraph_id(index), ())

    def emit_ran(self, result: Executable, observer: FirstCallObserver, index: int = 0) -> None:
        """Record that a subgraph was called, and the overrides inside it."""
        id = self.subgraph_id(index)
        chosen = [s for s in self._subgraphs if s.subgraph == id or s.subgraph.startswith(f"{id}/")]
        emit_ran(self._context, chosen, result, observer)

    def _describe(
        self,
        index: int,
        lowering: str,
        nodes: Sequence[Node],
        boundary: tuple[list[Any], list[Any], list[Any]],
        *,
        whole: bool,
    ) -> None:
        identity = self.subgraph_id(index)
        inputs, outputs, read = boundary
        self._subgraphs.append(
            self._subgraph(
                identity,
                lowering,
                nodes,
                inputs=inputs,
                outputs=outputs,
                read=read,
                modules=self._context.graph.modules if whole else distinct(map(module_path, nodes)),
                sources=self._context.graph.sources if whole else distinct(map(source_line, nodes)),
                module="" if whole else common_path(filter(None, map(module_path, nodes))),
            )
        )
        calls = self._calls.setdefault(identity, [])
        for node in nodes:
            call = planned_call(node, identity)
            if call is not None:
                calls.append(call)
            item = override_of(node)
            if item is None or lowering != MAIN.name:
                continue
            names = self._overrides.setdefault(identity, [])
            count = sum(1 for name in names if name.split(":")[0] == item.name)
            names.append(item.name if count == 0 else f"{item.name}:{count}")
            calls[-1] = dataclasses.replace(calls[-1], subgraph=f"{identity}/{names[-1]}")
            self._subgraphs.append(
                self._subgraph(
                    f"{identity}/{names[-1]}",
                    "override",
                    [node],
                    inputs=(sources := [fake_value(source) for source in node.all_input_nodes]),
                    read=sources,
                    outputs=[fake_value(node)],
                    modules=distinct([module_path(node)]),
                    sources=distinct([source_line(node)]),
                    module=module_path(node),
                )
            )

    def _subgraph(
        self,
        identity: str,
        lowering: str,
        nodes: Sequence[Node],
        *,
        inputs: list[Any],
        outputs: list[Any],
        read: list[Any],
        modules: tuple[str, ...],
        sources: tuple[str, ...],
        module: str,
    ) -> Subgraph:
        cost = cost_of(nodes)
        size, size_hint = size_of([*read, *outputs])
        return Subgraph(
            graph=self._context.graph_id,
            part=self._context.part,
            subgraph=identity,
            lowering=lowering,
            nodes=len(nodes),
            ops=dict(sorted(Counter(map(op_name, nodes)).items())),
            flops=str(cost.flops),
            flops_hint=cost.flops_hint,
            bytes=str(size),
            bytes_hint=size_hint,
            inputs=len(inputs),
            outputs=len(outputs),
            modules=modules,
            sources=sources,
            module=module,
            fingerprint=stable_identity(nodes),
            refused=tuple(node.name for node in nodes if node.name in self._declined)[:_SHOWN],
        )

    def _note(self, plan: Plan) -> str:
        behind = self._names[self._names.index("override") + 1 :] if "override" in self._names else ()
        rest = sum(plan.counts.get(name, 0) for name in behind)
        return f"no override is registered for the operators of {rest} nodes" if rest else ""

    def _attempts(self, builds: Sequence[tuple[str, float]]) -> list[Attempt]:
        reasons = {placed.node: placed.chain for placed in self._plan.declined}
        attempts: list[Attempt] = []
        for index, (run, (artefact, seconds)) in enumerate(zip(self._plan.runs, builds, strict=True)):
            identity = self.subgraph_id(index)
            refused = {reason.by: reason for node in run.nodes for reason in reasons.get(node.name, ())}
            unfit = (self._unfit.get((node.name, op_name(node)), ()) for node in run.nodes)
            refused.update(("override", reason) for chain in unfit for reason in chain[:1])
            for name in self._names:
                if name == run.lowering:
                    attempts.append(
                        self._attempt(identity, name, ok=True, selected=True, seconds=seconds, artefact=artefact)
                    )
                    break
                inside = self._overrides.get(identity)
                skipped = "" if name in refused else _skipped(name, inside)
                attempts.append(self._attempt(identity, name, ok=False, reason=refused.get(name), skipped=skipped))
            inside = [node for node in run.nodes if override_of(node) is not None]
            for name, node in zip(self._overrides.get(identity, ()), inside, strict=False):
                child = f"{identity}/{name}"
                before = {reason.by: reason for reason in reasons.get(node.name, ())}
                attempts += [self._attempt(child, by, ok=False, reason=reason) for by, reason in before.items()]
                attempts.append(self._attempt(child, MAIN.name, ok=False, skipped="skipped: kernel_override selected"))
                attempts.append(self._attempt(child, "override", ok=True, selected=True))
        return attempts

    def _attempt(self, subgraph: str, lowering: str, *, ok: bool, **fields: Any) -> Attempt:
        context = self._context
        return Attempt(graph=context.graph_id, part=context.part, subgraph=subgraph, lowering=lowering, ok=ok, **fields)

    def _append(self, *events: Event) -> None:
        for event in events:
            self._context.timeline.append(event)


def _skipped(lowering: str, inside: list[str] | None) -> str:
    if lowering == "override":
        if inside:
            return f"skipped: the overrides {', '.join(inside)} are called from inside the compiled graph"
        return "skipped: no override is registered for its operators"
    return "skipped: it takes none of its operators"


def _boundary(module: GraphModule, piece: Piece | None) -> tuple[list[Any], list[Any], list[Any]]:
    """The inputs and outputs of a subgraph as fake values, and what it reads of the inputs."""
    if piece is not None:
        inside = piece.module.graph.find_nodes(op="placeholder")
        inputs, outputs = piece.fake_inputs, [fake_value(node) for node in piece.outputs]
    else:
        inside = module.graph.find_nodes(op="placeholder")
        output = next(iter(reversed(module.graph.nodes)))
        inputs, outputs = list(map(fake_value, inside)), [fake_value(node) for node in output.all_input_nodes]
    read = [value for each, known in zip(inside, inputs, strict=True) for value in read_of(each, known)]
    return inputs, outputs, read


def emit_cudagraphs_off(context: LoweringContext) -> None:
    """Record that CUDA graphs were asked for, but the part has more than one executable."""
    context.timeline.append(
        Option(
            graph=context.graph_id,
            key="triton.cudagraphs",
            requested="True",
            effective="False",
            reason=Reason(
                code="option_ineffective",
                by="execution",
                sentence=f"{context.part_id} has more than one executable, and CUDA graphs need a whole one",
                lever="remove what makes it fall back; the declined nodes of the placement are the list",
            ),
        )
    )


def _without_identity(event: Event, whole: bool) -> dict[str, Any]:
    dropped = _UNRECORDED
    if isinstance(event, Certified):
        dropped += ("seconds", "kept")
    if isinstance(event, (Subgraph, Boundary)):
        places = whole and isinstance(event, Subgraph) and "/" not in event.subgraph
        dropped += (*_HINTS, *_PLACES) if places else _HINTS
    return {key: value for key, value in event.to_dict().items() if key not in dropped}


def emit_ran(
    context: LoweringContext, subgraphs: Sequence[Subgraph], result: Executable, observer: FirstCallObserver
) -> None:
    """Record what a subgraph ran, from the evidence of its first call.

    Where the evidence contradicts the executable's claim, the audit shows a difference from the plan. An
    override inside it ran only if the generated module calls its operator, and the operator was called.
    """
    evidence, kernels = result.attest()
    counted: Counter[str] = Counter()
    for subgraph in subgraphs:
        if "/" not in subgraph.subgraph:
            ran, seen, calls = observer.ran, "; ".join(filter(None, (observer.evidence, evidence))), kernels
            note = observer.notes.get(subgraph.subgraph, "")
            seen = f"{seen}; {note}" if note and ran == "override" else seen
            context.timeline.append(_ran(context, subgraph, ran, seen, calls))
            continue
        name = "".join(subgraph.ops)
        counted[name] += 1
        if observer.was_replaced(subgraph.subgraph):
            ran, seen, calls = "eager", f"{observer.notes[subgraph.subgraph]}, called from {evidence}", {}
        elif observer.watched and observer.calls_of(subgraph.ops) < counted[name]:
            ran, seen, calls = observer.ran, f"not called in the first call of {evidence}", {}
        else:
            operators = [f"torch.ops.{op}" for op in subgraph.ops]
            calls = {name: count for name, count in kernels.items() if name in operators}
            ran = "override" if calls else result.lowering
            seen = f"{', '.join(calls)} called from {evidence}" if calls else f"not called from {evidence}"
            note = observer.notes.get(subgraph.subgraph, "")
            seen = f"{seen}; {note}" if note and calls else seen
        context.timeline.append(_ran(context, subgraph, ran, seen, calls))


def _ran(context: LoweringContext, subgraph: Subgraph, lowering: str, evidence: str, kernels: dict[str, int]) -> Ran:
    return Ran(
        graph=context.graph_id,
        part=context.part,
        subgraph=subgraph.subgraph,
        lowering=lowering,
        evidence=evidence,
        kernels=kernels,
    )


def replay(kept: compile_fx.Kept, context: LoweringContext, compiled: Any, cache: str = "aot_autograd") -> None:
    """Put the record of a restored part into the timeline, guard its calls, and attest the first.

    Args:
        kept: results of `PartRecord.dumps` and `eager_artefact.dumps`, as far as the artefact holds them.
        context: where the part belongs now.
        compiled: the restored graph.
        cache: what restored it.
    """
    subgraph, guard = f"{context.part_id}.0", None
    restored = dataclasses.replace(whole_executable(compiled), recordable=kept.recordable)
    result = record_calls(restored, context, subgraph)
    subgraphs, overrides = read_record(
        kept.record, context, compile_fx.artefact_key(compiled), {subgraph: result.artefact}, cache=cache
    )
    if kept.fallback and context.policy.on_error != "raise":
        guard = eager_artefact.guard(kept.fallback, context, compiled, recorded=kept.recorded)
    verifier = None if kept.recorded else eager_artefact.verifier(kept.fallback, context)

    def emit(result: Executable, observer: FirstCallObserver) -> None:
        emit_ran(context, subgraphs, result, observer)

    # What the graph writes to is not known here, so that a forward can't be given up.
    wrapped = wrap(
        result,
        context,
        subgraph,
        emit,
        guard=guard,
        verifier=verifier,
        calls=overrides,
        repeatable=False,
        announced=eager_artefact.announced(kept.fallback),
    )
    compile_fx.call_first(compiled, wrapped.first, wrapped.later)


def read_record(
    record: str | None,
    context: LoweringContext,
    key: str,
    artefacts: Mapping[str, str],
    *,
    whole: bool = True,
    cache: str = "aot_autograd",
) -> tuple[list[Subgraph], list[PlannedCall]]:
    """Put the record of a restored part into the timeline.

    Args:
        record: what `PartRecord.dumps` made; None if the artefact has none.
        context: where the part belongs now.
        key: of the artefact.
        artefacts: by subgraph, the generated code that is called now.
        whole: whether the part was not cut.
        cache: what restored it.

    Returns:
        Its subgraphs, and the calls of overrides in them.
    """
    timeline = context.timeline
    timeline.append(
        Cache(
            graph=context.graph_id,
            part=context.part,
            cache=cache,
            verdict="hit",
            key=key,
            note="" if record else "the artefact has no record of the decisions that made it",
        )
    )
    subgraphs: list[Subgraph] = []
    overrides: list[PlannedCall] = []
    for data in context.graph.places.fill_in(json.loads((record or "[]").replace('"@', f'"{context.part_id}'))):
        event = event_from_dict({**data, "schema": 1, "graph": context.graph_id})
        if isinstance(event, Boundary):
            event = dataclasses.replace(event, bytes_hint=hint_of_text(event.bytes, context.graph.sizes))
        elif isinstance(event, Subgraph):
            event = _read_afresh(event, context, whole)
            subgraphs.append(event)
            overrides += _calls_again(event)
        elif isinstance(event, Attempt) and event.selected and event.lowering == MAIN.name:
            event = dataclasses.replace(event, artefact=artefacts.get(event.subgraph, ""))
        elif isinstance(event, Certified):
            event = dataclasses.replace(event, kept=True)
        if event is not None:
            timeline.append(event)
    return subgraphs, overrides


def _calls_again(event: Subgraph) -> list[PlannedCall]:
    """The calls of overrides in a row of a restored part."""
    from omnicomp.lowerings.overrides.tag import matched_at

    parent, _, name = event.subgraph.rpartition("/")
    if not parent and event.lowering == "override":
        calls: list[PlannedCall] = []
        for op, count in event.ops.items():
            found = next(((i, o) for i in registered() for o in i.operators if str(o) == op), None)
            if found is not None:
                block = next(filter(None, (matched_at(found[0], path) for path in event.modules)), None)
                calls += [planned(*found, block, event.subgraph)] * count
        return calls
    item = next((i for i in registered() if parent and i.name == name.split(":")[0]), None)
    operator = next((o for o in item.operators if str(o) in event.ops), None) if item is not None else None
    if item is None or operator is None:
        return []
    block = next(filter(None, (matched_at(item, path) for path in event.modules)), None)
    return [planned(item, operator, block, event.subgraph)]


def _read_afresh(event: Subgraph, context: LoweringContext, whole: bool) -> Subgraph:
    """Fill in what the record leaves out: sizes, and the source lines and modules of a whole part."""
    if whole and "/" not in event.subgraph:
        event = dataclasses.replace(event, modules=context.graph.modules, sources=context.graph.sources)
    return dataclasses.replace(
        event,
        flops_hint=hint_of_text(event.flops, context.graph.sizes),
        bytes_hint=hint_of_text(event.bytes, context.graph.sizes),
    )
