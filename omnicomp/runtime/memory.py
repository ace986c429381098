"""Samples of the device's memory around each call of a subgraph, and its time (`omnicomp.runtime.timing`).

The options `memory` and `timing` ask for them.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from omnicomp.lowerings.base import LoweringContext
from omnicomp.runtime.timing import timed
from omnicomp.timeline import Memory

__all__ = ["sampled"]

Boxed = Callable[[list[Any]], Sequence[Any]]


def sampled(call: Boxed, context: LoweringContext, subgraph: str) -> Boxed:
    """The callable with samples of its time and memory; itself if the policy asks for neither.

    With the option `memory` there is an event for each call that returns.

    The device is waited for before and after, and its peak is reset: the user's own statistics are reset, too.

    Args:
        call: a boxed callable, built of a part or of a piece of one.
        context: where it belongs.
        subgraph: its id.
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
