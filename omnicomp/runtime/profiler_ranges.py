"""Named ranges around calls of subgraphs, for torch's profiler and NVIDIA's tools: the option `ranges`."""

from collections.abc import Callable, Sequence
from typing import Any

from omnicomp._torch.ranges import Range, nvtx_range
from omnicomp.lowerings.base import LoweringContext

__all__ = ["named"]

Boxed = Callable[[list[Any]], Sequence[Any]]


def named(call: Boxed, context: LoweringContext, subgraph: str, lowering: str = "inductor") -> Boxed:
    """The callable inside a range `omni g0.forward.0 (inductor)`; itself if the policy does not ask for it.

    Args:
        call: a boxed callable, built of a part or of a piece of one.
        context: where it belongs.
        subgraph: its id.
        lowering: what built it.
    """
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
