"""Cut parts in the compile caches, so that a warm start restores them without placing and cutting again.

AOTAutograd's cache stores a part if Inductor's cache has it. So a cut part becomes an entry of Inductor's cache
(`_torch/inductor/cache_entry.py`): the stitched code, the record, eager subgraphs and eager graphs as text, and the
keys of the subgraphs that Inductor built. If something cannot be stored, the reason is recorded, and the part is built
in each process.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from omnicomp._torch.autograd.call_hooks import tapped
from omnicomp._torch.fx import copy_module
from omnicomp._torch.inductor import cache_entry, compile_fx
from omnicomp._torch.inductor.cache_entry import StitchedGraph
from omnicomp._torch.inductor.graph_text import dump_constant, from_source, load_constant
from omnicomp.analysis.layouts import depends_on_data, layout_of, restride
from omnicomp.analysis.nodes import fake_value
from omnicomp.builder import eager_artefact
from omnicomp.builder.partition import Call, Piece, Stitching
from omnicomp.builder.record import PartRecord, emit_cudagraphs_off, emit_ran, read_record
from omnicomp.errors import first_line
from omnicomp.lowerings import MAIN, Executable, LoweringContext
from omnicomp.lowerings.inductor import executable
from omnicomp.lowerings.override import PlannedCall
from omnicomp.options.policy import VERIFYING
from omnicomp.runtime.evidence import FirstCallObserver
from omnicomp.runtime.wrappers import Wrapped, wrap
from omnicomp.timeline import Cache, Subgraph

# What these lowerings call is the generated code of the graph.
_AS_TEXT: Final = ("eager", "override")
_FAILED: Final = "a compiler failed on some of it, which is looked up or found out in each process"


def keep(
    call: Call,
    code: Stitching,
    built: Sequence[tuple[Piece, Executable, float]],
    record: PartRecord,
    inputs: Sequence[Any],
    context: LoweringContext,
    *,
    failed: bool,
) -> None:
    """Store a cut part in Inductor's cache, and its key for AOTAutograd's cache, if that is on.

    Args:
        call: the code bound to what it calls; gets the key.
        code: the code.
        built: its subgraphs, the executable of each, and the seconds that it took; the graphs may be changed.
        record: of its decisions.
        inputs: fake tensors and symbolic sizes of the part.
        context: where it belongs.
        failed: whether a compiler failed on some of it, so that another process may place it otherwise.
    """
    if not cache_entry.is_asked_for():
        return
    graph, why = None, _FAILED if failed else ""
    try:
        if not why or cache_entry.is_bundled():
            graph = _artefact(code, built, record, context)
            if not cache_entry.is_bundled():
                why = cache_entry.save(graph, inputs, context.graph.digest, sum(seconds for _, _, seconds in built))
    except Exception as error:  # noqa: BLE001 - the reason why it is built in each process
        why = str(error) if isinstance(error, ValueError) else first_line(error)
    if why:
        note = f"a part that was cut is not kept: {why}"
        context.timeline.append(
            Cache(graph=context.graph_id, part=context.part, cache="aot_autograd", verdict="bypass", note=note)
        )
        graph = graph or StitchedGraph()
        graph.unkept = why
    if graph is not None and (cache_entry.is_bundled() or not why):
        cache_entry.mark(call, graph)


def _artefact(
    code: Stitching, built: Sequence[tuple[Piece, Executable, float]], record: PartRecord, context: LoweringContext
) -> StitchedGraph:
    graphs: dict[int, Any] = {}
    pieces: list[dict[str, Any]] = []
    for index, (piece, result, _) in enumerate(built):
        data: dict[str, Any] = {"lowering": result.lowering}
        if result.lowering == MAIN.name:
            why = cache_entry.unkept(result.compiled)
            if why:
                notes = "; ".join(lookup.note for lookup in result.lookups if lookup.note)
                raise ValueError(f"{record.subgraph_id(index)} can't be found again, as {why}{notes and f' ({notes})'}")
            graphs[index] = result.compiled
            predicted = [fake_value(node) for node in piece.outputs]
            if any(map(depends_on_data, predicted)):
                data["layouts"] = [layout and dataclasses.asdict(layout) for layout in map(layout_of, predicted)]
        elif result.lowering not in _AS_TEXT:
            raise ValueError(
                f"{record.subgraph_id(index)} is on {result.lowering}, whose code stays in this process; leave it out "
                "of options['lowerings'] to keep the part"
            )
        else:
            data["evidence"], data["kernels"] = result.attest()
            data["graph"] = eager_artefact.dump_graph(copy_module(piece.module))
        if result.lowering != "eager":
            from_outside = context.part != "backward"
            held = [fake_value(node) for node in piece.inputs if not (from_outside and node.op == "placeholder")]
            verified = result.lowering == MAIN.name and context.policy.verify in VERIFYING
            data["fallback"] = eager_artefact.dumps(
                piece.module, piece.fake_inputs, held=held, verified=verified
            ).decode()
        pieces.append(data)
    content = {
        "part": context.part,
        "record": record.dumps(),
        "source": code.source,
        "constants": {name: dump_constant(name, value) for name, value in code.constants.items()},
        "pieces": pieces,
    }
    return StitchedGraph(json.dumps(content, sort_keys=True), graphs)


def restoring(
    context: Callable[[str], LoweringContext], cache: str = "aot_autograd"
) -> contextlib.AbstractContextManager[None]:
    """Inside, the parts that were cut and that AOTAutograd's cache restores are made callable."""
    return cache_entry.on_stitched_loaded(lambda compiled, recorded: _restore(compiled, recorded, context, cache))


