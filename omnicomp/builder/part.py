"""Building a part: a post-autograd graph is placed, cut and built; nodes that fail step down, and no others.

The usual case comes first and costs nothing extra: a graph that goes wholly to Inductor is handed over as it is.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.autograd.early_writes import write_early
from omnicomp._torch.dynamo.control_flow import CONTROL_FLOW
from omnicomp._torch.fx import boxed, copy_module
from omnicomp._torch.inductor import compile_fx
from omnicomp._torch.inductor.cache_entry import is_bundled
from omnicomp._torch.inductor.failures import failure_of_autotuning, not_kept, without_autotuning
from omnicomp._torch.repairs import checked_sizes
from omnicomp._torch.symbols import expression
from omnicomp._torch.user_code import may_raise, user_operators
from omnicomp.analysis.costs import size_of
from omnicomp.analysis.nodes import fake_value
from omnicomp.builder import eager_artefact
from omnicomp.builder.early_regions import EarlyRegions, InlinedPart, settle
from omnicomp.builder.find_failing import Prober, Verdict, find_failing, refused_by
from omnicomp.builder.last_resort import run_eagerly
from omnicomp.builder.on_failure import PartFailures
from omnicomp.builder.partition import Piece, extract, gather_getitems, stitching
from omnicomp.builder.placement import Plan, Run, left_for_overrides, place, taken_together
from omnicomp.builder.record import PartRecord, emit_cudagraphs_off
from omnicomp.builder.regions import Shared, left_whole, share_regions
from omnicomp.builder.stitched_artefact import keep
from omnicomp.errors import LoweringError, first_line
from omnicomp.lowerings import MAIN, Executable, Lowering, LoweringContext, in_order, lowering
from omnicomp.lowerings.eager import EagerLowering
from omnicomp.lowerings.override import put_references
from omnicomp.lowerings.overrides.late import LateOverrides, can_restart, left_for, raise_late, too_late
from omnicomp.lowerings.overrides.rewrite import apply_overrides
from omnicomp.options.checks import engine_names
from omnicomp.options.policy import VERIFYING
from omnicomp.runtime.announced_inputs import announce
from omnicomp.runtime.guard import Guard, beside_collectives, drawing_devices, obstacle, recorded_as_cudagraph
from omnicomp.runtime.recording import record_calls
from omnicomp.runtime.wrappers import Wrapped, wrap
from omnicomp.timeline import Certified, NodePlacement, Reason
from omnicomp.timeline.activity import activity
from omnicomp.timeline.graph_dump import dump, dump_placement
from omnicomp.timeline.recorder import record_step_down

if TYPE_CHECKING:
    from omnicomp.runtime.verify import Verifier


def build_part(
    module: GraphModule, inputs: Sequence[Any], context: LoweringContext, regions: EarlyRegions | Reason | None = None
) -> Any:
    """Build a forward, backward or inference graph.

    Args:
        module: the graph, with `meta["val"]` on its nodes; owned by this function.
        inputs: fake tensors and symbolic sizes.
        context: what the lowerings may know.
        regions: what of the Dynamo graph was made calls of one body, or why nothing could be.

    Returns:
        A boxed callable; Inductor's own compiled graph where everything went to Inductor.

    Raises:
        LoweringError: a node is left that no lowering can build.
    """
    builder = None
    try:
        if checked_sizes.NEEDED.here:
            checked_sizes.check_sizes(module.graph)
        if context.part == "backward":
            _take_layouts(module, inputs)
        else:
            only_eager = set(context.policy.lowerings) <= {"eager", "override"}
            write_early(module.graph, (lambda _: True) if only_eager else may_raise)
        inlined = regions.inlined(module) if isinstance(regions, EarlyRegions) else None
        if inlined is not None:
            module = inlined.module
        unshared = regions if isinstance(regions, Reason) else None
        builder = _Builder(module, inputs, context, inlined, unshared)
        return builder.build()
    except CONTROL_FLOW:
        raise
    except Exception as error:
        if context.policy.on_error == "raise":
            raise
        if can_restart():
            raise_late(context.graph, error, "ladder")
        return run_eagerly(module if builder is None else builder.plain, inputs, context, error)


def _take_layouts(module: GraphModule, inputs: Sequence[Any]) -> None:
    """Give a backward's inputs the layouts that they have: what the forward saves may have got padded rows."""

    def strides(value: Any) -> list[Any]:
        return [expression(step) for step in value.stride()] if isinstance(value, torch.Tensor) else []

    for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if strides(value) != strides(fake_value(node)):
            node.meta["val"] = value


