"""The ladder: a post-autograd graph is placed, cut and built; what fails steps down, for its own nodes alone.

The usual case comes first and costs nothing extra: a graph that goes wholly to Inductor is handed over as it is.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch.fx import GraphModule, Node

from omnicomp._torch import inductor
from omnicomp._torch.dynamo import CONTROL_FLOW
from omnicomp._torch.fx import boxed, copy_module
from omnicomp.costs import size_of
from omnicomp.errors import LoweringError
from omnicomp.localize import Budget, find_failing, first_line
from omnicomp.lowerings import LOWERINGS, Executable, Lowering, LoweringContext, in_order
from omnicomp.lowerings.eager import EagerLowering
from omnicomp.lowerings.inductor import executable
from omnicomp.lowerings.overrides.rewrite import apply_overrides
from omnicomp.once import Once
from omnicomp.partition import Piece, extract, gather_getitems, stitch
from omnicomp.placement import Plan, Run, place
from omnicomp.records import PartRecord
from omnicomp.retreat import Guard, obstacle, recorded_as_cudagraph
from omnicomp.timeline import NodePlacement, Ran, Reason, Retreat
from omnicomp.verify import Verifier

__all__ = ["build_part"]

# Of what was saved for a backward, this much is held until its call has returned, so that it can be repeated.
_HELD_BYTES: Final = 64 * 2**20


def build_part(module: GraphModule, inputs: Sequence[Any], context: LoweringContext) -> Any:
    """Build a forward, backward or inference graph.

    Args:
        module: the graph, with `meta["val"]` on its nodes; owned by this function.
        inputs: fake tensors and symbolic sizes.
        context: what the lowerings may know.

    Returns:
        A boxed callable; Inductor's own compiled graph where everything went to Inductor.

    Raises:
        LoweringError: a node is left that no lowering can build.
    """
    return _Builder(module, inputs, context).build()


@dataclasses.dataclass
class _Stage:
    """A piece's callable, reached through one attribute, so that the recording of its first call can remove itself."""

    call: Callable[[list[Any]], Sequence[Any]]


