"""The lowering to a device's own compiler, which `Device.compile_subgraph` calls."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from omnicomp.devices import Device
from omnicomp.lowerings.base import Executable, LoweringContext, Support
from omnicomp.lowerings.eager import EagerLowering, eager_executable, prepare

__all__ = ["DeviceLowering"]


class DeviceLowering:
    """Calls `Device.compile_subgraph`; if it raises, the error is the reason why the next lowering is asked."""

    name = "device"

    def supports(self, node: Node, context: LoweringContext) -> Support:
        """Every node that runs outside Inductor's generated code; the device's compiler decides when it builds."""
        reason = EagerLowering().supports(node, context)
        return None if reason is None else dataclasses.replace(reason, by=self.name)

    def lower(self, module: GraphModule, inputs: Sequence[Any], context: LoweringContext) -> Executable:
        """Compile, and make the results' strides what the neighbours were built for."""
        layouts, operators = prepare(module)
        call = context.device.compile_subgraph(module, inputs)
        evidence = f"{context.device.type}: {_compiler(context.device)} gave {_name(call)}"
        built = eager_executable(call, layouts, operators)
        return dataclasses.replace(built, lowering=self.name, attest=lambda: (evidence, {}))


def _compiler(device: Device) -> str:
    return device.capabilities().compiler or f"{type(device).__qualname__}.compile_subgraph"


def _name(call: Callable[..., Any]) -> str:
    kind = call if hasattr(call, "__qualname__") else type(call)
    return f"{kind.__module__}.{kind.__qualname__}"