class _Builder:
    """State of one build: nodes that were cut, pieces that are built, and the number of builds left."""

    def __init__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        context: LoweringContext,
        inlined: InlinedPart | None,
        unshared: Reason | None,
    ) -> None:
        self._module = module
        self.plain = module  # as it came, to go on with should a build or a call fail
        self._inlined = inlined
        self._inputs = inputs
        self._context = context
        self._lowerings = in_order(context.policy.lowerings, context.device.lowerings)
        self._cut: dict[str, Reason] = {}
        self._refused: dict[str, dict[str, Reason]] = {}
        self._boundaries: frozenset[str] = frozenset()
        self._prober = Prober(self._try, context.policy.max_builds)
        self._failures = PartFailures(module, context)
        self._tunes = True
        self._gave_up = False  # a compiler other than Inductor
        self._built: dict[tuple[str, ...], tuple[Executable, float]] = {}
        self._shared: dict[tuple[str, ...], Shared] = {}
        self._unshared = unshared  # why a whole part is built without regions
        self._asked: set[str] = set()  # nodes for which overrides were asked
        self._declined: list[NodePlacement] = []
        self._certificates: list[Certified] = []  # of overrides

    def build(self) -> Any:
        known = self._failures.known()
        if known is not None:
            self._cut.update(known.cut)
            self._boundaries |= known.boundaries
            self._tunes = known.untuned is None
        plan = self._place()
        if known is not None:
            why = "as is known from an earlier process"
            self._record_narrowed(plan, known.cut, why, known.scripts, known.untuned)
        runs = [(run.lowering, [node.name for node in run.nodes]) for run in plan.runs]
        dump_placement(self._context.graph_id, self._module, runs, self._context.part)
        record = self._record(plan)
        if not plan.runs:
            record.emit_empty()
            code, call = stitching(self._module, ()), boxed(self._module)
            keep(call, code, (), record, self._inputs, self._context, failed=False)
            return call
        while plan.whole:
            shared = None
            try:
                shared = self._share(record)
                return self._build_whole(record)
            except CONTROL_FLOW:
                raise
            except Exception as error:  # noqa: BLE001 - becomes the reason of the retreat
                self._module = copy_module(self.plain)
                self._asked.clear()
                self._declined.clear()
                self._certificates.clear()
                self._override()
                gather_getitems(self._module)
                plan = self._place()
                if shared is None or shared.calls:
                    self._unshared = left_whole(f"the build failed: {first_line(error)}")
                else:
                    plan = self._narrow(plan.runs[0], error)
                record = self._record(plan)
        return self._build_pieces(plan)

    def _keep(self) -> None:
        """Keep a copy of the graph, which overrides or Inductor are about to rewrite."""
        if self.plain is self._module:
            self.plain = copy_module(self._module, lazy=True)

    def _share(self, record: PartRecord) -> Shared:
        """Rewrite a part that is one Inductor graph so that what repeats in it is built once."""
        calling = None if self._inlined is None else self._inlined.calls_for(self._module)
        if self._inlined is not None and self._unshared is None and calling is not None:
            self._module, shared = calling, self._inlined.shared
            record.share(shared)
            return shared
        self._keep()
        if self._inlined is not None:
            settle(self._module)
        if self._unshared is None:
            shared = share_regions(self._module, self._context)
        else:
            shared = Shared(left_whole=self._unshared)
        record.share(shared)
        return shared

    def _record(self, plan: Plan, pieces: Sequence[Piece] = ()) -> PartRecord:
        names = [each.name for each in self._lowerings]
        blocks = () if self._context.part == "backward" else self._context.graph.declined
        refused = (*blocks, *self._declined)
        return PartRecord(self._module, plan, refused, self._context, names, pieces, self._certificates)

    def _override(self) -> None:
        """Put in the overrides of the nodes that all before them refuse by now; each node is asked about once.

        Raises:
            LateOverrides: one that enters before autograd would take a node.
        """
        context, failed = self._context, {**self._refused, MAIN.name: self._cut}
        left = left_for_overrides(self._module, self._lowerings, context, failed)
        left = {node: chain for node, chain in left.items() if node.name not in self._asked}
        if not left:
            return
        self._asked.update(node.name for node in left)
        matches = left_for(left, context)
        self._declined += [match.declined for match in matches if match.declined is not None]
        wanted = {match: left[node] for match, node in matches.items() if match.declined is None}
        if wanted and not can_restart():
            self._declined += [too_late(match, matches[match], context) for match in wanted]
        elif wanted:
            for reason in dict.fromkeys(reason for chain in wanted.values() for reason in chain):
                if reason.code == "cut_out":
                    self._record_retreat(reason.by, "override", reason)
            raise LateOverrides(wanted)
        self._keep()
        before = copy_module(self._module, lazy=True) if context.policy.certifies else None
        self._declined += apply_overrides(self._module, context, left)
        if before is not None:
            from omnicomp.builder.certificates import certify_overrides

            self._certificates += certify_overrides(before, self._module, context.graph_id, context.policy)
        if any(left.values()):  # a part that may be cut
            gather_getitems(self._module)

    def _place(self) -> Plan:
        while True:
            self._override()
            plan = place(self._module, self._lowerings, self._context, self._cut, self._boundaries, self._refused)
            known = len(self._boundaries), sum(map(len, self._refused.values()))
            for run in plan.runs:
                boundaries, reason = taken_together(lowering(run.lowering), run.nodes, self._context)
                self._boundaries |= boundaries
                if reason is not None:
                    self._refused.setdefault(run.lowering, {}).update(
                        dict.fromkeys((n.name for n in run.nodes), reason)
                    )
            if known == (len(self._boundaries), sum(map(len, self._refused.values()))):
                return plan

    def _build_whole(self, record: PartRecord) -> Any:
        start, plain = time.perf_counter(), self.plain
        subgraph, guard = record.subgraph_id(0), None
        # In a cache that holds the code itself, the graph that it is compared with goes along.
        verified = self._context.policy.verify in VERIFYING and is_bundled()
        why = ""
        try:
            fallback = eager_artefact.dumps(plain, self._inputs, verified=verified)
        except Exception as error:
            if not verified:
                raise
            why = f"verify={self._context.policy.verify!r} needs the graph, and {first_line(error)}"
            fallback = eager_artefact.dumps(plain, self._inputs)
        with self._building(MAIN, subgraph, len(self._module.graph.nodes)), self._tuning():
            result = MAIN.lower_whole(self._module, self._inputs, self._context, record.dumps(), fallback)
        record.emit(time.perf_counter() - start, result.artefact)
        record.emit_cache(result.lookups)
        if result.install is None:
            return result.call
        install, result = result.install, record_calls(result, self._context, subgraph)
        if self._context.policy.on_error != "raise":
            held = self._inputs if self._context.part == "backward" else ()
            guard = self._guard(plain, self._inputs, subgraph, result, held)
        wrapped = wrap(
            result,
            self._context,
            subgraph,
            record.emit_ran,
            guard=guard,
            verifier=self._verifier(plain, self._inputs, subgraph, MAIN.name),
            calls=record.calls(0),
            repeatable=obstacle(plain) is None,
            announced=announce(self._inputs),
        )
        install(wrapped.first, wrapped.later)
        if why:
            result.compiled.unkept = why
        return not_kept(result.compiled) if self._failed else result.compiled

    def _verifier(self, module: GraphModule, inputs: Sequence[Any], subgraph: str, name: str) -> "Verifier | None":
        """The verifier of an executable, if one is asked for; first calls on engines are always verified."""
        from omnicomp.runtime.verify import Verifier

        context = self._context
        if name in engine_names() and context.policy.verify != "off":
            return Verifier(module=module, inputs=inputs, context=context, subgraph=subgraph, lowering=name)
        if name != MAIN.name:
            return None
        if context.policy.verify not in VERIFYING or recorded_by_torch(context):
            return None
        return Verifier(
            module=module,
            inputs=inputs,
            context=context,
            subgraph=subgraph,
            lowering=name,
            on_wrong=lambda reason: self._failures.learn_wrong(module, inputs, reason),
        )

    def _guard(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        subgraph: str,
        result: Executable,
        held: Sequence[Any],
    ) -> Guard:
        """The guard of an executable; in its eager graph, overrides are their references.

        `held` are the inputs that nobody else holds during a call: values saved for a backward, and results of an
        earlier subgraph.
        """
        context = self._context
        names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
        return Guard(
            call=result.call,
            inputs=names,
            build=lambda: EagerLowering().lower(put_references(copy_module(module)), inputs, context),
            overwritten=result.overwritten & set(names),
            obstacle=recorded_as_cudagraph(context.part_id)
            if recorded_by_torch(context)
            else obstacle(module, context.part) or beside_collectives(self._module),
            draws=drawing_devices(module),
            operators=user_operators(module),
            context=context,
            subgraph=subgraph,
            lowering=result.lowering,
            keep_inputs=0 <= size_of(held)[1] <= eager_artefact.HELD_BYTES,
        )

    def _narrow(self, run: Run, error: Exception) -> Plan:
        """Find the nodes that made an Inductor run fail, cut them out, and place again."""
        if self._context.policy.on_error == "raise":
            raise error
        if run.lowering != MAIN.name:
            return self._refuse(run, error)
        verdict = self._failures.learn(self._module, self._verdict(run, error))
        self._cut.update(verdict.cut)
        self._boundaries |= verdict.boundaries
        plan = self._place()
        self._record_narrowed(plan, verdict.cut, first_line(verdict.error), [verdict.script], verdict.untuned)
        return plan

    def _verdict(self, run: Run, error: Exception) -> Verdict:
        """What to change for a run to build."""
        failure = failure_of_autotuning(error) if self._tunes else None
        if failure is not None:
            self._tunes = False
            return Verdict(cut={}, error=error, untuned=_untunable(failure))
        everything = [node for node in self._module.graph.nodes if node.op == "call_function"]
        return find_failing(run.nodes, error, self._prober, everything)

    def _refuse(self, run: Run, error: Exception) -> Plan:
        """Take from another compiler the nodes that it fails on; the whole run, if it compiles nothing at all."""
        name, self._gave_up = run.lowering, True
        prober = Prober(lambda nodes: self._try(nodes, lowering(name)), self._context.policy.max_builds)
        nothing = isinstance(error, NotImplementedError)
        verdict = None if nothing else find_failing(run.nodes, error, prober, run.nodes)
        refused = refused_by(run.nodes, verdict, error, name, self._context.device.type)
        self._refused.setdefault(name, {}).update(refused)
        self._boundaries |= frozenset() if verdict is None else verdict.boundaries
        plan = self._place()
        moved = {node.name: later.lowering for later in plan.runs for node in later.nodes if node.name in refused}
        target = ", ".join(sorted(set(moved.values()))) or name
        self._record_retreat(name, target, next(reversed(refused.values())))
        return plan

    def _record_narrowed(
        self, plan: Plan, cut: Mapping[str, Reason], why: str, scripts: Iterable[str], untuned: Reason | None = None
    ) -> None:
        """Record that a part is cut again, around nodes or between nodes, or built without autotuning."""
        now = {node.name: later.lowering for later in plan.runs for node in later.nodes if node.name in cut}
        names = ", ".join(name for name in scripts if name)
        reason = (
            next(iter(cut.values()), None)
            or untuned
            or Reason(
                code="build_failed",
                by=MAIN.name,
                sentence=f"{MAIN.title} can't build the nodes together, only in two parts: {why}",
                lever=f"report the error to PyTorch{f'; `omnicomp bisect {names}` repeats it' if names else ''}",
            )
        )
        self._record_retreat(MAIN.name, ", ".join(sorted(set(now.values()))) or MAIN.name, reason)

    def _record_retreat(self, source: str, target: str, reason: Reason) -> None:
        context = self._context
        record_step_down(context.timeline, context.where(context.part_id), source, target, reason, attempts=False)

    @property
    def _failed(self) -> bool:
        """Whether a compiler failed on some of the part, so that another process may build it otherwise."""
        return bool(self._cut or self._boundaries or self._gave_up) or not self._tunes

    def _try(self, nodes: Sequence[Node], builder: Lowering = MAIN) -> Exception | None:
        try:
            self._build_piece(builder, extract(self._module, nodes), nodes)
        except CONTROL_FLOW:
            raise
        except Exception as error:  # noqa: BLE001 - the answer to "does it build?"
            return error
        return None

    def _build_pieces(self, plan: Plan) -> Any:
        self._keep()
        if self._inlined is not None:
            settle(self._module)
        while True:
            gather_getitems(self._module)
            plan = self._place()
            pieces = [extract(self._module, run.nodes) for run in plan.runs]
            failure = self._build_all(plan, pieces)
            if failure is None:
                break
            self._narrow(*failure)
        record = self._record(plan, pieces)
        for index, run in enumerate(plan.runs):
            record.share(self._shared[_key(run.lowering, run.nodes)], index)
        if compile_fx.disable_cudagraphs(self._context.inductor_kwargs) and not self._context.records:
            emit_cudagraphs_off(self._context)
        results = [self._built[_key(run.lowering, run.nodes)] for run in plan.runs]
        record.emit_pieces([(result.artefact, seconds) for result, seconds in results])
        for index, (result, _) in enumerate(results):
            record.emit_cache(result.lookups, index)
        repeatable = obstacle(self._module) is None
        wrapped: list[Wrapped] = []
        for index, (run, (result, _)) in enumerate(zip(plan.runs, results, strict=True)):
            subgraph, guard, verifier = record.subgraph_id(index), None, None
            result = record_calls(result, self._context, subgraph)
            announced: list[list[Any]] = []
            if result.lowering != "eager":
                piece = extract(self._module, run.nodes)  # the first was the lowering's to change
                if self._context.policy.on_error != "raise":
                    backward = self._context.part == "backward"
                    held = [fake_value(node) for node in piece.inputs if backward or node.op != "placeholder"]
                    guard = self._guard(piece.module, piece.fake_inputs, subgraph, result, held)
                verifier = self._verifier(piece.module, piece.fake_inputs, subgraph, result.lowering)
                announced = announce(piece.fake_inputs)
            wrapped.append(
                wrap(
                    result,
                    self._context,
                    subgraph,
                    functools.partial(record.emit_ran, index=index),
                    guard=guard,
                    verifier=verifier,
                    calls=record.calls(index),
                    repeatable=repeatable,
                    announced=announced,
                )
            )
        code = stitching(self._module, pieces)
        call = code.bind([each.first for each in wrapped], [each.later for each in wrapped])
        built = [(extract(self._module, run.nodes), *result) for run, result in zip(plan.runs, results, strict=True)]
        keep(call, code, built, record, self._inputs, self._context, failed=self._failed)
        return call

    def _tuning(self) -> contextlib.AbstractContextManager[Any]:
        """What Inductor measures inside: nothing, once that has failed for this part."""
        return contextlib.nullcontext() if self._tunes else without_autotuning()

    def _building(self, builder: Lowering, subgraph: str, nodes: int) -> contextlib.AbstractContextManager[Any]:
        """An attempt is under way inside; without a subgraph it is one to find out which nodes fail."""
        context, name = self._context, MAIN.title if builder is MAIN else builder.name
        text = f"{name} builds {subgraph or f'{nodes} operators of {context.part_id} to find what fails'}"
        about = {"graph": context.graph_id, "part": context.part, "subgraph": subgraph, "lowering": builder.name}
        return activity("build", text, shown=context.policy.progress, **about)

    def _build_all(self, plan: Plan, pieces: Sequence[Piece]) -> tuple[Run, Exception] | None:
        """Build the runs that are not built yet; returns the first one that a compiler failed on."""
        for index, (run, piece) in enumerate(zip(plan.runs, pieces, strict=True)):
            if _key(run.lowering, run.nodes) in self._built:
                continue
            if len(pieces) > 1:
                dump(self._context.graph_id, f"piece_{index}_{run.lowering}", piece.module, self._context.part)
            try:
                self._build_piece(lowering(run.lowering), piece, run.nodes, f"{self._context.part_id}.{index}")
            except CONTROL_FLOW:
                raise
            except Exception as error:
                if run.lowering not in ("override", "eager"):
                    return run, error
                raise LoweringError(
                    f"{run.lowering} can't build {len(run.nodes)} nodes of {self._context.part_id} "
                    f"({first_line(error)}), and there is no lowering after it"
                ) from error
        return None

    def _of_piece(self, piece: Piece) -> LoweringContext:
        """The context with the inputs of a piece whose addresses stay."""
        if not self._context.records:
            return self._context
        kwargs, placeholders = self._context.inductor_kwargs, self._module.graph.find_nodes(op="placeholder")
        static = {placeholders[index] for index in kwargs.get("static_input_idxs", ())}
        own = tuple(index for index, node in enumerate(piece.inputs) if node in static)
        return dataclasses.replace(self._context, inductor_kwargs={**kwargs, "static_input_idxs": own})

    def _build_piece(self, builder: Lowering, piece: Piece, nodes: Sequence[Node], subgraph: str = "") -> None:
        start, key = time.perf_counter(), _key(builder.name, nodes)
        shared, context = None, self._of_piece(piece)
        with self._building(builder, subgraph, len(nodes)), self._tuning():
            try:
                shared = share_regions(piece.module, self._context) if builder is MAIN and subgraph else Shared()
                result = builder.lower(piece.module, piece.fake_inputs, context)
            except CONTROL_FLOW:
                raise
            except Exception as error:
                if shared is not None and not shared.calls:
                    raise
                shared = Shared(left_whole=left_whole(f"the build failed: {first_line(error)}"))
                piece = extract(self._module, nodes)
                result = builder.lower(piece.module, piece.fake_inputs, context)
        self._built[key], self._shared[key] = (result, time.perf_counter() - start), shared


def recorded_by_torch(context: LoweringContext) -> bool:
    """Whether torch records the part as a CUDA graph, whose results are the recording's memory."""
    return bool(context.inductor_kwargs.get("cudagraphs")) and context.device.type == "cuda" and not context.records


def _untunable(error: BaseException) -> Reason:
    return Reason(
        code="build_failed",
        by=MAIN.name,
        sentence=f"autotuning failed, and {MAIN.title} builds the part again without it: {first_line(error)}",
        observed=type(error).__name__,
        lever="set max_autotune=False, or free memory",
    )


def _key(lowering: str, nodes: Sequence[Node]) -> tuple[str, ...]:
    return (lowering, *(node.name for node in nodes))
