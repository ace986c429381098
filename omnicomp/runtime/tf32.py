"""TF32 for the graphs that are compiled with it, and for no other code of the program.

Torch has one setting for the whole process. It is read by Inductor while it generates code, and by cuBLAS and cuDNN
when they are called. So it is set while such a graph is built and while it is called, forward and backward, and put
back each time: Dynamo's guards, and whatever else the program runs, see what the user has set. Another thread that
multiplies at the same time may do so in TF32.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from omnicomp._torch.devices.precision import allow_tf32, while_compiling
from omnicomp.devices import Device
from omnicomp.lowerings.base import LoweringContext
from omnicomp.options.dtype_policy import DtypePolicy
from omnicomp.timeline import Option, Reason, Timeline

Boxed = Callable[[list[Any]], Sequence[Any]]


def uses_tf32(policy: DtypePolicy, device: Device) -> bool:
    """Whether the float32 products of a graph are to be computed in TF32, and can be."""
    return policy.matmul == "tf32" and device.capabilities().tf32


def compiling(context: LoweringContext) -> contextlib.AbstractContextManager[None]:
    """Inside, the precision settings of a graph are in effect."""
    tf32 = uses_tf32(context.policy.dtype_policy, context.device)
    return while_compiling() if tf32 else contextlib.nullcontext()


def with_tf32(call: Boxed, context: LoweringContext) -> Boxed:
    """The callable with the precision settings that its graph was built with; itself if these are the user's."""
    if not uses_tf32(context.policy.dtype_policy, context.device):
        return call

    def in_tf32(inputs: list[Any]) -> Sequence[Any]:
        restore = allow_tf32()
        if restore is None:
            return call(inputs)
        try:
            return call(inputs)
        finally:
            restore()

    in_tf32._boxed_call = True  # type: ignore[attr-defined]
    return in_tf32


def record_without_tf32(graph: str, policy: DtypePolicy, device: Device, timeline: Timeline) -> None:
    """Record that a policy asks for TF32 on a device that does not have it."""
    if policy.matmul != "tf32" or device.capabilities().tf32:
        return
    timeline.append(
        Option(
            graph=graph,
            key="dtype_policy",
            requested=str(policy),
            effective="float32 products in float32",
            reason=Reason(
                code="option_ineffective",
                by="dtype_policy",
                sentence=f"the {device.type} device has no TF32, and its float32 products are as they were",
                observed=device.capabilities().name or device.type,
                needed="an NVIDIA GPU of compute capability 8.0 or newer",
                lever='choose dtype_policy="keep", or "bf16"',
            ),
        )
    )
