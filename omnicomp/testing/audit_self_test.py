"""A test of the audit itself: executables that lie about what they run, and whether the audit says so.

They go the way that every first call goes: a `FirstCallObserver` sees it, `emit_ran` records it, and the audit compares
that with the plan. Nothing is compiled, so that `omnicomp doctor` can run this anywhere.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule

from omnicomp._torch.fx import boxed
from omnicomp.audit.fold import fold
from omnicomp.builder.record import emit_ran
from omnicomp.devices import resolve_device
from omnicomp.lowerings import Executable, GraphRecord, LoweringContext
from omnicomp.lowerings.override import PlannedCall
from omnicomp.lowerings.overrides.declaration import Override
from omnicomp.options.policy import Policy
from omnicomp.runtime.evidence import FirstCallObserver
from omnicomp.timeline import Subgraph, Timeline

Boxed = Callable[[list[Any]], Sequence[Any]]

_OPERATOR: Final = torch.ops.aten.sin.default
_GENERATED: Final = "<omnicomp self-test: generated module>"
_ID: Final = "g0.inference.0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lie:
    """An executable that does not do what it says, and one that does."""

    says: str  # what it claims, for people
    claim: str  # its lowering
    does: Callable[[], Boxed]  # what it runs
    honest: Callable[[], Boxed]  # what would be true


def _eager(operator: Any) -> Callable[[], Boxed]:
    def make() -> Boxed:
        graph = Graph()
        graph.output((graph.call_function(operator, (graph.placeholder("x"),)),))
        return boxed(GraphModule({}, graph))

    return make


def _generated(path: str) -> Callable[[], Boxed]:
    """A function of a module at a path, as Inductor's are."""

    def make() -> Boxed:
        namespace: dict[str, Any] = {"sin": torch.sin}
        exec(compile("def call(args):\n    (x,) = args\n    return (sin(x),)\n", path, "exec"), namespace)
        return namespace["call"]

    return make


LIES: Final = (
    Lie(
        says="a subgraph that says inductor runs eager",
        claim="inductor",
        does=_eager(_OPERATOR),
        honest=_generated(_GENERATED),
    ),
    Lie(
        says="a subgraph that says inductor runs another module than the one it shows",
        claim="inductor",
        does=_generated("<omnicomp self-test: another module>"),
        honest=_generated(_GENERATED),
    ),
    Lie(
        says="an override that says it ran was not called",
        claim="override",
        does=_eager(torch.ops.aten.cos.default),
        honest=_eager(_OPERATOR),
    ),
    Lie(
        says="a subgraph that says eager runs generated code",
        claim="eager",
        does=_generated(_GENERATED),
        honest=_eager(_OPERATOR),
    ),
)


def self_test() -> list[str]:
    """Plant each lie, and its truth.

    Returns:
        What the audit got wrong: lies that it believed, and truths that it did not; empty if nothing.
    """
    wrong: list[str] = []
    for lie in LIES:
        if not _mismatches(lie.claim, lie.does()):
            wrong.append(f"not caught: {lie.says}")
        if _mismatches(lie.claim, lie.honest()):
            wrong.append(f"a false alarm where it is not so: {lie.says}")
    return wrong


def _mismatches(claim: str, call: Boxed) -> int:
    """How many differences from the plan the audit finds after a first call."""
    timeline = Timeline()
    context = LoweringContext(
        graph=GraphRecord(id="g0"),
        part="inference",
        device=resolve_device("cpu"),
        policy=Policy(verify="off"),
        timeline=timeline,
    )
    plan = Subgraph(graph="g0", part="inference", subgraph=_ID, lowering=claim, nodes=1, ops={str(_OPERATOR): 1})
    timeline.append(plan)
    calls: list[PlannedCall] = []
    if claim == "override":
        item = Override(name="self_test", declared=_eager, function=_eager, operators=(_OPERATOR,))
        calls.append(PlannedCall(item=item, operator=_OPERATOR, truth=None, subgraph=_ID))
    observer = FirstCallObserver(context, claim, calls, path=_GENERATED if claim == "inductor" else "")
    result = Executable(lowering=claim, call=call, attest=lambda: (f"it says {claim}", {}))
    observer.first(call, [torch.ones(3)])
    emit_ran(context, [plan], result, observer)
    return len(fold(timeline.events()).mismatches)