def _restore(compiled: StitchedGraph, recorded: bool, context: Callable[[str], LoweringContext], cache: str) -> Call:
    """The callable of a restored part; its record goes into the timeline, and its first call is attested."""
    data: dict[str, Any] = json.loads(compiled.text)
    where = context(data["part"])
    results = [_restored(piece, compiled.graphs.get(index)) for index, piece in enumerate(data["pieces"])]
    if recorded and not where.records:
        emit_cudagraphs_off(where)
    artefacts = {f"{where.part_id}.{index}": result.artefact for index, result in enumerate(results)}
    key = compile_fx.artefact_key(compiled)
    rows, overrides = read_record(data["record"], where, key, artefacts, whole=False, cache=cache)
    wrapped: list[Wrapped] = []
    for index, (piece, result) in enumerate(zip(data["pieces"], results, strict=True)):
        id = f"{where.part_id}.{index}"
        own = [row for row in rows if row.subgraph == id or row.subgraph.startswith(f"{id}/")]
        calls = [call for call in overrides if any(row.subgraph == call.subgraph for row in own)]
        wrapped.append(_wrapped(index, piece, result, own, calls, where))
    constants = {name: load_constant(value) for name, value in data["constants"].items()}
    return Stitching(source=data["source"], constants=constants).bind(
        [each.first for each in wrapped], [each.later for each in wrapped]
    )


def _restored(data: dict[str, Any], graph: Any) -> Executable:
    """The executable of one subgraph."""
    if data["lowering"] == MAIN.name:
        result = executable(graph)
        run = compile_fx.direct(graph)
        layouts = [eager_artefact.load_layout(layout) for layout in data.get("layouts", ())]
        if not layouts:
            return dataclasses.replace(result, call=run)
        return dataclasses.replace(result, call=lambda inputs: list(map(restride, run(inputs), layouts)))
    if data["lowering"] == "eager":
        return eager_artefact.load_graph(data["graph"])
    evidence, kernels = data["evidence"], dict(data["kernels"])
    run = from_source(json.loads(data["graph"])["graph"])
    return Executable(lowering=data["lowering"], call=run, attest=lambda: (evidence, kernels))


def _wrapped(
    index: int,
    data: dict[str, Any],
    result: Executable,
    rows: Sequence[Subgraph],
    calls: Sequence[PlannedCall],
    context: LoweringContext,
) -> Wrapped:
    """What to call: as for a subgraph that was just built."""
    guard = verifier = None
    kept = data.get("fallback", "").encode()

    def around(run: Call) -> Call:
        return _with_references(run, calls)

    if kept:
        verifier = eager_artefact.verifier(kept, context, index, result.lowering, around)
    if kept and context.policy.on_error != "raise":
        guard = eager_artefact.guard_call(
            kept,
            context,
            result.call,
            overwritten=result.overwritten,
            piece=index,
            lowering=result.lowering,
            around=around,
        )

    def emit(result: Executable, observer: FirstCallObserver) -> None:
        emit_ran(context, rows, result, observer)

    # What the graph writes to is not known here, so that a forward can't be given up.
    id = f"{context.part_id}.{index}"
    return wrap(
        result,
        context,
        id,
        emit,
        guard=guard,
        verifier=verifier,
        calls=calls,
        repeatable=False,
        announced=eager_artefact.announced(kept),
    )


def _with_references(run: Call, calls: Sequence[PlannedCall]) -> Call:
    """The function of a graph in which calls of overrides go to their references, as far as these are known."""
    operators = list({call.operator: None for call in calls if call.truth is not None})
    if not operators:
        return run

    def referring(inputs: list[Any]) -> Sequence[Any]:
        pending = {each: [call.truth for call in calls if call.operator is each] for each in operators}

        def to_reference(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], original: Any) -> Any:
            truths = pending[operator]
            truth = truths.pop(0) if len(truths) > 1 else truths[0]
            return (truth or original)(*args, **kwargs)

        with tapped(operators, to_reference):
            return run(inputs)

    return referring
