"""Letting go of the tensors that a copy of a graph refers to."""

import torch
from torch.fx import GraphModule

__all__ = ["forget_tensors"]


def forget_tensors(module: GraphModule) -> None:
    """Drop the parameters and constants of a graph that is not called any more, and of the graphs that it calls.

    A graph and its module refer to each other. What they refer to besides, such as the state of an optimizer, would
    live until the garbage collector comes by.

    Args:
        module: a copy of ours, as `copy_module` makes it: the tensors are shared with the program, the containers not.
    """
    for child in module.children():
        if isinstance(child, GraphModule):
            forget_tensors(child)
    module._parameters.clear()
    module._buffers.clear()
    for name, value in list(vars(module).items()):
        if isinstance(value, torch.Tensor):
            delattr(module, name)
