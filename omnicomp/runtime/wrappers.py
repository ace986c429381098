"""Wrappers around the call of an executable, built or restored, a whole part or a piece.

Most wrappers return the callable itself where the policy does not ask for them, so that it costs nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

from omnicomp.errors import Once
from omnicomp.lowerings import Executable, LoweringContext
from omnicomp.lowerings.override import PlannedCall
from omnicomp.runtime.evidence import FirstCallObserver
from omnicomp.runtime.fallback_limit import within_budget
from omnicomp.runtime.guard import Guard
from omnicomp.runtime.memory import sampled
from omnicomp.runtime.profiler_ranges import named
from omnicomp.runtime.tf32 import with_tf32
from omnicomp.runtime.verify import Verifier

__all__ = ["WRAPPERS", "Surroundings", "Wrapped", "wrap"]

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The executable as wrappers see it.

    Attributes:
        context: where it belongs.
        subgraph: its id.
        lowering: what built it.
        guard: steps down from it where a call raises; None if nothing does.
        verifier: compares it with eager; None if nothing does.
    """

    context: LoweringContext
    subgraph: str
    lowering: str
    guard: Guard | None
    verifier: Verifier | None


Wrapper = Callable[[Boxed, Surroundings], Boxed]

WRAPPERS: Final[tuple[Wrapper, ...]] = (
    lambda call, at: call if at.guard is None else at.guard.around(call),
    lambda call, at: call if at.verifier is None else at.verifier.around(call),
    lambda call, at: with_tf32(call, at.context),
    lambda call, at: sampled(call, at.context, at.subgraph),
    lambda call, at: named(call, at.context, at.subgraph, at.lowering),
    lambda call, at: within_budget(call, at.context),
)
"""From the inside out; the first call is watched around all of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapped:
    """A callable with all wrappers around it.

    Attributes:
        first: the first call, which is observed.
        later: returns the callable of all later calls, once the first has returned.
    """

    first: Boxed
    later: Callable[[], Boxed]


def wrap(
    result: Executable,
    context: LoweringContext,
    subgraph: str,
    emit: Callable[[Executable, FirstCallObserver], None],
    *,
    guard: Guard | None,
    verifier: Verifier | None = None,
    calls: Sequence[PlannedCall] = (),
    repeatable: bool = False,
) -> Wrapped:
    """Surround an executable with every wrapper.

    Args:
        result: the executable.
        context: where it belongs.
        subgraph: its id.
        emit: records, once, what the first call ran, unless it stepped down.
        guard: steps down from it where a call raises; None if nothing does.
        verifier: compares it with eager; None if nothing does.
        calls: the calls of overrides in it, in program order.
        repeatable: whether a forward leaves nothing behind when it is given up in the middle.
    """
    at = Surroundings(context=context, subgraph=subgraph, lowering=result.lowering, guard=guard, verifier=verifier)
    call = result.call
    for wrapper in WRAPPERS:
        call = wrapper(call, at)
    observer = FirstCallObserver(context, result.lowering, calls, path=result.generated, repeatable=repeatable)

    def ran() -> None:
        if not (guard is not None and guard.stepped_down) and not (verifier is not None and verifier.failed):
            emit(_with_verdict(result, verifier), observer)

    once = Once(ran)

    def first(inputs: list[Any]) -> Sequence[Any]:
        outputs = observer.first(call, inputs)
        once()
        return outputs

    return Wrapped(first=first, later=lambda: observer.after_first(call))


def _with_verdict(result: Executable, verifier: Verifier | None) -> Executable:
    """The executable with the result of its verification in its evidence."""
    if verifier is None:
        return result

    def attest() -> tuple[str, dict[str, int]]:
        evidence, kernels = result.attest()
        return f"{evidence}; {verifier.verdict}", kernels

    return dataclasses.replace(result, attest=attest)
