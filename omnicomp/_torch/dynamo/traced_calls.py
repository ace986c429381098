"""Graphs of ATen operators, traced from a function of tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["traced_call"]


def traced_call(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> tuple[GraphModule, list[Any]]:
    """Trace a function without gradients.

    Args:
        function: takes the inputs and returns a tuple of tensors.
        inputs: real tensors.

    Returns:
        The graph, and the fake tensors of its inputs.
    """
    with torch.no_grad():
        module = make_fx(function, tracing_mode="fake")(*inputs)
    return module, [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