class _Builder:
    """State of one build: what was cut out so far, what is built already, and how many builds are left."""

    def __init__(self, module: GraphModule, inputs: Sequence[Any], context: LoweringContext) -> None:
        self._module = module
        self._inputs = inputs
        self._context = context
        self._lowerings = in_order(context.policy.lowerings, context.device.lowerings)
        self._cut: dict[str, Reason] = {}
        self._boundaries: frozenset[str] = frozenset()
        self._budget = Budget(context.policy.max_builds)
        self._built: dict[tuple[str, ...], tuple[Executable, float]] = {}

    def build(self) -> Any:
        names = [lowering.name for lowering in self._lowerings]
        # Overrides and Inductor rewrite the graph: keep one to go on with, should a build or a call fail.
        plain = copy_module(self._module)
        refused = self._override(names)
        plan = self._place()
        record = PartRecord(self._module, plan, refused, self._context, names)
        if not plan.runs:
            record.emit_empty()
            return boxed(self._module)
        if plan.whole:
            try:
                return self._build_whole(record, plain)
            except CONTROL_FLOW:
                raise
            except Exception as error:  # noqa: BLE001 - becomes the reason of the retreat
                self._module = plain
                refused = self._override(names)
                gather_getitems(self._module)
                plan = self._narrow(self._place().runs[0], error)
        return self._build_pieces(plan, refused)

    def _override(self, names: Sequence[str]) -> tuple[NodePlacement, ...]:
        if "override" in names and names.index("override") < _index(names, "inductor"):
            blocks = () if self._context.part == "backward" else self._context.declined
            return (*blocks, *apply_overrides(self._module, self._context))
        return ()

    def _place(self) -> Plan:
        return place(self._module, self._lowerings, self._context, self._cut, self._boundaries)

    def _build_whole(self, record: PartRecord, plain: GraphModule) -> Any:
        start = time.perf_counter()
        before = inductor.cache_counters()
        compiled = inductor.compile_part(self._module, self._inputs, record.dumps(), **self._context.inductor_kwargs)
        record.emit(time.perf_counter() - start, inductor.artefact_path(compiled))
        record.emit_cache(before, compiled)
        if not isinstance(compiled, inductor.CompiledFxGraph):
            return compiled
        guard: Guard | None = None
        if self._context.policy.on_error != "raise":
            written = inductor.overwritten_inputs(compiled)
            guard = self._guard(plain, self._inputs, record.subgraph_id(0), compiled.current_callable, written)
            inductor.exchange_callable(compiled, lambda _: guard.boxed())

        verifier = self._verifier(plain, self._inputs, record.subgraph_id(0))
        if verifier is not None:
            inductor.exchange_callable(compiled, verifier.around)

        def ran() -> None:
            if not (guard is not None and guard.stepped_down) and not (verifier is not None and verifier.failed):
                record.emit_ran(_with_verdict(executable(compiled), verifier))

        inductor.call_once_before_restoring(compiled, ran)
        return compiled

    def _verifier(self, module: GraphModule, inputs: Sequence[Any], subgraph: str) -> Verifier | None:
        """What compares an Inductor executable with eager, if that is asked for."""
        context = self._context
        recorded = bool(context.inductor_kwargs.get("cudagraphs")) and context.device.type == "cuda"
        if context.policy.verify == "off" or recorded:
            return None
        return Verifier(module=module, inputs=inputs, context=context, subgraph=subgraph, lowering="inductor")

    def _guard(
        self, module: GraphModule, inputs: Sequence[Any], subgraph: str, call: Any, overwritten: frozenset[str]
    ) -> Guard:
        """What steps down from Inductor to eager if a call raises, where that is safe."""
        context = self._context
        recorded = bool(context.inductor_kwargs.get("cudagraphs")) and context.device.type == "cuda"
        names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
        return Guard(
            call=call,
            inputs=names,
            build=lambda: EagerLowering().lower(module, inputs, context),
            overwritten=overwritten & set(names),
            obstacle=recorded_as_cudagraph(context.part_id) if recorded else obstacle(module),
            context=context,
            subgraph=subgraph,
            lowering="inductor",
            keep_inputs=context.part != "backward" or 0 <= size_of(inputs)[1] <= _HELD_BYTES,
        )

    def _narrow(self, run: Run, error: Exception) -> Plan:
        """Learn from a failed Inductor run which nodes to cut out, and place again."""
        if self._context.policy.on_error == "raise":
            raise error
        verdict = find_failing(run.nodes, error, self._try, self._budget)
        self._cut.update(verdict.cut)
        self._boundaries |= verdict.boundaries
        plan = self._place()
        first = next(iter(verdict.cut.values()), None)
        now = {node.name: later.lowering for later in plan.runs for node in later.nodes if node.name in verdict.cut}
        self._context.timeline.append(
            Retreat(
                graph=self._context.graph_id,
                part=self._context.part,
                subgraph=self._context.part_id,
                source_lowering="inductor",
                target_lowering=", ".join(sorted(set(now.values()))) or "inductor",
                reason=first
                or Reason(
                    code="build_failed",
                    by="inductor",
                    sentence=f"Inductor can't build the nodes together, only in two parts: {first_line(error)}",
                    lever="report the error to PyTorch",
                ),
            )
        )
        return plan

    def _try(self, nodes: Sequence[Node]) -> Exception | None:
        try:
            self._build_piece(self._lowering("inductor"), extract(self._module, nodes), nodes)
        except CONTROL_FLOW:
            raise
        except Exception as error:  # noqa: BLE001 - the answer to "does it build?"
            return error
        return None

    def _build_pieces(self, plan: Plan, refused: tuple[NodePlacement, ...]) -> Any:
        gather_getitems(self._module)
        while True:
            plan = self._place()
            pieces = [extract(self._module, run.nodes) for run in plan.runs]
            failure = self._build_all(plan, pieces)
            if failure is None:
                break
            self._narrow(*failure)
        names = [lowering.name for lowering in self._lowerings]
        record = PartRecord(self._module, plan, refused, self._context, names, pieces=pieces)
        if inductor.disable_cudagraphs(self._context.inductor_kwargs):
            record.emit_cudagraphs_off()
        results = [self._built[_key(run.nodes)] for run in plan.runs]
        record.emit_pieces([(result.artefact, seconds) for result, seconds in results])
        stages: list[Callable[[list[Any]], Sequence[Any]]] = []
        for index, (run, (result, _)) in enumerate(zip(plan.runs, results, strict=True)):
            guard: Guard | None = None
            verifier: Verifier | None = None
            if result.lowering == "inductor":
                piece = extract(self._module, run.nodes)  # the first was Inductor's to change
                subgraph = record.subgraph_id(index)
                if self._context.policy.on_error != "raise":
                    guard = self._guard(piece.module, piece.fake_inputs, subgraph, result.call, result.overwritten)
                    result = dataclasses.replace(result, call=guard.boxed())
                verifier = self._verifier(piece.module, piece.fake_inputs, subgraph)
                if verifier is not None:
                    result = dataclasses.replace(result, call=verifier.around(result.call))
            stages.append(self._attested(record.subgraph_id(index), result, guard, verifier))
        return stitch(self._module, pieces, stages)

    def _build_all(self, plan: Plan, pieces: Sequence[Piece]) -> tuple[Run, Exception] | None:
        """Build what is not built yet; returns the first Inductor run that failed."""
        for run, piece in zip(plan.runs, pieces, strict=True):
            if _key(run.nodes) in self._built:
                continue
            try:
                self._build_piece(self._lowering(run.lowering), piece, run.nodes)
            except CONTROL_FLOW:
                raise
            except Exception as error:
                if run.lowering == "inductor":
                    return run, error
                raise LoweringError(
                    f"{run.lowering} can't build {len(run.nodes)} nodes of {self._context.part_id} "
                    f"({first_line(error)}), and there is no lowering after it"
                ) from error
        return None

    def _build_piece(self, lowering: Lowering, piece: Piece, nodes: Sequence[Node]) -> None:
        start = time.perf_counter()
        result = lowering.lower(piece.module, piece.fake_inputs, self._context)
        self._built[_key(nodes)] = (result, time.perf_counter() - start)

    def _lowering(self, name: str) -> Lowering:
        return LOWERINGS[name]

    def _attested(
        self, subgraph: str, result: Executable, guard: Guard | None, verifier: Verifier | None
    ) -> Callable[[list[Any]], Sequence[Any]]:
        """A callable that records, on its first call, what ran."""
        context = self._context

        def record() -> None:
            if (guard is not None and guard.stepped_down) or (verifier is not None and verifier.failed):
                return
            evidence, kernels = _with_verdict(result, verifier).attest()
            context.timeline.append(
                Ran(
                    graph=context.graph_id,
                    part=context.part,
                    subgraph=subgraph,
                    lowering=result.lowering,
                    evidence=evidence,
                    kernels=kernels,
                )
            )

        once = Once(record)

        def first_call(inputs: list[Any]) -> Sequence[Any]:
            outputs = result.call(inputs)
            stage.call = result.call
            once()
            return outputs

        stage = _Stage(first_call)
        return lambda inputs: stage.call(inputs)


def _with_verdict(result: Executable, verifier: Verifier | None) -> Executable:
    """The executable with what its verification found in its evidence."""
    if verifier is None:
        return result

    def attest() -> tuple[str, dict[str, int]]:
        evidence, kernels = result.attest()
        return f"{evidence}; {verifier.verdict}", kernels

    return dataclasses.replace(result, attest=attest)


def _key(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _index(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)
