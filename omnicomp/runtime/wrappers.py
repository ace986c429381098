"""Wrappers around the call of an executable, built or restored, a whole part or a piece.

Most wrappers return the callable itself where the policy does not ask for them, so that it costs nothing.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from omnicomp._torch.structured import Range, nvtx_range
from omnicomp.errors import LoweringError, Once, harmless
from omnicomp.lowerings import MAIN, Executable
from omnicomp.lowerings.base import LoweringContext
from omnicomp.lowerings.override import PlannedCall
from omnicomp.runtime.announced_inputs import difference
from omnicomp.runtime.evidence import FirstCallObserver
from omnicomp.runtime.fallback_limit import within_budget
from omnicomp.runtime.guard import Guard
from omnicomp.runtime.ranks import EAGER, agree, explain
from omnicomp.runtime.tf32 import with_tf32
from omnicomp.safety.forks import new_lock
from omnicomp.timeline import Memory, Outcome, Timing

if TYPE_CHECKING:
    from omnicomp.runtime.verify import Verifier

Boxed = Callable[[list[Any]], Sequence[Any]]
_PROFILED: Final = 8  # calls before the one that is profiled: by then CUDA graphs are recorded


def sampled(call: Boxed, context: LoweringContext, subgraph: str) -> Boxed:
    """The callable with samples of its time and memory; itself if the policy asks for neither.

    With the option `memory` there is an event for each call that returns.

    The device is waited for before and after, and its peak is reset: the user's own statistics are reset, too.
    """
    call = timed(call, context, subgraph)
    if not context.policy.memory:
        return call
    device, calls = context.device, itertools.count()

    def observed(inputs: list[Any]) -> Sequence[Any]:
        device.synchronize()
        device.reset_memory_stats()
        before = device.memory_stats()
        outputs = call(inputs)
        device.synchronize()
        after = device.memory_stats()
        context.timeline.append(
            Memory(
                graph=context.graph_id,
                part=context.part,
                subgraph=subgraph,
                device=device.type,
                call=next(calls),
                before_bytes=_known(before["allocated_bytes"]),
                after_bytes=_known(after["allocated_bytes"]),
                peak_bytes=_known(after["peak_bytes"]),
            )
        )
        return outputs

    observed._boxed_call = True  # type: ignore[attr-defined]
    return observed


def _known(value: int | None) -> int:
    return -1 if value is None else value


def timed(call: Boxed, context: LoweringContext, subgraph: str) -> Boxed:
    """The callable with its calls that return timed; itself if the policy does not ask for it.

    The device is waited for before and after each call, so that the time is that call's alone. After 1, 2, 4, 8, …
    calls an event sums up all so far, so that a long run has few of them. On CUDA one call is profiled and not timed.
    """
    if not context.policy.timing:
        return call
    device, lock = context.device, new_lock()
    calls, total, fastest, host = 0, 0.0, math.inf, 0.0
    kernels: tuple[int, float] | None = None

    def tell() -> None:
        with harmless("how long a call took"):
            from omnicomp.devices.limits import Limits, known

            rates = known(device.type) or Limits(bytes=0.0, flops=0.0, dtype="")
            context.timeline.append(
                Timing(
                    **context.where(subgraph),
                    device=device.type,
                    calls=calls,
                    seconds=total,
                    fastest=fastest,
                    host_seconds=host,
                    kernels=kernels[0] if kernels else 0,
                    kernel_seconds=kernels[1] if kernels else 0.0,
                    copy_rate=rates.bytes,
                    product_rate=rates.flops,
                    product_dtype=rates.dtype,
                )
            )

    def observed(inputs: list[Any]) -> Sequence[Any]:
        nonlocal calls, total, fastest, host, kernels
        device.synchronize()
        if calls == _PROFILED and kernels is None and device.type == "cuda":
            from omnicomp.runtime.kernels import kernels_of

            outputs, count, took = kernels_of(lambda: call(inputs))
            kernels = (count, took)
            tell()
            return outputs
        start = time.perf_counter()
        outputs = call(inputs)
        returned = time.perf_counter() - start
        device.synchronize()
        seconds = time.perf_counter() - start
        with lock:
            calls, total = calls + 1, total + seconds
            if seconds < fastest:
                fastest, host = seconds, returned
            if not calls & (calls - 1):
                tell()
        return outputs

    observed._boxed_call = True  # type: ignore[attr-defined]
    return observed


def named(call: Boxed, context: LoweringContext, subgraph: str, lowering: str = "inductor") -> Boxed:
    """The callable inside a range `omni g0.forward.0 (inductor)`; itself if the policy does not ask for it."""
    if not context.policy.ranges:
        return call
    name = f"omni {subgraph} ({lowering})"

    def ranged(inputs: list[Any]) -> Sequence[Any]:
        with Range(name):
            return call(inputs)

    def ranged_on_cuda(inputs: list[Any]) -> Sequence[Any]:
        with nvtx_range(name), Range(name):
            return call(inputs)

    chosen = ranged_on_cuda if context.device.type == "cuda" else ranged
    chosen._boxed_call = True  # type: ignore[attr-defined]
    return chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The executable as wrappers see it."""

    context: LoweringContext
    subgraph: str
    lowering: str
    guard: Guard | None
    verifier: "Verifier | None"


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
    """A callable with all wrappers around it."""

    first: Boxed  # the first call, which is observed
    later: Callable[[], Boxed]  # returns the callable of all later calls, once the first has returned


