"""Wall time of the calls of each subgraph: the option `timing`."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from omnicomp.errors import harmless
from omnicomp.forks import new_lock
from omnicomp.lowerings.base import LoweringContext
from omnicomp.timeline import Timing

__all__ = ["timed"]

Boxed = Callable[[list[Any]], Sequence[Any]]


def timed(call: Boxed, context: LoweringContext, subgraph: str) -> Boxed:
    """The callable with its calls that return timed; itself if the policy does not ask for it.

    The device is waited for before and after each call, so that the time is that call's alone. After 1, 2, 4, 8, …
    calls an event sums up all so far, so that a long run has few of them.

    Args:
        call: a boxed callable, built of a part or of a piece of one.
        context: where it belongs.
        subgraph: its id.
    """
    if not context.policy.timing:
        return call
    device, lock = context.device, new_lock()
    calls, total, fastest = 0, 0.0, math.inf

    def observed(inputs: list[Any]) -> Sequence[Any]:
        nonlocal calls, total, fastest
        device.synchronize()
        start = time.perf_counter()
        outputs = call(inputs)
        device.synchronize()
        seconds = time.perf_counter() - start
        with lock:
            calls, total, fastest = calls + 1, total + seconds, min(fastest, seconds)
            if calls & (calls - 1):
                return outputs
            event = Timing(
                graph=context.graph_id,
                part=context.part,
                subgraph=subgraph,
                device=device.type,
                calls=calls,
                seconds=total,
                fastest=fastest,
            )
        with harmless("how long a call took"):
            context.timeline.append(event)
        return outputs

    observed._boxed_call = True  # type: ignore[attr-defined]
    return observed
