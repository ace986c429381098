"""The graph of a part as text in its artefact, so that a part restored from a cache can step down to eager.

AOTAutograd's cache restores compiled code without the graph. If that code raises in a call, eager needs the graph: its
generated source, its small constants and the layout of its results are stored in the artefact, beside the record. A
warm start reads one short line of it; the rest is read only when a call has raised.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from omnicomp._torch.fx import copy_module, take_list
from omnicomp._torch.inductor import compile_fx
from omnicomp._torch.inductor.graph_text import from_source, load_constant, to_source
from omnicomp._torch.user_code import user_operators
from omnicomp.analysis.costs import hint_of_text, size_of
from omnicomp.analysis.layouts import Layout
from omnicomp.errors import LoweringError, first_line
from omnicomp.lowerings import MAIN, Executable, LoweringContext
from omnicomp.lowerings.eager import eager_executable, prepare
from omnicomp.runtime.announced_inputs import announce
from omnicomp.runtime.guard import Boxed, Guard, obstacle, recorded_as_cudagraph
from omnicomp.timeline import Reason

if TYPE_CHECKING:
    from omnicomp.runtime.verify import Verifier

# Values saved for a backward are held until its call has returned, up to this size, so that it can be repeated.
HELD_BYTES = 64 * 2**20


def dumps(
    module: GraphModule, inputs: Sequence[Any], *, held: Sequence[Any] | None = None, verified: bool = False
) -> bytes:
    """A post-autograd graph as text, made before Inductor gets it; equal for equal graphs.

    Args:
        module: the graph; it is copied.
        inputs: fake tensors and symbolic sizes.
        held: those of them that would be held for a call to be repeated; all of them if left out.
        verified: whether calls are to be verified, for which the graph is read at each start.

    Returns:
        A line of JSON that is read at each start, and one that is read after a failure.

    Raises:
        Exception: calls are to be verified, and something that the graph holds can't travel as text.
    """
    reason, body = obstacle(module), ""
    head: dict[str, Any] = {
        "inputs": [str(node.target) for node in module.graph.find_nodes(op="placeholder")],
        "announced": announce(inputs),
        "bytes": str(size_of(inputs if held is None else held)[0]),
        "operators": user_operators(module),
    }
    if verified:
        head["verified"] = [to_source(copy_module(module, lazy=True)), dump_graph(copy_module(module, lazy=True))]
    if reason is None:
        try:
            body = dump_graph(copy_module(module, lazy=True))
        except Exception as error:  # noqa: BLE001 - the reason why no other way is tried, should a call raise
            reason = Reason(
                code="not_repeatable",
                by="execution",
                sentence=f"a failed call can't be repeated after a start from the cache, as {first_line(error)}",
                lever="compile without the cache: torch._functorch.config.enable_autograd_cache = False",
            )
    # The user's lines would make the key depend on line numbers.
    head["obstacle"] = dataclasses.replace(reason, source="").to_dict() if reason is not None else None
    return f"{json.dumps(head, sort_keys=True)}\n{body}".encode()


def dump_graph(module: GraphModule) -> str:
    """A post-autograd graph as text, to be run operator by operator.

    Args:
        module: the graph; it is changed.

    Raises:
        Exception: something that the graph holds can't travel as text.
    """
    layouts, operators = prepare(module)
    take_list(module)
    return json.dumps(
        {
            "graph": to_source(module),
            "layouts": [layout and dataclasses.asdict(layout) for layout in layouts],
            "operators": operators,
        },
        sort_keys=True,
    )


def announced(kept: bytes) -> list[list[Any]]:
    """The inputs of a restored artefact as they were when it was built."""
    return json.loads(kept.partition(b"\n")[0] or b"{}").get("announced", [])


def guard(kept: bytes, context: LoweringContext, compiled: Any, *, recorded: bool) -> Guard:
    """The guard of a restored artefact, which repeats a call in eager if that is safe."""
    written = compile_fx.overwritten_inputs(compiled)
    return guard_call(kept, context, compiled.current_callable, overwritten=written, recorded=recorded)


def guard_call(
    kept: bytes,
    context: LoweringContext,
    call: Boxed,
    *,
    overwritten: frozenset[str],
    recorded: bool = False,
    piece: int | None = None,
    lowering: str = MAIN.name,
    around: Callable[[Boxed], Boxed] = lambda call: call,
) -> Guard:
    """The same for a callable, which may be a piece of a cut part.

    Args:
        kept: the result of `dumps`.
        context: where the part belongs now.
        call: the restored callable.
        overwritten: names of what it may write to once it is through with it.
        recorded: whether it is to be recorded as a CUDA graph.
        piece: its index, if the part was cut.
        lowering: its lowering.
        around: makes what eager calls of the graph's own function.
    """
    line, _, body = kept.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    names = tuple(head["inputs"])
    reason = Reason.from_dict(head["obstacle"]) if head["obstacle"] else None
    size = hint_of_text(head["bytes"], context.graph.sizes)

    def build() -> Executable:
        if not body:
            raise LoweringError(f"the artefact came without it, as {reason.sentence if reason else 'it was not kept'}")
        result = load_graph(body)
        return dataclasses.replace(result, call=around(result.call))

    return Guard(
        call=call,
        inputs=names,
        build=build,
        overwritten=overwritten & set(names),
        obstacle=recorded_as_cudagraph(context.part_id) if recorded else reason,
        context=context,
        subgraph=f"{context.part_id}.{piece or 0}",
        lowering=lowering,
        operators=tuple(head["operators"]),
        keep_inputs=(piece is None and context.part != "backward") or 0 <= size <= HELD_BYTES,
    )


def verifier(
    kept: bytes,
    context: LoweringContext,
    piece: int = 0,
    lowering: str = MAIN.name,
    around: Callable[[Boxed], Boxed] = lambda call: call,
) -> "Verifier | None":
    """The verifier of a restored artefact; None if it is not to be verified."""
    text = json.loads(kept.partition(b"\n")[0] or b"{}").get("verified")
    if text is None:
        return None
    source, eager = text

    def build() -> Executable:
        result = load_graph(eager)
        return dataclasses.replace(result, call=around(result.call))

    from omnicomp.runtime.verify import Verifier

    return Verifier(
        module=load_constant({"graph": source}),
        inputs=(),
        context=context,
        subgraph=f"{context.part_id}.{piece}",
        lowering=lowering,
        build=build,
    )


def load_graph(body: str | bytes) -> Executable:
    """The eager executable of what `dump_graph` made."""
    data: dict[str, Any] = json.loads(body)
    layouts = list(map(load_layout, data["layouts"]))
    return eager_executable(from_source(data["graph"]), layouts, data["operators"])


def load_layout(data: dict[str, Any] | None) -> Layout | None:
    """A layout from its fields."""
    if data is None:
        return None
    strides = data["strides"]
    return Layout(strides=None if strides is None else tuple(strides), order=tuple(data["order"]))