def wrap(
    result: Executable,
    context: LoweringContext,
    subgraph: str,
    emit: Callable[[Executable, FirstCallObserver], None],
    *,
    guard: Guard | None,
    verifier: "Verifier | None" = None,
    calls: Sequence[PlannedCall] = (),
    repeatable: bool = False,
    announced: Sequence[Sequence[Any]] = (),
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
        announced: the inputs that it was built for, as `announce` describes them; those of the first call are compared.

    Raises:
        LoweringError: in the first call, whose inputs are others, if nothing steps down.
        RanksError: in the first call of a part with collectives, which other ranks don't run, or run otherwise.
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
    raised = Once(lambda: context.timeline.append(Outcome(**context.where(subgraph), state="raised")))

    communicates = False

    def first(inputs: list[Any]) -> Sequence[Any]:
        nonlocal communicates
        agreed = None
        try:
            agreed = agree(context, can_follow=guard is not None or result.lowering == "eager")
            communicates = agreed is not None
            if agreed is not None and agreed.state == EAGER and guard is not None and not guard.stepped_down:
                guard.follow(agreed.sentence)
            different = difference(announced, inputs, strides=result.lowering == MAIN.name)
            if different and guard is None:
                raise LoweringError(f"{subgraph} on {result.lowering}: {different}")
            if different and guard is not None and not guard.stepped_down:
                guard.refuse(different)
            outputs = observer.first(call, inputs)
        except BaseException as error:
            raised()
            if agreed is not None:
                explain(context.timeline, context.graph_id, error)
            raise
        once()
        return outputs

    def later() -> Boxed:
        found = observer.after_first(call)
        return _explained(found, context) if communicates and guard is None else found

    return Wrapped(first=first, later=later)


def _explained(call: Boxed, context: LoweringContext) -> Boxed:
    """The callable of a part with collectives that nothing guards: when it raises, ranks tell each other."""

    def observed(inputs: list[Any]) -> Sequence[Any]:
        try:
            return call(inputs)
        except BaseException as error:
            explain(context.timeline, context.graph_id, error)
            raise

    observed._boxed_call = True  # type: ignore[attr-defined]
    return observed


def _with_verdict(result: Executable, verifier: "Verifier | None") -> Executable:
    """The executable with the result of its verification in its evidence."""
    if verifier is None:
        return result

    def attest() -> tuple[str, dict[str, int]]:
        evidence, kernels = result.attest()
        return f"{evidence}; {verifier.verdict}", kernels

    return dataclasses.replace(result, attest=attest)
